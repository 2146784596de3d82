"""Attention of plain graphs and of the ONNX operator, on the attention kernel where it fits."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

from tests.factories.graph_runs import GraphCase, relative_error

RANDOM = np.random.default_rng(21)
WIDTH, HEADS = 32, 4


def cross_model(rows: int, keys: int, kv_heads: int = HEADS, masked: str = "") -> onnx.ModelProto:
    """Projections of x and memory, heads split, softmax(q k^T / 8) v, an output projection."""
    hd = WIDTH // HEADS
    weights = {
        "wq": RANDOM.standard_normal((WIDTH, WIDTH)),
        "wk": RANDOM.standard_normal((WIDTH, kv_heads * hd)),
        "wv": RANDOM.standard_normal((WIDTH, kv_heads * hd)),
        "wo": RANDOM.standard_normal((WIDTH, WIDTH)),
        "mask": np.triu(np.full((rows, keys), -1e9), 1)[None, None],
    }
    text = f"""
    g (float[1, {rows}, {WIDTH}] x, float[1, {keys}, {WIDTH}] m) => (float[1, {rows}, {WIDTH}] y) {{
      q = MatMul (x, wq)
      k = MatMul (m, wk)
      v = MatMul (m, wv)
      a = Attention <q_num_heads = {HEADS}, kv_num_heads = {kv_heads}, scale = 0.125>
          (q, k, v{masked})
      y = MatMul (a, wo)
    }}"""
    graph = parser.parse_graph(text)
    for name, array in weights.items():
        graph.initializer.append(numpy_helper.from_array(array.astype(np.float32) / 4, name))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def ran(model: onnx.ModelProto, tmp_path: Path) -> set[str]:
    """Compare one run with ONNX Runtime and the simulator; return the plan's operations."""
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    case = GraphCase.of(path, tmp_path / "submission")
    arrays = {
        info.name: RANDOM.standard_normal(
            [d.dim_value for d in info.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for info in model.graph.input
    }
    feeds, wanted = case.feeds(arrays), case.wanted(arrays)
    native = case.native(feeds)
    assert native == case.simulated(feeds)
    for role, value in wanted.items():
        assert relative_error(case.array(role, native[role], value), value) <= 1e-5
    return case.operations


@pytest.mark.parametrize(
    ("rows", "keys", "kv_heads"), [(3, 11, 4), (9, 2, 4), (5, 7, 2), (1, 6, 1)]
)
def test_cross_attention_runs_on_the_attention_kernel(
    rows: int, keys: int, kv_heads: int, tmp_path: Path
) -> None:
    operations = ran(cross_model(rows, keys, kv_heads), tmp_path)
    assert operations <= {"ATTENTION", "LINEAR_F32", "LINEAR", "COLS_SLICE"}


def test_a_stored_causal_mask_is_the_kernels_own(tmp_path: Path) -> None:
    assert "ATTENTION" in ran(cross_model(6, 6, masked=", mask"), tmp_path)


def test_a_mask_over_other_rows_stays_with_the_reference_kernels(tmp_path: Path) -> None:
    assert "ATTENTION" not in ran(cross_model(4, 6, masked=", mask"), tmp_path)


def test_attention_reads_keys_and_values_that_are_inputs(tmp_path: Path) -> None:
    text = """g (float[1, 3, 32] q, float[1, 5, 32] k, float[1, 5, 32] v) => (float[1, 3, 32] y) {
      y = Attention <q_num_heads = 4, kv_num_heads = 4> (q, k, v)
    }"""
    model = helper.make_model(
        parser.parse_graph(text), opset_imports=[helper.make_opsetid("", 23)], ir_version=10
    )
    assert ran(model, tmp_path) == {"ATTENTION"}


def test_learned_queries_run_on_the_attention_kernel(tmp_path: Path) -> None:
    """A resampler: stored queries look at the rows of a picture."""
    text = f"""g (float[1, 9, {WIDTH}] m) => (float[1, 5, {WIDTH}] y) {{
      k = MatMul (m, wk)
      v = MatMul (m, wv)
      y = Attention <q_num_heads = {HEADS}, kv_num_heads = {HEADS}> (q, k, v)
    }}"""
    graph = parser.parse_graph(text)
    shapes = {"q": (1, 5, WIDTH), "wk": (WIDTH, WIDTH), "wv": (WIDTH, WIDTH)}
    for name, shape in shapes.items():
        array = RANDOM.standard_normal(shape).astype(np.float32) / 4
        graph.initializer.append(numpy_helper.from_array(array, name))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    assert ran(model, tmp_path) == {"ATTENTION", "LINEAR_F32", "REF_MOVE"}
