"""Which heads and channels of a raised module could go, if calibration says that they may.

Called by the driver on the module that the raising passes leave, before anything is chosen. A unit
is what the kernels let go by itself: a group of keys with its queries, or a hidden channel. Units
are named by the columns of the matrix that reads them, and go in steps: as many at once as keep the
columns of a four-bit matrix in whole groups of 32, because less saves nothing. Only four-bit
matrices are offered: calibration records what those are multiplied with. Sites that share a cache
lose as many groups as each other (`drop_dead_heads`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from compiler.dialects.mm import KvAppendOp
from compiler.dialects.moe import ExpertsOp
from compiler.dialects.sp import ConstantOp, LinearOp
from compiler.dialects.types import shape_of
from compiler.passes.base import PassContext
from compiler.passes.drop_dead_channels import shrinkable_experts, shrinkable_pair
from compiler.passes.drop_dead_heads import HeadSite, head_sites
from compiler.passes.functions import operations
from compiler.quant.w4 import GROUP

HEADS: Final = "heads"
CHANNELS: Final = "channels"
EXPERT_CHANNELS: Final = "expert channels"


@dataclass(frozen=True, slots=True)
class UnitSite:
    """Where units can go.

    Attributes:
        kind: HEADS, CHANNELS or EXPERT_CHANNELS.
        name: Of the node that the reading matrix came from, for people.
        weight: Digest of the matrix (N, K) or stack (E, N, K) that reads the units.
        units: Units of each matrix; the last step stays.
        width: Columns of a unit; unit u is columns u * width to (u + 1) * width.
        step: Units of each matrix that go together.
        matrices: Matrices of the stack; each loses units of its own.
        parameters: Weights, biases aside, that one unit of one matrix takes with it.
        shares_cache: Whether its heads are rows of the cache, where all layers are alike.
    """

    kind: str
    name: str
    weight: str
    units: int
    width: int
    step: int
    matrices: int
    parameters: int
    shares_cache: bool = False

    @property
    def steps(self) -> int:
        """How many steps there are; one step of units always stays."""
        return max(0, self.units // self.step - 1)


def removable_units(module: ModuleOp, ctx: PassContext) -> tuple[UnitSite, ...]:
    """Return all sites in order of their operations, each weight once."""
    heads = {site.out: site for site in head_sites(module, ctx) if site.out.storage.data == "w4"}
    cached = sum(site.append is not None for site in heads.values())
    appends = sum(isinstance(op, KvAppendOp) for op in operations(module))
    found: dict[str, UnitSite] = {}
    for op in operations(module):
        for site in _sites_of(op, heads, ctx):
            if not site.shares_cache or cached == appends:
                found.setdefault(site.weight, site)
    return tuple(site for site in found.values() if site.steps)


def _sites_of(op: object, heads: dict[LinearOp, HeadSite], ctx: PassContext) -> Iterator[UnitSite]:
    if isinstance(op, ExpertsOp) and shrinkable_experts(op, ctx):
        yield _experts(op, ctx)
    if not isinstance(op, LinearOp) or op.storage.data != "w4":
        return
    first = shrinkable_pair(op, ctx)
    if op in heads:
        yield _heads(heads[op], ctx)
    elif first is not None:
        rows, cols = _sizes(first.weight)
        parameters = cols + _sizes(op.weight)[0]
        yield UnitSite(
            CHANNELS, ctx.origins.near(op), _digest(op.weight), rows, 1, GROUP, 1, parameters
        )


def _heads(site: HeadSite, ctx: PassContext) -> UnitSite:
    width = site.share * site.width
    read = [_sizes(side.linear.weight)[1] for side in (site.q, site.k, site.v)]
    parameters = width * (read[0] + _sizes(site.out.weight)[0]) + site.width * (read[1] + read[2])
    return UnitSite(
        HEADS,
        ctx.origins.near(site.out),
        _digest(site.out.weight),
        site.groups,
        width,
        site.granule // gcd(site.granule, width),
        1,
        parameters,
        site.append is not None,
    )


def _experts(op: ExpertsOp, ctx: PassContext) -> UnitSite:
    experts, rows, channels = (dim.constant for dim in shape_of(op.w_out))
    inner, cols = (dim.constant for dim in shape_of(op.w_in)[1:])
    parameters = inner // channels * cols + rows
    name = ctx.origins.near(op)
    return UnitSite(
        EXPERT_CHANNELS, name, _digest(op.w_out), channels, 1, GROUP, experts, parameters
    )


def _sizes(weight: SSAValue) -> tuple[int, int]:
    rows, cols = shape_of(weight)
    return rows.constant, cols.constant


def _digest(weight: SSAValue) -> str:
    assert isinstance(weight.owner, ConstantOp)
    return weight.owner.sha256.data
