"""Every legal cell of the table shape x router, every activation, and what must not be raised."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from compiler.analysis import moe_meaning
from compiler.errors import CompilerError, MissingExpertsError, UnsupportedOperatorError
from compiler.frontend.moe_shapes import ACTS, CONTRIB_ACTS, ROUTERS, SHAPES, legal_cells
from compiler.kernels.program import ExpertAct, Module, RouteOrder
from compiler.simulator import Simulator
from tests.factories import moe_contrib, moe_shapes
from tests.factories.moe_contrib import Contrib, contrib
from tests.factories.moe_shapes import Mix, Weights, layers, mixture, route, trained
from tests.factories.onnx_blocks import Block, GraphBuilder
from tests.factories.onnx_models import graph_document, write_block, write_submission
from tests.factories.onnx_runs import (
    block_rows,
    lowered,
    module_difference,
    reference_rows,
    session,
)

TOLERANCE = 1e-5
TOKENS = 16
QUANTISED = Contrib(bits=4)


def block(shape: str, mix: Mix) -> Block:
    if shape in ("moe", "qmoe"):
        return contrib(mix, QUANTISED if shape == "qmoe" else Contrib())
    return mixture(shape, mix)


def written(folder: Path, shape: str, mix: Mix) -> Path:
    return write_block(folder, block(shape, mix), width=mix.width)


def kinds(module: Module) -> list[str]:
    return [call.op.name for call in module.programs[0].calls]


def order(module: Module) -> str:
    return RouteOrder(int(module.programs[0].calls[0].params["order"])).name.lower()


def act(module: Module) -> str:
    return ExpertAct(int(module.programs[0].calls[1].params["act"])).name.lower()


def test_it_names_every_router_and_activation() -> None:
    assert set(ROUTERS) == {kind.name.lower() for kind in RouteOrder}
    assert set(ACTS) == {kind.name.lower() for kind in ExpertAct}
    assert set(moe_shapes.SHAPES) == SHAPES.keys() - {"moe", "qmoe"}
    assert set(moe_contrib.ACTS) == set(ACTS) - CONTRIB_ACTS.keys()


SPARSE_CONTRIB = {("moe", "sparsemixer"), ("qmoe", "sparsemixer")}


@pytest.mark.parametrize(
    ("shape", "router"), [cell for cell in legal_cells() if cell not in SPARSE_CONTRIB]
)
def test_it_raises_every_legal_cell(tmp_path: Path, shape: str, router: str) -> None:
    contrib_sizes = {"width": 16, "hidden": 16} if shape in ("moe", "qmoe") else {}
    directory = written(tmp_path, shape, Mix(router=router, **contrib_sizes))
    module = lowered(directory).module
    assert kinds(module) == ["ROUTE", "EXPERTS"]
    assert order(module) == router
    assert module_difference(directory, module, TOKENS) < TOLERANCE


def test_it_reads_a_sparse_mixer_by_its_definition(tmp_path: Path) -> None:
    """ONNX Runtime's CPU kernel ignores the attribute, so the reference is our own."""
    mix = Mix(router="sparsemixer", width=16, hidden=16)
    directory = written(tmp_path, "moe", mix)
    module = lowered(directory).module
    assert order(module) == "sparsemixer"
    random = np.random.default_rng(0)
    weight = trained(random, 1, mix.experts, mix.width)[0] * 3
    stacks = Weights.of(mix, random)
    router = moe_meaning.Router(weight, None, mix.k, "sparsemixer", {"jitter": 0.02})
    experts = moe_meaning.Experts(stacks.w_in, stacks.w_out, None, None, "swiglu")
    x = block_rows(directory, TOKENS)
    index, gate, _ = moe_meaning.route(router, x)
    wanted = moe_meaning.mix(experts, x, index, gate)
    found = Simulator(module, mode="f64").run_arrays("forward", {"tensor": x})["tensor"]
    assert np.abs(found - wanted).max() < TOLERANCE * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ACTS)
@pytest.mark.parametrize("shape", ["gathered", "unrolled", "tiled"])
def test_it_raises_every_activation(tmp_path: Path, shape: str, kind: str) -> None:
    directory = written(tmp_path, shape, Mix(act=kind, biases=True))
    module = lowered(directory).module
    assert act(module) == kind
    assert module.programs[0].calls[1].params["biases"] == 1
    assert module_difference(directory, module, TOKENS) < TOLERANCE


