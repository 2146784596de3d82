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

    The step of a row is found from its largest element, which has the largest code of the width
    that the matrix was rounded to: that of the layout, or a narrower one.

    Raises:
        QuantError: Some row lies on no grid that the layout can hold.
    """
    rows = [_row_codes(row, CODE_BITS[layout]) for row in np.atleast_2d(weight)]
    codes, steps = zip(*rows, strict=True)
    return RowCodes(np.stack(codes), np.asarray(steps, np.float32))


def read_codes(data: bytes, layout: str, rows: int, steps: bytes) -> RowCodes:
    """Return what `arrays` stored."""
    codes = np.frombuffer(data, _DTYPES[layout]).reshape(rows, -1)
    return RowCodes(codes.astype(np.int32), np.frombuffer(steps, "<f4"))


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
