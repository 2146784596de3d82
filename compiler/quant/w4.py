"""Weights in W4-G32-S8, panel 16: quantise, freeze against an older grid, pack, unpack, reference.

    w[n, k] = (q[n, k] - 8) * s[n, k // 32] * r[n]       q 0..15, s u8 1..255, r f32 >= 0

Packed form of (N, K), K padded to 32 with code 8 and N padded to 16 with code 8, s = 1, r = 0:

    codes   [N/16][K/32][4 cells][64 bytes]; byte 4*row + i of cell c holds
            q[row, 8c + i] | q[row, 8c + 4 + i] << 4
    scales  [N/16][K/32][16] u8
    rows    [N/16][16] f32, little endian

With int8 activations every group sum fits int16 and, for K <= 8192, every row sum fits int32.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from compiler.errors import CompilerError

GROUP: Final = 32
PANEL: Final = 16
ZERO_CODE: Final = 8
MAX_SCALE: Final = 255
MAX_K: Final = 8192
REFRESH_RATIO: Final = 1.5
"""A clipping group keeps its frozen scale while its squared error is below this times the best."""
_CANDIDATES: Final = tuple(np.linspace(0.62, 1.02, 13, dtype=np.float32).tolist())
_ROWS_AT_ONCE: Final = 256

Codes = NDArray[np.uint8]
Scales = NDArray[np.uint8]
Rows = NDArray[np.float32]
Floats = NDArray[np.float32]


class QuantError(CompilerError):
    """A weight or a grid cannot be expressed in W4-G32-S8."""

    code: ClassVar[str] = "build.app.quant"


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The scales of a quantised matrix: s (N, G) u8 and r (N,) f32."""

    scales: Scales
    rows: Rows


@dataclass(frozen=True, slots=True)
class GridReport:
    """How much of a frozen grid survived.

    Attributes:
        groups: Groups of the matrix.
        groups_refreshed: Groups that got a new s because they clipped.
        rows_refreshed: Rows that got a new r, and with it new groups.
    """

    groups: int
    groups_refreshed: int = 0
    rows_refreshed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class W4Matrix:
    """A quantised matrix: codes (N, K) u8 0..15 on a grid."""

    codes: Codes
    grid: Grid
    report: GridReport

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, cols = self.codes.shape
        return rows, cols


@dataclass(frozen=True, slots=True, eq=False)
class PackedW4:
    """The bytes of one matrix, as kernels read them."""

    n: int
    k: int
    codes: bytes
    scales: bytes
    rows: bytes


def quantise_w4(weight: Floats, grid: Grid | None = None) -> W4Matrix:
    """Quantise a matrix; with `grid`, onto the scales of an older version.

    Frozen scales keep unchanged weights' bytes unchanged. A group leaves the grid only if it clips
    and its squared error exceeds `REFRESH_RATIO` times what fresh scales would give.

    Args:
        weight: (N, K) f32, finite, 1 <= K <= 8192.
        grid: Scales to keep, of a matrix of the same shape.

    Raises:
        QuantError: The matrix is not finite, too wide, or the grid has another shape.
    """
    values = grouped(weight)
    if grid is not None:
        _require_fit(values, grid)
    parts = [
        _quantise_rows(values[at : at + _ROWS_AT_ONCE], _slice_grid(grid, at))
        for at in range(0, len(values), _ROWS_AT_ONCE)
    ]
    codes = np.concatenate([part[0] for part in parts])
    codes = codes.reshape(len(codes), -1)[:, : weight.shape[1]]
    report = GridReport(
        groups=values.shape[0] * values.shape[1],
        groups_refreshed=sum(part[2] for part in parts),
        rows_refreshed=sum(part[3] for part in parts),
    )
    scales = np.concatenate([part[1].scales for part in parts])
    rows = np.concatenate([part[1].rows for part in parts])
    return W4Matrix(np.ascontiguousarray(codes), Grid(scales, rows), report)


def fresh_grid(values: Floats) -> tuple[Grid, Floats]:
    """Return the scales of least squared error on the weights alone.

    Args:
        values: (N, G, 32), see `grouped`.

    Returns:
        The grid, and the least squared error (N, G) of each group over free step sizes.
    """
    best = _best_steps(values)
    return _grid_near(values, best), _errors(values, best)


def on_grid(weight: Floats, grid: Grid) -> W4Matrix:
    """Quantise a matrix (N, K) to the nearest codes on exactly this grid.

    Raises:
        QuantError: As `quantise_w4` says.
    """
    values = grouped(weight)
    _require_fit(values, grid)
    codes = _codes(values, grid.scales, grid.rows)
    codes = codes.reshape(len(codes), -1)[:, : weight.shape[1]]
    return W4Matrix(np.ascontiguousarray(codes), grid, GridReport(grid.scales.size))


def dequantise_w4(matrix: W4Matrix) -> Floats:
    """Return the (N, K) f32 values that the codes stand for."""
    values = integer_w4(matrix).astype(np.float64) * matrix.grid.rows.astype(np.float64)[:, None]
    return values.astype(np.float32)


