"""Compact lists of live tiles: what a product launches, and how much local memory it takes.

    weight, rows -> work (one row per work group) and runs (one row per panel and block of rows)

Dead tiles are in no list, so the global size of a launch is the number of live tiles times the
number of row blocks. How many activation rows a work group keeps in local memory follows from the
density of the weight: where nearly all tiles live, more rows share one read of a tile; where few
do, blocks are small, so that there are enough work groups.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.tiles import GROUP, PANEL

UNIT: Final = 16
"""Lists hold byte offsets in units of this many bytes."""
LANES: Final = PANEL
_TILE_UNITS: Final = PANEL * GROUP // 2 // UNIT
_BLOCKS: Final = ((0.5, 8), (0.125, 4), (0.0, 2))
WORK_FIELDS: Final = 5
RUN_FIELDS: Final = 7


@dataclass(frozen=True, slots=True)
class StoredTiles:
    """A W4 matrix in device memory.

    Attributes:
        n: Rows.
        k: Columns.
        codes: Offset of the live tiles' codes, in units.
        scales: Offset of their scales, in units.
        row_scales: Offset of the row scales, in units.
        first: (panels + 1) first live tile of each panel, then their number.
        index: (live) group of each live tile, ascending within a panel.
    """

    n: int
    k: int
    codes: int
    scales: int
    row_scales: int
    first: NDArray[np.int64]
    index: NDArray[np.int64]

    @property
    def live(self) -> int:
        """How many tiles are live."""
        return len(self.index)

    @property
    def density(self) -> float:
        """Share of live tiles."""
        return self.live / ((len(self.first) - 1) * -(-self.k // GROUP))


@dataclass(frozen=True, slots=True)
class WorkList:
    """What one product launches.

    Attributes:
        work: (work groups, 5) u32; struct `sf_work` of the kernels.
        runs: (panels x blocks, 7) u32; struct `sf_run`.
        block: Activation rows that a work group holds in local memory.
    """

    work: NDArray[np.uint32]
    runs: NDArray[np.uint32]
    block: int

    @property
    def local_bytes(self) -> int:
        """Local memory of a work group: a block's columns of one group, as int8."""
        return self.block * GROUP

    @property
    def partial_bytes(self) -> int:
        """Memory of the partial sums, i32 per work group, row and lane."""
        return len(self.work) * self.block * LANES * 4


def block_rows(density: float, rows: int) -> int:
    """Return how many activation rows a work group takes, at most `rows`."""
    return min(rows, next(most for least, most in _BLOCKS if density > least or least == 0.0))


def work_list(products: Iterable[tuple[StoredTiles, int, int]]) -> WorkList:
    """Return the list of several products of one shape: (weight, first row, rows) each."""
    chosen = [product for product in products if product[2]]
    stored = sum(weight.live * rows for weight, _, rows in chosen)
    most = sum(weight.live / max(weight.density, 1e-9) * rows for weight, _, rows in chosen)
    block = block_rows(stored / max(most, 1.0), max((rows for *_, rows in chosen), default=1))
    work, runs, at = [], [], 0
    for weight, first, rows in chosen:
        for start in range(0, rows, block):
            count = min(block, rows - start)
            work.append(_work(weight, first + start, count))
            runs.append(_runs(weight, first + start, count, at))
            at += weight.live
    return WorkList(_joined(work, WORK_FIELDS), _joined(runs, RUN_FIELDS), block)


def _work(weight: StoredTiles, first: int, rows: int) -> NDArray[np.int64]:
    tiles = np.arange(weight.live)
    columns = (
        weight.codes + _TILE_UNITS * tiles,
        weight.scales + tiles,
        weight.index,
        np.full(weight.live, first),
        np.full(weight.live, rows),
    )
    return np.stack(columns, axis=1)


def _runs(weight: StoredTiles, first: int, rows: int, at: int) -> NDArray[np.int64]:
    panels = np.arange(len(weight.first) - 1)
    column = PANEL * panels
    columns = (
        at + weight.first[:-1],
        np.diff(weight.first),
        column,
        np.minimum(weight.n - column, PANEL),
        np.full(len(panels), first),
        np.full(len(panels), rows),
        weight.row_scales + (PANEL * 4 // UNIT) * panels,
    )
    return np.stack(columns, axis=1)


def _joined(parts: list[NDArray[np.int64]], fields: int) -> NDArray[np.uint32]:
    if not parts:
        return np.zeros((0, fields), np.uint32)
    return np.concatenate(parts).astype(np.uint32)
