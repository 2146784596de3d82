"""Search the scales of a W4 matrix for the least output error on calibration rows.

    error[n] = mean over rows x of (sum_k (w'[n, k] - w[n, k]) x[k])^2 = d H d',   H = mean of x'x

`d` is a row's rounding error. Group by group, the scale is chosen that minimises `d H d'` with the
errors of all other groups as they stand, so rounding errors of different groups cancel; then the
row scale is fitted by least squares. Codes stay the nearest ones on the grid: the same weights give
the same codes on a kept grid, which small deltas need. Three rules keep the search honest:

- H leans towards a multiple of the unit matrix, as if `PRIOR_ROWS` rows of white noise were seen: a
  matrix that was never reached is quantised for its weights alone.
- A scale whose error on the weights alone exceeds `MOST_LOSS` times the least is not considered:
  inputs that calibration did not show stay safe, and a kept grid is not refreshed needlessly
  (`REFRESH_RATIO` of `w4` is above `MOST_LOSS`).
- A row keeps the plain scales (largest value over 7) if they answer the calibration rows better.

The error reported is that of the device: int8 rows, exact integer sums, the simulator's epilogue.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compiler.quant.products import small_products
from compiler.quant.record import InputSample
from compiler.quant.w4 import (
    GROUP,
    MAX_SCALE,
    Floats,
    Grid,
    QuantError,
    W4Matrix,
    fresh_grid,
    grouped,
    integer_w4,
    on_grid,
)

PRIOR_ROWS: Final = 16
MOST_LOSS: Final = 1.4
BLOCK: Final = 1024
"""Columns whose errors are weighed against each other; H has so many rows and columns at most."""
ROWS_AT_ONCE: Final = 256
_RATIOS: Final = np.linspace(0.5, 1.05, 14, dtype=np.float32)
_ROW_FITS: Final = 2


@dataclass(frozen=True, slots=True)
class OutputError:
    """Mean squared error of a product on its calibration rows, beside that of plain scales.

    Attributes:
        rows: Calibration rows; 0 if the weight was never reached, then both errors are 0.
        plain: With scales from the largest value of each group.
        found: With the scales that were chosen.
    """

    rows: int
    plain: float
    found: float

    @property
    def reduction(self) -> float:
        """Share of the plain error that is gone."""
        return 1.0 - self.found / self.plain if self.plain else 0.0


def search_grid(weight: Floats, sample: InputSample) -> tuple[W4Matrix, OutputError]:
    """Quantise a matrix for the least output error on a sample of its inputs.

    Args:
        weight: (N, K) f32, finite, 1 <= K <= 8192.
        sample: What it is multiplied with; without rows, the weights alone decide.

    Raises:
        QuantError: As `quantise_w4` says, or the sample is of another width.
    """
    values = grouped(weight)
    if sample.rows.shape[1] != weight.shape[1]:
        raise QuantError(f"inputs of width {sample.rows.shape[1]} for a weight {weight.shape}")
    if not len(sample.rows):
        return on_grid(weight, fresh_grid(values)[0]), OutputError(0, 0.0, 0.0)
    moments = _moments(sample)
    parts = [
        _search_rows(values[at : at + ROWS_AT_ONCE], moments)
        for at in range(0, len(values), ROWS_AT_ONCE)
    ]
    scales = np.concatenate([grid.scales for grid in parts])
    rows = np.concatenate([grid.rows for grid in parts])
    return _keep_better_rows(weight, sample, on_grid(weight, Grid(scales, rows)))


def plain_grid(weight: Floats) -> Grid:
    """Return scales that put each group's largest value on code 7 or -7."""
    steps = np.abs(grouped(weight)).max(axis=2) / np.float32(7)
    rows = (steps.max(axis=1) / np.float32(MAX_SCALE)).astype(np.float32)
    safe = np.where(rows > 0, rows, np.float32(1))
    scales = np.clip(np.rint(steps / safe[:, None]), 1, MAX_SCALE).astype(np.uint8)
    return Grid(scales, rows)


