"""The table of ONNX operators: complete, fresh, and true where it claims support."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from compiler.driver import cli
from compiler.errors import LimitError, MalformedModelError, UnsupportedOperatorError
from compiler.frontend import evaluate
from compiler.frontend.control_flow import CONTROL
from compiler.frontend.describe import write_submission
from compiler.frontend.evaluate import make_node
from compiler.frontend.expansions import EXPANSIONS
from compiler.frontend.importer import import_pipeline
from compiler.frontend.onnx_ops import OPERATORS
from compiler.frontend.operator_table import NOTES, How, as_markdown, operator_table
from compiler.frontend.refused import REFUSED
from compiler.frontend.sequences import SEQUENCES
from compiler.frontend.values import Known, Runtime
from compiler.passes.reference_select import ONNX_ROWS
from tests.factories.onnx_control import CONTROL_CASES
from tests.factories.onnx_operators import GROUPS, Input, OperatorCase, case, f32, packed_product
from tests.factories.onnx_written import BY_THE_STANDARD, FOLDED, WRITTEN_OUT

PAGE = Path(__file__).resolve().parents[4] / "docs" / "operators.md"
TABLE = operator_table()


def test_its_page_is_fresh() -> None:
    found = PAGE.read_text(encoding="utf-8")
    assert found == as_markdown(TABLE), "run: python -m compiler operators --markdown"


def test_every_operator_of_the_standard_has_one_row() -> None:
    standard = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == ""}
    assert [row.name for row in TABLE] == sorted(standard)
    places = Counter([*OPERATORS, *EXPANSIONS, *SEQUENCES, *CONTROL, *REFUSED])
    assert {name: n for name, n in places.items() if n > 1} == {}
    assert not standard - places.keys()
    assert NOTES.keys() <= standard - REFUSED.keys()


def test_every_operator_with_a_kernel_has_a_reference_row() -> None:
    names = [row.name for row in TABLE if row.how is How.KERNEL]
    assert [name for name in names if name not in ONNX_ROWS] == ["Concat"] * ("Concat" in names)


def test_every_operator_that_is_not_refused_is_compared_with_a_runtime() -> None:
    groups = [*GROUPS.values(), WRITTEN_OUT, FOLDED, BY_THE_STANDARD]
    compared = {item.op for group in groups for item in group}
    compared |= {name for item in CONTROL_CASES for name in item.operators}
    assert [r.name for r in TABLE if r.how is not How.REFUSED and r.name not in compared] == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refusal_names_operator_node_reason_and_way_out(name: str) -> None:
    node = helper.make_node(name, ["x"], ["y"], name="the_node")
    with pytest.raises(UnsupportedOperatorError) as caught:
        make_node(node)
    assert f"operator {name} (node the_node) is not supported: " in str(caught.value)
    assert REFUSED[name].reason in str(caught.value)
    assert caught.value.hint == REFUSED[name].way_out


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (case("NonZero", f32(3, 4)), "elements known only at run time"),
        (case("Unique", f32(4), results=(1, 1)), "elements known only at run time"),
        (case("Compress", f32(4), f32(4)), "a condition known at run time"),
        (case("Det", f32(5, 5)), "up to 4 x 4"),
        (case("LpPool", f32(1, 2, 5, 5), kernel_shape=[2, 2], ceil_mode=1), "rounded up"),
    ],
    ids=lambda value: value.op if isinstance(value, OperatorCase) else "",
)
def test_what_an_operator_leaves_out_is_refused_by_name(
    item: OperatorCase, reason: str, tmp_path: Path
) -> None:
    inputs = [
        helper.make_tensor_value_info(f"x{at}", 9 if at else 1, operand.shape)
        for at, operand in enumerate(item.operands)
    ]
    names = [info.name for info in inputs]
    node = helper.make_node(item.op, names, ["y"], name="the_node", **item.attrs)
    cast = helper.make_node("Cast", ["y"], ["z"], to=1)
    graph = helper.make_graph([node, cast], "g", inputs, [onnx.ValueInfoProto(name="z")])
    graph.output[0].CopyFrom(helper.make_tensor_value_info("z", 1, None))
    graph.output[0].type.tensor_type.shape.dim.add()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    write_submission(tmp_path / "model.onnx", tmp_path / "out", {}, {})
    with pytest.raises(UnsupportedOperatorError, match=reason) as caught:
        import_pipeline(tmp_path / "out")
    assert f"operator {item.op} (node the_node)" in str(caught.value)


@pytest.mark.parametrize("name", ["loop", "scan"])
def test_unrolling_has_a_limit(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(evaluate, "MAX_EXPANDED_NODES", 9)
    (item,) = (item for item in CONTROL_CASES if item.name == name)
    onnx.save(item.model(), tmp_path / "model.onnx")
    write_submission(tmp_path / "model.onnx", tmp_path / "out", {}, {})
    with pytest.raises(UnsupportedOperatorError, match="unrolls to more than 9 nodes"):
        import_pipeline(tmp_path / "out")


@pytest.mark.parametrize(
    "item",
    [
        case("DFT", f32(1, 8, 1), np.array(1 << 40, np.int64), opset=17, axis=1),
        case("STFT", f32(1, 1 << 20, 1), np.array(1), None, np.array(1 << 19)),
        case("EyeLike", f32(1 << 18, 1 << 18)),
        case("HannWindow", np.array(1 << 40, np.int64)),
    ],
    ids=lambda item: item.op,
)
def test_what_is_made_while_importing_has_a_limit(item: OperatorCase) -> None:
    names = [f"x{at}" if operand is not None else "" for at, operand in enumerate(item.operands)]
    node = helper.make_node(item.op, names, ["y"], name="the_node", **item.attrs)
    given = {
        name: (Runtime(operand.shape, "float32") if isinstance(operand, Input) else Known(operand),)
        for name, operand in zip(names, item.operands, strict=True)
        if operand is not None
    }
    graph = helper.make_graph([node], "g", [], [])
    with pytest.raises(LimitError, match=item.op):
        evaluate.evaluate(graph, given, ["y"], ({},), opset=item.opset)


@pytest.mark.parametrize(
    ("name", "value"),
    [("scan_input_axes", [9, 1]), ("scan_input_axes", [0]), ("scan_output_axes", [9, 0])],
)
def test_a_broken_scan_is_malformed(name: str, value: list[int], tmp_path: Path) -> None:
    (item,) = (item for item in CONTROL_CASES if item.name == "scan")
    model = item.model()
    attribute = next(a for a in model.graph.node[0].attribute if a.name == name)
    attribute.ints[:] = value
    inputs = {i: (Runtime(shape, "float32"),) for i, shape in item.inputs.items()}
    with pytest.raises(MalformedModelError):
        evaluate.evaluate(model.graph, inputs, ["sums"], ({},), opset=18)


@pytest.mark.parametrize("bits", [3, 5])
def test_other_packed_products_are_refused_by_name(bits: int, tmp_path: Path) -> None:
    model = packed_product(4, 32, zeros=False).model()
    next(a for a in model.graph.node[0].attribute if a.name == "bits").i = bits
    onnx.save(model, tmp_path / "model.onnx")
    write_submission(tmp_path / "model.onnx", tmp_path / "out", {}, {})
    with pytest.raises(UnsupportedOperatorError, match=f"codes of {bits} bits") as caught:
        import_pipeline(tmp_path / "out")
    assert "2, 4 or 8 bits" in caught.value.hint


def test_the_command_prints_what_is_asked_for(capsys) -> None:
    assert cli.main(["operators", "Einsum", "Multinomial"]) == cli.OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["Einsum", "Multinomial"]
    assert "refused" in lines[1]
    assert cli.main(["operators", "Nonsense"]) == cli.BAD_ARGUMENTS
    assert "Nonsense" in capsys.readouterr().err
