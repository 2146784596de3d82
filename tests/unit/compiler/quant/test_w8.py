"""Grids of eight bits: found where they are, made where they are not, stored and read back."""

import numpy as np
import pytest

from compiler.quant.w4 import QuantError
from compiler.quant.w8 import find_w8, lies_on_grid, pack_w8, round_w8, unpack_w8
from tests.factories.w8 import on_grid


def normal(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((n, k)).astype(np.float32)


def test_a_matrix_on_a_grid_is_kept_exactly() -> None:
    weight = on_grid(70, 300)
    assert lies_on_grid(weight)
    assert np.array_equal(round_w8(weight), weight)
    assert np.array_equal(find_w8(weight).values(), weight)


@pytest.mark.parametrize("step", [1e-30, 3.1e-5, 0.0123, 1.0, 7e20])
@pytest.mark.parametrize("most", [1, 3, 64, 93, 127])
def test_the_largest_code_may_be_any(step: float, most: int) -> None:
    codes = np.random.default_rng(most).integers(-most, most + 1, (5, 50))
    codes[:, 0] = most
    codes[:, 1] = 1
    weight = codes.astype(np.float32) * np.float32(step)
    assert np.array_equal(find_w8(weight).codes, codes)


def test_a_zero_is_taken_only_where_it_is_needed() -> None:
    codes = np.array([[-128, 127, 0], [0, 255, 8], [-255, 0, -7], [-100, 155, 3]])
    matrix = find_w8(codes.astype(np.float32))
    assert matrix.zeros.tolist() == [128, 0, 255, 100]


def test_a_wider_range_is_refused() -> None:
    with pytest.raises(QuantError, match="row 1 lies on no grid"):
        find_w8(np.array([[1, 2, 3], [-128, 129, 1]], np.float32))


def test_any_other_matrix_is_rounded_by_half_a_step() -> None:
    weight = normal(40, 90)
    rounded = round_w8(weight)
    widest = np.abs(weight).max(axis=1)
    assert (np.abs(rounded - weight).max(axis=1) <= widest / 127 * 0.51).all()
    assert lies_on_grid(rounded)
    assert np.array_equal(round_w8(rounded), rounded)


def test_rows_on_a_grid_stay_beside_rows_that_are_not() -> None:
    weight = np.concatenate([on_grid(9, 40), normal(9, 40)])
    rounded = round_w8(weight)
    assert np.array_equal(rounded[:9], weight[:9])
    assert lies_on_grid(rounded)


def test_packing_and_unpacking_are_inverse() -> None:
    for shape in ((1, 1), (16, 32), (17, 33), (50, 500)):
        matrix = find_w8(on_grid(*shape))
        again = unpack_w8(pack_w8(matrix), *shape)
        assert np.array_equal(again.codes, matrix.codes)
        assert np.array_equal(again.steps, matrix.steps)


@pytest.mark.parametrize("weight", [np.zeros((0, 3)), np.zeros(3), np.array([[np.nan]])])
def test_what_is_no_matrix_is_refused(weight: np.ndarray) -> None:
    with pytest.raises(QuantError, match="cannot be stored"):
        round_w8(weight.astype(np.float32))
