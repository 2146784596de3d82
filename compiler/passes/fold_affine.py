"""Fold batch norms, and scales and shifts per channel, into the product before them.

Before (%gamma, %beta, %mean, %var and %shift constant, one number per channel):
    %1 = "sp.onnx"(%x, %w, %b) <{op = "Conv", ...}>
    %2 = "sp.onnx"(%1, %gamma, %beta, %mean, %var) <{op = "BatchNormalization", ...}>
    %3 = "sp.onnx"(%2, %shift) <{op = "Add"}>                      (%shift is 1 x C x 1 x 1)
After, with s = gamma / sqrt(var + epsilon):
    %3 = "sp.onnx"(%x, %w', %b') <{op = "Conv", ...}>
    with %w' = s w and %b' = s (b - mean) + beta + shift

Convolutions, transposed ones included, take batch norms and `Add`, `Sub`, `Mul` and `Div` with a
constant per channel; `MatMul` and `Gemm` of matrices take batch norms, `MatMul` by an `Add` that
raising then makes its bias. Every fold computes in f64 and rounds once. Left out: products that
anything else reads, batch norms in front of a product (the padding of a convolution is not scaled),
training mode, and constants that are not finite.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array
from compiler.dialects.sp import OnnxOp
from compiler.dialects.types import shape_of, type_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.match import attr, single_use
from compiler.passes.rewriting import insert_before, swap, sweep

Wide = NDArray[np.float64]
_BATCH_NORM: Final = "BatchNormalization"
_CONVOLUTIONS: Final = frozenset({"Conv", "ConvTranspose"})
_MATRICES: Final = frozenset({"MatMul", "Gemm"})


@dataclass(frozen=True)
class FoldAffine(Pass):
    """Make `product`, then `s * y + t` per channel, one product."""

    name: ClassVar[str] = "fold-affine"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Fold in one forward walk, so that chains fold into their first product."""
        return PassResult(sweep(module, ctx, _fold))


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """`y = scale * x + shift`, each (C,) f64."""

    scale: Wide
    shift: Wide


def _fold(op: Operation, ctx: PassContext) -> int:
    if not isinstance(op, OnnxOp):
        return 0
    for at in (0, 1) if op.op.data in ("Add", "Mul") else (0,):
        value = op.operand_at(at)
        product = value.owner if value is not None else None
        if not isinstance(product, OnnxOp) or value is None or not single_use(value):
            continue
        affine = _affine(op, at, value, ctx)
        if affine is not None and _into(product, op, affine, ctx):
            return 1
    return 0


def _affine(op: OnnxOp, at: int, x: SSAValue, ctx: PassContext) -> Affine | None:
    """Return what `op` does to each channel of its operand `x`, or None if it is not affine."""
    shape = shape_of(x)
    if len(shape) < 2 or not shape[1].is_static or shape_of(op.outputs[0]) != shape:
        return None
    channels = shape[1].constant
    with np.errstate(all="ignore"):
        if op.op.data == _BATCH_NORM:
            found = _batch_norm(op, channels, ctx)
        elif op.op.data in _ELEMENTWISE:
            vector = _per_channel(op.operand_at(1 - at), len(shape), channels, ctx)
            found = None if vector is None else _ELEMENTWISE[op.op.data](vector)
        else:
            return None
    if found is None or not (np.isfinite(found.scale).all() and np.isfinite(found.shift).all()):
        return None
    return found


def _batch_norm(op: OnnxOp, channels: int, ctx: PassContext) -> Affine | None:
    arrays = [ctx.constants.get(op.operand_at(at)) for at in range(1, 5)]
    vectors = [a.astype(np.float64).reshape(-1) for a in arrays if a is not None]
    if attr(op, "training_mode") or len(op.outputs) != 1 or len(vectors) != len(arrays):
        return None
    if any(vector.shape != (channels,) for vector in vectors):
        return None
    gamma, beta, mean, variance = vectors
    epsilon = attr(op, "epsilon")
    assert isinstance(epsilon, float)
    scale = gamma / np.sqrt(variance + epsilon)
    return Affine(scale, beta - mean * scale)


def _per_channel(value: SSAValue | None, rank: int, channels: int, ctx: PassContext) -> Wide | None:
    """Return (C,) of a constant that has one number, or one per channel, for an NC.. tensor."""
    array = ctx.constants.get(value)
    if array is None or array.dtype != np.float32 or array.ndim > rank:
        return None
    sizes = (1,) * (rank - array.ndim) + array.shape
    if any(size != 1 for at, size in enumerate(sizes) if at != 1) or sizes[1] not in (1, channels):
        return None
    return np.broadcast_to(array.reshape(-1).astype(np.float64), (channels,))


