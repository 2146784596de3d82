"""Whether bytes come from elsewhere: the only case in which a byte matcher beats differences.

Old bytes are known by their windows of 8 at multiples of a stride; of new bytes, runs are asked
for that are long enough to hold such a window wherever they came from. Windows of one repeated byte
say nothing. Used by the encoder alone: an answer that is wrong costs bytes or time, never
correctness.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Windows = npt.NDArray[np.uint64]

WINDOW: Final = 8
STRIDE: Final = 32
RUN: Final = STRIDE + WINDOW - 1
RUNS: Final = 48
LEAST_FOUND: Final = 2
_REPEATED: Final = np.uint64(0x0101010101010101)


class Known:
    """Bytes that something may have come from."""

    def __init__(self, source: bytes) -> None:
        whole = len(source) // STRIDE * STRIDE
        taken = np.frombuffer(source, "<u8", count=whole // WINDOW)[:: STRIDE // WINDOW]
        self._windows = np.unique(taken)

    def holds(self, piece: bytes, stayed: bytes = b"") -> bool:
        """Return whether `piece` has runs of these bytes, wherever.

        Args:
            piece: What may have come from here.
            stayed: What was in the place of `piece`; runs that are still there are not asked for.
        """
        runs = _runs(piece, stayed)
        if not self._windows.size or not runs.size:
            return False
        asked = _asked(piece, runs)
        places = np.minimum(np.searchsorted(self._windows, asked), self._windows.size - 1)
        return int(np.count_nonzero(self._windows[places] == asked)) >= LEAST_FOUND


def _runs(piece: bytes, stayed: bytes) -> npt.NDArray[np.int64]:
    """Return where up to about `RUNS` runs start that are not what `stayed` has there."""
    whole = len(piece) // RUN
    starts = np.arange(whole) * RUN
    if len(stayed) == len(piece):
        new, old = (np.frombuffer(part, np.uint8, whole * RUN) for part in (piece, stayed))
        starts = starts[(new != old).reshape(whole, RUN).any(axis=1)]
    return starts[:: max(1, starts.size // RUNS)]


def _asked(piece: bytes, starts: npt.NDArray[np.int64]) -> Windows:
    data = np.frombuffer(piece, np.uint8)
    places = starts[:, None, None] + np.arange(STRIDE)[:, None] + np.arange(WINDOW)
    windows: Windows = data[places].reshape(-1, WINDOW).view("<u8").reshape(-1)
    telling: Windows = windows[windows != (windows & np.uint64(255)) * _REPEATED]
    return telling
