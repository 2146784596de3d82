"""Remove hidden channels that the weights prove dead: nothing computed changes.

Before (row 3 of %w1 and %b1 are zero, or column 3 of %w2 is):
    %h = "sp.linear"(%x, %w1, %b1) <{act = "relu"}> : tensor<?x8xf32>, tensor<6x8xf32>, ...
    %y = "sp.linear"(%h, %w2) : tensor<?x6xf32>, tensor<8x6xf32>
After:
    %h = "sp.linear"(%x, %w1', %b1') <{act = "relu"}> : tensor<?x8xf32>, tensor<5x8xf32>, ...
    %y = "sp.linear"(%h, %w2') : tensor<?x5xf32>, tensor<8x5xf32>

A channel between two linear operations, or inside an expert, is dead if it is always zero (its row
is zero and its bias gives zero: `relu(b) = 0` for b <= 0, every act gives 0 for 0) or if nobody
reads it (its column of the second matrix is zero). W4 matrices lose channels by whole groups of 32,
because less saves nothing; all experts of a layer keep the same number. Sums lose only zero terms;
W4 groups form anew.

Left out: attention heads (`drop-dead-heads`), channels that calibration merely saw as zero, and
hidden rows that more than one operation reads.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from compiler.analysis.constants import Array
from compiler.dialects.moe import ExpertsOp
from compiler.dialects.sp import LinearOp
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import functions, operations
from compiler.passes.rewriting import erase_dead, insert_before, swap
from compiler.quant.w4 import GROUP

Mask = NDArray[np.bool_]
_GATED: Final = ("swiglu", "reglu")
_EXPERT_ACTS: Final = ("relu", *_GATED)


@dataclass(frozen=True)
class DropDeadChannels(Pass):
    """Shrink feed-forward matrices and experts by their dead channels."""

    name: ClassVar[str] = "drop-dead-channels"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite every pair of linear operations and every expert layer with dead channels."""
        changed = dropped = 0
        for op in operations(module):
            found = 0
            if isinstance(op, LinearOp):
                found = _linear(op, ctx)
            elif isinstance(op, ExpertsOp) and shrinkable_experts(op, ctx):
                found = _experts(op, ctx)
            changed += bool(found)
            dropped += found
        for func in functions(module):
            erase_dead(func, ctx.origins)
        return PassResult(changed, (f"{dropped} channels",) if dropped else ())


def silent_rows(weight: Array, bias: Array | None, act: str) -> Mask:
    """Return (F,) whether `act(weight @ x + bias)` is zero for every finite x; weight (F, D)."""
    zero: Mask = np.logical_not(weight.any(axis=1))
    if bias is None:
        return zero
    return zero & ((bias <= 0) if act == "relu" else (bias == 0))


def shrinkable_pair(second: LinearOp, ctx: PassContext) -> LinearOp | None:
    """Return the linear operation whose rows only `second` reads, if channels could go."""
    first = second.x.owner
    if not isinstance(first, LinearOp) or first.residual is not None:
        return None
    known = [ctx.constants.get(value) for value in (first.weight, second.weight)]
    is_shared = len(list(first.result.uses)) > 1
    is_open = first.bias is not None and ctx.constants.get(first.bias) is None
    return None if is_shared or is_open or any(array is None for array in known) else first


def shrinkable_experts(op: ExpertsOp, ctx: PassContext) -> bool:
    """Return whether channels of an expert layer could go."""
    known = [ctx.constants.get(value) is not None for value in (op.w_in, op.w_out)]
    is_open = op.b_in is not None and ctx.constants.get(op.b_in) is None
    return op.act.data in _EXPERT_ACTS and all(known) and not is_open