def _scaled(vector: Wide) -> Affine:
    return Affine(vector, np.zeros_like(vector))


def _shifted(vector: Wide) -> Affine:
    return Affine(np.ones_like(vector), vector)


_ELEMENTWISE: Final[Mapping[str, Callable[[Wide], Affine]]] = MappingProxyType(
    {
        "Add": _shifted,
        "Sub": lambda vector: _shifted(-vector),
        "Mul": _scaled,
        "Div": lambda vector: _scaled(1 / vector),
    }
)


def _into(product: OnnxOp, op: OnnxOp, affine: Affine, ctx: PassContext) -> bool:
    """Put `affine`, which `op` does, into its product; return whether it could be."""
    kind, weight = product.op.data, ctx.constants.get(product.operand_at(1))
    if weight is None or weight.dtype != np.float32:
        return False
    if kind in _CONVOLUTIONS:
        return _into_convolution(product, op, affine, weight, ctx)
    if kind in _MATRICES and op.op.data == _BATCH_NORM and weight.ndim == 2:
        return _into_matrix(product, op, affine, weight, ctx)
    return False


def _into_convolution(
    product: OnnxOp, op: OnnxOp, affine: Affine, weight: Array, ctx: PassContext
) -> bool:
    third = product.operand_at(2)
    bias = ctx.constants.get(third)
    if third is not None and bias is None:
        return False
    groups = attr(product, "group")
    assert isinstance(groups, int)
    wide, spatial = weight.astype(np.float64), (1,) * (weight.ndim - 2)
    if product.op.data == "Conv":  # (M, C / groups, ...)
        scaled = wide * affine.scale.reshape(-1, 1, *spatial)
    else:  # (C, M / groups, ...): the channels of a group share its rows
        parts = wide.reshape(groups, -1, *weight.shape[1:])
        scaled = parts * affine.scale.reshape(groups, 1, -1, *spatial)
    offset = affine.shift if bias is None else affine.shift + affine.scale * bias.reshape(-1)
    arrays = _rounded(scaled.reshape(weight.shape), offset)
    if arrays is None:
        return False
    constants = [ctx.constants.add(array) for array in arrays]
    operands = [product.operand_at(0), *(constant.result for constant in constants)]
    whole = OnnxOp(product.op.data, operands, product.attrs.data, [type_of(op.outputs[0])])
    insert_before(op, *constants)
    ctx.origins.stands(product, [whole])
    swap(op, whole, ctx.origins)
    return True


def _into_matrix(
    product: OnnxOp, op: OnnxOp, affine: Affine, weight: Array, ctx: PassContext
) -> bool:
    x, beta = product.operand_at(0), attr(product, "beta")
    if x is None or len(shape_of(x)) != 2:
        return False
    rows = product.op.data == "Gemm" and bool(attr(product, "transB"))
    scaled = weight.astype(np.float64) * (affine.scale[:, None] if rows else affine.scale[None, :])
    third = product.operand_at(2)
    bias = ctx.constants.get(third)
    if third is not None and (bias is None or bias.size not in (1, len(affine.scale))):
        return False
    share = float(beta) if isinstance(beta, float) else 1.0
    offset = affine.shift
    if bias is not None:
        offset = offset + affine.scale * share * bias.reshape(-1)
    arrays = _rounded(scaled, offset)
    if arrays is None:
        return False
    matrix, vector = (ctx.constants.add(array) for array in arrays)
    kinds = [type_of(op.outputs[0])]
    plain = OnnxOp(product.op.data, [x, matrix.result], product.attrs.data, kinds)
    total = OnnxOp("Add", [plain.outputs[0], vector.result], {}, kinds)
    insert_before(op, matrix, vector, plain)
    ctx.origins.stands(product, [plain])
    swap(op, total, ctx.origins)
    return True


def _rounded(weight: Wide, offset: Wide) -> tuple[Array, Array] | None:
    """Return weight and bias in f32, or None where a number does not fit."""
    with np.errstate(over="ignore"):
        arrays = weight.astype(np.float32), offset.astype(np.float32)
    return arrays if all(np.isfinite(array).all() for array in arrays) else None
