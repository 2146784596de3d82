"""Every ONNX operator of the importer: plan, native code and simulator against its runtime."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.factories.graph_runs import GraphCase, relative_error
from tests.factories.onnx_operators import GROUPS, OperatorCase

CASES = [(group, item) for group, items in GROUPS.items() for item in items]


@pytest.mark.parametrize(
    "item", [item for _, item in CASES], ids=[f"{g}-{i.name}" for g, i in CASES]
)
def test_it_computes_an_operator_as_onnx_runtime_does(item: OperatorCase, tmp_path: Path) -> None:
    path = tmp_path / "operator.onnx"
    onnx.save(item.model(), path)
    case = GraphCase.of(path, tmp_path / "submission")
    arrays = item.arrays()
    feeds, wanted = case.feeds(arrays), case.wanted(arrays)
    native = case.native(feeds)
    assert native == case.simulated(feeds)
    for role, value in wanted.items():
        found = case.array(role, native[role], value)
        assert np.isfinite(found).all()
        assert relative_error(found, value) <= item.tolerance, role
