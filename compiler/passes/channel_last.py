"""Operations on images (N, C, H, W) that may as well work on (N, H, W, C): one row per kind.

A line (N, C, W) counts as an image, too.

`layout_cut` asks `can_turn`, `sink_layouts` calls `turned`. A row changes axes and the order of
elements, never which elements meet nor in which order they are added, so every element keeps its
bits. Sizes must be fixed. Left out: what has no kernel on channels last (REF_CONV, pools of
windows), and what counts on a last axis (softmax, normalisation).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np
from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, StringAttr
from xdsl.ir import Attribute, Operation, SSAValue

from compiler.contract.operations import MAX_DIM
from compiler.dialects.movement import ConcatOp, ReshapeOp, SliceOp, TransposeOp
from compiler.dialects.properties import integer
from compiler.dialects.sp import BinaryOp, OnnxOp, UnaryOp
from compiler.dialects.types import Tensor, dtype_of, shape_of, tensor_type
from compiler.passes.base import PassContext
from compiler.passes.match import attr
from compiler.passes.reference_nn import folded_batch_norm
from compiler.passes.reference_rows import EACH_ELEMENT, REDUCTIONS
from compiler.passes.rewriting import insert_before

IMAGE_RANKS: Final = (3, 4)
_GLOBAL_POOLS: Final = MappingProxyType(
    {"GlobalAveragePool": "ReduceMean", "GlobalMaxPool": "ReduceMax"}
)


def channel_last(rank: int) -> tuple[int, ...]:
    """Return the permutation from (N, C, [H,] W) to (N, [H,] W, C)."""
    return (0, *range(2, rank), 1)


def channel_first(rank: int) -> tuple[int, ...]:
    """Return the permutation from (N, [H,] W, C) to (N, C, [H,] W)."""
    return (0, rank - 1, *range(1, rank - 1))


def is_image(value: SSAValue) -> bool:
    """Return whether a tensor has three or four axes of fixed size."""
    shape = shape_of(value)
    return len(shape) in IMAGE_RANKS and all(dim.is_static for dim in shape)


def sizes_of(value: SSAValue) -> tuple[int, ...]:
    """Return the sizes of a tensor whose sizes are fixed."""
    return tuple(dim.constant for dim in shape_of(value))


def is_neutral(value: SSAValue) -> bool:
    """Return whether an image has the same flat order either way: one channel or one pixel."""
    _, channels, *spatial = sizes_of(value)
    return channels == 1 or prod(spatial) == 1


def to_last(image: SSAValue) -> ReshapeOp | TransposeOp:
    """Return the movement of (N, C, H, W) to (N, H, W, C)."""
    shape, perm = shape_of(image), channel_last(len(shape_of(image)))
    if is_neutral(image):
        return ReshapeOp(image, [shape[p] for p in perm])
    return TransposeOp(image, perm)


def to_first(image: SSAValue) -> ReshapeOp | TransposeOp:
    """Return the movement of (N, H, W, C) to (N, C, H, W)."""
    shape, perm = shape_of(image), channel_first(len(shape_of(image)))
    _, *spatial, channels = sizes_of(image)
    if channels == 1 or prod(spatial) == 1:
        return ReshapeOp(image, [shape[p] for p in perm])
    return TransposeOp(image, perm)


@dataclass(slots=True)
class Turning:
    """Images of one function with channels last, as far as they exist.

    Attributes:
        ctx: Constants.
        anchor: Where new operations go: before the operation that is being turned.
        twins: Images with channels last by the value with channels first.
    """

    ctx: PassContext
    anchor: Operation
    twins: dict[SSAValue, SSAValue] = field(default_factory=dict)

    def add(self, op: Operation) -> Operation:
        """Insert an operation before the anchor."""
        insert_before(self.anchor, op)
        return op

    def constant(self, array: np.ndarray) -> SSAValue:
        """Return a constant operand."""
        return self.add(self.ctx.constants.add(array)).results[0]

    def operand(self, value: SSAValue, rank: int) -> SSAValue:
        """Return an operand of an operation on images of `rank` axes with channels last."""
        shape = shape_of(value)
        array = self.ctx.constants.get(value)
        if len(shape) < rank and all(dim.constant == 1 for dim in shape):
            return value
        if array is not None:
            whole = array.reshape((1,) * (rank - array.ndim) + array.shape)
            return self.constant(whole.transpose(channel_last(rank)))
        return self.image(value)

    def image(self, value: SSAValue) -> SSAValue:
        """Return an image with channels last; the movement is made at most once."""
        if value not in self.twins:
            self.twins[value] = self.add(to_last(value)).results[0]
        return self.twins[value]


def can_turn(op: Operation, ctx: PassContext) -> bool:
    """Return whether an operation may work on channels last."""
    kind = op.op.data if isinstance(op, OnnxOp) else op.name
    rule = _RULES.get(kind)
    if rule is None or not op.operands or not (rule is _ELEMENTS or is_image(op.operands[0])):
        return False
    extra = [result for result in op.results[1:] if result.first_use is not None]
    images = [sizes_of(value) for value in (*op.operands, *op.results) if is_image(value)]
    fits = all(n * prod(spatial) <= MAX_DIM for n, _, *spatial in images)
    return not extra and fits and rule.fits(op, ctx)


def turned(op: Operation, state: Turning) -> SSAValue:
    """Insert the operation on channels last; return its result, with channels last if an image."""
    kind = op.op.data if isinstance(op, OnnxOp) else op.name
    return _RULES[kind].make(op, state)


@dataclass(frozen=True, slots=True)
class _Rule:
    fits: Callable[[Operation, PassContext], bool]
    make: Callable[[Operation, Turning], SSAValue]


def _copy(
    op: Operation,
    operands: Sequence[SSAValue],
    state: Turning,
    properties: Mapping[str, Attribute] | None = None,
) -> SSAValue:
    """Insert `op` over other operands; its results are images with channels last."""
    types = [_turned_type(r) if is_image(r) else r.type for r in op.results]
    given = {**op.properties, **(properties or {})}
    made = type(op).create(operands=list(operands), result_types=types, properties=given)
    return state.add(made).results[0]


def _turned_type(image: SSAValue) -> Tensor:
    shape = shape_of(image)
    return tensor_type(dtype_of(image), [shape[p] for p in channel_last(len(shape))])


def _with_attrs(op: Operation, **changed: Attribute) -> dict[str, Attribute]:
    assert isinstance(op, OnnxOp)
    return {"attrs": DictionaryAttr(dict(sorted({**op.attrs.data, **changed}.items())))}


# ---- elements by themselves ----


def _broadcasts(op: Operation, ctx: PassContext) -> bool:
    """Return whether operands are images, numbers, or constants of fewer axes."""
    if not is_image(op.results[0]):
        return False
    rank = len(shape_of(op.results[0]))
    for value in op.operands:
        shape = shape_of(value)
        if not all(dim.is_static for dim in shape) or len(shape) > rank:
            return False
        fixed = ctx.constants.get(value) is not None or prod(d.constant for d in shape) == 1
        if len(shape) < rank and not fixed:
            return False
    return True


def _each(op: Operation, state: Turning) -> SSAValue:
    rank = len(shape_of(op.results[0]))
    return _copy(op, [state.operand(value, rank) for value in op.operands], state)


def _is_fixed_norm(op: Operation, ctx: PassContext) -> bool:
    assert isinstance(op, OnnxOp)
    known = all(ctx.constants.get(op.operand_at(at)) is not None for at in range(1, 5))
    return known and not attr(op, "training_mode") and dtype_of(op.results[0]) == "float32"


def _batch_norm(op: Operation, state: Turning) -> SSAValue:
    assert isinstance(op, OnnxOp)
    arrays = [state.ctx.constants.get(op.operand_at(at)) for at in range(1, 5)]
    epsilon = attr(op, "epsilon")
    scale, offset = folded_batch_norm(arrays, epsilon if isinstance(epsilon, float) else 1e-5)
    x = state.image(op.operands[0])
    for kind, vector in (("mul", scale), ("add", offset)):
        b = state.constant(vector.reshape(*[1] * (len(shape_of(x)) - 1), -1))
        x = state.add(BinaryOp(x, b, kind=kind)).results[0]
    return x


# ---- axes ----


def _axis(axis: int, op: Operation) -> int:
    """Return where an axis of the image that `op` reads is with channels last."""
    rank = len(shape_of(op.operands[0]))
    return channel_last(rank).index(axis % rank)


def _has_image(op: Operation, _ctx: PassContext) -> bool:
    return all(is_image(value) for value in (*op.operands, *op.results))


def _along(op: Operation, state: Turning) -> SSAValue:
    """Join or slice along the axis where it is now."""
    assert isinstance(op, ConcatOp | SliceOp)
    moved, rank = integer(_axis(op.axis.value.data, op)), len(shape_of(op.results[0]))
    operands = [state.operand(value, rank) for value in op.operands]
    return _copy(op, operands, state, {"axis": moved})


def _keeps_places(op: Operation, _ctx: PassContext) -> bool:
    """Return whether a reduction leaves an image, or numbers by image and channel."""
    assert isinstance(op, OnnxOp)
    axes = attr(op, "axes")
    if not isinstance(axes, list) or not axes or len(op.operands) != 1:
        return False
    rank = len(shape_of(op.operands[0]))
    spatial = sorted(int(axis) % rank for axis in axes) == list(range(2, rank))
    return spatial or len(shape_of(op.results[0])) == rank


def _reduce(op: Operation, state: Turning) -> SSAValue:
    assert isinstance(op, OnnxOp)
    axes = attr(op, "axes")
    assert isinstance(axes, list)
    moved = ArrayAttr([integer(_axis(int(axis), op)) for axis in axes])
    return _copy(op, [state.image(op.operands[0])], state, _with_attrs(op, axes=moved))


def _global_pool(op: Operation, state: Turning) -> SSAValue:
    assert isinstance(op, OnnxOp)
    rank = len(shape_of(op.operands[0]))
    axes = ArrayAttr([integer(axis) for axis in range(1, rank - 1)])
    properties = {
        **_with_attrs(op, axes=axes, keepdims=integer(1)),
        "op": StringAttr(_GLOBAL_POOLS[op.op.data]),
    }
    return _copy(op, [state.image(op.operands[0])], state, properties)


def _resizes_planes(op: Operation, ctx: PassContext) -> bool:
    assert isinstance(op, OnnxOp)
    known = all(ctx.constants.get(value) is not None for value in op.operands[1:])
    keeps = sizes_of(op.operands[0])[:2] == sizes_of(op.results[0])[:2]
    return known and keeps and attr(op, "coordinate_transformation_mode") != "tf_crop_and_resize"


def _resize(op: Operation, state: Turning) -> SSAValue:
    """Resize along the axes where they are now; scales given for all axes move with them."""
    assert isinstance(op, OnnxOp)
    axes, operands = attr(op, "axes"), [state.image(op.operands[0])]
    named, rank = isinstance(axes, list) and bool(axes), len(shape_of(op.operands[0]))
    for value in op.operands[1:]:
        array = state.ctx.constants.get(value)
        assert array is not None
        whole = array.size == rank and not named
        operands.append(state.constant(array[list(channel_last(rank))]) if whole else value)
    properties: dict[str, Attribute] = {}
    if named:
        assert isinstance(axes, list)
        moved = ArrayAttr([integer(_axis(int(axis), op)) for axis in axes])
        properties = _with_attrs(op, axes=moved)
    return _copy(op, operands, state, properties)


def _pads_known(op: Operation, ctx: PassContext) -> bool:
    assert isinstance(op, OnnxOp)
    known = all(ctx.constants.get(value) is not None for value in op.operands[1:])
    return known and op.operand_at(3) is None and op.operand_at(1) is not None


def _pad(op: Operation, state: Turning) -> SSAValue:
    """Pad as before; amounts are (before, after) of all axes."""
    amounts = state.ctx.constants.get(op.operands[1])
    assert amounts is not None
    rank = len(shape_of(op.operands[0]))
    both = amounts.reshape(2, rank)[:, list(channel_last(rank))].reshape(-1)
    operands = [state.image(op.operands[0]), state.constant(both), *op.operands[2:]]
    return _copy(op, operands, state)


_ELEMENTS: Final = _Rule(_broadcasts, _each)
_RULES: Final[Mapping[str, _Rule]] = MappingProxyType(
    {
        **dict.fromkeys((UnaryOp.name, BinaryOp.name, *sorted(EACH_ELEMENT)), _ELEMENTS),
        **dict.fromkeys((ConcatOp.name, SliceOp.name), _Rule(_has_image, _along)),
        **dict.fromkeys(sorted(REDUCTIONS), _Rule(_keeps_places, _reduce)),
        **dict.fromkeys(_GLOBAL_POOLS, _Rule(_has_image, _global_pool)),
        "BatchNormalization": _Rule(_is_fixed_norm, _batch_norm),
        "Pad": _Rule(_pads_known, _pad),
        "Resize": _Rule(_resizes_planes, _resize),
    }
)