def output_error(weight: Floats, matrix: W4Matrix, sample: InputSample) -> OutputError:
    """Return how far a quantised matrix's products are from the original's, on a sample."""
    expected = _expected(weight, sample)
    plain = _row_errors(on_grid(weight, plain_grid(weight)), sample, expected)
    return _error(sample, plain, _row_errors(matrix, sample, expected))


def _keep_better_rows(
    weight: Floats, sample: InputSample, found: W4Matrix
) -> tuple[W4Matrix, OutputError]:
    """Give rows that plain scales serve better their plain scales."""
    plain, expected = on_grid(weight, plain_grid(weight)), _expected(weight, sample)
    before, after = (_row_errors(matrix, sample, expected) for matrix in (plain, found))
    worse = after > before
    if worse.any():
        grid = Grid(
            np.where(worse[:, None], plain.grid.scales, found.grid.scales),
            np.where(worse, plain.grid.rows, found.grid.rows),
        )
        codes = np.where(worse[:, None], plain.codes, found.codes)
        found = W4Matrix(codes, grid, found.report)
    return found, _error(sample, before, np.minimum(before, after))


def _error(
    sample: InputSample, plain: NDArray[np.float64], found: NDArray[np.float64]
) -> OutputError:
    return OutputError(len(sample.rows), float(plain.mean()), float(found.mean()))


def _expected(weight: Floats, sample: InputSample) -> NDArray[np.float64]:
    return small_products(sample.values(), weight.astype(np.float64).T)


