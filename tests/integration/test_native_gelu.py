"""GELU as exporters write it: one call, the bits of the simulator, ONNX Runtime's values."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.factories.graph_runs import GraphCase, relative_error

ROOT_TWO = math.sqrt(2)
TANH_SCALE = math.sqrt(2 / math.pi)


class Writer:
    """Writes a graph of x (4, 24) and constants."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def __call__(self, op: str, *operands: str | float, **attrs: Any) -> str:
        names = [item if isinstance(item, str) else self._constant(item) for item in operands]
        made = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, names, [made], **attrs))
        return made

    def _constant(self, value: float) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, np.float32), name))
        return name

    def save(self, result: str, path: Path) -> Path:
        kind = onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            self.nodes,
            "gelu",
            [helper.make_tensor_value_info("x", kind, [4, 24])],
            [helper.make_tensor_value_info(result, kind, [4, 24])],
            self.constants,
        )
        opsets = [helper.make_opsetid("", 20)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
        return path


def erf(w: Writer, *, divided: bool, root: float = ROOT_TWO) -> str:
    scaled = w("Div", "x", root) if divided else w("Mul", 1 / root, "x")
    return w("Add", w("Erf", scaled), 1.0)


def tanh(w: Writer, cube: str) -> str:
    return w("Add", 1.0, w("Tanh", w("Mul", w("Add", w("Mul", cube, 0.044715), "x"), TANH_SCALE)))


FORMS = {
    "operator": ("GELU", lambda w: w("Gelu", "x")),
    "operator, tanh": ("GELU_TANH", lambda w: w("Gelu", "x", approximate="tanh")),
    "torch": ("GELU", lambda w: w("Mul", w("Mul", "x", erf(w, divided=True)), 0.5)),
    "half first": ("GELU", lambda w: w("Mul", w("Mul", 0.5, "x"), erf(w, divided=False))),
    "half last": ("GELU", lambda w: w("Mul", "x", w("Mul", erf(w, divided=True), 0.5))),
    "new": (
        "GELU_TANH",
        lambda w: w("Mul", w("Mul", 0.5, "x"), tanh(w, w("Pow", "x", 3.0))),
    ),
    "fast": (
        "GELU_TANH",
        lambda w: w("Mul", "x", w("Mul", 0.5, tanh(w, w("Mul", w("Mul", "x", "x"), "x")))),
    ),
}


def case_of(build: Any, tmp_path: Path) -> GraphCase:
    w = Writer()
    return GraphCase.of(w.save(build(w), tmp_path / "gelu.onnx"), tmp_path / "submission")


@pytest.mark.parametrize("form", FORMS)
def test_it_is_one_call(form: str, tmp_path: Path) -> None:
    kind, build = FORMS[form]
    case = case_of(build, tmp_path)
    (call,) = case.pipeline.module.programs[0].calls
    assert (call.op.name, call.params["kind"]) == ("UNARY", {"GELU": 8, "GELU_TANH": 9}[kind])
    x = np.random.default_rng(5).normal(0, 3, (4, 24)).astype(np.float32)
    x[0, :5] = (0.0, -0.0, 40.0, -40.0, 1e-30)
    native = case.native(feeds := case.feeds({"x": x}))
    assert native == case.simulated(feeds)
    (wanted,) = case.wanted({"x": x}).values()
    assert relative_error(case.array("tensor", native["tensor"], wanted), wanted) <= 1e-6


@pytest.mark.parametrize(
    "build",
    [
        lambda w: w("Mul", w("Mul", "x", erf(w, divided=True, root=1.414)), 0.5),
        lambda w: w("Mul", w("Mul", "x", erf(w, divided=True)), 0.51),
        lambda w: w("Mul", w("Mul", "x", erf(w, divided=True)), "x"),
        lambda w: w("Mul", w("Mul", 0.5, "x"), tanh(w, w("Pow", "x", 2.0))),
    ],
    ids=["root", "half", "square", "cube"],
)
def test_it_leaves_what_only_looks_like_it(build: Any, tmp_path: Path) -> None:
    case = case_of(build, tmp_path)
    assert len(case.pipeline.module.programs[0].calls) > 1
    x = np.random.default_rng(6).normal(0, 2, (4, 24)).astype(np.float32)
    native = case.native(feeds := case.feeds({"x": x}))
    assert native == case.simulated(feeds)
    (wanted,) = case.wanted({"x": x}).values()
    assert relative_error(case.array("tensor", native["tensor"], wanted), wanted) <= 2e-6
