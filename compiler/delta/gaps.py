"""Gap coding: an ascending list of positions as the distances between them.

One byte a gap; 255 means "255 more, go on". Geometric gaps under zstd's Huffman coder come within
1-2 % of their entropy. Where few positions are taken, two bytes a gap, low ones and high ones
apart, 65535 to go on.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from compiler.contract.delta import DeltaFormatError
from compiler.delta.blobs import BlobReader, pack_blob

BYTE: Final = 255
PAIR: Final = 65_535

Positions = npt.NDArray[np.int32 | np.int64]


def pack_gaps(positions: Positions) -> bytes:
    """Return strictly ascending `positions`, (n,) from 0, as a blob."""
    return pack_blob(_steps(positions, BYTE).astype(np.uint8).tobytes())


def pack_wide_gaps(positions: Positions) -> bytes:
    """Return strictly ascending `positions`, (n,) from 0, as two blobs."""
    steps = _steps(positions, PAIR)
    low, high = (steps & BYTE).astype(np.uint8), (steps >> 8).astype(np.uint8)
    return pack_blob(low.tobytes()) + pack_blob(high.tobytes())


def _steps(positions: Positions, more: int) -> npt.NDArray[np.int64]:
    gaps = np.diff(positions, prepend=-1) - 1
    escapes = gaps // more
    steps = np.full(int(escapes.sum()) + gaps.size, more, np.int64)
    steps[np.cumsum(escapes + 1) - 1] = gaps % more
    return steps


def read_gaps(reader: BlobReader, limit: int, most: int) -> Positions:
    """Return strictly ascending positions in [0, limit), (n,) with n <= most.

    Raises:
        DeltaFormatError: Too many positions, one out of range, or a list that ends in an escape.
    """
    steps = np.frombuffer(reader.blob(most + limit // BYTE), np.uint8)
    ends = _ends(steps == BYTE, most)
    positions = np.cumsum(steps, dtype=np.int32)[ends]  # at most 255 x (1 Mi + 16 Ki) < 2^31
    positions += np.arange(ends.size, dtype=np.int32)
    return _within(positions, limit)


def read_wide_gaps(reader: BlobReader, limit: int, most: int) -> Positions:
    """Return strictly ascending positions in [0, limit), (n,) with n <= most.

    Raises:
        DeltaFormatError: As `read_gaps`, or the two blobs have other lengths.
    """
    low = np.frombuffer(reader.blob(most + limit // PAIR), np.uint8)
    high = np.frombuffer(reader.blob(low.size, exact=True), np.uint8)
    steps = low | high.astype(np.uint16) << 8
    ends = _ends(steps == PAIR, most)
    positions = np.cumsum(steps, dtype=np.int64)[ends]
    positions += np.arange(ends.size)
    return _within(positions, limit)


def _ends(goes_on: npt.NDArray[np.bool_], most: int) -> npt.NDArray[np.int64]:
    """Return which steps end a gap."""
    ends = np.flatnonzero(~goes_on)
    if ends.size > most or (goes_on.size and goes_on[-1]):
        raise DeltaFormatError("gap list too long or unfinished")
    return ends


def _within(positions: Positions, limit: int) -> Positions:
    if positions.size and positions[-1] >= limit:
        raise DeltaFormatError("gap list leaves its range")
    return positions