def _row_errors(
    matrix: W4Matrix, sample: InputSample, expected: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return (N,) mean squared errors of the device's products against exact ones (R, N)."""
    weight = integer_w4(matrix).astype(np.float64).T
    sums = small_products(sample.rows.astype(np.float64), weight)
    got = sums.astype(np.float32) * (matrix.grid.rows * sample.scales[:, None])
    mean: NDArray[np.float64] = np.square(got - expected).mean(axis=0)
    return mean


def _moments(sample: InputSample) -> tuple[Floats, ...]:
    """Return H of each block of columns, padded to whole groups: (B, B) f32."""
    values = sample.values()
    width = -(-values.shape[1] // GROUP) * GROUP
    padded = np.zeros((len(values), width))
    padded[:, : values.shape[1]] = values
    blocks = []
    for at in range(0, width, BLOCK):
        block = padded[:, at : at + BLOCK]
        moment = small_products(block.T, block)
        white = np.trace(moment) / len(moment) / len(values)
        moment += PRIOR_ROWS * white * np.eye(len(moment))
        blocks.append((moment / (len(values) + PRIOR_ROWS)).astype(np.float32))
    return tuple(blocks)


def _search_rows(values: Floats, moments: tuple[Floats, ...]) -> Grid:
    """Return scales for rows (n, G, 32)."""
    grid, least = fresh_grid(values)
    scales, allowed = grid.scales.copy(), np.float32(MOST_LOSS) * least
    error = _rounding(values, grid)
    for number, moment in enumerate(moments):
        first = number * BLOCK // GROUP
        for at in range(len(moment) // GROUP):
            _choose_scale(values, grid.rows, scales, allowed, error, moment, first, at)
    return _fit_rows(values, Grid(scales, grid.rows), moments, allowed)


def _choose_scale(
    values: Floats,
    rows: Floats,
    scales: NDArray[np.uint8],
    allowed: Floats,
    error: Floats,
    moment: Floats,
    first: int,
    at: int,
) -> None:
    """Choose the scales of one group of every row; update `scales` and `error`.

    Args:
        values: (n, G, 32) weights.
        rows: (n,) row scales.
        scales: (n, G) u8.
        allowed: (n, G), most squared error on the weights alone.
        error: (n, G * 32), rounding errors of the codes as they stand.
        moment: (B, B) of this block.
        first: First group of the block.
        at: Which group of the block.
    """
    group, inner = first + at, slice(at * GROUP, (at + 1) * GROUP)
    block = error[:, first * GROUP : first * GROUP + len(moment)]
    now = block[:, inner]
    own = moment[inner, inner]
    pull = small_products(block, moment[:, inner]) - now @ own
    wanted = values[:, group]
    choices, steps = _choices(wanted, rows)
    trial = _nearest(wanted, steps) - wanted
    cost = _cost(trial, own, pull)
    cost = np.where(np.square(trial).sum(axis=2) <= allowed[:, group], cost, np.float32(np.inf))
    best = cost.argmin(axis=0)
    each = np.arange(len(wanted))
    better = cost[best, each] < _cost(now, own, pull)
    scales[better, group] = choices[best, each][better]
    error[better, group * GROUP : (group + 1) * GROUP] = trial[best, each][better]


def _choices(wanted: Floats, rows: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Return candidate scales (C, n) u8 and their step sizes (C, n)."""
    widest = np.abs(wanted).max(axis=1) / np.float32(7)
    safe = np.where(rows > 0, rows, np.float32(1))
    choices = np.clip(np.rint(_RATIOS[:, None] * (widest / safe)), 1, MAX_SCALE).astype(np.uint8)
    return choices, np.multiply(choices, rows, dtype=np.float32)


def _nearest(wanted: Floats, steps: Floats) -> Floats:
    """Return the values (C, n, 32) that stand for `wanted` (n, 32) at step sizes (C, n)."""
    wide = steps[..., None]
    levels = np.rint(wanted / np.where(wide > 0, wide, np.float32(1)))
    return np.asarray(np.clip(levels, -8, 7) * wide, np.float32)


def _cost(error: Floats, own: Floats, pull: Floats) -> Floats:
    """Return e H e' + 2 e c over the last axis."""
    return np.asarray(((error @ own + 2 * pull) * error).sum(axis=-1), np.float32)


def _fit_rows(values: Floats, grid: Grid, moments: tuple[Floats, ...], allowed: Floats) -> Grid:
    """Scale each row scale by least squares, as long as the error falls and no group loses much."""
    wide, rows = values.reshape(len(values), -1), grid.rows
    error = _rounding(values, grid)
    now = _weighed(error, error, moments)
    for _ in range(_ROW_FITS):
        stored = wide + error
        above, below = _weighed(wide, stored, moments), _weighed(stored, stored, moments)
        factor = np.where(below > 0, above / np.where(below > 0, below, 1), 1)
        tried = (rows * factor).astype(np.float32)
        other = _rounding(values, Grid(grid.scales, tried))
        then = _weighed(other, other, moments)
        loss = np.square(other).reshape(values.shape).sum(axis=2)
        better = (then < now) & (tried > 0) & (loss <= allowed).all(axis=1)
        rows, now = np.where(better, tried, rows), np.where(better, then, now)
        error = np.where(better[:, None], other, error)
    return Grid(grid.scales, rows)


def _weighed(left: Floats, right: Floats, moments: tuple[Floats, ...]) -> Floats:
    """Return (n,) a H b' for rows a and b."""
    total = np.zeros(len(left), np.float32)
    for number, moment in enumerate(moments):
        at = slice(number * BLOCK, number * BLOCK + len(moment))
        total += (small_products(left[:, at], moment) * right[:, at]).sum(axis=1)
    return total


def _rounding(values: Floats, grid: Grid) -> Floats:
    """Return what the codes on `grid` stand for minus the weights (n, G, 32), as (n, G * 32)."""
    steps = np.multiply(grid.scales, grid.rows[:, None], dtype=np.float32)
    levels = np.clip(np.rint(values / np.where(steps > 0, steps, 1)[..., None]), -8, 7)
    return np.asarray(levels * steps[..., None] - values, np.float32).reshape(len(values), -1)
