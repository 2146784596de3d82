"""What a call costs in each variant on a target, and the policy that follows.

    latency = f(density, M, N, K, hardware):
    t = roof * max(bytes / bandwidth, products / peak) + bytes, products, M * K, M * N, groups, 1

`roof` and the other coefficients are not negative and fitted per target, kind of call and variant
(`least_squares`), to measured products kept with the name of their host
(`compiler.hardware.measured`). A variant that shares is fitted to what it really cut into pieces,
which begins with waking a thread; what is one piece has a fit of its own. Bandwidth and peak are
the best that any of those products reached. The error of a kind is found by leaving out whole
shapes: each fifth of the shapes is predicted from the other four (mean absolute percentage error).

A cell of the table gets the variant that is predicted to be fastest for its middle; the variants
within the error of it are its doubts, which a device measures. A target that was not measured gets
priors: what needs no measuring as the default, everything else in doubt.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.analysis.least_squares import nonnegative_least_squares
from compiler.contract.policy import (
    CELLS,
    DENSITY_BOUNDS,
    FULL,
    LEGAL,
    ROW_BOUNDS,
    SIZE_BYTES,
    CallKind,
    Cell,
    Flags,
    Policy,
    Variant,
)
from compiler.contract.tiles import GROUP, PANEL, TILE_BYTES
from compiler.hardware.measured import MeasuredProduct, measured_on
from compiler.kernels.constants import MIN_PIECE_BYTES

Array = NDArray[Any]
FOLDS: Final = 5
W4_BYTES: Final = 17 / 32
F32_BYTES: Final = 4.0
TOP_K: Final = 2
"""Experts of a token in the measured calls."""
MATRICES: Final = 2
THREADS: Final = 2
"""Threads of the measured calls."""
_BLIND: Final = Variant.UNCHECKED
_MOST_RESIDUAL: Final = 0.5
DENSE_FROM: Final = 900
"""Per mille: above it reading listed groups takes as long as reading all; see `analysis.checks`."""


@dataclass(frozen=True, slots=True)
class Product:
    """One call as the model sees it.

    Attributes:
        kind: What runs.
        rows: M, activation rows.
        n, k: Rows and columns of the weight; of an expert's first matrix.
        density: Of the stored weights or, for CHECKED, of the live activations.
    """

    kind: CallKind
    rows: int
    n: int
    k: int
    density: float


def terms(product: Product, variant: Variant) -> Array:
    """Return bytes, products (multiplications) and the other terms of a call."""
    rows, n, k, density = product.rows, product.n, product.k, product.density
    entries = rows
    if product.kind is CallKind.CHECKED and variant & _BLIND:
        density = 1.0
    if product.kind is CallKind.EXPERTS:
        entries, n = rows * TOP_K, n * MATRICES
    width = F32_BYTES if product.kind is CallKind.LINEAR_F32 else W4_BYTES
    read = density * n * k * width
    if product.kind is CallKind.EXPERTS:
        read *= min(rows * TOP_K, 2 * TOP_K)
    live = density * n * k * entries
    groups = density * -(-n // 16) * -(-k // GROUP) * entries
    return np.array([read, live, entries * k, entries * n, groups, 1.0])


def pieces(product: Product, variant: Variant) -> int:
    """Return how many pieces the pool cuts a call into with `THREADS` threads; see pool.c.in."""
    if variant & Variant.ALONE:
        return 1
    rows, n, density = product.rows, product.n, product.density
    groups = -(-product.k // GROUP)
    units, tile = -(-n // PANEL), TILE_BYTES
    if product.kind is CallKind.CHECKED and variant & _BLIND:
        density = 1.0
    if product.kind is CallKind.LINEAR_F32:
        units, unit_bytes = n, int(F32_BYTES) * product.k * rows
    elif product.kind is CallKind.EXPERTS:
        entries = rows * TOP_K
        unit_bytes = groups * tile * (min(entries, TOP_K) + entries // 8)
    else:
        unit_bytes = int(density * groups) * tile * -(-rows // 8)
    per_thread = 1 if variant & Variant.COARSE else 2
    fair = -(-units // (per_thread * THREADS))
    least = -(-MIN_PIECE_BYTES // max(1, unit_bytes))
    return -(-units // max(1, min(units, max(fair, least))))


@dataclass(frozen=True)
class Fit:
    """The model of one kind and variant: coefficients, bandwidth and peak."""

    coefficients: Array
    bytes_per_us: float
    products_per_us: float

    def predict(self, product: Product, variant: Variant) -> float:
        """Return microseconds."""
        return float(self._terms(product, variant) @ self.coefficients)

    def _terms(self, product: Product, variant: Variant) -> Array:
        plain = terms(product, variant)
        roof = max(plain[0] / self.bytes_per_us, plain[1] / self.products_per_us)
        return np.array([roof, *plain])

    @classmethod
    def of(cls, rows: Sequence[MeasuredProduct], variant: Variant) -> "Fit":
        """Return the fit with the least relative error."""
        found = [terms(_product(row), variant) for row in rows]
        times = np.array([row.microseconds[variant] for row in rows])
        table = np.array(found)
        roofs = (table[:, 0] / times).max(), (table[:, 1] / times).max()
        fit = cls(np.zeros(table.shape[1] + 1), float(roofs[0]), float(roofs[1]))
        scaled = [fit._terms(_product(row), variant) for row in rows]
        relative = np.array(scaled) / times[:, None]
        return cls(nonnegative_least_squares(relative, np.ones(len(rows))), *roofs)


def _product(row: MeasuredProduct) -> Product:
    return Product(row.kind, row.rows, row.n, row.k, row.density)


@dataclass(frozen=True)
class SharedFit:
    """The models of a variant: for calls of one piece, and for those that are cut."""

    whole: Fit
    cut: Fit

    def predict(self, product: Product, variant: Variant) -> float:
        """Return microseconds."""
        fit = self.cut if pieces(product, variant) > 1 else self.whole
        return fit.predict(product, variant)

    @classmethod
    def of(cls, rows: Sequence[MeasuredProduct], variant: Variant) -> "SharedFit":
        """Return the fits with the least relative error."""
        is_cut = [pieces(_product(row), variant) > 1 for row in rows]
        cut = [row for row, cuts in zip(rows, is_cut, strict=True) if cuts]
        whole = [row for row, cuts in zip(rows, is_cut, strict=True) if not cuts]
        return cls(Fit.of(whole or cut, variant), Fit.of(cut or whole, variant))


def held_out_error(rows: Sequence[MeasuredProduct]) -> float:
    """Return the mean absolute relative error of predictions on shapes that were left out."""
    shapes = sorted({(row.n, row.k) for row in rows})
    errors: list[float] = []
    for fold in range(FOLDS):
        left_out = set(shapes[fold::FOLDS])
        known = [row for row in rows if (row.n, row.k) not in left_out]
        asked = [row for row in rows if (row.n, row.k) in left_out]
        for variant in LEGAL[rows[0].kind] if known else ():
            fit = SharedFit.of(known, variant)
            errors += [
                abs(fit.predict(_product(row), variant) / row.microseconds[variant] - 1.0)
                for row in asked
            ]
    return float(np.mean(errors)) if errors else _MOST_RESIDUAL


@dataclass(frozen=True)
class TargetModel:
    """All fits of a target.

    Attributes:
        host: Where it was measured.
        fits: By kind and variant.
        errors: Held-out error by kind.
    """

    host: str
    fits: Mapping[CallKind, Mapping[Variant, SharedFit]]
    errors: Mapping[CallKind, float]

    @property
    def residual(self) -> float:
        """The mean held-out error over kinds."""
        return float(np.mean(list(self.errors.values())))

    def predict(self, product: Product) -> dict[Variant, float]:
        """Return microseconds by variant; nothing for a kind that was not measured."""
        fits = self.fits.get(product.kind, {})
        return {variant: fit.predict(product, variant) for variant, fit in fits.items()}


@cache
def target_model(target_id: str) -> TargetModel | None:
    """Return the model of a target, None if nothing was measured for it."""
    measured = measured_on(target_id)
    return None if measured is None else model_of(measured.host, measured.products)


def model_of(host: str, rows: Iterable[MeasuredProduct]) -> TargetModel:
    """Fit a model to measured products."""
    by_kind: dict[CallKind, list[MeasuredProduct]] = {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row)
    fits = {
        kind: {variant: SharedFit.of(found, variant) for variant in LEGAL[kind]}
        for kind, found in by_kind.items()
    }
    errors = {kind: held_out_error(found) for kind, found in by_kind.items()}
    return TargetModel(host, fits, errors)


def seed_policy(target_id: str, *, fixed: bool = False) -> Policy:
    """Return the policy that a bundle for a target carries.

    Args:
        target_id: What is compiled for.
        fixed: Leave the device nothing to measure or adapt: constant-time plans.
    """
    model = target_model(target_id)
    variants, doubts = bytearray(CELLS), bytearray(CELLS)
    for index in range(CELLS):
        cell = Cell.at(index)
        default, doubtful = _seed(model, cell)
        variants[index] = default
        if len(doubtful) > 1 and not fixed:
            doubts[index] = sum(1 << variant for variant in doubtful)
    flags = (Flags.MEASURED if model else 0) | (Flags.FIXED if fixed else 0)
    residual = 0 if model is None else min(FULL, round(FULL * model.residual))
    return Policy(bytes(variants), bytes(doubts), Flags(flags), residual)


def _seed(model: TargetModel | None, cell: Cell) -> tuple[Variant, tuple[Variant, ...]]:
    known = LEGAL[cell.kind]
    times = {} if model is None else model.predict(middle(cell))
    if not times or model is None:
        return _prior(cell), known
    best = min(times, key=lambda variant: times[variant])
    error = min(_MOST_RESIDUAL, model.errors[cell.kind])
    limit = times[best] * (1.0 + error) / (1.0 - error)
    return best, tuple(variant for variant in known if times[variant] <= limit)


def _prior(cell: Cell) -> Variant:
    """Return what is best where nothing was measured: look for zeros where there may be enough."""
    is_dense = cell.density == len(DENSITY_BOUNDS)
    return Variant.UNCHECKED if cell.kind is CallKind.CHECKED and is_dense else Variant.SHARED


def middle(cell: Cell) -> Product:
    """Return a square product in the middle of a cell."""
    read = _middle(SIZE_BYTES, cell.size)
    rows = round(_middle(ROW_BOUNDS, cell.rows))
    density = min(1.0, _middle(DENSITY_BOUNDS, cell.density) / FULL)
    stored = 1.0 if cell.kind is CallKind.CHECKED else density
    width = F32_BYTES if cell.kind is CallKind.LINEAR_F32 else W4_BYTES
    matrices = TOP_K * MATRICES if cell.kind is CallKind.EXPERTS else 1
    side = max(GROUP, round((read / (width * stored * matrices)) ** 0.5))
    return Product(cell.kind, rows, side, side, density)


def _middle(bounds: Sequence[int], bucket: int) -> float:
    """Return the geometric middle of a bucket; twice the last bound beyond it, 1 row as 1."""
    if bucket == len(bounds):
        return 2.0 * bounds[-1]
    low = bounds[bucket - 1] if bucket else bounds[0] / 2 if bounds[0] > 1 else 1
    return float((low * bounds[bucket]) ** 0.5)
