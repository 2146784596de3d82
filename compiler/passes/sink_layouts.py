"""Let operations between convolutions work on channels last, so that layouts change once.

Before (%1 is what a convolution made, in rows of pixels):
    %2 = "sp.transpose"(%1) <{perm = [0, 3, 1, 2]}> : (tensor<1x8x8x16xf32>) -> tensor<1x16x8x8xf32>
    %3 = "sp.onnx"(%2) <{op = "HardSwish"}> : (tensor<1x16x8x8xf32>) -> tensor<1x16x8x8xf32>
    %4 = "sp.transpose"(%3) <{perm = [0, 2, 3, 1]}> : ...  -> tensor<1x8x8x16xf32>
After:
    %3 = "sp.onnx"(%1) <{op = "HardSwish"}> : (tensor<1x8x8x16xf32>) -> tensor<1x8x8x16xf32>

`layout_cut` chooses where, so that the fewest elements are moved in the whole function; what is
left are moves at inputs, outputs and operations without such a kernel. Every element keeps its
bits. Elementwise operations, sums and products with a constant or a factor per channel, batch
norms, global pools and reductions, resizing, padding, joins and slices take part.
"""

from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from compiler.dialects.movement import TransposeOp
from compiler.dialects.types import shape_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.channel_last import Turning, channel_last, is_image, to_first, turned
from compiler.passes.functions import functions
from compiler.passes.layout_cut import operations_to_turn
from compiler.passes.rewriting import erase_dead, insert_before, replace


@dataclass(frozen=True)
class SinkLayouts(Pass):
    """Turn operations on images to channels last where that moves fewer elements."""

    name: ClassVar[str] = "sink-layouts"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Choose and rewrite function by function; `canonicalise` takes away what cancels."""
        return PassResult(sum(_sink(func, ctx) for func in functions(module)))


def _sink(func: FuncOp, ctx: PassContext) -> int:
    chosen = operations_to_turn(func, ctx)
    if not chosen:
        return 0
    state = Turning(ctx, chosen[0])
    for op in chosen:
        state.anchor = op
        made = turned(op, state)
        if not is_image(op.results[0]):
            replace(op, [made, *op.results[1:]], ctx.origins)
            continue
        back = to_first(made)
        insert_before(op, back)
        state.twins[back.result] = made
        replace(op, [back.result, *op.results[1:]], ctx.origins)
        _cancel(back, made, ctx)
    erase_dead(func, ctx.origins)
    return len(chosen)


def _cancel(back: Operation, made: SSAValue, ctx: PassContext) -> None:
    """Let what moves an image to channels last again read what stands there already."""
    perm = channel_last(len(shape_of(made)))
    for user in dict.fromkeys(use.operation for use in back.results[0].uses):
        if isinstance(user, TransposeOp) and tuple(user.perm.get_values()) == perm:
            replace(user, [made], ctx.origins)
