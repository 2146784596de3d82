"""Scales searched on calibration rows: better than plain ones, safe, and stable as a base grid."""

import numpy as np
import pytest

from compiler.contract.session import step_inputs
from compiler.kernels.program import Weight
from compiler.quant.grid_search import (
    MOST_LOSS,
    output_error,
    plain_grid,
    search_grid,
)
from compiler.quant.module import pack_module
from compiler.quant.record import InputSample, Recorder
from compiler.quant.w4 import (
    PackedW4,
    QuantError,
    dequantise_w4,
    fresh_grid,
    gemv_w4,
    grouped,
    on_grid,
    pack_w4,
    quantise_w4,
)
from compiler.simulator import Simulator
from compiler.simulator.numerics import Bits
from tests.factories.modules import small_decoder


def weights(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def sample(k: int, rows: int = 200, seed: int = 1, *, relu: bool = False) -> InputSample:
    """Correlated rows with channels of very different size, like real activations."""
    random = np.random.default_rng(seed)
    mixing = random.standard_normal((k, k)) * k**-0.5 * np.exp(random.standard_normal(k))
    x = random.standard_normal((rows, k)) @ mixing + random.standard_normal(k)
    x = np.maximum(x, 0) if relu else x
    scales = (np.abs(x).max(axis=1) / 127).astype(np.float32)
    quantised = np.rint(x / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8)
    return InputSample(quantised, scales, rows, (x == 0).sum(axis=0), np.square(x).mean(axis=0))


def parts(packed: PackedW4) -> tuple[bytes, bytes, bytes]:
    return packed.codes, packed.scales, packed.rows


def halves(whole: InputSample) -> tuple[InputSample, InputSample]:
    middle = len(whole.rows) // 2
    return tuple(
        InputSample(whole.rows[at], whole.scales[at], middle, whole.zeros, whole.energy)
        for at in (slice(0, middle), slice(middle, None))
    )


@pytest.mark.parametrize("shape", [(1, 1), (17, 33), (40, 200), (300, 64), (8, 1100)])
@pytest.mark.parametrize("relu", [False, True])
def test_it_is_never_worse_than_plain_scales(shape: tuple[int, int], relu: bool) -> None:
    weight, rows = weights(*shape), sample(shape[1], relu=relu)
    matrix, error = search_grid(weight, rows)
    assert error == output_error(weight, matrix, rows)
    assert error.rows == 200
    assert error.found <= error.plain


@pytest.mark.parametrize("relu", [False, True])
def test_it_takes_a_third_off_the_error_on_rows_it_has_not_seen(relu: bool) -> None:
    weight = weights(64, 256)
    seen, unseen = halves(sample(256, 800, relu=relu))
    found, error = search_grid(weight, seen)
    assert error.reduction > 0.4
    assert output_error(weight, found, unseen).reduction > 0.3
    alone = output_error(weight, on_grid(weight, fresh_grid(grouped(weight))[0]), unseen)
    assert output_error(weight, found, unseen).found < alone.found


def test_it_measures_with_the_sums_of_the_simulator() -> None:
    weight, rows = weights(24, 96), sample(96, 5)
    matrix, error = search_grid(weight, rows)
    packed = pack_w4(matrix)
    bits = Bits((Weight(0, "w4", weight, "s"),), {0: packed})
    device = bits.linear(rows.rows.astype(np.float64), rows.scales[:, None], 0)
    exact = rows.values() @ weight.astype(np.float64).T
    assert error.found == pytest.approx(np.square(device - exact).mean(), rel=1e-12)
    sums = np.stack([gemv_w4(matrix, x) for x in rows.rows])
    assert np.array_equal(
        device, sums.astype(np.float32) * (matrix.grid.rows * rows.scales[:, None])
    )


def test_it_quantises_for_the_weights_alone_without_rows() -> None:
    weight = weights(20, 70)
    empty = InputSample(
        np.zeros((0, 70), np.int8), np.zeros(0, np.float32), 0, np.zeros(70, np.int64), np.zeros(70)
    )
    expected = parts(pack_w4(quantise_w4(weight)))
    found, error = search_grid(weight, empty)
    assert parts(pack_w4(found)) == expected
    assert (error.rows, error.reduction) == (0, 0.0)


def test_it_stays_safe_for_inputs_that_it_has_not_seen() -> None:
    weight, rows = weights(64, 128), sample(128)
    found = np.square(dequantise_w4(search_grid(weight, rows)[0]) - weight).sum()
    least = np.square(dequantise_w4(quantise_w4(weight)) - weight).sum()
    assert found <= 1.1 * MOST_LOSS * least


@pytest.mark.parametrize("seed", range(4))
def test_its_grid_changes_no_byte_of_an_unchanged_matrix(seed: int) -> None:
    weight, rows = weights(64, 160, seed), sample(160, seed=seed + 9, relu=bool(seed % 2))
    first, _ = search_grid(weight, rows)
    second = quantise_w4(weight, first.grid)
    assert parts(pack_w4(second)) == parts(pack_w4(first))
    assert (second.report.groups_refreshed, second.report.rows_refreshed) == (0, 0)


def test_its_grid_serves_a_slightly_trained_matrix() -> None:
    weight, rows = weights(64, 256), sample(256)
    first, _ = search_grid(weight, rows)
    moved = weight + 0.02 * weights(64, 256, seed=1)
    second = quantise_w4(moved, first.grid)
    assert second.report.groups_refreshed + second.report.rows_refreshed < 0.08 * 512
    assert np.mean(second.codes != first.codes) < 0.15


def test_it_keeps_zero_rows_zero() -> None:
    weight, rows = weights(6, 64), sample(64)
    weight[2] = 0
    found, _ = search_grid(weight, rows)
    assert not dequantise_w4(found)[2].any()


def test_plain_scales_reach_the_largest_value() -> None:
    weight = weights(8, 64)
    grid = plain_grid(weight)
    reach = 7.0 * grid.scales * grid.rows[:, None]
    largest = np.abs(weight.reshape(8, 2, 32)).max(axis=2)
    assert np.allclose(reach, largest, rtol=0.02)


def test_it_packs_a_module_with_a_record_and_keeps_a_base() -> None:
    module = small_decoder()
    recorder = Recorder(module)
    simulator = Simulator(module, mode="f64", observer=recorder)
    for step in range(8):
        simulator.run("step", step_inputs([step, step + 9, 40 - step], 3 * step))
    record = recorder.finish()
    searched = pack_module(module, record=record)
    plain = pack_module(module)
    assert searched.errors.keys() == {w for w in searched.packed if record.sample(w)}
    assert all(error.found <= error.plain for error in searched.errors.values())
    assert float(np.median([e.reduction for e in searched.errors.values()])) > 0.2
    for weight, packed in plain.packed.items():
        if record.sample(weight) is None:
            assert parts(packed) == parts(searched.packed[weight])
    again = pack_module(module, base=plain.packed, record=record)
    for weight, packed in plain.packed.items():
        assert parts(again.packed[weight]) == parts(packed)


def test_it_needs_a_sample_of_the_right_width() -> None:
    with pytest.raises(QuantError, match="96"):
        search_grid(weights(4, 64), sample(96))
