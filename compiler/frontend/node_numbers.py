"""Numbers of the nodes of a file, carried along while the importer rewrites the file's graph.

    ModelProto --number_nodes--> tagged nodes --expansions, `marked`--> ... --> `Node.sources`

A node's metadata holds the numbers of the nodes of the submission that it stands for: its own for a
node of the file, those of the node that it was written for otherwise. The inliner of ONNX keeps
metadata, so nodes of local functions count once per call, under the name that the inliner gives.
The importer calls `number_nodes` first and `settle_imported` last; whatever writes nodes in between
calls `marked`. Subgraphs of control flow are numbered too.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import onnx
from xdsl.dialects.func import FuncOp

from compiler.frontend.control_flow import subgraphs
from compiler.passes.functions import body
from compiler.passes.origins import UNREAD, Origins

KEY: Final = "ai.sparsefleet.nodes"


def name_of(node: onnx.NodeProto) -> str:
    """Return what messages call a node: its name, or the value that it makes."""
    return node.name or (f"the one that makes {node.output[0]!r}" if node.output else "?")


def number_nodes(model: onnx.ModelProto, component: str, origins: Origins) -> None:
    """Number every node of a model, those of subgraphs behind the node that holds them."""
    for node in _walk(model.graph):
        domain = f"{node.domain}::" if node.domain not in ("", "ai.onnx") else ""
        _tag(node, [origins.add_node(component, name_of(node), f"{domain}{node.op_type}")])


def numbers_of(node: onnx.NodeProto) -> tuple[int, ...]:
    """Return the numbers of the nodes that a node stands for; none outside an import."""
    for item in node.metadata_props:
        if item.key == KEY:
            return tuple(int(number) for number in item.value.split(",") if number)
    return ()


def numbers_inside(nodes: Iterable[onnx.NodeProto]) -> tuple[int, ...]:
    """Return the numbers of nodes and of everything in their subgraphs."""
    inner = [child for node in nodes for child in (node, *_inside(node))]
    return tuple(sorted({number for node in inner for number in numbers_of(node)}))


def marked(nodes: Sequence[onnx.NodeProto], numbers: Iterable[int]) -> Sequence[onnx.NodeProto]:
    """Let those nodes that have no numbers yet stand for `numbers`; return the nodes."""
    given = list(numbers)
    for node in nodes:
        if given and not numbers_of(node):
            _tag(node, given)
    return nodes


def mark_inlined(
    before: Sequence[onnx.NodeProto],
    after: Sequence[onnx.NodeProto],
    functions: Sequence[onnx.FunctionProto],
) -> None:
    """Let the nodes of an inlined body stand for the call, which stood in the same place.

    Args:
        before: Nodes of the graph with its calls.
        after: Nodes of the graph without them, in the same order.
        functions: What was inlined; the bodies call no other of them.
    """
    lengths = {(f.domain, f.name): len(f.node) for f in functions}
    at = 0
    for node in before:
        count = lengths.get((node.domain, node.op_type))
        if count is not None:
            marked(after[at : at + count], numbers_of(node))
        at += 1 if count is None else count


def settle_imported(
    component: str, func: FuncOp, reached: frozenset[int], origins: Origins
) -> None:
    """Decide about the nodes of a component that no operation of its function stands for.

    Those that were evaluated are known at compile time, or only their shapes matter: folded. The
    others are dead.
    """
    carried = {number for op in body(func).ops for number in origins.of(op)}
    own = {at for at, node in enumerate(origins.nodes) if node.component == component} - carried
    origins.folded |= own & reached
    origins.lose(sorted(own - reached), UNREAD)


def _walk(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        yield from _inside(node)


def _inside(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    for inner in subgraphs(node):
        yield from _walk(inner)


def _tag(node: onnx.NodeProto, numbers: Sequence[int]) -> None:
    entry = node.metadata_props.add()
    entry.key, entry.value = KEY, ",".join(map(str, numbers))
