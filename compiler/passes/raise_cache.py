"""Check that the cache outputs are `past ++ new rows` of every layer, and make them state.

Before:
    func.func @decoder(%past: ... {sp.role = "past_key"}) -> (... {sp.role = "present_key"})
After:
    func.func @decoder(...) -> (...)       the appended rows live in the device's cache

Attention has been raised to read the cache by layer; this pass proves, on index arrays, that what
the file hands to the next call is the same thing. A file that says otherwise is refused: running it
from our cache would give other answers than its author measured.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import BlockArgument, Operation, SSAValue

from compiler.analysis.movement import Index, Trace, chain_symbols, trace
from compiler.dialects.dims import witnesses
from compiler.dialects.mm import KvAppendOp
from compiler.dialects.movement import MOVEMENT_OPS
from compiler.errors import MalformedModelError
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import arguments, body, functions, results, set_results
from compiler.passes.raise_attention import cache_planes, first_layer, layers_of
from compiler.passes.rewriting import erase_dead

_PAST_OF: Final = {"present_key": "past_key", "present_value": "past_value"}


@dataclass(frozen=True)
class RaiseCache(Pass):
    """Remove cache outputs that have been proven to be the cache."""

    name: ClassVar[str] = "raise-cache"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Check and drop the present outputs of every function.

        Raises:
            MalformedModelError: An output of role present_* is not past rows followed by new ones,
                or a layer of the cache is never appended to.
        """
        changed = 0
        for func in functions(module):
            outputs = results(func)
            present = [(role, value) for role, value in outputs if role in _PAST_OF]
            if not present:
                continue
            appends = _check(func, present)
            for _, value in present:
                _hand_over(value, appends.values(), ctx)
            set_results(func, [pair for pair in outputs if pair not in present])
            erase_dead(func, ctx.origins)
            changed += len(present)
        return PassResult(changed)


def _hand_over(value: SSAValue, appends: Collection[KvAppendOp], ctx: PassContext) -> None:
    """Let appends stand for the movement that joined their rows to the past."""
    readers: dict[SSAValue, list[Operation]] = {}
    for append in appends:
        for row in (*append.operands, *append.results):
            readers.setdefault(row, []).append(append)

    def heirs(part: SSAValue) -> list[Operation]:
        if part not in readers:
            readers[part] = []
            owner = part.owner
            if isinstance(owner, MOVEMENT_OPS):
                found = [heir for operand in owner.operands for heir in heirs(operand)]
                readers[part] = list(dict.fromkeys(found))
                ctx.origins.stands(owner, readers[part])
        return readers[part]

    heirs(value)


def _check(func: FuncOp, present: list[tuple[str, SSAValue]]) -> dict[int, KvAppendOp]:
    """Return the appends by layer."""
    appends = {op.layer.value.data: op for op in body(func).ops if isinstance(op, KvAppendOp)}
    layers = sum(layers_of(value) for role, value in arguments(func) if role == "past_key")
    if sorted(appends) != list(range(layers)):
        raise MalformedModelError(
            f"{func.sym_name.data}: attention over the cache was found in layers"
            f" {sorted(appends)}, the cache has {layers}",
            hint="past_key, past_value and causal_mask must belong to the same attention layers",
        )
    counted = dict.fromkeys(_PAST_OF, 0)
    for role, value in present:
        count = _layers_in(value, role, counted[role], appends)
        if count == 0:
            raise MalformedModelError(
                f"{func.sym_name.data}: output of role {role} is not its past followed by new rows",
                hint="present outputs must be concat(past, new keys or values) for every layer",
            )
        counted[role] += count
    if any(count != layers for count in counted.values()):
        raise MalformedModelError(
            f"{func.sym_name.data}: cache outputs cover {counted} of {layers} layers"
        )
    return appends


def _layers_in(value: SSAValue, role: str, first: int, appends: dict[int, KvAppendOp]) -> int:
    """Return how many layers `value` holds, 0 if they are not what the cache holds."""
    count = 0
    for binding in witnesses(chain_symbols(value)):
        found = trace(value, binding)
        if found.index.ndim not in (4, 5):
            return 0
        planes = found.index.reshape(-1, *found.index.shape[-3:])
        count = len(planes)
        for at, plane in enumerate(planes):
            append = appends.get(first + at)
            if append is None or not _is_layer(found, plane, role, append):
                return 0
    return count


def _is_layer(found: Trace, plane: Index, role: str, append: KvAppendOp) -> bool:
    rows = append.k if role == "present_key" else append.v
    new = found.reads(rows)
    if new is None:
        return False
    heads, _, head_dim = plane.shape
    if new.sizes[-1] != heads * head_dim:
        return False
    block = new.numbers().reshape(-1, heads, head_dim).transpose(1, 0, 2)
    for leaf in found.leaves:
        if not isinstance(leaf.value, BlockArgument) or _role(leaf.value) != _PAST_OF[role]:
            continue
        offset = append.layer.value.data - first_layer(leaf.value)
        stored = cache_planes(leaf)
        same_heads = stored.shape[1] == heads and stored.shape[3] == head_dim
        if 0 <= offset < len(stored) and same_heads:
            wanted = np.concatenate([stored[offset], block], axis=1)
            return np.array_equal(plane, wanted)
    return False


def _role(value: BlockArgument) -> str:
    func = value.block.parent_op()
    assert isinstance(func, FuncOp)
    return arguments(func)[value.index][0]
