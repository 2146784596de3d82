"""Layouts: the cheapest by the model, a model near its points, and text that reads back."""

from pathlib import Path

import numpy as np
import pytest
from xdsl.utils.exceptions import VerifyException

from compiler.analysis.cost import (
    DENSE,
    TILES,
    choose,
    coefficients,
    cost_table,
    count_tiles,
    nonnegative_least_squares,
    predict,
    worst_errors,
)
from compiler.analysis.layout_points import POINTS
from compiler.dialects.hw import LayoutAttr
from compiler.dialects.text import parse_module, print_module
from compiler.kernels.program import TILES as STORED_AS_TILES
from tests.factories.onnx_blocks import gemm_block
from tests.factories.onnx_models import write_block
from tests.factories.onnx_runs import block_difference, lowered
from tests.golden.passes.cases import sparse_block


def weight(density: float, n: int = 256, k: int = 256) -> np.ndarray:
    random = np.random.default_rng(int(density * 100))
    tiles = random.random((n // 16, k // 32)) < density
    return random.standard_normal((n, k)) * np.kron(tiles, np.ones((16, 32)))


@pytest.mark.parametrize("density", [0.05, 0.3, 0.6, 0.9])
def test_the_choice_is_the_cheapest_row_of_the_table(density: float) -> None:
    count = count_tiles(weight(density))
    table = cost_table(count)
    able = [row for row in table if row.emitted and row.microseconds is not None]
    assert choose(count).microseconds == min(row.microseconds for row in able if row.microseconds)
    assert {row.layout for row in table if not row.emitted} == {"csr", "coo", "blocked_ell<32,4>"}
    assert all(row.microseconds is None for row in table if not row.emitted)


def test_a_full_weight_and_an_empty_one_stay_dense() -> None:
    assert choose(count_tiles(weight(1.0))).layout == DENSE
    assert choose(count_tiles(np.zeros((64, 64)))).layout == DENSE


def test_no_layout_beyond_the_workspace_is_chosen() -> None:
    count = count_tiles(weight(0.1))
    assert choose(count).layout == TILES
    assert all(row.workspace_bytes <= 0 for row in cost_table(count) if row.emitted)


def test_bytes_are_those_that_are_stored() -> None:
    count = count_tiles(weight(0.3))
    dense, tiles, csr, coo, _ = cost_table(count)
    assert dense.bytes == 128 * 272 + 256 * 4
    assert tiles.bytes < dense.bytes
    assert coo.bytes > csr.bytes - 4 * 257


def test_the_model_is_near_its_points_and_chooses_well() -> None:
    assert len(POINTS) >= 60
    assert (coefficients() >= 0).all()
    assert np.median(worst_errors(POINTS)) < 0.25
    times = {point[:5]: point[5] for point in POINTS}
    regrets = []
    for (rows, n, k, live, tiled), spent in times.items():
        if tiled:
            dense = times[rows, n, k, live, False]
            count = count_tiles(np.zeros((n, k)))._replace(live=live)
            chosen = (
                spent
                if predict(rows, count, tiled=True) < predict(rows, count, tiled=False)
                else dense
            )
            regrets.append(chosen / min(spent, dense) - 1.0)
    assert np.mean(regrets) <= 0.05
    assert np.mean(np.array(regrets) == 0.0) >= 0.9


def test_least_squares_stay_non_negative() -> None:
    random = np.random.default_rng(1)
    a = random.random((30, 4))
    exact = np.array([0.5, 0.0, 2.0, 0.0])
    assert np.allclose(nonnegative_least_squares(a, a @ exact), exact, atol=1e-8)
    pulled = nonnegative_least_squares(a, a @ np.array([1.0, -3.0, 0.5, 0.2]))
    assert (pulled >= 0).all()
    best = np.linalg.norm(a @ pulled - a @ np.array([1.0, -3.0, 0.5, 0.2]))
    for _ in range(200):
        other = np.maximum(pulled + 0.05 * random.standard_normal(4), 0.0)
        assert np.linalg.norm(a @ other - a @ np.array([1.0, -3.0, 0.5, 0.2])) >= best - 1e-9


def test_the_layout_reads_back_and_refuses_nonsense(tmp_path: Path) -> None:
    text = lowered(write_block(tmp_path, sparse_block)).ir_text["kernels"]
    assert '#hw.layout<"tiles", block [16, 32], live ' in text
    assert print_module(parse_module(text)) == text
    with pytest.raises(VerifyException):
        LayoutAttr.make("csr", (16, 32), 1, 2)
    with pytest.raises(VerifyException):
        LayoutAttr.make("tiles", (16, 32), 3, 2)


def test_only_weights_with_empty_tiles_are_stored_as_tiles(tmp_path: Path) -> None:
    sparse = lowered(write_block(tmp_path / "sparse", sparse_block)).module
    layouts = [w.layout for w in sparse.weights if w.kind == "w4"]
    assert layouts.count(STORED_AS_TILES) == 1
    assert block_difference(write_block(tmp_path / "again", sparse_block), tokens=5) < 1e-5
    dense = lowered(write_block(tmp_path / "dense", gemm_block)).module
    assert {w.layout for w in dense.weights} == {DENSE}
