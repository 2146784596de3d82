"""What a four-bit weight costs in each layout: stored bytes, and the time of one product.

`AssignLayouts` chooses by it, `benchmarks.layouts` measures its points and its error. Time is a sum
of roofline terms (an upper bound of their maximum, and linear, so that it can be fitted):

    t = a * bytes + b * rows * tiles * 512 + c * rows * K + d * rows * N
        + e * [tiled] * rows * tiles + f

bytes: stored bytes read once per product; tiles: stored 16 x 32 tiles; rows: activation rows. The
coefficients are not negative: least squares under that condition (Lawson and Hanson, Solving Least
Squares Problems, 1974, chapter 23) over `layout_points.POINTS`.

Formats that no kernel reads stand in the table with their bytes and `emitted=False`; their time is
unknown, so they are never chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiler.analysis.layout_points import POINTS
from compiler.contract.tiles import GROUP, PANEL, TILE_BYTES, tile_bytes

Array = NDArray[Any]
DENSE: Final = "dense"
TILES: Final = "tiles"
WORKSPACE_BUDGET_BYTES: Final = 2 * 1024 * 1024
_ELL_ROWS, _ELL_COLS = 32, 4
_WIDE_INDEX: Final = 2
_MOST_PASSES: Final = 50


class TileCount(NamedTuple):
    """Stored and all tiles of a weight, its elements that are not zero, and its shape."""

    live: int
    tiles: int
    nonzero: int
    rows: int
    cols: int
    ell_width: int


@dataclass(frozen=True, slots=True)
class LayoutCost:
    """One row of the cost table.

    Attributes:
        bytes: Stored bytes.
        workspace_bytes: Bytes that a conversion at run time would need; 0 for weights, which are
            converted when they are compiled.
        microseconds: Predicted time of one product with one row; None if nothing was measured.
        emitted: Whether kernels read it.
    """

    layout: str
    bytes: int
    workspace_bytes: int
    microseconds: float | None
    emitted: bool


def count_tiles(array: Array) -> TileCount:
    """Count the tiles of a weight (N, K) that hold anything but zeros."""
    rows, cols = array.shape
    filled = _blocks(array != 0, PANEL, GROUP)
    ell = _blocks(array != 0, _ELL_ROWS, _ELL_COLS)
    return TileCount(
        int(filled.sum()),
        filled.size,
        int(np.count_nonzero(array)),
        rows,
        cols,
        int(ell.sum(axis=1).max()),
    )


def cost_table(count: TileCount) -> tuple[LayoutCost, ...]:
    """Return what a weight costs in each layout, for one activation row."""
    panels, codes = -(-count.rows // PANEL), -(-count.nonzero // 2)
    dense = count.tiles * (TILE_BYTES + PANEL) + panels * PANEL * 4
    ell = -(-count.rows // _ELL_ROWS) * count.ell_width
    return (
        LayoutCost(DENSE, dense, 0, predict(1, count, tiled=False), emitted=True),
        LayoutCost(
            TILES,
            tile_bytes(count.rows, count.live),
            0,
            predict(1, count, tiled=True),
            emitted=True,
        ),
        LayoutCost(
            "csr",
            codes + _WIDE_INDEX * count.nonzero + 4 * (count.rows + 1),
            0,
            None,
            emitted=False,
        ),
        LayoutCost("coo", codes + 2 * _WIDE_INDEX * count.nonzero, 0, None, emitted=False),
        LayoutCost(
            f"blocked_ell<{_ELL_ROWS},{_ELL_COLS}>",
            ell * (_ELL_ROWS * _ELL_COLS // 2 + _WIDE_INDEX),
            0,
            None,
            emitted=False,
        ),
    )


def choose(count: TileCount, budget_bytes: int = WORKSPACE_BUDGET_BYTES) -> LayoutCost:
    """Return the cheapest emitted layout within the workspace budget; ties go to the first."""
    known = [row for row in cost_table(count) if row.emitted and row.microseconds is not None]
    able = [row for row in known if row.workspace_bytes <= budget_bytes]
    if count.live in (0, count.tiles):
        return known[0]
    return min(able, key=lambda row: row.microseconds or 0.0)


def predict(rows: int, count: TileCount, *, tiled: bool) -> float:
    """Return the predicted microseconds of one product with `rows` activation rows."""
    return float(_terms(rows, count, tiled=tiled) @ coefficients())


@cache
def coefficients() -> Array:
    """Return the coefficients, fitted to the relative error of the measured points."""
    terms, times = [], []
    for rows, n, k, live, tiled, microseconds in POINTS:
        count = TileCount(live, -(-n // PANEL) * -(-k // GROUP), 0, n, k, 0)
        terms.append(_terms(rows, count, tiled=tiled) / microseconds)
        times.append(1.0)
    return nonnegative_least_squares(np.array(terms), np.array(times))


def _terms(rows: int, count: TileCount, *, tiled: bool) -> Array:
    tiles = count.live if tiled else count.tiles
    stored = tiles * (TILE_BYTES + PANEL)
    index = rows * tiles if tiled else 0
    macs = rows * tiles * PANEL * GROUP
    return np.array([stored, macs, rows * count.cols, rows * count.rows, index, 1], np.float64)


def nonnegative_least_squares(a: Array, b: Array) -> Array:
    """Return x >= 0 that minimises |a x - b|, by active sets; columns are scaled first."""
    scale = np.maximum(np.abs(a).max(axis=0), 1e-30)
    scaled = a / scale
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], bool)
    for _ in range(_MOST_PASSES):
        gradient = scaled.T @ (b - scaled @ x)
        if free.all() or gradient[~free].max() <= 1e-10:
            break
        free[np.argmax(np.where(free, -np.inf, gradient))] = True
        while True:
            step = np.zeros_like(x)
            step[free] = np.linalg.lstsq(scaled[:, free], b, rcond=None)[0]
            falling = free & (step <= 0)
            if not falling.any():
                x = step
                break
            share = (x[falling] / np.maximum(x[falling] - step[falling], 1e-300)).min()
            x = x + share * (step - x)
            free &= x > 1e-15
            x[~free] = 0.0
    return np.asarray(x / scale)


def _blocks(filled: Array, high: int, wide: int) -> Array:
    rows, cols = filled.shape
    padded = np.zeros((-(-rows // high) * high, -(-cols // wide) * wide), bool)
    padded[:rows, :cols] = filled
    return np.asarray(padded.reshape(padded.shape[0] // high, high, -1, wide).any(axis=(1, 3)))


def worst_errors(points: Sequence[tuple[int, int, int, int, bool, float]]) -> Array:
    """Return |predicted / measured - 1| for each point."""
    found = []
    for rows, n, k, live, tiled, microseconds in points:
        count = TileCount(live, -(-n // PANEL) * -(-k // GROUP), 0, n, k, 0)
        found.append(abs(predict(rows, count, tiled=tiled) / microseconds - 1.0))
    return np.array(found)
