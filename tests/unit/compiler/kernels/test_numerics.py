"""The arithmetic that C and simulator share, against f64 and against plain loops."""

import numpy as np
import pytest

from compiler.kernels.constants import EXP
from compiler.simulator.numerics import Bits, Exact, relu, silu

BITS, EXACT = Bits((), {}), Exact(())


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_it_computes_exp_within_two_ulp() -> None:
    x = np.linspace(EXP.low, EXP.high, 200_001).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    ulp = np.spacing(expected.astype(np.float32)).astype(np.float64)
    assert (np.abs(BITS.exp(x) - expected) / ulp).max() <= 2.0


def test_it_saturates_exp_at_both_ends() -> None:
    x = np.float32([-np.inf, -1000, EXP.low - 0.1, 0, EXP.high + 0.1, np.inf, np.nan])
    y = BITS.exp(x)
    assert (y[:3] == 0).all()
    assert y[3] == 1
    assert np.isposinf(y[4:6]).all()
    assert np.isnan(y[6])


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 100])
def test_it_sums_in_eight_lanes(size: int) -> None:
    x = normal(size)
    lanes = [np.float32(0)] * 8
    for at, value in enumerate(x):
        lanes[at % 8] = lanes[at % 8] + value
    low = [lanes[at] + lanes[at + 4] for at in range(4)]
    expected = (low[0] + low[2]) + (low[1] + low[3])
    assert BITS.total(x) == expected
    products = BITS.dot_rows(x[None], np.ones((1, size), np.float32))
    assert products[0, 0] == expected


def test_it_adds_values_in_key_order() -> None:
    weights, values = normal(1, 40), normal(40, 3)
    expected = np.zeros(3, np.float32)
    for weight, value in zip(weights[0], values, strict=True):
        expected = expected + weight * value
    assert np.array_equal(BITS.running_sum(weights, values)[0], expected)


def test_it_rounds_half_to_even_and_keeps_zero_rows() -> None:
    x = np.float32([[127, 0.5, 1.5, -2.5], [0, 0, 0, 0], [1e-31, 0, 0, 0]])
    q, scale = BITS.quantise(x)
    assert q[0].tolist() == [127, 0, 2, -2]
    assert not q[1:].any()
    assert scale[:, 0].tolist() == [1, 0, 0]


def test_it_keeps_nan_through_relu() -> None:
    y = relu(np.float32([-1, -0.0, 2, np.nan]))
    assert y[0] == 0
    assert y[2] == 2
    assert np.isnan(y[3])


def test_it_agrees_with_f64_on_silu() -> None:
    x = normal(1000) * 5
    exact = silu(EXACT, x.astype(np.float64))
    assert np.abs(silu(BITS, x) - exact).max() < 2e-6
