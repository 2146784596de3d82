"""Convolutions by live taps: the same bits as all taps, from the mask of a model to native code."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from compiler.analysis.conv_runs import RUN_TAPS, Runs, all_taps, find_runs, worthwhile
from compiler.contract.native_errors import NativeError
from compiler.contract.plan import parse_plan
from compiler.driver.plan_facts import explain_rows
from compiler.frontend.domain import attach_functions
from compiler.hardware.targets import find_target
from compiler.kernels.program import Op
from compiler.quant.constant_time import constant_time
from tests.factories.graph_runs import GraphCase, relative_error
from tests.factories.image_models import CHANNELS, WIDTH, conv, image_model
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import single_call
from tests.factories.onnx_blocks import DOMAIN, GraphBuilder

FILTERS = 40


def blocks(size: int, dead: float, filters: int = FILTERS, taps: int = 9 * 32) -> np.ndarray:
    """Return a weight whose blocks of 16 filters and `size` taps are dead at this share."""
    rng = np.random.default_rng(size)
    live = np.repeat(rng.random((-(-filters // 16), taps // size)) >= dead, size, axis=1)
    filled = rng.standard_normal((filters, taps)) * np.repeat(live, 16, axis=0)[:filters]
    return filled.astype(np.float32)


@pytest.mark.parametrize("size", [1, 2, 4, 16, 32])
@pytest.mark.parametrize("dead", [0.0, 0.5, 0.9, 1.0])
def test_runs_are_the_weight_and_end_with_their_row(size: int, dead: float) -> None:
    weight, row = blocks(size, dead), 96
    found = find_runs(weight, row)
    assert np.array_equal(all_taps(found, *weight.shape), weight)
    at, count = found.runs.T
    assert (at % row + count <= row).all()
    assert found.first[0, -1] == len(found.runs)
    assert count.sum() == len(found.taps)


def test_a_gap_is_stored_where_another_run_would_cost_more() -> None:
    weight = np.zeros((16, 40), np.float32)
    weight[3, [0, 1 + RUN_TAPS, 3 + 2 * RUN_TAPS]] = 1.0
    assert find_runs(weight, 40).runs.tolist() == [[0, 2 + RUN_TAPS], [3 + 2 * RUN_TAPS, 1]]
    assert find_runs(weight, 1 + RUN_TAPS).runs.tolist()[:2] == [[0, 1], [1 + RUN_TAPS, 1]]


@pytest.mark.parametrize(("dead", "pays"), [(0.0, False), (0.1, False), (0.3, True), (1.0, True)])
def test_few_dead_blocks_stay_with_the_dense_kernel(dead: float, pays: bool) -> None:
    assert (worthwhile(blocks(16, dead), 96) is not None) is pays


def test_zeros_of_single_filters_do_not_pay() -> None:
    weight = blocks(16, 0.0) * (np.random.default_rng(3).random((FILTERS, 9 * 32)) < 0.5)
    assert worthwhile(weight.astype(np.float32), 96) is None


def call(found: Runs, **changed: np.ndarray) -> Case:
    """Return SPARSE_CONV over an image of 6 x 6 x 32, some of its operands changed."""
    given = {"taps": found.taps, "first": found.first, "runs": found.runs, **changed}
    weights = [("f32", given["taps"]), ("i32", given["first"]), ("i32", given["runs"])]
    window = {"kh": 3, "kw": 3, "stride": 1, "pad": 1, "H": 6, "W": 6}
    ports = [(36, 32, "f32")], [(36, FILTERS, "f32")]
    return Case.of(single_call(Op.SPARSE_CONV, *ports, weights, window))


def test_leaving_zeros_out_changes_no_bit() -> None:
    weight = blocks(16, 0.7)
    window = {"kh": 3, "kw": 3, "stride": 1, "pad": 1, "H": 6, "W": 6}
    ports = [(36, 32, "f32")], [(36, FILTERS, "f32")]
    dense = Case.of(single_call(Op.CONV2D, *ports, [("f32", weight)], window))
    x = {"x0": np.random.default_rng(2).standard_normal((36, 32)).astype(np.float32)}
    wanted = raw(dense.simulator().run("run", x))
    sparse = call(find_runs(weight, 96))
    for target in native_targets():
        assert raw(sparse.native(target).run("run", x)) == wanted, target


@pytest.mark.parametrize("bias", [True, False])
def test_constant_time_reads_every_tap(bias: bool) -> None:
    weight = blocks(16, 0.7)
    found = find_runs(weight, 96)
    weights = [("f32", found.taps), ("i32", found.first), ("i32", found.runs)]
    weights += [("f32", np.arange(FILTERS, dtype=np.float32)[None])] if bias else []
    window = {"kh": 3, "kw": 3, "stride": 1, "pad": 1, "H": 6, "W": 6}
    ports = [(36, 32, "f32")], [(36, FILTERS, "f32")]
    module = single_call(Op.SPARSE_CONV, *ports, weights, window)
    whole = constant_time(module)
    assert [call.op for call in whole.programs[0].calls] == [Op.CONV2D]
    assert [item.id for item in whole.weights] == list(range(1 + bias))
    x = {"x0": np.random.default_rng(2).standard_normal((36, 32)).astype(np.float32)}
    wanted = raw(Case.of(module).simulator().run("run", x))
    assert raw(Case.of(whole).native(native_targets()[0]).run("run", x)) == wanted


@pytest.mark.parametrize("native", [True, False], ids=["native", "simulator"])
@pytest.mark.parametrize(
    ("part", "at", "value"),
    [
        ("first", 0, 1),
        ("first", 1, -1),
        ("first", 1, 10**6),
        ("first", 3, 1),
        ("first", 4, 1),
        ("first", 5, 0),
        ("first", 7, 2**31 - 1),
        ("runs", 0, -1),
        ("runs", 0, 3 * 96),
        ("runs", 1, 0),
        ("runs", 1, 97),
        ("runs", 1, -(2**31)),
        ("runs", 2, 0),
        ("taps", 0, 0),
    ],
)
def test_it_refuses_runs_that_are_none(part: str, at: int, value: int, native: bool) -> None:
    found = find_runs(blocks(16, 0.7), 96)
    changed = {"taps": found.taps, "first": found.first, "runs": found.runs}[part].copy()
    if part == "taps":
        changed = changed[:-1]
    else:
        changed.reshape(-1)[at] = value
    case = call(found, **{part: changed})
    runner = case.native(native_targets()[0]) if native else case.simulator()
    with pytest.raises(NativeError):
        runner.run("run", {"x0": np.ones((36, 32), np.float32)})


def masked(b: GraphBuilder, x: str) -> str:
    """`SparseConv` of our domain between two convolutions; its mask kills blocks of 16 filters."""
    channels = 16
    mask = np.repeat(b.rng.random((2, channels // 8, 3, 3)) < 0.3, 16, axis=0)
    mask = np.repeat(mask, 8, axis=1).astype(np.float32)
    attrs = {"strides": [1, 1], "pads": [1, 1, 1, 1], "dilations": [1, 1], "group": 1}
    y = b.op("Relu", conv(b, x, CHANNELS, channels, 3))
    weights = b.weight(32, channels, 3, 3), b.weight(32), b.const(mask)
    y = b.op("SparseConv", y, *weights, domain=DOMAIN, **attrs)
    return conv(b, b.op("HardSwish", y), 32, WIDTH)


def test_a_masked_convolution_of_a_model_runs_by_live_taps(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(attach_functions(image_model(masked)), path)
    case = GraphCase.of(path, tmp_path / "s")
    names = [call.op.name for call in case.pipeline.module.programs[0].calls]
    assert names[:3] == ["REF_MOVE", "CONV2D", "SPARSE_CONV"]
    x = np.random.default_rng(5).standard_normal((1, CHANNELS, 8, 8)).astype(np.float32)
    native = case.native(feeds := case.feeds({"x": x}))
    assert native == case.simulated(feeds)
    (wanted,) = case.wanted({"x": x}).values()
    assert relative_error(case.array("tensor", native["tensor"], wanted), wanted) <= 1e-6
    rows = explain_rows(parse_plan(case.case.emitted.plan_bytes), find_target("x86-64-v3"))
    (row,) = [r for r in rows if isinstance(r, dict) and "sparseconv" in str(r["kernel"])]
    assert row["kernel"] == "sf_sparseconv_rm_f32_1x8__avx2"