@pytest.mark.parametrize("merge", ["scatter_nd", "scatter_elements", "add"])
@pytest.mark.parametrize("mask", ["equal", "one_hot"])
def test_it_raises_every_merge_of_unrolled_experts(tmp_path: Path, merge: str, mask: str) -> None:
    directory = written(tmp_path, "unrolled", Mix(merge=merge, mask=mask))
    module = lowered(directory).module
    assert kinds(module) == ["ROUTE", "EXPERTS"]
    assert module_difference(directory, module, TOKENS) < TOLERANCE


@pytest.mark.parametrize("shape", sorted(moe_shapes.SHAPES))
def test_it_raises_mixtures_of_the_rows_of_an_input(tmp_path: Path, shape: str) -> None:
    """No node makes their rows, as where the file holds the mixture alone."""
    mix = Mix()
    b = GraphBuilder()
    index, gate = route(b, "x", mix)
    y = moe_shapes.SHAPES[shape](b, "x", index, gate, mix, Weights.of(mix, b.rng))
    y = b.op("Reshape", y, b.ints(-1, mix.width))
    model = b.model({"x": ("float32", ("s", mix.width))}, {"y": y})
    directory = write_submission(tmp_path, {"model": model}, graph_document(model))
    module = lowered(directory).module
    assert kinds(module) == ["ROUTE", "EXPERTS"]
    x = np.random.default_rng(0).standard_normal((TOKENS, mix.width)).astype(np.float32)
    (wanted,) = session(directory / "model.onnx").run(None, {"x": x})
    found = Simulator(module, mode="f64").run_arrays("forward", {"tensor": x})["tensor"]
    assert np.abs(found - wanted).max() < TOLERANCE * np.abs(wanted).max()


@pytest.mark.parametrize(
    "shapes",
    [
        ("unrolled", "unrolled"),
        ("traced", "looped", "gathered"),
        ("masked", "tiled", "branched"),
        ("looped_hits", "traced"),
    ],
)
def test_it_raises_layers_of_all_shapes(tmp_path: Path, shapes: tuple[str, ...]) -> None:
    routers = ("softmax_topk_renorm", "topk_softmax", "sparsemixer")
    mixes = [Mix(router=router) for router in routers[: len(shapes)]]
    directory = write_block(tmp_path, layers(shapes, mixes), width=Mix().width)
    module = lowered(directory).module
    assert [kind for kind in kinds(module) if kind != "ADD"] == ["ROUTE", "EXPERTS"] * len(shapes)
    assert module_difference(directory, module, TOKENS) < TOLERANCE


# --- experts that a trace left out ---------------------------------------------------------------


def test_it_names_missing_experts(tmp_path: Path) -> None:
    directory = written(tmp_path, "unrolled", Mix(missing=(1, 4)))
    with pytest.raises(MissingExpertsError, match="chooses among 6, the file holds 4") as caught:
        lowered(directory)
    assert "missing are 1, 4" in str(caught.value)
    assert "dummy input" in caught.value.hint


@pytest.mark.parametrize(
    ("shape", "mix"),
    [("traced", Mix(missing=(2,))), ("unrolled", Mix(missing=(0, 3), stacked=True))],
)
def test_it_repairs_a_trace_from_complete_stacks(tmp_path: Path, shape: str, mix: Mix) -> None:
    whole = written(tmp_path / "whole", "gathered", Mix())
    pipeline = lowered(written(tmp_path / "short", shape, mix))
    assert any("traced expert bodies became one layer of 6" in note for note in pipeline.notes)
    assert module_difference(whole, pipeline.module, TOKENS) < TOLERANCE


# --- what must not be raised ---------------------------------------------------------------------

Mutation = Callable[[onnx.GraphProto], None]


def nodes_of(graph: onnx.GraphProto, kind: str) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type == kind]


def swap_halves(graph: onnx.GraphProto) -> None:
    """The last expert's gate and up change places."""
    split = [node for node in nodes_of(graph, "Split") if len(node.output) == 2][-1]
    split.output[0], split.output[1] = split.output[1], split.output[0]


def renormalise_wrongly(graph: onnx.GraphProto) -> None:
    """Gates are divided by their greatest instead of their sum."""
    division = nodes_of(graph, "Div")[0]
    total = next(node for node in graph.node if node.output[0] == division.input[1])
    total.op_type = "ReduceMax"


