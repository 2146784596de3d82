"""Which taps of a convolution are stored, and whether leaving out the others pays.

Sixteen output channels, a panel, share runs of taps that follow one another within a row of the
window (`Op.SPARSE_CONV`). Beginning a run costs what `RUN_TAPS` taps cost, so a gap of no more taps
is stored with its zeros. A dead block of the weight, 16 filters by any number of channels of one
tap, is such a gap. A zero left out changes no bit of a sum of finite products: it starts at +0,
and a product with zero adds a zero. Called by kernel selection and by benchmarks.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from compiler.analysis.constants import Array
from compiler.contract.tiles import PANEL

RUN_TAPS: Final = 1
"""Measured on one core over 3x3 windows of 96 channels, with AVX-512, AVX2 and SSE4: runs cost 0.2
to 1 taps each, of one tap (of which half are dead: 0.57 to 0.61 of the time of all) or of 8."""
LEAST_GAIN: Final = 1.15
"""How many times as fast as the dense kernel the model must say, as for four-bit weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The operands of SPARSE_CONV.

    Attributes:
        taps: (S, 16) f32, one column per channel of the panel.
        first: (2, P + 1) i32, the first run of each panel, and its first tap.
        runs: (R, 2) i32, place of the first tap and number of taps.
    """

    taps: Array
    first: Array
    runs: Array

    def gain(self, taps: int) -> float:
        """Return how many times as fast as all `taps` of a filter they are, by the model."""
        every: int = taps * (self.first.shape[1] - 1)
        return every / (len(self.taps) + RUN_TAPS * len(self.runs))


def worthwhile(weight: Array, row: int) -> Runs | None:
    """Return the runs of a weight if they pay, else None; see `find_runs`."""
    if np.count_nonzero(weight) * LEAST_GAIN > weight.size:
        return None
    found = find_runs(weight, row)
    return found if found.gain(weight.shape[1]) >= LEAST_GAIN else None


def find_runs(weight: Array, row: int) -> Runs:
    """Return the runs of a weight that holds anything.

    Args:
        weight: (Co, kh*kw*Ci) f32 in (ky, kx, ci) order.
        row: kw*Ci, the taps of one row of the window.
    """
    filters, taps = weight.shape
    panels = np.zeros((-(-filters // PANEL), PANEL, taps), np.float32)
    panels.reshape(-1, taps)[:filters] = weight
    live = (panels != 0).any(axis=1)
    live[0, 0] |= not live.any()
    runs, ends, stored = [], [(0, 0)], []
    for panel, filled in zip(panels, live, strict=True):
        found = _runs_of(np.flatnonzero(filled), row)
        runs.extend(found)
        ends.append((ends[-1][0] + len(found), ends[-1][1] + sum(count for _, count in found)))
        stored += [panel[:, at : at + count].T for at, count in found]
    return Runs(
        np.ascontiguousarray(np.concatenate(stored)),
        np.array(ends, np.int32).T.copy(),
        np.array(runs, np.int32),
    )


def all_taps(found: Runs, filters: int, taps: int) -> Array:
    """Return the weight (filters, taps) f32 that runs stand for."""
    panels = found.first.shape[1] - 1
    whole = np.zeros((panels, taps, PANEL), np.float32)
    count = found.runs[:, 1]
    panel = np.repeat(np.arange(panels), np.diff(found.first[1]))
    offset = np.arange(len(found.taps)) - np.repeat(np.cumsum(count) - count, count)
    whole[panel, np.repeat(found.runs[:, 0], count) + offset] = found.taps
    return np.ascontiguousarray(whole.transpose(0, 2, 1).reshape(-1, taps)[:filters])


def _runs_of(places: Array, row: int) -> list[tuple[int, int]]:
    """Join ascending places within a row, over gaps that cost less than another run."""
    if not len(places):
        return []
    gaps, rows = np.diff(places) - 1, np.diff(places // row)
    ends = np.flatnonzero((gaps > RUN_TAPS) | (rows > 0))
    first = places[np.concatenate([[0], ends + 1])]
    last = places[np.concatenate([ends, [len(places) - 1]])]
    return list(zip(first.tolist(), (last - first + 1).tolist(), strict=True))
