"""Operators of `ai.sparsefleet` without kernels of their own: their bodies through ours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from compiler.frontend.domain import attach_functions
from tests.factories.graph_runs import GraphCase, relative_error
from tests.factories.onnx_blocks import DOMAIN

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class DomainCase:
    """One call of an operator with every size fixed."""

    name: str
    inputs: Shapes
    outputs: dict[str, tuple[str, tuple[int, ...]]]
    attrs: dict[str, Any]

    def model(self) -> onnx.ModelProto:
        node = helper.make_node(
            self.name, list(self.inputs), list(self.outputs), domain=DOMAIN, **self.attrs
        )
        given = [(name, "float32", shape) for name, shape in self.inputs.items()]
        made = [(name, *kind) for name, kind in self.outputs.items()]
        infos = [
            [
                helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(np.dtype(d)), s)
                for n, d, s in entries
            ]
            for entries in (given, made)
        ]
        graph = helper.make_graph([node], "g", *infos)
        imports = [helper.make_opsetid("", 18)]
        return attach_functions(helper.make_model(graph, opset_imports=imports, ir_version=10))


def attention(rows: int, heads: int, sink: int, window: int) -> DomainCase:
    shape = (1, rows, heads * 8)
    attrs = {"num_heads": heads, "sink": sink, "window": window, "scale": 8**-0.5}
    return DomainCase(
        "SparseAttention", dict.fromkeys("qkv", shape), {"y": ("float32", shape)}, attrs
    )


def topk(rows: int, count: int, most: int) -> DomainCase:
    return DomainCase(
        "DynamicTopK",
        {"scores": (rows, count), "mass": ()},
        {
            "values": ("float32", (rows, most)),
            "index": ("int64", (rows, most)),
            "count": ("int64", (rows,)),
        },
        {"k": most},
    )


CASES = {
    "attention": attention(9, 2, 1, 3),
    "attention-no-sink": attention(7, 4, 0, 2),
    "attention-sees-all": attention(5, 1, 2, 8),
    "topk": topk(6, 16, 4),
    "topk-of-all": topk(3, 5, 5),
}


def values(case: DomainCase, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    arrays = {
        name: (2.0 * random.standard_normal(shape)).astype(np.float32)
        for name, shape in case.inputs.items()
    }
    return arrays | ({"mass": np.asarray(0.7, np.float32)} if "mass" in arrays else {})


@pytest.mark.parametrize("name", sorted(CASES))
def test_it_computes_an_operator_of_the_domain_as_its_body_does(name: str, tmp_path: Path) -> None:
    item, path = CASES[name], tmp_path / "operator.onnx"
    onnx.save(item.model(), path)
    case = GraphCase.of(path, tmp_path / "submission")
    for seed in range(3):
        arrays = values(item, seed)
        feeds, wanted = case.feeds(arrays), case.wanted(arrays)
        native = case.native(feeds)
        assert native == case.simulated(feeds)
        assert len(wanted) == len(item.outputs)
        for role, value in wanted.items():
            found = case.array(role, native[role], value)
            if value.dtype == np.int64:
                assert np.array_equal(found, value)
            assert relative_error(found, value) <= 1e-3