def weigh_by_another(graph: onnx.GraphProto) -> None:
    """The last expert is weighed with the gates of the first."""
    first, *_, last = [n for n in nodes_of(graph, "ReduceSum") if n.attribute[0].i == 1][1:]
    for node in graph.node:
        node.input[:] = [first.output[0] if n == last.output[0] else n for n in node.input]


def choose_another(graph: onnx.GraphProto) -> None:
    """The last expert runs on the rows of the first."""
    equal = nodes_of(graph, "Equal")
    equal[-1].input[1] = equal[0].input[1]


def permute_index(graph: onnx.GraphProto) -> None:
    """The second matrices are those of the reversed choices."""
    gathers = nodes_of(graph, "GatherND")
    flat = next(node for node in graph.node if node.output[0] == gathers[1].input[1])
    values = [("start", [2**63 - 1]), ("end", [-(2**63)]), ("axis", [0]), ("step", [-1])]
    for name, value in values:
        array = np.asarray(value, np.int64)
        graph.initializer.append(onnx.numpy_helper.from_array(array, f"turn_{name}"))
    turn = onnx.helper.make_node(
        "Slice", [flat.output[0], *(f"turn_{name}" for name, _ in values)], ["turned"]
    )
    gathers[1].input[1] = "turned"
    graph.node.insert(list(graph.node).index(gathers[1]), turn)


def sum_other_axis(graph: onnx.GraphProto) -> None:
    """Choices are maximised instead of summed."""
    nodes_of(graph, "ReduceSum")[-1].op_type = "ReduceMax"


MUTATIONS: list[tuple[str, Mutation]] = [
    ("unrolled", swap_halves),
    ("unrolled", renormalise_wrongly),
    ("unrolled", weigh_by_another),
    ("unrolled", choose_another),
    ("masked", swap_halves),
    ("masked", weigh_by_another),
    ("gathered", renormalise_wrongly),
    ("gathered", permute_index),
    ("gathered", sum_other_axis),
    ("tiled", renormalise_wrongly),
    ("tiled", sum_other_axis),
    ("traced", renormalise_wrongly),
    ("traced", swap_halves),
    ("looped", renormalise_wrongly),
]


@pytest.mark.parametrize(("shape", "mutate"), MUTATIONS)
def test_it_never_raises_a_mutant_wrongly(tmp_path: Path, shape: str, mutate: Mutation) -> None:
    directory = written(tmp_path, shape, Mix())
    x = block_rows(directory, TOKENS)
    original = reference_rows(directory, x)
    model = onnx.load(directory / "model.onnx")
    mutate(model.graph)
    onnx.save(model, directory / "model.onnx")
    assert np.abs(reference_rows(directory, x) - original).max() > 1e-3 * np.abs(original).max()
    with pytest.raises(CompilerError) as caught:
        lowered(directory)
    assert isinstance(caught.value, UnsupportedOperatorError | MissingExpertsError)


def on_the_way_in(b: GraphBuilder, x: str) -> str:
    """Llama 4's way: the rows are weighed, not the results."""
    mix = Mix()
    rows = b.op("Reshape", x, b.ints(-1, mix.width))
    index, gate = moe_shapes.route(b, rows, mix)
    stacks = moe_shapes.Stacks.of(b, mix, Weights.of(mix, b.rng))
    size = b.op("Concat", b.op("Shape", index, start=0, end=1), b.ints(mix.experts), axis=0)
    dense = b.op("ScatterElements", b.op("Expand", b.const(0.0), size), index, gate, axis=1)
    weight = b.op("Unsqueeze", b.op("Transpose", dense, perm=[1, 0]), b.ints(-1))
    spread = b.op("Mul", b.op("Unsqueeze", rows, b.ints(0)), weight)
    wide = b.op("MatMul", spread, b.op("Transpose", stacks.w_in, perm=[0, 2, 1]))
    hidden = moe_shapes.activate(b, wide, mix)
    out = b.op("MatMul", hidden, b.op("Transpose", stacks.w_out, perm=[0, 2, 1]))
    total = b.op("ReduceSum", out, b.ints(0), keepdims=0)
    return b.op("Reshape", total, b.ints(1, -1, mix.width))


def test_it_does_not_move_gates_through_an_activation(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOperatorError):
        lowered(write_block(tmp_path, on_the_way_in, width=Mix().width))