def _linear(second: LinearOp, ctx: PassContext) -> int:
    """Shrink the pair that ends in `second`; return the channels that went."""
    first = shrinkable_pair(second, ctx)
    if first is None:
        return 0
    w_in, w_out = ctx.constants.get(first.weight), ctx.constants.get(second.weight)
    bias = ctx.constants.get(first.bias)
    assert w_in is not None
    assert w_out is not None
    dead = silent_rows(w_in, bias, first.act.data) | ~w_out.any(axis=0)
    is_packed = "w4" in (first.storage.data, second.storage.data)
    kept = _kept(dead, _least(dead, GROUP if is_packed else 1))
    if len(kept) == len(dead):
        return 0
    arrays = [w_in[kept], w_out[:, kept], *([bias[kept]] if bias is not None else [])]
    constants = [ctx.constants.add(array) for array in arrays]
    insert_before(first, *constants)
    values: list[SSAValue] = [constant.results[0] for constant in constants]
    narrow = LinearOp(
        first.x,
        values[0],
        values[2] if bias is not None else None,
        act=first.act.data,
        storage=first.storage.data,
    )
    insert_before(first, narrow)
    ctx.origins.stands(first, [narrow])
    wide = LinearOp(
        narrow.result,
        values[1],
        second.bias,
        second.residual,
        act=second.act.data,
        storage=second.storage.data,
    )
    swap(second, wide, ctx.origins)
    return len(dead) - len(kept)


def _experts(op: ExpertsOp, ctx: PassContext) -> int:
    """Shrink the experts of a layer; return the channels that went, over all experts."""
    w_in, w_out, bias = (ctx.constants.get(value) for value in (op.w_in, op.w_out, op.b_in))
    assert w_in is not None
    assert w_out is not None
    parts = 2 if op.act.data in _GATED else 1
    rows = w_in.reshape(len(w_in), parts, -1, w_in.shape[2])
    biases = None if bias is None else bias.reshape(len(bias), parts, -1)
    dead = np.stack(
        [_dead_in_expert(rows, biases, w_out, expert, op.act.data) for expert in range(len(rows))]
    )
    count = max(_least(one, GROUP) for one in dead)
    if count >= dead.shape[1]:
        return 0
    kept = np.stack([_kept(one, count) for one in dead])
    arrays: list[Array] = [
        np.take_along_axis(rows, kept[:, None, :, None], axis=2).reshape(
            len(rows), parts * count, -1
        ),
        np.take_along_axis(w_out, kept[:, None, :], axis=2),
    ]
    if biases is not None:
        chosen = np.take_along_axis(biases, kept[:, None, :], axis=2)
        arrays.append(chosen.reshape(len(rows), -1))
    constants = [ctx.constants.add(array) for array in arrays]
    insert_before(op, *constants)
    values: list[SSAValue] = [constant.results[0] for constant in constants]
    narrow = ExpertsOp(
        op.x,
        op.index,
        op.gate,
        values[0],
        values[1],
        values[2] if biases is not None else None,
        op.b_out,
        act=op.act.data,
        storage=op.stored_as,
        **op.options(),
    )
    swap(op, narrow, ctx.origins)
    return int(dead.shape[0] * (dead.shape[1] - count))


def _dead_in_expert(rows: Array, biases: Array | None, w_out: Array, expert: int, act: str) -> Mask:
    """Return (F,): a gated channel is a product, so one factor of zero is enough."""
    dead: Mask = ~w_out[expert].any(axis=0)
    for part in range(rows.shape[1]):
        bias = None if biases is None else biases[expert, part]
        dead |= silent_rows(rows[expert, part], bias, act)
    return dead


def _least(dead: Mask, granule: int) -> int:
    """Return how many channels must stay: the live ones, up to whole granules, at least one."""
    live = max(1, int((~dead).sum()))
    return min(len(dead), -(-live // granule) * granule)


def _kept(dead: Mask, count: int) -> NDArray[np.int64]:
    """Return `count` channels in ascending order: all live ones, then the first dead ones."""
    ranked = np.argsort(dead, kind="stable")
    return np.sort(ranked[:count])
