"""W4-G32-S8: quality, exactness, packing, frozen grids, bad input."""

import numpy as np
import pytest

from compiler.kernels.program import Module, Program, Weight
from compiler.quant.module import pack_module
from compiler.quant.w4 import (
    PackedW4,
    QuantError,
    dequantise_w4,
    gemv_w4,
    integer_w4,
    pack_w4,
    quantise_w4,
    unpack_w4,
)

SHAPES = ((1, 1), (16, 32), (17, 33), (5, 100), (48, 31), (33, 256))


def normal(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def sqnr_db(weight: np.ndarray, approximation: np.ndarray) -> float:
    noise = ((weight - approximation).astype(np.float64) ** 2).sum()
    return float(10 * np.log10((weight.astype(np.float64) ** 2).sum() / noise))


def test_it_quantises_gaussian_weights_at_21_db() -> None:
    weight = normal(256, 512)
    assert sqnr_db(weight, dequantise_w4(quantise_w4(weight))) > 21.0


def test_it_beats_scales_taken_from_the_largest_value() -> None:
    weight = normal(64, 256)
    groups = weight.reshape(64, 8, 32)
    step = np.abs(groups).max(axis=2, keepdims=True) / 7
    plain = (np.clip(np.rint(groups / step), -8, 7) * step).reshape(weight.shape)
    assert sqnr_db(weight, dequantise_w4(quantise_w4(weight))) > sqnr_db(weight, plain) + 0.3


@pytest.mark.parametrize("shape", SHAPES)
def test_it_unpacks_what_it_packed(shape: tuple[int, int]) -> None:
    matrix = quantise_w4(normal(*shape))
    packed = pack_w4(matrix)
    again = unpack_w4(packed)
    assert np.array_equal(again.codes, matrix.codes)
    assert np.array_equal(again.grid.scales, matrix.grid.scales)
    assert np.array_equal(again.grid.rows, matrix.grid.rows)
    assert pack_w4(again) == packed or pack_w4(again).codes == packed.codes
    panels, groups = -(-shape[0] // 16), -(-shape[1] // 32)
    assert len(packed.codes) == panels * groups * 256
    assert len(packed.scales) == panels * groups * 16
    assert len(packed.rows) == panels * 64


def test_it_pads_rows_so_that_they_add_nothing() -> None:
    packed = pack_w4(quantise_w4(normal(3, 5)))
    rows = np.frombuffer(packed.rows, "<f4")
    codes = np.frombuffer(packed.codes, np.uint8).reshape(4, 16, 4)
    assert not rows[3:].any()
    assert (codes[:, 3:] == 0x88).all()
    assert (np.frombuffer(packed.scales, np.uint8)[3:] == 1).all()


def test_it_multiplies_exactly_at_the_extremes() -> None:
    weight = np.tile(np.float32([-8.0, 7.0] * 16), (2, 256))
    matrix = quantise_w4(weight)
    x = np.full(weight.shape[1], 127, np.int8)
    wide = integer_w4(matrix).astype(object) @ x.astype(object)
    assert [int(v) for v in gemv_w4(matrix, x)] == [int(v) for v in wide]
    assert max(abs(int(v)) for v in wide) < 2**31


def test_it_keeps_zero_rows_zero() -> None:
    weight = normal(4, 64)
    weight[2] = 0
    weight[1, :32] = 0
    matrix = quantise_w4(weight)
    assert matrix.grid.rows[2] == 0
    assert not dequantise_w4(matrix)[2].any()
    assert not dequantise_w4(matrix)[1, :32].any()


def test_it_changes_no_byte_of_an_unchanged_matrix_on_its_own_grid() -> None:
    weight = normal(40, 200)
    first = quantise_w4(weight)
    second = quantise_w4(weight, first.grid)
    assert pack_w4(second).codes == pack_w4(first).codes
    assert pack_w4(second).scales == pack_w4(first).scales
    assert (second.report.groups_refreshed, second.report.rows_refreshed) == (0, 0)


def test_it_freezes_the_grid_of_a_slightly_trained_matrix() -> None:
    weight = normal(64, 256)
    first = quantise_w4(weight)
    moved = weight + 0.02 * normal(64, 256, seed=1)
    second = quantise_w4(moved, first.grid)
    report = second.report
    assert report.groups_refreshed + report.rows_refreshed < 0.05 * report.groups
    assert np.mean(second.codes != first.codes) < 0.15
    fresh = sqnr_db(moved, dequantise_w4(quantise_w4(moved)))
    assert sqnr_db(moved, dequantise_w4(second)) > fresh - 0.5


def test_it_refreshes_only_the_groups_that_clip() -> None:
    weight = normal(16, 256)
    first = quantise_w4(weight)
    row, group = np.unravel_index(first.grid.scales.argmin(), first.grid.scales.shape)
    weight = weight.copy()
    weight[row, 32 * group : 32 * group + 32] *= 1.5
    second = quantise_w4(weight, first.grid)
    changed = second.grid.scales != first.grid.scales
    assert second.report.groups_refreshed == 1
    assert second.report.rows_refreshed == 0
    assert changed.sum() == 1
    assert changed[row, group]
    assert np.array_equal(second.grid.rows, first.grid.rows)


def test_it_refreshes_a_row_that_outgrew_its_scale() -> None:
    weight = normal(16, 64)
    first = quantise_w4(weight)
    weight = weight.copy()
    weight[3] *= 10
    second = quantise_w4(weight, first.grid)
    assert second.report.rows_refreshed == 1
    assert second.grid.rows[3] > 5 * first.grid.rows[3]
    assert np.array_equal(np.delete(second.codes, 3, 0), np.delete(first.codes, 3, 0))
    assert sqnr_db(weight, dequantise_w4(second)) > 19


@pytest.mark.parametrize(
    "weight",
    [
        np.float32([[np.nan, 1]]),
        np.float32([[np.inf, 1]]),
        np.zeros((2, 8193), np.float32),
        np.zeros(4, np.float32),
    ],
)
def test_it_refuses_what_it_cannot_express(weight: np.ndarray) -> None:
    with pytest.raises(QuantError):
        quantise_w4(weight)


def test_it_refuses_a_grid_of_another_shape() -> None:
    grid = quantise_w4(normal(16, 64)).grid
    with pytest.raises(QuantError, match="grid"):
        quantise_w4(normal(16, 96), grid)


def test_it_refuses_damaged_packed_bytes() -> None:
    good = pack_w4(quantise_w4(normal(16, 64)))
    short = PackedW4(good.n, good.k, good.codes[:-1], good.scales, good.rows)
    zero = PackedW4(good.n, good.k, good.codes, bytes(len(good.scales)), good.rows)
    for bad in (short, zero):
        with pytest.raises(QuantError):
            unpack_w4(bad)


def test_it_packs_a_module_against_an_older_version() -> None:
    old = normal(16, 64)

    def module(array: np.ndarray) -> Module:
        weights = (Weight(0, "w4", array, "s"), Weight(1, "f32", old, "s"))
        return Module((Program("p", (), {}, {}),), (), weights, None, 1)

    first = pack_module(module(old))
    same = pack_module(module(old), base=first.packed)
    other_shape = pack_module(module(normal(16, 96)), base=first.packed)
    assert set(first.packed) == {0}
    assert same.packed[0].codes == first.packed[0].codes
    assert same.reports[0].groups == 32
    assert other_shape.packed[0].k == 96
