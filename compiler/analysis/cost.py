"""What a four-bit weight costs in each layout: stored bytes, workspace, and the time of a product.

`AssignLayouts` chooses by it, `benchmarks.layouts` measures its points and its regret. Time is a
sum of terms, linear so that it can be fitted, with coefficients of its own per family of layouts:

    dense, tiles   bytes | rows * tiles * 512 | rows * K | rows * N | [tiled] rows * tiles | 1
    csr, coo       single * elements | wide * elements | rows * K | single * N | wide * N | 1
    blocked ELL    rows * blocks | pairs * blocks | rows * K | rows * N | 1
    nm             bytes | rows * halves | rows * K | rows * N | 1

bytes: stored bytes, read once; tiles: stored 16 x 32 tiles; halves: tiles of which half is stored;
rows: activation rows; single, wide, pairs: how often a kernel goes over the weight with one, eight
or two rows. Coefficients are not negative: least squares of the relative error under that condition
(Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23) over `layout_points.POINTS`.

2:4 per row is priced in bytes and never emitted: choosing activations per row costs what the halved
multiplication saves. Shared by the 16 rows of a panel it is the layout `nm<2,4,16>`, which takes
any 8 of 16 columns; it may be chosen only where the model says `LEAST_GAIN` times as fast as dense.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiler.analysis.layout_points import POINTS
from compiler.analysis.least_squares import nonnegative_least_squares
from compiler.contract.elements import (
    ELL_COLS,
    ELL_ROWS,
    MAX_COO_ROWS,
    WORKSPACE_BUDGET_BYTES,
    stored_bytes,
    workspace_bytes,
)
from compiler.contract.plan_format import Kind, weight_bytes
from compiler.contract.tiles import GROUP, MAX_GROUPS, PANEL, TILE_BYTES, tile_bytes

Array = NDArray[Any]
DENSE: Final = "dense"
TILES: Final = "tiles"
CSR: Final = "csr"
COO: Final = "coo"
ELL: Final = "blocked_ell<32,4>"
N_OF_M: Final = "structured[2,4]"
NM: Final = "nm<2,4,16>"
EMITTED: Final = (DENSE, TILES, CSR, COO, ELL, NM)
"""Layouts that kernels read, as `compiler.kernels.program.W4_LAYOUTS` calls them."""
KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        DENSE: Kind.W4,
        TILES: Kind.W4_TILES,
        CSR: Kind.W4_CSR,
        COO: Kind.W4_COO,
        ELL: Kind.W4_ELL,
        NM: Kind.W4_NM,
    }
)
BLOCKS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {TILES: (PANEL, GROUP), CSR: (1, 1), COO: (1, 1), ELL: (ELL_ROWS, ELL_COLS), NM: (PANEL, 1)}
)
"""What a layout stores or leaves out as a whole: rows and columns."""
LEAST_GAIN: Final = 1.15
HALF: Final = 16
KEPT: Final = 8
LANES: Final = 8
_FEWEST_WIDE: Final = 3
_FAMILIES: Final[Mapping[str, str]] = MappingProxyType({DENSE: TILES, ELL: "ell", NM: "nm"})


class ZeroCount(NamedTuple):
    """What is stored of a weight in each layout, and its shape.

    Attributes:
        live: Tiles of 16 x 32 that hold anything but zeros, of `tiles`.
        nonzero: Elements that are not zero, of `elements`.
        blocks: Blocks of 32 x 4 that blocked ELL stores, padding included, of `all_blocks`.
        rows: N, of all matrices if there are several.
        cols: K.
        is_2_of_4: Whether at most two of every four neighbours of a row are not zero.
        is_nm: Whether every panel of 16 rows needs at most 8 of every 16 columns.
    """

    live: int
    tiles: int
    nonzero: int
    elements: int
    blocks: int
    all_blocks: int
    rows: int
    cols: int
    is_2_of_4: bool = False
    is_nm: bool = False

    @property
    def units(self) -> Mapping[str, int]:
        """How many tiles, elements or blocks each layout stores."""
        columns = self.tiles * GROUP // (1 + self.is_nm)
        counts = (self.tiles, self.live, self.nonzero, self.nonzero, self.blocks, columns)
        return dict(zip(EMITTED, counts, strict=True))

    @property
    def most(self) -> Mapping[str, int]:
        """How many there are."""
        columns = self.tiles * GROUP
        counts = (self.tiles, self.tiles, self.elements, self.elements, self.all_blocks, columns)
        return dict(zip(EMITTED, counts, strict=True))


@dataclass(frozen=True, slots=True)
class LayoutCost:
    """One row of the cost table.

    Attributes:
        bytes: Stored bytes.
        workspace_bytes: Bytes that kernels need at run time to lay activations out for it.
        microseconds: Predicted time of the products; None if nothing was measured.
        refused: Why it may not be chosen, whatever it costs; empty if it may.
    """

    layout: str
    bytes: int
    workspace_bytes: int
    microseconds: float | None
    refused: str = ""


def count_zeros(array: Array) -> ZeroCount:
    """Count what is stored of a weight (N, K) in each layout."""
    rows, cols = array.shape
    filled = array != 0
    tiles = _blocks(filled, PANEL, GROUP)
    small = _blocks(filled, ELL_ROWS, ELL_COLS)
    columns = _blocks(_padded(filled, PANEL, GROUP), PANEL, 1).reshape(-1, HALF)
    return ZeroCount(
        live=int(tiles.sum()),
        tiles=tiles.size,
        nonzero=int(filled.sum()),
        elements=filled.size,
        blocks=len(small) * int(small.sum(axis=1).max()),
        all_blocks=small.size,
        rows=rows,
        cols=cols,
        is_2_of_4=bool((_padded(filled, 1, 4).reshape(-1, 4).sum(axis=1) <= 2).all()),
        is_nm=bool((columns.sum(axis=1) <= KEPT).all()),
    )


def cost_table(
    count: ZeroCount,
    rows: Collection[int] = (1,),
    budget_bytes: int = WORKSPACE_BUDGET_BYTES,
    readable: Collection[str] = EMITTED,
) -> tuple[LayoutCost, ...]:
    """Return what a weight costs in each layout, dense first.

    Args:
        count: What is stored of it.
        rows: Activation rows of each product with it; times are their sum.
        budget_bytes: The most workspace that a layout may need.
        readable: The layouts that the kernels of all those products read.
    """
    table = [_row(layout, count, rows, budget_bytes, readable) for layout in EMITTED]
    table[-1] = _worthwhile(table[-1], table[0])
    if count.is_2_of_4:
        codes = count.elements * 3 // 8
        stored = codes + -(-count.rows // PANEL) * PANEL * (-(-count.cols // GROUP) + 4)
        reason = "no kernel: picking activations per row costs what it saves"
        table.append(LayoutCost(N_OF_M, stored, 0, None, reason))
    return tuple(table)


def choose(
    count: ZeroCount,
    rows: Collection[int] = (1,),
    budget_bytes: int = WORKSPACE_BUDGET_BYTES,
    readable: Collection[str] = EMITTED,
) -> LayoutCost:
    """Return the cheapest layout that may be chosen; ties go to the first of the table."""
    return cheapest(cost_table(count, rows, budget_bytes, readable))


def cheapest(table: Iterable[LayoutCost]) -> LayoutCost:
    """Return the cheapest row of a cost table that may be chosen; ties go to the first."""
    able = [row for row in table if not row.refused and row.microseconds is not None]
    return min(able, key=lambda row: row.microseconds or 0.0)


def _row(
    layout: str,
    count: ZeroCount,
    rows: Collection[int],
    budget_bytes: int,
    readable: Collection[str],
) -> LayoutCost:
    workspace = workspace_bytes(KINDS[layout], count.cols)
    reason = _reason(layout, count)
    if layout not in readable:
        reason = reason or "the kernel of its call reads dense panels and live tiles only"
    if workspace > budget_bytes:
        reason = reason or f"needs {workspace} bytes of workspace, the budget is {budget_bytes}"
    spent = sum(predict(layout, each, count) for each in rows)
    return LayoutCost(layout, _stored_bytes(layout, count), workspace, spent, reason)


def _worthwhile(row: LayoutCost, dense: LayoutCost) -> LayoutCost:
    """Refuse a layout whose gain over dense could be an error of the model."""
    gain = (dense.microseconds or 0.0) / (row.microseconds or 1.0)
    if row.refused or gain >= LEAST_GAIN:
        return row
    return replace(row, refused=f"{gain:.2f} times as fast as dense, at least {LEAST_GAIN} pay")


def _reason(layout: str, count: ZeroCount) -> str:
    """Return why a weight cannot be stored so, or nothing."""
    if layout == DENSE:
        return ""
    units = count.units[layout]
    if layout == NM and not count.is_nm:
        return f"nothing is left out: a panel of {PANEL} rows needs {KEPT + 1} of {HALF} columns"
    if units == count.most[layout] or not count.nonzero:
        return "nothing is left out" if units else "nothing is stored"
    if layout == TILES and count.cols > MAX_GROUPS * GROUP:
        return f"its index counts {MAX_GROUPS} groups"
    if layout == COO and count.rows > MAX_COO_ROWS:
        return f"its index counts {MAX_COO_ROWS} rows"
    return ""


def _stored_bytes(layout: str, count: ZeroCount) -> int:
    units = count.units[layout]
    if layout == DENSE:
        return units * (TILE_BYTES + PANEL) + -(-count.rows // PANEL) * PANEL * 4
    if layout == TILES:
        return tile_bytes(count.rows, units)
    if layout == NM:
        return weight_bytes(Kind.W4_NM, count.rows, count.cols)
    if layout == ELL:
        return stored_bytes(Kind.W4_ELL, count.rows, units // -(-count.rows // ELL_ROWS))
    return stored_bytes(KINDS[layout], count.rows, units)


def predict(layout: str, rows: int, count: ZeroCount) -> float:
    """Return the predicted microseconds of one product with `rows` activation rows."""
    terms = _terms(layout, rows, count.rows, count.cols, count.units[layout])
    return float(terms @ coefficients(_FAMILIES.get(layout, layout)))


@cache
def coefficients(family: str) -> Array:
    """Return the coefficients of a family: `tiles` (dense too), `csr`, `coo`, `ell` or `nm`."""
    points = [point for point in POINTS if _FAMILIES.get(point[0], point[0]) == family]
    terms = [_terms(*point[:5]) / point[5] for point in points]
    return nonnegative_least_squares(np.array(terms), np.ones(len(terms)))


def _terms(layout: str, rows: int, n: int, k: int, units: int) -> Array:
    if layout in (DENSE, TILES):
        index = rows * units if layout == TILES else 0
        stored = units * (TILE_BYTES + PANEL)
        terms = [stored, rows * units * PANEL * GROUP, rows * k, rows * n, index, 1]
    elif layout == NM:
        halves = units * 2 // GROUP
        stored = halves * (TILE_BYTES // 2 + PANEL + KEPT)
        terms = [stored, rows * halves, rows * k, rows * n, 1]
    elif layout == ELL:
        terms = [rows * units, -(-rows // 2) * units, rows * k, rows * n, 1]
    else:
        left = rows % LANES
        wide = rows // LANES + (left >= _FEWEST_WIDE)
        single = left if left < _FEWEST_WIDE else 0
        terms = [single * units, wide * units, rows * k, single * n, wide * n, 1]
    return np.array(terms, np.float64)


def relative_errors() -> Array:
    """Return |predicted / measured - 1| for each fitted point."""
    return np.array(
        [
            abs(
                float(_terms(*point[:5]) @ coefficients(_FAMILIES.get(point[0], point[0])))
                / point[5]
                - 1.0
            )
            for point in POINTS
        ]
    )


def _padded(filled: Array, high: int, wide: int) -> Array:
    rows, cols = filled.shape
    padded = np.zeros((-(-rows // high) * high, -(-cols // wide) * wide), bool)
    padded[:rows, :cols] = filled
    return padded


def _blocks(filled: Array, high: int, wide: int) -> Array:
    padded = _padded(filled, high, wide)
    return np.asarray(padded.reshape(len(padded) // high, high, -1, wide).any(axis=(1, 3)))
