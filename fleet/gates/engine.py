"""The arithmetic of the gate: e-values for ratios of event rates, valid at every look.

Conditional binomial on a grid of ratios. Of `d = d_T + d_C` events in one stratum and one interval
with exposures `y_T`, `y_C`, each belongs to treatment with probability `rho*y_T / (rho*y_T + y_C)`
when the rate ratio is rho. So

    LL(rho) += d_T * ln(rho*y_T / (rho*y_T + y_C)) + d_C * ln(y_C / (rho*y_T + y_C))

    harm, H0 ratio <= rho0:    E = mean over rho >= 1.25*rho0 of exp(LL(rho) - LL(rho0))
    safe, H0 ratio >= Delta: S = mean over 0.5 <= rho <= min(1.5, Delta/1.15) of exp(LL(rho) -
    LL(Delta)) band (1-a): { rho : ln mean over the grid of exp(LL) - LL(rho) < ln(1/a) }

Each look conditions on the exposures of both arms, so any drift of the base rate and any enrolment
between looks is allowed, and under H0 the probability that E ever reaches 1/alpha is at most alpha
(Ville). Log-likelihoods are divided by the dispersion of the metric before use: events that come in
bursts count as fewer.

One-sample tests (failed installations; a rate shown to be below an absolute limit) are likelihood
ratios of the same kind.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

from fleet.gates.evidence import Increment
from fleet.gates.spec import MetricSpec

BASE_GRID: Final = tuple(2.0 ** (step / 4) for step in range(-12, 29))  # 1/8 .. 128
MAX_LOG: Final = 600.0  # e^600 is still a float; evidence beyond it is not different evidence
_INSTALL_GRID_STEPS: Final = 64


def grid_of(spec: MetricSpec) -> tuple[float, ...]:
    """Return the grid of ratios of a metric: the base grid and the margins themselves."""
    margins = [value for value in (spec.harm_ratio, spec.safe_ratio) if value > 0]
    return tuple(sorted({*BASE_GRID, *margins}))


def add(
    ledger: Sequence[float], grid: Sequence[float], increments: Iterable[Increment]
) -> tuple[float, ...]:
    """Return `ledger` (one log-likelihood per grid point, or empty) plus the new events."""
    total = list(ledger) or [0.0] * len(grid)
    for row in increments:
        if row.exposure_t <= 0 or row.exposure_c <= 0:
            continue
        for index, ratio in enumerate(grid):
            both = ratio * row.exposure_t + row.exposure_c
            total[index] += row.events_t * math.log(ratio * row.exposure_t / both)
            total[index] += row.events_c * math.log(row.exposure_c / both)
    return tuple(total)


def log_harm(
    ledger: Sequence[float], grid: Sequence[float], harm_ratio: float, dispersion: float
) -> float:
    """Return ln E against "ratio <= harm_ratio", moved up to the next grid point."""
    null = next((index for index, ratio in enumerate(grid) if ratio >= harm_ratio), len(grid) - 1)
    terms = [
        (value - ledger[null]) / dispersion
        for ratio, value in zip(grid, ledger, strict=True)
        if ratio >= 1.25 * grid[null]
    ]
    return _log_mean_exp(terms)


def log_safe(
    ledger: Sequence[float], grid: Sequence[float], safe_ratio: float, dispersion: float
) -> float:
    """Return ln S against "ratio >= safe_ratio"; the ratio must be a grid point."""
    null = grid.index(safe_ratio)
    high = min(1.5, safe_ratio / 1.15)
    terms = [
        (value - ledger[null]) / dispersion
        for ratio, value in zip(grid, ledger, strict=True)
        if 0.5 <= ratio <= high
    ]
    return _log_mean_exp(terms)


def band(
    ledger: Sequence[float], grid: Sequence[float], dispersion: float, a: float = 0.05
) -> tuple[float, float]:
    """Return the ends of the (1 - a) confidence sequence of the ratio, within the grid."""
    scaled = [value / dispersion for value in ledger]
    top = _log_mean_exp(scaled)
    inside = [
        ratio for ratio, value in zip(grid, scaled, strict=True) if top - value < math.log(1 / a)
    ]
    return inside[0], inside[-1]


def log_rate_below(events: int, exposure: int, limit: float, dispersion: float) -> float:
    """Return ln S against "event probability >= limit", from `events` in `exposure` trials."""
    quiet = exposure - events
    terms = []
    for share in (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2):
        rate = share * limit
        if rate == 0.0:
            value = -math.inf if events else -quiet * math.log1p(-limit)
        else:
            value = events * math.log(share) + quiet * (math.log1p(-rate) - math.log1p(-limit))
        terms.append(value / dispersion)
    return _log_mean_exp(terms)


def log_rate_above(events: int, trials: int, limit: float) -> float:
    """Return ln E against "event probability <= limit": a uniform mixture over (limit, 1)."""
    terms = []
    for step in range(_INSTALL_GRID_STEPS):
        rate = limit + (1 - limit) * (step + 0.5) / _INSTALL_GRID_STEPS
        terms.append(
            events * math.log(rate / limit)
            + (trials - events) * (math.log1p(-rate) - math.log1p(-limit))
        )
    return _log_mean_exp(terms)


def log_weighted_mean(rows: Iterable[tuple[float, float]]) -> float:
    """Return ln of the weighted mean of e-values, given as (weight, ln E).

    Weights that sum to less than 1 leave the rest on the constant 1, which is an e-value too.
    """
    pairs = [(weight, value) for weight, value in rows if weight > 0]
    rest = 1.0 - sum(weight for weight, _ in pairs)
    if rest > 1e-12:
        pairs.append((rest, 0.0))
    top = max(value for _, value in pairs)
    return min(MAX_LOG, top + math.log(sum(w * math.exp(value - top) for w, value in pairs)))


def _log_mean_exp(terms: Sequence[float]) -> float:
    top = max(terms, default=0.0)
    if not math.isfinite(top):
        return -MAX_LOG
    mean = sum(math.exp(term - top) for term in terms) / max(1, len(terms))
    return max(-MAX_LOG, min(MAX_LOG, top + math.log(mean)))
