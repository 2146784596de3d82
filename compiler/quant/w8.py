"""Weights in eight bits: one step and one zero per row, panels of 16 rows.

    w[n, k] = f32(q[n, k] - z[n]) * step[n]        q, z 0..255, step f32 >= 0

A module holds them as f32 on such a grid: a model that stores eight bits has it already and keeps
it exactly, any other matrix is rounded to it (`round_w8`). Emitter and simulator find codes, zeros
and steps again (`find_w8`). Packed form of (N, K), K padded to 32 and N to 16, all with code and
zero 128, step 0:

    codes   [N/16][K/4][16][4] u8
    steps   [N/16][16] f32, little endian
    zeros   [N/16][16] u8

With int8 activations every sum fits int32 for K <= 8192, whatever the bytes.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.plan_format import align
from compiler.quant.row_codes import round_to_codes, search_codes
from compiler.quant.w4 import GROUP, PANEL, QuantError

Floats = NDArray[np.float32]
Array = NDArray[Any]
MIDDLE: Final = 128
"""The zero of a symmetric row: codes -128..127."""


@dataclass(frozen=True, slots=True, eq=False)
class W8Matrix:
    """A matrix on a grid per row.

    Attributes:
        codes: (N, K) i32, without the zero: the difference of any two of a row, and of any and 0,
            is at most 255.
        steps: (N,) f32, 0 for a row of zeros.
    """

    codes: NDArray[np.int32]
    steps: Floats

    def values(self) -> Floats:
        """Return the matrix (N, K) f32 that the codes stand for."""
        return np.asarray(self.codes.astype(np.float32) * self.steps[:, None], np.float32)

    @property
    def zeros(self) -> NDArray[np.int32]:
        """Which stored code stands for zero, (N,): 128 where the codes fit signed bytes."""
        low, high = _ends(self.codes)
        fits = (low >= -MIDDLE) & (high < MIDDLE)
        return np.asarray(np.where(fits, MIDDLE, -low), np.int32)


def round_w8(weight: Floats) -> Floats:
    """Return a matrix (N, K) of which every row lies on a grid of eight bits.

    A row that lies on one stays as it is; the largest element of any other gets code +-127.

    Raises:
        QuantError: The matrix is not finite, or not two-dimensional.
    """
    _, _, found = search_codes(_checked(weight))
    if found.all():
        return weight
    rest = round_to_codes(weight[~found], 8).values()
    rounded = weight.astype(np.float32)
    rounded[~found] = rest
    return rounded


def find_w8(weight: Floats) -> W8Matrix:
    """Return the codes of a matrix whose rows lie on grids: with the largest step that serves.

    Raises:
        QuantError: A row lies on no grid of eight bits.
    """
    codes, steps, found = search_codes(_checked(weight))
    if not found.all():
        raise QuantError(f"row {int(np.argmin(found))} lies on no grid of 8 bits")
    return W8Matrix(codes, steps)


def lies_on_grid(weight: Floats) -> bool:
    """Return whether every row of a matrix (N, K) lies on a grid of eight bits."""
    return bool(search_codes(_checked(weight))[2].all())


def pack_w8(matrix: W8Matrix) -> tuple[bytes, bytes, bytes]:
    """Return codes, steps and zeros as they are stored."""
    n, k = matrix.codes.shape
    rows, cols = align(n, PANEL), align(k, GROUP)
    zeros = matrix.zeros
    codes = np.full((rows, cols), MIDDLE, np.uint8)
    codes[:n, :k] = matrix.codes + zeros[:, None]
    all_zeros, steps = np.full(rows, MIDDLE, np.uint8), np.zeros(rows, "<f4")
    all_zeros[:n], steps[:n] = zeros, matrix.steps
    cells = codes.reshape(rows // PANEL, PANEL, cols // 4, 4).transpose(0, 2, 1, 3)
    return cells.tobytes(), steps.tobytes(), all_zeros.tobytes()


def unpack_w8(parts: tuple[bytes, ...], n: int, k: int) -> W8Matrix:
    """Return the matrix (n, k) whose stored arrays are `parts`; lengths are those of the plan."""
    rows, cols = align(n, PANEL), align(k, GROUP)
    cells = np.frombuffer(parts[0], np.uint8).reshape(rows // PANEL, cols // 4, PANEL, 4)
    codes = cells.transpose(0, 2, 1, 3).reshape(rows, cols)[:n, :k].astype(np.int32)
    zeros = np.frombuffer(parts[2], np.uint8)[:n].astype(np.int32)
    steps = np.frombuffer(parts[1], "<f4")[:n].astype(np.float32)
    return W8Matrix(codes - zeros[:, None], steps)


def _checked(weight: Floats) -> Floats:
    if weight.ndim != 2 or not weight.size or not np.isfinite(weight).all():
        raise QuantError(f"a matrix of shape {weight.shape} cannot be stored in 8 bits")
    return np.asarray(weight, np.float32)


def _ends(codes: Array) -> tuple[Array, Array]:
    """Return the least and the greatest code of each row, 0 among them."""
    return np.minimum(codes.min(axis=1), 0), np.maximum(codes.max(axis=1), 0)
