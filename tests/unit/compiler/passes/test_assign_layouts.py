"""Layouts: the cheapest by the model, a model near its points, and reasons that can be read."""

from pathlib import Path

import numpy as np
import pytest
from xdsl.utils.exceptions import VerifyException

from compiler.analysis.cost import (
    COO,
    CSR,
    DENSE,
    ELL,
    EMITTED,
    KINDS,
    LEAST_GAIN,
    N_OF_M,
    NM,
    TILES,
    choose,
    coefficients,
    cost_table,
    count_zeros,
    relative_errors,
)
from compiler.analysis.layout_points import POINTS
from compiler.analysis.least_squares import nonnegative_least_squares
from compiler.contract.elements import stored_bytes
from compiler.contract.plan_format import weight_bytes
from compiler.contract.tiles import tile_bytes
from compiler.dialects.hw import LayoutAttr
from compiler.dialects.text import parse_module, print_module
from compiler.driver.explain.text import explain_lines
from compiler.frontend import import_pipeline
from compiler.kernels.program import W4_LAYOUTS
from compiler.passes.pipeline import lower_pipeline
from tests.factories.onnx_blocks import GraphBuilder, block_model, gemm_block, moe_block
from tests.factories.onnx_models import graph_document, write_block, write_submission
from tests.factories.onnx_runs import block_difference, lowered
from tests.golden.passes.cases import sparse_block


