"""Remove attention heads that add nothing, from projections, attention and cache: exact.

Before (the columns of head 1 of %wo are zero, or everything %v holds of it is):
    %q = "sp.linear"(%x, %wq) : ..., tensor<128x128xf32>        heads = 4, each 32 columns
    %k, %v likewise
    %a = "mm.attention"(%q, %k, %v) <{heads = 4, kv_heads = 4, ...}>
    %y = "sp.linear"(%a, %wo, %x) : ..., tensor<128x128xf32>
After:
    %q = "sp.linear"(%x, %wq') : ..., tensor<96x128xf32>        heads = 3
    %a = "mm.attention"(%q, %k, %v) <{heads = 3, kv_heads = 3, ...}>
    %y = "sp.linear"(%a, %wo', %x) : ..., tensor<128x96xf32>

A head is dead if each of its columns is proved zero by the forward masks (its values are), or meets
a column of zeros in the output projection. Both are proved for executions that compute neither NaN
nor infinity; four-bit products refuse all others. Between them may stand rotations and the append
to the cache. Heads go by what kernels can hold: every group of
keys keeps as many queries as the others, all layers of the cache keep as many groups, and columns
of a four-bit output projection stay whole groups of 32 if they were. Where that forbids a dead head
to go, it stays.

What is computed stays the same, and bit for bit where the projection is f32 or the head's values
are zero: heads do not mix before it, and zero terms leave whole lanes of its sums. A four-bit
projection that never reads a head still scales its row by the head's peak; without the head the
scale can only become finer. Left out: queries and keys that something else reads (a score of visual
tokens), norms per head.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array
from compiler.analysis.propagation import module_facts
from compiler.dialects.mm import AttentionOp, KvAppendOp, RopeOp
from compiler.dialects.sp import LinearOp
from compiler.dialects.types import shape_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import body, functions, operations
from compiler.passes.rewriting import erase, erase_dead, insert_before, swap
from compiler.quant.w4 import GROUP

Mask = NDArray[np.bool_]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer and the rotations behind it, in order; nothing else reads any of them."""

    linear: LinearOp
    ropes: tuple[RopeOp, ...]


@dataclass(frozen=True, slots=True)
class HeadSite:
    """An attention whose heads can go: everything that holds a part of a head."""

    attention: AttentionOp
    q: Projection
    k: Projection
    v: Projection
    append: KvAppendOp | None
    out: LinearOp

    @property
    def groups(self) -> int:
        """Groups of queries that share a key."""
        return self.attention.kv_heads.value.data

    @property
    def share(self) -> int:
        """Queries per group."""
        return self.attention.heads.value.data // self.groups

    @property
    def width(self) -> int:
        """Columns of a head."""
        return shape_of(self.attention.q)[-1].constant // self.attention.heads.value.data

    @property
    def granule(self) -> int:
        """Columns of the output projection that go together."""
        aligned = self.out.storage.data == "w4" and shape_of(self.out.x)[-1].constant % GROUP == 0
        return GROUP if aligned else 1

    def fits(self, groups: int, share: int) -> bool:
        """Return whether kernels can hold so many groups of so many queries."""
        return groups * share * self.width % self.granule == 0


