"""The layout benchmark: held-out products, densities of its patterns, points and claims by hand."""

import numpy as np
import pytest

from benchmarks.layouts import (
    FITTED,
    FITTED_SHAPES,
    HELD_OUT,
    HELD_OUT_SHAPES,
    Measured,
    points,
    pruned,
    regret_claims,
)
from compiler.analysis.cost import COO, CSR, DENSE, ELL, TILES, choose, count_zeros


def test_nothing_that_is_judged_was_fitted() -> None:
    assert not set(FITTED_SHAPES) & set(HELD_OUT_SHAPES)
    assert not set(FITTED) & set(HELD_OUT)


@pytest.mark.parametrize(("pattern", "density"), HELD_OUT)
def test_patterns_keep_their_density(pattern: str, density: float) -> None:
    weight = pruned(pattern, 768, 1536, density, 1)
    assert weight.dtype == np.float32
    assert np.count_nonzero(weight) / weight.size == pytest.approx(density, rel=0.15)
    if pattern == "2:4":
        assert ((weight.reshape(-1, 4) != 0).sum(axis=1) == 2).all()
    if pattern == "1:16":
        assert ((weight.reshape(-1, 16) != 0).sum(axis=1) == 1).all()


def measured(density: float, times: dict[str, float], rows: int = 1) -> Measured:
    weight = pruned("elements", 256, 256, density, 3)
    return Measured("elements", density, rows, count_zeros(weight), times)


def test_points_are_medians_of_what_matters() -> None:
    found = [
        measured(0.5, {DENSE: 4.0, CSR: 90.0}),
        measured(0.5, {DENSE: 6.0}),
        measured(0.01, {DENSE: 5.5, CSR: 2.0}),
    ]
    rows = {(row[0], row[-1]) for row in points(found)}
    assert rows == {(DENSE, 5.5), (CSR, 2.0)}


def test_regret_is_the_time_lost_to_the_best() -> None:
    count = measured(0.5, {}).count
    assert choose(count, (1,)).layout == DENSE
    every = dict.fromkeys((DENSE, TILES, CSR, COO, ELL), 9.0)
    found = [
        measured(0.5, every | {DENSE: 4.0}),
        measured(0.5, every | {DENSE: 5.0, ELL: 4.0}),
        measured(0.5, every | {DENSE: 3.0}),
    ]
    claims = {claim.id: claim for claim in regret_claims(found)}
    assert claims["layouts.choice.best"].ratio == pytest.approx(2 / 3)
    assert not claims["layouts.choice.best"].ok
    assert claims["layouts.regret.worst"].value == pytest.approx(25.0)
    assert claims["layouts.regret.mean"].value == pytest.approx(25.0 / 3)
    assert claims["layouts.regret.median"].value == 0.0
    assert claims[f"layouts.{ELL}.best"].value == 1
    assert claims[f"layouts.{DENSE}.best"].note == "chosen for 3"
