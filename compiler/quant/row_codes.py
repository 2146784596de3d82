"""Matrices on a symmetric grid per row: integer codes, one step per row, and how to find them.

    value = f32(code) * step          one f32 product, so decoding gives the same bits everywhere

`round_to_codes` makes them from any matrix, `find_codes` reads them back from a matrix that lies on
such a grid: a module holds routers as f32, the emitter stores their codes. Called by the router
search and by the emitter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.quant.w4 import QuantError

Floats = NDArray[np.float32]
I8: Final = "i8"
I16: Final = "i16"
CODE_BITS: Final = {I8: 8, I16: 16}
_ZERO: Final = np.float32(0)
_INFINITY: Final = np.float32(np.inf)
MOST_APART: Final = 255
_LOOK: Final = 32
"""Elements of a row that tell most wrong steps apart."""
_NEAR: Final = 1e-3
_FIRST: Final = 8
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {I8: np.dtype("<i1"), I16: np.dtype("<i2")}


@dataclass(frozen=True, slots=True, eq=False)
class RowCodes:
    """A matrix on a grid.

    Attributes:
        codes: (N, K) integers within +-(2^(bits - 1) - 1).
        steps: (N,) f32, not negative; 0 for a row of zeros.
    """

    codes: NDArray[np.int32]
    steps: Floats

    def values(self) -> Floats:
        """Return the matrix (N, K) that the codes stand for, f32."""
        return np.asarray(self.codes.astype(np.float32) * self.steps[:, None], np.float32)

    def arrays(self, layout: str) -> tuple[bytes, bytes]:
        """Return codes, row-major in the width of `layout`, and steps, as they are stored."""
        return self.codes.astype(_DTYPES[layout]).tobytes(), self.steps.astype("<f4").tobytes()


def layout_of(bits: int) -> str:
    """Return the narrowest stored form of a grid of at most 16 bits."""
    return I8 if bits <= CODE_BITS[I8] else I16


def round_to_codes(weight: Floats, bits: int) -> RowCodes:
    """Return the nearest codes of a matrix (N, K); a row's largest element has the largest code."""
    most = 2 ** (bits - 1) - 1
    widest = np.abs(weight.astype(np.float64)).max(axis=1)
    steps = (widest / most).astype(np.float32)
    safe = np.where(steps > 0, steps, np.float32(1)).astype(np.float64)
    codes = np.where(steps[:, None] > 0, np.rint(weight / safe[:, None]), 0)
    return RowCodes(np.clip(codes, -most, most).astype(np.int32), steps)


def find_codes(weight: Floats, layout: str) -> RowCodes:
    """Return codes whose values are exactly this matrix (N, K), for storing it in `layout`.

    The step of a row is found from its largest element: with 8 bits it may have any code, with more
    it has the largest of the width that the matrix was rounded to.

    Raises:
        QuantError: Some row lies on no grid that the layout can hold.
    """
    if layout == I8:
        found, steps_found, on_grid = search_codes(np.atleast_2d(weight))
        if not on_grid.all() or not _are_bytes(found):
            raise QuantError("a row lies on no grid of at most 8 bits")
        return RowCodes(found, steps_found)
    rows = [_row_codes(row, CODE_BITS[layout]) for row in np.atleast_2d(weight)]
    codes, steps = zip(*rows, strict=True)
    return RowCodes(np.stack(codes), np.asarray(steps, np.float32))


def has_codes(weight: Floats) -> bool:
    """Return whether `find_codes` finds codes of 8 bits; looks at a few rows first."""
    for rows in (weight[:_FIRST], weight):
        found, _, on_grid = search_codes(rows)
        if not on_grid.all() or not _are_bytes(found):
            return False
    return True


def read_codes(data: bytes, layout: str, rows: int, steps: bytes) -> RowCodes:
    """Return what `arrays` stored."""
    codes = np.frombuffer(data, _DTYPES[layout]).reshape(rows, -1)
    return RowCodes(codes.astype(np.int32), np.frombuffer(steps, "<f4"))


def _are_bytes(codes: NDArray[np.int32]) -> bool:
    return bool(codes.min() >= -128 and codes.max() <= 127)


def _row_codes(row: Floats, most_bits: int) -> tuple[NDArray[np.int32], np.float32]:
    widest = np.abs(row).max()
    if widest == 0:
        return np.zeros(row.shape, np.int32), np.float32(0)
    for bits in range(most_bits, 1, -1):
        near = np.float32(float(widest) / (2 ** (bits - 1) - 1))
        for step in (near, np.nextafter(near, _ZERO), np.nextafter(near, _INFINITY)):
            if step == 0:
                continue
            codes = np.rint(row.astype(np.float64) / float(step))
            if np.array_equal(codes.astype(np.float32) * step, row):
                return codes.astype(np.int32), step
    raise QuantError(f"a row lies on no grid of at most {most_bits} bits")


def search_codes(values: Floats) -> tuple[NDArray[np.int32], Floats, NDArray[np.bool_]]:
    """Return codes (N, K), steps (N,) and which rows of a matrix lie on a grid of eight bits.

    Codes of a row, and 0, differ by at most 255.

    The largest element of a row is `most` steps; every `most` is tried, the least first, so that
    the answer depends on the values alone and codes have no common factor.
    """
    n, k = values.shape
    widest = np.abs(values).max(axis=1)
    codes, steps = np.zeros((n, k), np.int32), np.zeros(n, np.float32)
    found = widest == 0
    looked = values[:, np.linspace(0, k - 1, min(k, _LOOK)).astype(np.intp)].astype(np.float64)
    for most in range(1, MOST_APART + 1):
        open_rows = np.nonzero(~found)[0]
        if not len(open_rows):
            break
        near = (widest[open_rows].astype(np.float64) / most).astype(np.float32)
        counts = looked[open_rows] / np.where(near > 0, near, 1)[:, None]
        likely = (np.abs(counts - np.rint(counts)) < _NEAR).all(axis=1) & (near > 0)
        _settle(values, open_rows[likely], near[likely], (codes, steps, found))
    return codes, steps, found


def _settle(
    values: Floats,
    rows: NDArray[np.intp],
    near: Floats,
    into: tuple[NDArray[np.int32], Floats, NDArray[np.bool_]],
) -> None:
    """Find codes of some rows with steps within two ulp of `near`, the nearest first."""
    codes, steps, found = into
    less, more = np.nextafter(near, -_INFINITY), np.nextafter(near, _INFINITY)
    far = np.nextafter(less, -_INFINITY), np.nextafter(more, _INFINITY)
    for step in (near, less, more, *far):
        left = ~found[rows] & (step > 0)
        if not left.any():
            continue
        at, each = rows[left], step[left][:, None]
        tried = np.rint(values[at].astype(np.float64) / each)
        apart = np.maximum(tried.max(axis=1), 0) - np.minimum(tried.min(axis=1), 0)
        fits = (tried.astype(np.float32) * each == values[at]).all(axis=1) & (apart <= MOST_APART)
        codes[at[fits]], steps[at[fits]], found[at[fits]] = tried[fits], step[left][fits], True
