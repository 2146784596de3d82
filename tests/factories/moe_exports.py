"""Exports of MoE blocks as `transformers` and torch write them, and what breaks them.

`KEPT` are files of the repository. `fresh_exports` writes them anew with the pinned exporters, in a
process that sees those and nothing of the running environment. A mutation edits an export so that
it still runs and means something that is no layer of experts: `EDITS` are those of every file.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import onnx

from tests.factories.locked_packages import LockedPackages

KEPT = Path(__file__).parents[2] / "examples" / "moe-exports"
FILES = sorted(path.name for path in KEPT.glob("*.onnx"))
EXPORTERS = LockedPackages(
    what="exports written anew", lock="requirements-exporters.lock", folder="exporters",
    timeout_s=1_200,
)  # fmt: skip
EXPORT_S = 1_200
"""Longest time for writing all exports; they take half a minute of one core."""

Edit = Callable[[onnx.GraphProto], None]


def fresh_exports(folder: Path) -> Path:
    """Write all exports into `folder`, or skip the test where the exporters cannot be had."""
    script = KEPT / "exporters" / "export_transformers.py"
    subprocess.run(
        [
            sys.executable,
            "-S",
            "-B",
            script,
            folder,
        ],  # -S: without the packages of this environment
        env={"PYTHONPATH": str(EXPORTERS.need()), "HF_HUB_OFFLINE": "1"},
        check=True,
        timeout=EXPORT_S,
    )
    return folder


def structure(model: onnx.ModelProto) -> list[str]:
    """Return everything of a model but the values of its matrices, one line for each part."""
    return [
        *(f"opset {opset.domain} {opset.version}" for opset in model.opset_import),
        *map(str, (*model.graph.input, *model.graph.output, *model.graph.node)),
        *(f"{t.name} {t.data_type} {t.dims}" for t in model.graph.initializer),
    ]


def maker(graph: onnx.GraphProto, name: str) -> onnx.NodeProto | None:
    """Return the node that gives a value."""
    return next((node for node in graph.node if name in node.output), None)


def made_by(graph: onnx.GraphProto, name: str) -> str:
    """Return the operator that gives a value, or nothing."""
    node = maker(graph, name)
    return node.op_type if node else ""


def gates_of(graph: onnx.GraphProto) -> str:
    """Return the gates of the chosen experts: renormalised, else merged, else as top-k has them."""
    for node in graph.node:
        if node.op_type == "Div" and _is_sum(graph, node.input[1]):
            return node.output[0]
    for node in graph.node:
        if node.op_type == "Concat" and made_by(graph, node.input[0]) == "GatherElements":
            return node.output[0]
    return next(node.output[0] for node in graph.node if node.op_type == "TopK")


def _is_sum(graph: onnx.GraphProto, name: str) -> bool:
    node = maker(graph, name)
    if node is not None and node.op_type == "Add":
        return any(_is_sum(graph, term) for term in node.input)
    return node is not None and node.op_type == "ReduceSum"


def renormalise_wrongly(graph: onnx.GraphProto) -> None:
    """Gates go through one softmax more, before or behind what the family does with them."""
    gates = gates_of(graph)
    for node in graph.node:
        node.input[:] = ["once_more" if name == gates else name for name in node.input]
    once_more = onnx.helper.make_node("Softmax", [gates], ["once_more"], axis=-1)
    made = maker(graph, gates)
    graph.node.insert(list(graph.node).index(made) + 1, once_more)


def drop_expert(graph: onnx.GraphProto) -> None:
    """Every stack of matrices loses its last expert; the router still chooses it."""
    gathered = {n.input[0] for n in graph.node if n.op_type in ("Gather", "GatherND")}
    stacks = [t for t in graph.initializer if t.name in gathered and len(t.dims) > 1]
    assert len(stacks) >= 2
    for stack in stacks:
        array = onnx.numpy_helper.to_array(stack)[:-1].copy()
        stack.CopyFrom(onnx.numpy_helper.from_array(array, stack.name))


def swap_halves(graph: onnx.GraphProto) -> None:
    """The last expert of a loop reads its gate rows as up rows, and the other way round."""
    slices = [node for node in reversed(graph.node) if node.op_type == "Slice"]
    gate, up = next(pair for pair in pairwise(slices) if pair[0].input[0] == pair[1].input[0])
    gate.output[0], up.output[0] = up.output[0], gate.output[0]


def edits(name: str) -> Iterator[tuple[str, Edit]]:
    """Yield the mutations of a file with their names."""
    yield "wrong-renormalisation", renormalise_wrongly
    yield "missing-expert", drop_expert
    if "eager" in name or name == "trap.onnx":
        yield "swapped-halves", swap_halves


EDITS = [(name, label, edit) for name in FILES for label, edit in edits(name)]


def edited(model: onnx.ModelProto, edit: Edit) -> onnx.ModelProto:
    """Return a copy of a model after an edit."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    edit(copy.graph)
    return copy
