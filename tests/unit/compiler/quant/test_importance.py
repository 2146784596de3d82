"""The error of removing columns is what removing them does, and the order is the greedy one."""

import numpy as np
import pytest

from compiler.quant import importance
from compiler.quant.importance import removal_order


def product(seed: int = 0, rows: int = 40, outputs: int = 12, columns: int = 16):
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((columns, columns)) * 0.4 + np.eye(columns)
    x = random.standard_normal((rows, columns)) @ mixed + random.standard_normal(columns)
    return random.standard_normal((outputs, columns)).astype(np.float32), x.astype(np.float32)


def lost(w: np.ndarray, x: np.ndarray, columns: np.ndarray, mean: np.ndarray) -> float:
    """Return E(S) by doing it: the output without the columns, and with their mean instead."""
    whole = x.astype(np.float64) @ w.astype(np.float64).T
    left = x.astype(np.float64).copy()
    left[:, columns] = mean[columns]
    error = np.square(whole - left @ w.astype(np.float64).T).sum(axis=1).mean()
    return float(error / np.square(whole).sum(axis=1).mean())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [1, 4])
def test_the_error_is_what_removing_does(width: int, has_bias: bool) -> None:
    w, x = product()
    found = removal_order(w, x, width, has_bias=has_bias)
    assert sorted(found.units) == list(range(16 // width))
    for count in range(len(found.units) + 1):
        columns = (found.units[:count, None] * width + np.arange(width)).reshape(-1)
        wanted = lost(w, x, columns, found.mean)
        assert found.error[count] == pytest.approx(wanted, rel=1e-9)


def test_each_unit_is_the_one_that_adds_least() -> None:
    w, x = product(3)
    found = removal_order(w, x, 1, has_bias=False)
    gone: list[int] = []
    for unit in found.units[:8]:
        tried = {
            other: lost(w, x, np.array([*gone, other]), found.mean)
            for other in range(16)
            if other not in gone
        }
        assert tried[int(unit)] == pytest.approx(min(tried.values()))
        gone.append(int(unit))


def test_columns_that_cancel_go_together() -> None:
    """Two columns of opposite weights over equal inputs add nothing; one alone adds much."""
    w, x = product(5)
    x[:, 7] = x[:, 2]
    w[:, 7] = -w[:, 2]
    w[:, [2, 7]] *= 0.8
    found = removal_order(w, x, 1, has_bias=False)
    places = [list(found.units).index(column) for column in (2, 7)]
    assert abs(places[0] - places[1]) == 1
    assert found.error[max(places) + 1] == pytest.approx(found.error[min(places)])


def test_a_bias_makes_up_for_a_constant_input() -> None:
    w, x = product(7)
    x[:, 5] = 3.0
    with_bias = removal_order(w, x, 1, has_bias=True)
    assert with_bias.units[0] == 5
    assert with_bias.error[1] == pytest.approx(0.0, abs=1e-9)
    assert with_bias.mean[5] == pytest.approx(3.0)
    without = removal_order(w, x, 1, has_bias=False)
    assert without.units[0] != 5
    assert not without.mean.any()


def test_planted_columns_go_first() -> None:
    w, x = product(9)
    w[:, [3, 11]] *= 1e-4
    x[:, [6, 8]] *= 1e-4
    found = removal_order(w, x, 1, has_bias=False)
    assert sorted(found.units[:4]) == [3, 6, 8, 11]
    assert found.error[4] < 1e-6 < found.error[5]


def test_without_rows_the_norm_decides() -> None:
    w, _ = product(11)
    found = removal_order(w, np.zeros((0, 16)), 2, has_bias=True)
    norms = np.square(w).sum(axis=0).reshape(-1, 2).sum(axis=1)
    assert list(found.units) == list(np.argsort(norms))
    assert found.energy == 0.0
    assert not found.error.any()


def test_a_wide_matrix_is_ranked_without_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = product(13)
    monkeypatch.setattr(importance, "MAX_JOINT_COLUMNS", 8)
    found = removal_order(w, x, 4, has_bias=False)
    alone = [lost(w, x, np.arange(4) + 4 * unit, found.mean) for unit in range(4)]
    assert list(found.units) == list(np.argsort(alone))
    assert found.error[-1] == pytest.approx(sum(alone))