@dataclass(frozen=True)
class DropDeadHeads(Pass):
    """Shrink attentions by their dead heads."""

    name: ClassVar[str] = "drop-dead-heads"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite every attention that can lose a head; all layers of a cache alike."""
        sites = head_sites(module, ctx)
        live = [mask.reshape(site.groups, site.share) for site, mask in _live(module, ctx, sites)]
        appends = sum(isinstance(op, KvAppendOp) for op in operations(module))
        cached = [at for at, site in enumerate(sites) if site.append is not None]
        alone = [[at] for at in range(len(sites)) if at not in cached]
        together = [cached] if cached and len(cached) == appends else []
        changed = heads = keys = 0
        for members in (*alone, *together):
            kept = common_size([sites[at] for at in members], [live[at] for at in members])
            for at, (groups, share) in zip(members, kept, strict=True):
                site = sites[at]
                if (groups, share) == (site.groups, site.share):
                    continue
                _shrink(site, _kept(live[at], groups, share), ctx)
                changed += 1
                heads += site.groups * site.share - groups * share
                keys += (site.groups - groups) * (site.append is not None)
        for func in functions(module):
            erase_dead(func, ctx.origins)
        if not changed:
            return PassResult(0)
        note = f"{heads} heads" + (f", {keys} heads of cached keys and values" if keys else "")
        return PassResult(changed, (note,))


def head_sites(module: ModuleOp, ctx: PassContext) -> list[HeadSite]:
    """Return the attentions whose heads can be removed, in order."""
    found = (_site(op, ctx) for op in operations(module) if isinstance(op, AttentionOp))
    return [site for site in found if site is not None]


def common_size(sites: Sequence[HeadSite], live: Sequence[Mask]) -> list[tuple[int, int]]:
    """Return the least (groups, queries per group) of each site; all have as many groups.

    Args:
        sites: Attentions that share a cache, or one.
        live: (groups, queries per group) of each, whether the head does something.
    """
    least = max(max(1, int(mask.any(axis=1).sum())) for mask in live)
    for groups in range(least, sites[0].groups):
        sizes = [_least_share(site, mask, groups) for site, mask in zip(sites, live, strict=True)]
        found = [size for size in sizes if size is not None]
        if len(found) == len(sites):
            return found
    whole = sites[0].groups
    return [
        _least_share(site, mask, whole) or (whole, site.share)
        for site, mask in zip(sites, live, strict=True)
    ]


def _least_share(site: HeadSite, live: Mask, groups: int) -> tuple[int, int] | None:
    least = max(1, int(live.sum(axis=1).max()))
    options = product([groups], range(least, site.share + 1))
    return next((size for size in options if site.fits(*size)), None)


def _live(
    module: ModuleOp, ctx: PassContext, sites: Sequence[HeadSite]
) -> Iterable[tuple[HeadSite, Mask]]:
    """Yield (heads,) of each site: whether a column of the head can be observed."""
    if not sites:
        return
    funcs = functions(module)
    found = module_facts(funcs, ctx.constants, all_finite=True)
    facts = {op: known for func, known in zip(funcs, found, strict=True) for op in body(func).ops}
    for site in sites:
        columns = facts[site.attention].proved(site.attention.result).columns()
        weight = ctx.constants.get(site.out.weight)
        assert weight is not None
        live = np.ones(weight.shape[1], np.bool_) if columns is None else columns
        observed: Mask = live & weight.any(axis=0)
        yield site, np.asarray(observed.reshape(-1, site.width).any(axis=1))


def _site(attention: AttentionOp, ctx: PassContext) -> HeadSite | None:
    out = _only_user(attention.result)
    if not isinstance(out, LinearOp) or out.x is not attention.result:
        return None
    append = attention.k.owner
    k, v = attention.k, attention.v
    if isinstance(append, KvAppendOp):
        read_once = _only_user(append.keys) is attention and _only_user(append.values) is attention
        if attention.v is not append.values or not read_once:
            return None
        k, v = append.k, append.v
    sides = [_projection(value, ctx) for value in (attention.q, k, v)]
    q, keys, values = sides
    if q is None or keys is None or values is None or values.ropes:
        return None
    if ctx.constants.get(out.weight) is None or len({side.linear for side in sides if side}) < 3:
        return None
    return HeadSite(
        attention, q, keys, values, append if isinstance(append, KvAppendOp) else None, out
    )


def _only_user(value: SSAValue) -> Operation | None:
    uses = list(value.uses)
    return uses[0].operation if len(uses) == 1 else None


def _projection(value: SSAValue, ctx: PassContext) -> Projection | None:
    """Return the linear layer behind a side of an attention, if only the attention reads it."""
    ropes: list[RopeOp] = []
    while _only_user(value) is not None and isinstance(value.owner, RopeOp):
        ropes.insert(0, value.owner)
        value = value.owner.x
    linear = value.owner
    if not isinstance(linear, LinearOp) or _only_user(value) is None:
        return None
    has_bias = linear.bias is None or ctx.constants.get(linear.bias) is not None
    plain = linear.residual is None and has_bias and ctx.constants.get(linear.weight) is not None
    return Projection(linear, tuple(ropes)) if plain else None


def _kept(live: Mask, groups: int, share: int) -> Index:
    """Return (groups, share) numbers of the heads to keep, ascending: live ones, then others."""
    chosen = np.sort(np.argsort(~live.any(axis=1), kind="stable")[:groups])
    queries = np.sort(np.argsort(~live[chosen], axis=1, kind="stable")[:, :share], axis=1)
    return np.asarray(chosen[:, None] * live.shape[1] + queries)


def _shrink(site: HeadSite, kept: Index, ctx: PassContext) -> None:
    """Build the attention again from the heads that stay."""
    groups = kept[:, 0] // site.share
    queries, keys = (_columns(heads, site.width) for heads in (kept.reshape(-1), groups))
    q = _narrow(site.q, queries, kept.size, ctx)
    k, v = (_narrow(side, keys, len(groups), ctx) for side in (site.k, site.v))
    old = site.attention
    if site.append is not None:
        append = KvAppendOp(k, v, layer=site.append.layer.value.data, heads=len(groups))
        insert_before(old, append)
        ctx.origins.stands(site.append, [append])
        k, v = append.keys, append.values
    attention = AttentionOp(
        q,
        k,
        v,
        heads=kept.size,
        kv_heads=len(groups),
        scale=old.scale.value.data,
        mask=old.mask.data,
    )
    weight = ctx.constants.get(site.out.weight)
    assert weight is not None
    narrow = ctx.constants.add(weight[:, queries])
    insert_before(site.out, attention, narrow)
    ctx.origins.stands(old, [attention])
    out = LinearOp(
        attention.result,
        narrow.result,
        site.out.bias,
        site.out.residual,
        act=site.out.act.data,
        storage=site.out.storage.data,
    )
    swap(site.out, out, ctx.origins)
    erase(old, ctx.origins)
    if site.append is not None:
        erase(site.append, ctx.origins)  # appending rows is not pure: nothing else erases it


def _columns(heads: Index, width: int) -> Index:
    return np.asarray((heads[:, None] * width + np.arange(width)).reshape(-1))


def _narrow(side: Projection, rows: Index, heads: int, ctx: PassContext) -> SSAValue:
    """Return the projection, rotated, to some of its rows; it stands where the old one did."""
    linear = side.linear
    arrays: list[Array] = []
    for old in (linear.weight, linear.bias):
        array = ctx.constants.get(old)
        arrays += [] if array is None else [array[rows]]
    constants = [ctx.constants.add(array) for array in arrays]
    new = LinearOp(
        linear.x,
        constants[0].result,
        constants[1].result if len(constants) > 1 else None,
        act=linear.act.data,
        storage=linear.storage.data,
    )
    ctx.origins.stands(linear, [new])
    insert_before(linear, *constants, new)
    value: SSAValue = new.result
    for rope in side.ropes:
        turned = RopeOp(value, rope.positions, rope.inv_freq, heads=heads)
        ctx.origins.stands(rope, [turned])
        insert_before(rope, turned)
        value = turned.result
    return value