def weight(density: float, high: int, wide: int, n: int = 1024, k: int = 512) -> np.ndarray:
    """Return a weight of which about `density` of the blocks are not zero."""
    random = np.random.default_rng(int(density * 1e4))
    blocks = random.random((-(-n // high), -(-k // wide))) < density
    return random.standard_normal((n, k)) * np.kron(blocks, np.ones((high, wide)))[:n, :k]


def pruned_block(density: float, high: int, wide: int, k: int = 512):
    """Return a block whose second linear layer is pruned."""

    def block(b: GraphBuilder, x: str) -> str:
        up = b.op("MatMul", x, b.weight(8, k))
        return b.op("MatMul", up, b.const(weight(density, high, wide, 1024, k).T))

    return block


@pytest.mark.parametrize(
    ("density", "high", "wide", "rows", "layout"),
    [
        (0.9, 1, 1, 1, DENSE),
        (0.1, 1, 1, 1, DENSE),
        (0.3, 16, 32, 1, TILES),
        (0.2, 32, 4, 1, ELL),
        (0.2, 32, 4, 8, ELL),
        (0.003, 1, 1, 1, CSR),
        (0.01, 1, 1, 8, CSR),
        (0.001, 1, 1, 1, COO),
    ],
)
def test_each_layout_is_chosen_where_its_pattern_pays(
    density: float, high: int, wide: int, rows: int, layout: str
) -> None:
    count = count_zeros(weight(density, high, wide))
    table = cost_table(count, (rows,))
    assert choose(count, (rows,)).layout == layout
    able = [row.microseconds for row in table if not row.refused and row.microseconds is not None]
    assert choose(count, (rows,)).microseconds == min(able)
    assert [row.layout for row in table[: len(EMITTED)]] == list(W4_LAYOUTS)


def test_a_price_is_the_sum_over_the_calls() -> None:
    count = count_zeros(weight(0.02, 1, 1))
    one, many = choose(count, (1,)), choose(count, (8,))
    assert (one.layout, many.layout) == (DENSE, CSR)
    both = cost_table(count, (1, 8))
    for each, first, second in zip(
        both, cost_table(count, (1,)), cost_table(count, (8,)), strict=True
    ):
        assert each.microseconds == pytest.approx(first.microseconds + second.microseconds)


def test_a_full_weight_and_an_empty_one_stay_dense() -> None:
    for array in (weight(1.0, 1, 1), np.zeros((64, 64))):
        table = cost_table(count_zeros(array))
        assert choose(count_zeros(array)).layout == DENSE
        assert all(row.refused.startswith("nothing is") for row in table[1 : len(EMITTED)])


def test_two_of_four_is_priced_and_refused() -> None:
    random = np.random.default_rng(4)
    live = random.random((64, 16, 4)).argsort(axis=2) < 2
    pruned = random.standard_normal((64, 64)) * live.reshape(64, 64)
    row = cost_table(count_zeros(pruned))[-1]
    assert (row.layout, row.microseconds) == (N_OF_M, None)
    assert "no kernel" in row.refused
    assert row.bytes < cost_table(count_zeros(pruned))[0].bytes
    assert choose(count_zeros(pruned)).layout == DENSE
    assert cost_table(count_zeros(weight(0.9, 1, 1)))[-1].layout == NM


def shared(n: int, k: int) -> np.ndarray:
    """Return a weight of which the 16 rows of a panel keep the same two of every four columns."""
    random = np.random.default_rng(4)
    live = random.random((n // 16, k // 4, 4)).argsort(axis=2) < 2
    return random.standard_normal((n, k)) * np.repeat(live.reshape(n // 16, k), 16, axis=0)


def test_two_of_four_shared_by_a_panel_is_taken_where_it_pays() -> None:
    count = count_zeros(shared(1024, 1024))
    table = {row.layout: row for row in cost_table(count)}
    assert choose(count).layout == NM
    assert table[NM].bytes == weight_bytes(KINDS[NM], 1024, 1024)
    assert table[DENSE].microseconds >= LEAST_GAIN * table[NM].microseconds
    small = count_zeros(shared(128, 128))
    refused = next(row for row in cost_table(small, (64,)) if row.layout == NM).refused
    assert choose(small, (64,)).layout == DENSE
    assert refused.endswith(f"times as fast as dense, at least {LEAST_GAIN} pay")
    other = shared(1024, 1024)
    other[0, :16] = 1.0
    assert not count_zeros(other).is_nm


def test_a_product_with_half_of_the_columns_is_compiled(tmp_path: Path) -> None:
    def block(b: GraphBuilder, x: str) -> str:
        up = b.op("MatMul", x, b.weight(8, 1024))
        return b.op("MatMul", up, b.const(shared(1024, 1024).T))

    model = block_model(block)
    module = lowered(write_submission(tmp_path, {"model": model}, graph_document(model))).module
    assert NM in {weight.layout for weight in module.weights}


def test_no_layout_beyond_the_workspace_is_chosen() -> None:
    count = count_zeros(weight(0.003, 1, 1))
    needed = choose(count).workspace_bytes
    assert (choose(count).layout, needed) == (CSR, 16 * 512)
    assert choose(count, budget_bytes=needed).layout == CSR
    table = {row.layout: row for row in cost_table(count, budget_bytes=needed - 1)}
    assert choose(count, budget_bytes=needed - 1).layout in (DENSE, ELL, TILES)
    assert table[CSR].refused == "needs 8192 bytes of workspace, the budget is 8191"
    assert table[COO].refused == table[CSR].refused


def test_bytes_are_those_that_are_stored() -> None:
    count = count_zeros(weight(0.01, 1, 1))
    found = {row.layout: row.bytes for row in cost_table(count)}
    assert found[DENSE] == 64 * 16 * 272 + 1024 * 4
    assert found[TILES] == tile_bytes(1024, count.live)
    assert found[CSR] == stored_bytes(KINDS[CSR], 1024, count.nonzero)
    assert found[COO] == stored_bytes(KINDS[COO], 1024, count.nonzero)
    assert found[ELL] == stored_bytes(KINDS[ELL], 1024, count.blocks // 32)
    assert found[CSR] < found[COO] < found[DENSE]


def test_the_model_is_near_its_points_and_chooses_well() -> None:
    assert {point[0] for point in POINTS} == set(EMITTED)
    for family in ("tiles", "csr", "coo", "ell", "nm"):
        assert (coefficients(family) >= 0).all()
    assert np.median(relative_errors()) < 0.15
    assert relative_errors().max() < 0.6


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
    text = lowered(write_block(tmp_path, pruned_block(0.2, 32, 4))).ir_text["kernels"]
    assert '#hw.layout<"blocked_ell<32,4>", block [32, 4], live ' in text
    assert print_module(parse_module(text)) == text
    with pytest.raises(VerifyException):
        LayoutAttr.make(N_OF_M, (1, 4), 1, 2)
    with pytest.raises(VerifyException):
        LayoutAttr.make("tiles", (16, 32), 3, 2)


def test_only_weights_with_zeros_are_stored_otherwise(tmp_path: Path) -> None:
    sparse = lowered(write_block(tmp_path / "sparse", sparse_block)).module
    layouts = [w.layout for w in sparse.weights if w.kind == "w4"]
    assert [layout for layout in layouts if layout != DENSE] == [ELL]
    assert block_difference(write_block(tmp_path / "again", sparse_block), tokens=5) < 1e-5
    for name, block in (("gemm", gemm_block), ("moe", moe_block())):
        dense = lowered(write_block(tmp_path / name, block))
        assert {w.layout for w in dense.module.weights} == {DENSE}
        assert dense.layouts == []


def test_the_report_says_why_another_layout_was_taken(tmp_path: Path) -> None:
    directory = write_block(tmp_path, pruned_block(0.003, 1, 1))
    free, tight = (
        lower_pipeline(import_pipeline(directory), layout_workspace_bytes=budget)
        for budget in (2 * 1024 * 1024, 4096)
    )
    assert [w.layout for w in free.module.weights if w.layout != DENSE] == [CSR]
    assert CSR not in {w.layout for w in tight.module.weights}
    (row,) = tight.layouts
    assert row["chosen"] in (ELL, TILES, DENSE)
    report = {"layouts": tight.layouts}
    lines = list(explain_lines(report, {"programs": {}}))
    refused = [line for line in lines if line.lstrip().startswith("csr ")]
    assert len(refused) == 1
    assert refused[0].endswith("  needs 8192 bytes of workspace, the budget is 4096")
    head = f"{100 * row['density']:.2f}% not zero: {row['chosen']}"
    assert any(line.startswith("weight 1024 x 512 of LINEAR") and head in line for line in lines)
