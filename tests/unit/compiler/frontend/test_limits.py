"""Each limit bites, says its name and its option, and bites before anything is allocated."""

import resource
import signal
import threading
from dataclasses import fields
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compiler.driver import vet
from compiler.driver.bounds import bounded
from compiler.driver.vet import Verdict, vet_submission
from compiler.errors import LimitError, MalformedModelError, UnsupportedOperatorError
from compiler.frontend import import_pipeline
from compiler.frontend.limits import ImportLimits
from compiler.frontend.onnx_file import SET_ASIDE_BYTES, read_model
from tests.factories.onnx_blocks import GraphBuilder, block_model, mlp_block, native_moe_block
from tests.factories.onnx_models import graph_document, write_block, write_submission


def folded(b: GraphBuilder, x: str) -> str:
    """x plus a constant that is made in many steps of 4 KiB."""
    total = b.const(np.ones((16, 64)))
    for _ in range(20):
        total = b.op("Add", total, b.const(1.0))
    return b.op("Add", x, b.op("ReduceMax", total, keepdims=0))


@pytest.mark.parametrize(
    ("block", "limits", "name"),
    [
        (mlp_block, ImportLimits(max_file_bytes=100), "max_file_bytes"),
        (mlp_block, ImportLimits(max_nodes=3), "max_nodes"),
        (native_moe_block, ImportLimits(max_nodes=15), "max_nodes"),
        (mlp_block, ImportLimits(max_tensor_elements=100), "max_tensor_elements"),
        (folded, ImportLimits(max_folded_bytes=20_000), "max_folded_bytes"),
    ],
)
def test_it_names_the_limit_and_its_option(tmp_path: Path, block, limits, name) -> None:
    directory = write_block(tmp_path, block)
    import_pipeline(directory)
    with pytest.raises(LimitError, match=f"the limit {name} is") as caught:
        import_pipeline(directory, limits)
    assert f"--{name.replace('_', '-')}" in caught.value.hint
    assert caught.value.code == "build.user.limit"


def test_views_are_free_of_charge(tmp_path: Path) -> None:
    def turned(b: GraphBuilder, x: str) -> str:
        weight = b.weight(8, 64)
        for _ in range(40):
            weight = b.op("Transpose", weight, perm=[1, 0])
        return b.op("MatMul", x, weight)

    assert import_pipeline(write_block(tmp_path, turned), ImportLimits(max_folded_bytes=1024))


@pytest.mark.parametrize("name", [item.name for item in fields(ImportLimits)])
def test_a_limit_is_positive(name: str) -> None:
    for value in (0, -1, 10**300, float("nan"), float("inf")):
        with pytest.raises(LimitError, match=name):
            ImportLimits(**{name: value})


def test_time_is_bounded() -> None:
    with pytest.raises(LimitError, match="max_seconds"), bounded(ImportLimits(max_seconds=0.05)):
        threading.Event().wait(60.0)


def test_an_alarm_set_before_is_set_again_behind_the_block() -> None:
    before = signal.setitimer(signal.ITIMER_REAL, 500.0)
    try:
        with bounded(ImportLimits(max_seconds=10.0)):
            assert signal.getitimer(signal.ITIMER_REAL)[0] <= 10.0
        assert 10.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500.0
        with bounded(ImportLimits(max_seconds=1000.0)):
            assert signal.getitimer(signal.ITIMER_REAL)[0] <= 500.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_memory_is_bounded_while_the_block_runs() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = ImportLimits(max_memory_bytes=used + (64 << 20))
    with pytest.raises(LimitError, match="max_memory_bytes"), bounded(limits):
        np.ones(128 << 20, np.uint8)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_time_is_not_bounded_where_signals_do_not_arrive() -> None:
    done = []

    def work() -> None:
        with bounded(ImportLimits(max_seconds=0.001)):
            done.append(threading.Event().wait(0.01))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [False]


@pytest.mark.parametrize(
    ("error", "name"), [(MemoryError(), "max_memory_bytes"), (RecursionError(), "max_nesting")]
)
def test_what_runs_out_is_named(error: Exception, name: str) -> None:
    with pytest.raises(LimitError, match=name), bounded(ImportLimits()):
        raise error


def test_a_process_of_its_own_gives_the_same_verdict(tmp_path: Path) -> None:
    vet_submission(write_block(tmp_path / "good", mlp_block))
    model = block_model(mlp_block)
    node = next(node for node in model.graph.node if node.op_type == "Relu")
    node.domain, node.op_type = "example", "Mystery"
    model.opset_import.append(helper.make_opsetid("example", 1))
    bad = write_submission(tmp_path / "bad", {"model": model}, graph_document(model))
    with pytest.raises(UnsupportedOperatorError, match="operator example::Mystery") as caught:
        vet_submission(bad)
    assert caught.value.hint.startswith("supported operators")


def test_a_process_that_dies_is_a_verdict_too(tmp_path: Path, monkeypatch) -> None:
    """The directory is imported by a process whose memory does not even hold the weights."""

    def heavy(b: GraphBuilder, x: str) -> str:
        return b.op("Add", x, b.op("ReduceMax", b.weight(1 << 23), keepdims=0))

    directory = write_block(tmp_path, heavy)
    with pytest.raises((MalformedModelError, LimitError)):
        vet_submission(directory, ImportLimits(max_memory_bytes=1 << 20))
    monkeypatch.setattr(vet, "START_SECONDS", 0.0)
    with pytest.raises(LimitError, match="max_seconds"):
        vet_submission(directory, ImportLimits(max_seconds=0.001))


def test_an_unknown_code_is_our_fault() -> None:
    error = Verdict("build.app.other", "broken").error()
    assert error is not None
    assert error.code == "build.app.compiler"


def test_large_initializers_come_back_whole(tmp_path: Path) -> None:
    array = np.arange(SET_ASIDE_BYTES, dtype=np.float32).reshape(64, -1)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1024])
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [x],
        [y],
        [onnx.numpy_helper.from_array(array, "w")],
    )
    imports = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), tmp_path / "m.onnx")
    (read,) = read_model(tmp_path / "m.onnx").graph.initializer
    assert np.array_equal(onnx.numpy_helper.to_array(read), array)
