"""Two arithmetics for one set of operations.

`Bits` does what the C kernels do, bit for bit: f32, eight-lane sums, our own exp and ln, int8
activations against W4 and W8 weights. `Exact` does the same mathematics in f64 on the original
weights.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from compiler.contract.native_errors import NotFiniteError
from compiler.contract.operations import Act
from compiler.kernels.constants import EXP, LOG, SMALLEST_AMAX
from compiler.kernels.program import Weight
from compiler.quant.products import small_products
from compiler.quant.w4 import PackedW4, integer_w4, unpack_w4
from compiler.quant.w8 import find_w8

Array = NDArray[Any]
Floats = NDArray[Any]

Product = Callable[[int, Floats], None]
"""Receives, before each W4 product, the weight's number and the real rows (R, K)."""

_LANES: Final = 8
_F32: Final = np.float32


class Numerics(Protocol):
    """What the operations need of an arithmetic. Arrays are of its `dtype`."""

    dtype: type[np.floating[Any]]

    def exp(self, x: Floats) -> Floats:
        """Return e^x."""

    def log(self, x: Floats) -> Floats:
        """Return ln x of x >= 2^-126."""

    def total(self, x: Floats) -> Floats:
        """Return sums over the last axis."""

    def dot_rows(self, x: Floats, rows: Floats) -> Floats:
        """Return (..., R, N) products of x (..., R, K) with rows (..., N, K)."""

    def running_sum(self, weights: Floats, values: Floats) -> Floats:
        """Return (..., R, D): sum over j of weights (..., R, J) * values (..., J, D)."""

    def quantise(self, x: Floats, step: float = 0.0) -> tuple[Floats, Floats]:
        """Return x (R, K) as `linear` wants it, and a scale per row (R, 1).

        A step > 0 is what the rows are multiples of.
        """

    def linear(self, x: Floats, scale: Floats, weight: int, columns: Array | None = None) -> Floats:
        """Return (R, N) products of quantised rows with W4 or W8 weight number `weight`.

        `columns` are the numbers of all columns that are not zero in every row, if that is known.
        """


def act(numerics: Numerics, kind: int, x: Floats) -> Floats:
    """Return x after activation `kind`."""
    if kind == Act.RELU:
        return relu(x)
    if kind == Act.SILU:
        return silu(numerics, x)
    return x


def relu(x: Floats) -> Floats:
    """Return x where it is not negative, else +0; NaN stays."""
    y: Floats = np.where(x < 0, np.zeros((), x.dtype), x)
    return y


def silu(numerics: Numerics, x: Floats) -> Floats:
    """Return x / (1 + e^-x)."""
    return np.asarray(x / (1 + numerics.exp(-x)))


def tanh(numerics: Numerics, x: Floats) -> Floats:
    """Return sign(x) * (1 - t) / (1 + t) with t = e^(-2|x|)."""
    t = numerics.exp(np.abs(x) * numerics.dtype(-2))
    return np.asarray(np.copysign((1 - t) / (1 + t), x))


