"""Gap coding: an ascending list of positions as the distances between them.

One byte a gap; 255 means "255 more, go on". Geometric gaps under zstd's Huffman coder come within
1-2 % of their entropy.
"""

import numpy as np
import numpy.typing as npt

from compiler.contract.delta import DeltaFormatError
from compiler.delta.blobs import BlobReader, pack_blob

Positions = npt.NDArray[np.int64]


def pack_gaps(positions: Positions) -> bytes:
    """Return strictly ascending `positions`, (n,) from 0, as a blob."""
    gaps = np.diff(positions, prepend=-1) - 1
    escapes = gaps // 255
    steps = np.full(int(escapes.sum()) + gaps.size, 255, np.uint8)
    steps[np.cumsum(escapes + 1) - 1] = gaps % 255
    return pack_blob(steps.tobytes())


def read_gaps(reader: BlobReader, limit: int, most: int) -> Positions:
    """Return strictly ascending positions in [0, limit), (n,) with n <= most.

    Raises:
        DeltaFormatError: Too many positions, one out of range, or a list that ends in an escape.
    """
    steps = np.frombuffer(reader.blob(most + limit // 255), np.uint8)
    if not steps.size:
        return np.zeros(0, np.int64)
    ends = np.flatnonzero(steps != 255)
    if ends.size > most or steps[-1] == 255:
        raise DeltaFormatError("gap list too long or unfinished")
    positions = np.cumsum(steps, dtype=np.int64)[ends] + np.arange(ends.size)
    if positions[-1] >= limit:
        raise DeltaFormatError("gap list leaves its range")
    return positions
