"""Gathered Mixture-of-Experts blocks in every spelling, and spellings of something else."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from compiler.errors import MissingExpertsError, UnsupportedOperatorError
from compiler.kernels.program import Module, RouteOrder
from tests.factories.moe_exports import Edit, drop_expert
from tests.factories.moe_exports import edited as edited_export
from tests.factories.onnx_blocks import Block, GraphBuilder, MoeShape, moe_block
from tests.factories.onnx_models import graph_document, write_block, write_submission
from tests.factories.onnx_runs import block_difference, lowered

EXPORTS = Path(__file__).parents[4] / "examples" / "moe-exports"

SPELLINGS = [
    MoeShape(),
    MoeShape(order="softmax_topk"),
    MoeShape(order="topk_softmax"),
    MoeShape(act="relu"),
    MoeShape(act="reglu"),
    MoeShape(act="reglu", separate=True),
    MoeShape(act="reglu", interleaved=True, swapped=True),
    MoeShape(swapped=True),
    MoeShape(interleaved=True),
    MoeShape(interleaved=True, swapped=True),
    MoeShape(transposed=True),
    MoeShape(gather="Gather"),
    MoeShape(gather="Gather", transposed=True, act="relu", order="topk_softmax"),
    MoeShape(separate=True),
    MoeShape(k=3),
    MoeShape(k=1),
]


def operations(module: Module) -> list[str]:
    return [call.op.name for call in module.programs[0].calls]


def route_order(module: Module) -> str:
    return RouteOrder(int(module.programs[0].calls[0].params["order"])).name.lower()


@pytest.mark.parametrize("shape", SPELLINGS, ids=str)
def test_it_raises_every_spelling_and_keeps_its_meaning(tmp_path: Path, shape: MoeShape) -> None:
    directory = write_block(tmp_path, moe_block(shape))
    module = lowered(directory).module
    assert operations(module) == ["ROUTE", "EXPERTS"]
    assert route_order(module) == shape.order
    assert block_difference(directory, tokens=9) < 1e-5


def test_it_gives_each_expert_a_section(tmp_path: Path) -> None:
    module = lowered(write_block(tmp_path, moe_block())).module
    sections = [w.section for w in module.weights if w.kind == "w4"]
    assert sections == [f"expert.L0.E{e}" for e in range(4) for _ in range(2)]


def test_it_puts_gate_rows_first_whichever_half_they_are(tmp_path: Path) -> None:
    plain = lowered(write_block(tmp_path / "a", moe_block())).module
    swapped = lowered(write_block(tmp_path / "b", moe_block(MoeShape(swapped=True)))).module
    first, second = (next(w for w in m.weights if w.kind == "w4") for m in (plain, swapped))
    assert np.array_equal(np.roll(first.array, 6, axis=0), second.array)


def test_it_sees_a_missing_renormalisation(tmp_path: Path) -> None:
    with_sum = lowered(write_block(tmp_path / "a", moe_block())).module
    without = lowered(write_block(tmp_path / "b", moe_block(MoeShape(order="softmax_topk")))).module
    assert route_order(with_sum) != route_order(without)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_it_compiles_exported_blocks(tmp_path: Path, name: str) -> None:
    model = onnx.load(EXPORTS / f"exp_{name}_batched_mm_dynamo.onnx")
    directory = write_submission(tmp_path, {"model": model}, graph_document(model))
    module = lowered(directory).module
    assert operations(module) == ["ROUTE", "EXPERTS"]
    for tokens in (1, 9, 16):
        assert block_difference(directory, tokens) < 1e-4


def cut_router(graph: onnx.GraphProto) -> None:
    """The router loses its last expert; the stacks keep it."""
    weight = next(t for t in graph.initializer if t.name.endswith("gate.weight"))
    array = onnx.numpy_helper.to_array(weight)[:-1].copy()
    weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))


def exported(tmp_path: Path, edit: Edit) -> Path:
    model = edited_export(onnx.load(EXPORTS / "exp_qwen3_moe_batched_mm_dynamo.onnx"), edit)
    return write_submission(tmp_path, {"model": model}, graph_document(model))


def test_it_names_experts_that_the_stacks_lack(tmp_path: Path) -> None:
    with pytest.raises(MissingExpertsError, match="among 4, the file holds 3; missing are 3") as e:
        lowered(exported(tmp_path, drop_expert))
    assert "cut the router" in e.value.hint


def test_it_takes_experts_that_no_router_chooses(tmp_path: Path) -> None:
    directory = exported(tmp_path, cut_router)
    assert operations(lowered(directory).module) == ["ROUTE", "EXPERTS"]
    assert block_difference(directory, tokens=9) < 1e-4


def edited(tmp_path: Path, edit: dict[str, str]) -> Path:
    """Write the block with one operator exchanged for another."""
    directory = write_block(tmp_path, moe_block())
    model = onnx.load(directory / "model.onnx")
    for node in model.graph.node:
        if node.op_type in edit:
            node.op_type = edit[node.op_type]
    onnx.save(model, directory / "model.onnx")
    return directory


@pytest.mark.parametrize("edit", [{"Sigmoid": "Tanh"}, {"Div": "Mul"}, {"ReduceSum": "ReduceMax"}])
def test_it_does_not_match_other_arithmetic(tmp_path: Path, edit: dict[str, str]) -> None:
    with pytest.raises(UnsupportedOperatorError):
        lowered(edited(tmp_path, edit))


def wrong_row(b: GraphBuilder, x: str) -> str:
    """Experts that read the rows in reverse order: each token gets another token's experts."""
    steps = b.op("Slice", x, b.ints(2**63 - 1), b.ints(-(2**63)), b.ints(1), b.ints(-1))
    return b.op("Add", moe_block()(b, steps), x)


def shuffled_choices(b: GraphBuilder, x: str) -> str:
    """Gates reach the other choice: the last block sums o[0]*g[1] + o[1]*g[0]."""
    shape = MoeShape()
    plain = moe_block(shape)
    y = plain(b, x)
    gate_node = next(n for n in b.nodes if n.op_type == "Div")
    turned = b.op("Slice", gate_node.output[0], b.ints(1), b.ints(-3), b.ints(1), b.ints(-1))
    moved = b.nodes.pop()
    b.nodes.insert(b.nodes.index(gate_node) + 1, moved)
    for node in b.nodes:
        if node.op_type == "Reshape" and node.input[0] == gate_node.output[0]:
            node.input[0] = turned
    return y


def foreign_up(b: GraphBuilder, x: str) -> str:
    """The up half is not a product of gathered matrices but the repeated rows themselves."""
    y = moe_block(MoeShape(hidden=8, separate=True))(b, x)
    repeated = next(n.output[0] for n in b.nodes if n.op_type == "Expand")
    rows = next(n.output[0] for n in b.nodes if n.op_type == "Reshape" and n.input[0] == repeated)
    product = next(n for n in b.nodes if n.op_type == "Mul" and "Sigmoid" in _maker(b, n.input[1]))
    last = next(n for n in b.nodes if n.input and n.input[0] == product.output[0])
    last.input[1] = rows
    return y


def _maker(b: GraphBuilder, name: str) -> str:
    return next(n.op_type for n in b.nodes if name in n.output)


@pytest.mark.parametrize("block", [wrong_row, shuffled_choices, foreign_up])
def test_it_does_not_match_other_movement(tmp_path: Path, block: Block) -> None:
    with pytest.raises(UnsupportedOperatorError):
        lowered(write_block(tmp_path, block))