def integer_w4(matrix: W4Matrix) -> NDArray[np.int32]:
    """Return (q - 8) * s as (N, K) i32: the matrix in units of its row scales."""
    spread = np.repeat(matrix.grid.scales.astype(np.int32), GROUP, axis=1)
    return (matrix.codes.astype(np.int32) - ZERO_CODE) * spread[:, : matrix.codes.shape[1]]


def gemv_w4(matrix: W4Matrix, x: NDArray[np.int8]) -> NDArray[np.int32]:
    """Return the exact integer product of the matrix with an int8 vector of length K."""
    product: NDArray[np.int64] = integer_w4(matrix).astype(np.int64) @ x.astype(np.int64)
    return product.astype(np.int32)


def pack_stored(
    codes: NDArray[np.uint8], scales: NDArray[np.uint8], rows: NDArray[np.float32]
) -> PackedW4:
    """Return the packed weight of codes (N, K), scales (N, groups) and row scales (N).

    For readers of other layouts: what they found is taken as it is, nothing is fitted.
    """
    grid = Grid(np.ascontiguousarray(scales), rows.astype(np.float32))
    return pack_w4(W4Matrix(np.ascontiguousarray(codes), grid, GridReport(scales.size)))


def whole_codes(codes: Codes, high: int, wide: int) -> Codes:
    """Return codes (N, K) filled up with the code of zero to blocks of `high` rows, `wide` columns.

    Every layout that stores blocks starts from this.
    """
    n, k = codes.shape
    whole = np.full((-(-n // high) * high, -(-k // wide) * wide), ZERO_CODE, np.uint8)
    whole[:n, :k] = codes
    return whole


def pack_w4(matrix: W4Matrix) -> PackedW4:
    """Return the panel-16 bytes of a quantised matrix."""
    n, k = matrix.shape
    panels, groups = -(-n // PANEL), -(-k // GROUP)
    cells = whole_codes(matrix.codes, PANEL, GROUP).reshape(panels, PANEL, groups, 4, 2, 4)
    packed = cells[..., 0, :] | (cells[..., 1, :] << 4)
    scales = np.ones((panels * PANEL, groups), np.uint8)
    scales[:n] = matrix.grid.scales
    rows = np.zeros(panels * PANEL, "<f4")
    rows[:n] = matrix.grid.rows
    return PackedW4(
        n=n,
        k=k,
        codes=packed.transpose(0, 2, 3, 1, 4).tobytes(),
        scales=scales.reshape(panels, PANEL, groups).transpose(0, 2, 1).tobytes(),
        rows=rows.tobytes(),
    )


def unpack_w4(packed: PackedW4) -> W4Matrix:
    """Return the matrix behind panel-16 bytes; the inverse of `pack_w4`.

    Raises:
        QuantError: A part has the wrong length, or a scale is zero.
    """
    n, k = packed.n, packed.k
    panels, groups = -(-n // PANEL), -(-k // GROUP)
    lengths = (len(packed.codes), len(packed.scales), len(packed.rows))
    if lengths != (panels * groups * 256, panels * groups * PANEL, panels * PANEL * 4):
        raise QuantError(f"packed parts of {lengths} bytes do not hold {n} x {k}")
    cells = np.frombuffer(packed.codes, np.uint8).reshape(panels, groups, 4, PANEL, 4)
    cells = cells.transpose(0, 3, 1, 2, 4)
    codes = np.stack([cells & 15, cells >> 4], axis=-2).reshape(panels * PANEL, groups * GROUP)
    scales = np.frombuffer(packed.scales, np.uint8).reshape(panels, groups, PANEL)
    scales = np.ascontiguousarray(scales.transpose(0, 2, 1).reshape(-1, groups)[:n])
    if not scales.all():
        raise QuantError("a packed group scale is zero")
    rows = np.frombuffer(packed.rows, "<f4").astype(np.float32)[:n]
    report = GridReport(groups=n * groups)
    return W4Matrix(np.ascontiguousarray(codes[:n, :k]), Grid(scales, rows), report)


def grouped(weight: Floats) -> Floats:
    """Return a matrix as (N, G, 32) f32, zero padded.

    Raises:
        QuantError: The matrix is not finite, or too wide.
    """
    if weight.ndim != 2 or not 1 <= weight.shape[1] <= MAX_K or weight.shape[0] < 1:
        raise QuantError(f"a matrix of shape {weight.shape} cannot be packed")
    if not np.isfinite(weight).all():
        raise QuantError("the matrix holds infinities or NaN")
    n, k = weight.shape
    groups = -(-k // GROUP)
    padded = np.zeros((n, groups * GROUP), np.float32)
    padded[:, :k] = weight
    return padded.reshape(n, groups, GROUP)


def _require_fit(values: Floats, grid: Grid) -> None:
    if grid.scales.shape != values.shape[:2] or grid.rows.shape != values.shape[:1]:
        raise QuantError(f"a grid of {grid.scales.shape} does not fit {values.shape[:2]} groups")


def _slice_grid(grid: Grid | None, at: int) -> Grid | None:
    if grid is None:
        return None
    return Grid(grid.scales[at : at + _ROWS_AT_ONCE], grid.rows[at : at + _ROWS_AT_ONCE])


def _quantise_rows(values: Floats, frozen: Grid | None) -> tuple[Codes, Grid, int, int]:
    """Return codes, grid, refreshed groups and refreshed rows of (n, G, 32) values."""
    if frozen is None:
        grid = _fresh_grid(values)
        return _codes(values, grid.scales, grid.rows), grid, 0, 0
    scales, rows = frozen.scales.copy(), frozen.rows.astype(np.float32).copy()
    steps = _steps(scales, rows)
    clipped = ((values < -8.5 * steps) | (values > 7.5 * steps)).any(axis=2)
    if not clipped.any():
        return _codes(values, scales, rows), Grid(scales, rows), 0, 0
    at_row, at_group = np.nonzero(clipped)
    groups = values[at_row, at_group]
    best = _best_steps(groups)
    allowed = np.float32(REFRESH_RATIO) * _errors(groups, best)
    stale = _errors(groups, steps[at_row, at_group, 0]) > allowed
    beyond = (best > rows[at_row] * np.float32(MAX_SCALE)) & (
        _errors(groups, rows[at_row] * np.float32(MAX_SCALE)) > allowed
    )
    at_row, at_group, best, beyond = at_row[stale], at_group[stale], best[stale], beyond[stale]
    fresh_rows = np.unique(at_row[beyond])
    within = ~np.isin(at_row, fresh_rows)
    at_row, at_group, best = at_row[within], at_group[within], best[within]
    scales[at_row, at_group] = _nearest_scale(best, rows[at_row])
    if len(fresh_rows):
        fresh = _fresh_grid(values[fresh_rows])
        scales[fresh_rows], rows[fresh_rows] = fresh.scales, fresh.rows
    codes = _codes(values, scales, rows)
    return codes, Grid(scales, rows), len(at_row), len(fresh_rows)


def _fresh_grid(values: Floats) -> Grid:
    """Choose r so that the widest group has s = 255, then s per group of least squared error."""
    return _grid_near(values, _best_steps(values))


def _grid_near(values: Floats, best: Floats) -> Grid:
    """Return the grid of least error near the step sizes (N, G) that suit each group best."""
    rows = (best.max(axis=1) / np.float32(MAX_SCALE)).astype(np.float32)
    middle = _nearest_scale(best, rows[:, None]).astype(np.int32)
    chosen = np.clip(middle, 1, MAX_SCALE)
    least = np.full(chosen.shape, np.inf, np.float32)
    for shift in (0, -1, 1):
        scales = np.clip(middle + shift, 1, MAX_SCALE)
        error = _errors(values, scales.astype(np.float32) * rows[:, None])
        better = error < least
        chosen, least = np.where(better, scales, chosen), np.where(better, error, least)
    return Grid(chosen.astype(np.uint8), rows)


def _nearest_scale(steps: Floats, rows: Floats) -> Scales:
    safe = np.where(rows > 0, rows, np.float32(1))
    return np.clip(np.rint(steps / safe), 1, MAX_SCALE).astype(np.uint8)


def _best_steps(values: Floats) -> Floats:
    """Return the real step size (..., ) of least squared error for groups (..., 32)."""
    widest = np.abs(values).max(axis=-1) / np.float32(7)
    chosen: Floats = widest.copy()
    least = np.full(widest.shape, np.inf, np.float32)
    for ratio in _CANDIDATES:
        steps = widest * np.float32(ratio)
        error = _errors(values, steps)
        better = error < least
        chosen, least = np.where(better, steps, chosen), np.where(better, error, least)
    return chosen


def _errors(values: Floats, steps: Floats) -> Floats:
    """Return the squared rounding error (..., ) of groups (..., 32) on step sizes (..., )."""
    wide = steps[..., None]
    levels = np.clip(np.rint(_divide(values, wide)), -8, 7)
    difference = values - levels * wide
    total: Floats = np.einsum("...k,...k->...", difference, difference).astype(np.float32)
    return total


def _divide(values: Floats, steps: Floats) -> Floats:
    return np.asarray(values / np.where(steps > 0, steps, np.float32(1)), np.float32)


def _steps(scales: Scales, rows: Rows) -> Floats:
    """Return s * r as (n, G, 1) f32."""
    steps: Floats = np.multiply(scales, rows[:, None], dtype=np.float32)
    return steps[..., None]


def _codes(values: Floats, scales: Scales, rows: Rows) -> Codes:
    steps = _steps(scales, rows)
    levels = np.clip(np.rint(_divide(values, steps)), -8, 7)
    levels = np.where(steps > 0, levels, np.float32(0))
    return (levels + ZERO_CODE).astype(np.uint8)