class Bits:
    """f32 arithmetic with the bits of the C kernels."""

    dtype: type[np.floating[Any]] = _F32

    def __init__(
        self,
        weights: tuple[Weight, ...],
        packed: dict[int, PackedW4],
        product: Product | None = None,
    ) -> None:
        self._product = product
        self._integers: dict[int, Floats] = {}
        self._rows: dict[int, Floats] = {}
        for weight in weights:
            if weight.kind == "w4":
                matrix = unpack_w4(packed[weight.id])
                self._integers[weight.id] = integer_w4(matrix).astype(np.float64).T
                self._rows[weight.id] = matrix.grid.rows
            elif weight.kind == "w8":
                found = find_w8(weight.array)
                self._integers[weight.id] = found.codes.astype(np.float64).T
                self._rows[weight.id] = found.steps

    def exp(self, x: Floats) -> Floats:
        """Return e^x by the polynomial of the C kernels."""
        under, over = x < _F32(EXP.low), x > _F32(EXP.high)
        inside = np.where(under, _F32(EXP.low), np.where(over, _F32(EXP.high), x))
        shifted = inside * _F32(EXP.log2e) + _F32(EXP.magic)
        power = shifted.view(np.int32) - np.array(EXP.magic, _F32).view(np.int32)
        whole = shifted - _F32(EXP.magic)
        rest = inside - whole * _F32(EXP.ln2_high)
        rest = rest - whole * _F32(EXP.ln2_low)
        y = np.full_like(rest, EXP.polynomial[0])
        for coefficient in EXP.polynomial[1:]:
            y = y * rest + _F32(coefficient)
        y = y * (rest * rest)
        y = y + rest
        y = y + _F32(1)
        y = y * ((power + np.int32(127)) << np.int32(23)).view(_F32)
        return np.where(over, _F32(np.inf), np.where(under, _F32(0), y))

    def log(self, x: Floats) -> Floats:
        """Return ln x by the series of the C kernels."""
        bits = x.view(np.int32)
        power = (bits - np.int32(LOG.half)) >> np.int32(23)
        inside, whole = (bits - (power << np.int32(23))).view(_F32), power.astype(_F32)
        s = (inside - _F32(1)) / (inside + _F32(1))
        square = s * s
        y = np.full_like(s, LOG.series[0])
        for factor in LOG.series[1:]:
            y = y * square + _F32(factor)
        y = y * s + whole * _F32(EXP.ln2_low)
        return np.asarray(y + whole * _F32(EXP.ln2_high))

    def total(self, x: Floats) -> Floats:
        """Return eight-lane sums over the last axis."""
        blocks = _blocks(x)
        lanes = np.zeros((*x.shape[:-1], _LANES), _F32)
        for at in range(blocks.shape[-2]):
            lanes += blocks[..., at, :]
        return _tree(lanes)

    def dot_rows(self, x: Floats, rows: Floats) -> Floats:
        """Return eight-lane dot products of every row with every row."""
        left, right = _blocks(x), _blocks(rows)
        shape = np.broadcast_shapes(x.shape[:-2], rows.shape[:-2])
        lanes = np.zeros((*shape, x.shape[-2], rows.shape[-2], _LANES), _F32)
        for at in range(left.shape[-2]):
            lanes += left[..., :, None, at, :] * right[..., None, :, at, :]
        return _tree(lanes)

    def running_sum(self, weights: Floats, values: Floats) -> Floats:
        """Return sums over j in ascending order."""
        shape = np.broadcast_shapes(weights.shape[:-2], values.shape[:-2])
        total = np.zeros((*shape, weights.shape[-2], values.shape[-1]), _F32)
        for at in range(weights.shape[-1]):
            total += weights[..., at, None] * values[..., None, at, :]
        return total

    def quantise(self, x: Floats, step: float = 0.0) -> tuple[Floats, Floats]:
        """Return int8 values (as f64, so that BLAS sums them exactly) and row scales."""
        widest = np.abs(x).max(axis=1, keepdims=True)
        if not np.isfinite(widest).all():
            raise NotFiniteError("an activation is infinite or NaN")
        if step:
            widest = np.full_like(widest, _F32(127) * _F32(step))
        zero = widest < _F32(SMALLEST_AMAX)
        safe = np.where(zero, _F32(1), widest)
        inverse = np.where(zero, _F32(0), _F32(127) / safe)
        scale = np.where(zero, _F32(0), safe / _F32(127))
        whole = np.rint(np.clip(x * inverse, -127, 127) if step else x * inverse)
        return whole.astype(np.float64), scale

    def linear(self, x: Floats, scale: Floats, weight: int, columns: Array | None = None) -> Floats:
        """Return exact integer sums, times row scale and activation scale."""
        if self._product is not None:
            self._product(weight, x * scale)
        integers = self._integers[weight]
        if columns is not None:
            x, integers = x[:, columns], integers[columns]
        sums = small_products(x, integers).astype(_F32)
        y: Floats = sums * (self._rows[weight] * scale)
        return y


class Exact:
    """f64 arithmetic on the original weights."""

    dtype: type[np.floating[Any]] = np.float64

    def __init__(self, weights: tuple[Weight, ...], product: Product | None = None) -> None:
        self._product = product
        self._weights = {
            w.id: w.array.astype(np.float64).T for w in weights if w.kind in ("w4", "w8")
        }

    def exp(self, x: Floats) -> Floats:
        """Return e^x."""
        return np.asarray(np.exp(x))

    def log(self, x: Floats) -> Floats:
        """Return ln x."""
        return np.asarray(np.log(x))

    def total(self, x: Floats) -> Floats:
        """Return sums over the last axis."""
        return np.asarray(x.sum(axis=-1))

    def dot_rows(self, x: Floats, rows: Floats) -> Floats:
        """Return the products of every row with every row."""
        return np.asarray(x @ np.swapaxes(rows, -1, -2))

    def running_sum(self, weights: Floats, values: Floats) -> Floats:
        """Return weights @ values."""
        if weights.ndim == values.ndim == 2:
            return small_products(weights, values)
        return np.asarray(weights @ values)

    def quantise(self, x: Floats, step: float = 0.0) -> tuple[Floats, Floats]:  # noqa: ARG002
        """Return x unchanged, scale 1."""
        if not np.isfinite(x).all():
            raise NotFiniteError("an activation is infinite or NaN")
        return x, np.ones((len(x), 1))

    def linear(
        self,
        x: Floats,
        scale: Floats,
        weight: int,
        columns: Array | None = None,  # noqa: ARG002 - one signature; f64 sums take every column
    ) -> Floats:
        """Return the product with the original weight."""
        if self._product is not None:
            self._product(weight, x)
        return np.multiply(small_products(x, self._weights[weight]), scale)


def _blocks(x: Floats) -> Floats:
    """Return (..., n / 8, 8), zero padded."""
    size = x.shape[-1]
    if size % _LANES:
        padded = np.zeros((*x.shape[:-1], -(-size // _LANES) * _LANES), x.dtype)
        padded[..., :size] = x
        x = padded
    return x.reshape(*x.shape[:-1], -1, _LANES)


def _tree(lanes: Floats) -> Floats:
    """Return ((l0+l4) + (l2+l6)) + ((l1+l5) + (l3+l7))."""
    four = lanes[..., :4] + lanes[..., 4:]
    two = four[..., :2] + four[..., 2:]
    return np.asarray(two[..., 0] + two[..., 1])
