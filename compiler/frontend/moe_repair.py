"""Rewrite mixtures with data-dependent bodies to the gathered form, or say what they lack.

Called by the importer before shapes are evaluated. Three shapes come in: traced loops over the
experts that a dummy input hit (O3), one body per expert with weights of its own (O4), and `Loop` or
`If` over experts (O6). What goes out is plain ONNX: matrices gathered by the chosen experts, one
sum over the choices.

Every rewriting is judged: ONNX Runtime runs the region as it is in the file and as it was written,
on random rows, choices and gates. A traced loop only runs when exactly as many experts are hit as
were traced, so the choices hit that many, taking turns until every expert was among them. Where
they differ, the graph stays as it is and a note says so. Experts that a router can choose but the
file does not hold cannot be repaired: `MissingExpertsError` names them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from compiler.frontend.graph_view import GraphView, extract, router_shape, widths
from compiler.frontend.moe_batch import Batch, BodyError
from compiler.frontend.moe_regions import Region, find_regions
from compiler.frontend.node_numbers import marked, numbers_inside
from compiler.frontend.onnx_file import opset_of
from compiler.frontend.values import Array
from compiler.passes.expert_count import need_all
from compiler.passes.judge import Run, agrees, ready, sample_choices, sample_rows

RUNS: Final = 24
"""The most runs of one judgement; each covers as many experts as were traced."""
SCALES: Final = (1.0, 6.0)
FED_BYTES: Final = 1 << 16
TRACED_HINT: Final = (
    "the model was exported by tracing, and only the experts that the dummy input reached were"
    " written; export with stacked expert weights (`batched_mm`) or with an input that reaches all"
    " of them"
)
_SIGNS: Final = frozenset({"OneHot", "Equal", "Loop", "If"})


@dataclass(frozen=True, slots=True)
class _Sizes:
    """T is free; k choices among `experts`, rows of `width`."""

    k: int
    experts: int
    width: int


def repair_experts(model: onnx.ModelProto, file: str) -> tuple[str, ...]:
    """Rewrite the mixtures of a model in place; return what a reader should know of it.

    Args:
        model: Checked model, functions inlined.
        file: Its name, for messages.

    Raises:
        MissingExpertsError: Experts are absent that the router can choose.
    """
    if not _may_have_one(model.graph):
        return ()
    notes: list[str] = []
    written: list[Batch] = []
    try:
        view = GraphView.of(model.graph)
        for number, region in enumerate(find_regions(view)):
            batch, note = _repair(model, view, region, _prefix(model.graph, number), file)
            notes.append(note)
            written += [batch] if batch is not None else []
    except (ValueError, KeyError, IndexError, TypeError) as error:
        notes.append(f"{file}: not searched for experts to the end: {error}")
    for batch in sorted(written, key=lambda batch: -batch.region.place):
        _splice(model.graph, batch.region, batch)
    return tuple(notes)


def _prefix(graph: onnx.GraphProto, number: int) -> str:
    """Return the start of names that no value of the graph has."""
    prefix = f"moe{number}/"
    names = {name for node in graph.node for name in node.output}
    names.update(tensor.name for tensor in graph.initializer)
    while any(name.startswith(prefix) for name in names):
        prefix = f"_{prefix}"
    return prefix


def _may_have_one(graph: onnx.GraphProto) -> bool:
    return any(node.op_type in _SIGNS for node in graph.node)


def _repair(
    model: onnx.ModelProto, view: GraphView, region: Region, prefix: str, file: str
) -> tuple[Batch | None, str]:
    """Return the gathered form of a region if the judge confirms it, and a note."""
    where = f"{file}: experts at {region.result!r}"
    ids = [body.expert for body in region.bodies]
    written = [expert for expert in ids if expert is not None]
    batch = Batch(view, region, prefix, written if len(written) == len(ids) else None)
    router, k = router_shape(view, region.index), widths(view, region.index)
    if router is None or k is None:
        return None, f"{where} stay as they are: no product makes their router's logits"
    sizes = _Sizes(k, *router)
    if batch.experts is not None and not batch.holds_stacks():
        _need_all(region, file, sizes.experts, set(written))
    try:
        batch.write(f"{prefix}result")
    except BodyError as error:
        return None, f"{where} stay as they are: {error}"
    _need_all(region, file, sizes.experts, set(range(batch.stacked)))
    if not _judged(model, region, batch, sizes):
        return None, f"{where} stay as they are: the gathered form disagrees with the file"
    traced = len(region.bodies)
    how = "a loop over experts" if traced == 1 else f"{traced} traced expert bodies"
    return batch, f"{where}: {how} became one layer of {sizes.experts}, judged by ONNX Runtime"


def _need_all(region: Region, file: str, experts: int, present: set[int]) -> None:
    """Refuse a mixture that lacks experts which the router can choose."""
    where = f"{file}: the router of the experts that end in {region.result!r}"
    need_all(where, experts, present, TRACED_HINT)


# --- judge ---------------------------------------------------------------------------------------


def _judged(model: onnx.ModelProto, region: Region, batch: Batch, sizes: _Sizes) -> bool:
    source = extract(
        model.graph, region.result, _leaves(region), list(model.graph.node)[: region.place + 1]
    )
    written = (batch.nodes, batch.initializers)
    pool, hit = _hits(region, sizes)
    runners: list[Run | None] = []
    runs = min(RUNS, 2 + 2 * len(pool) // hit)
    for run in range(runs):
        rows = max(4, -(-hit // sizes.k) + 1)
        x = sample_rows(rows, sizes.width, run, SCALES[run % len(SCALES)])
        places, gate = sample_choices(rows, sizes.k, hit, run)
        index = np.sort(np.roll(pool, run * hit)[:hit])[places]
        feeds = {region.x: x, region.index: index, region.gate: gate}
        if not runners:
            runners = [
                _ready(model, source, region.result, feeds),
                _ready(model, written, f"{batch.prefix}result", feeds),
            ]
        found, wanted = (None if run is None else run(feeds) for run in runners)
        if found is None or wanted is None or not agrees(wanted[0], found[0]):
            return False
    return True


def _leaves(region: Region) -> list[str]:
    return [region.x, region.index, region.gate]


def _hits(region: Region, sizes: _Sizes) -> tuple[Array, int]:
    """Return which experts a run may hit, and exactly how many it must hit.

    Bodies with written ids answer for these experts alone. Bodies whose ids are computed run only
    when as many experts are hit as were traced; a loop takes any number.
    """
    written = [body.expert for body in region.bodies if body.expert is not None]
    pool = np.asarray(written or range(sizes.experts), np.int64)
    traced = not written and len(region.bodies) > 1
    return pool, len(region.bodies) if traced else len(pool)


def _ready(
    model: onnx.ModelProto,
    part: tuple[list[onnx.NodeProto], list[onnx.TensorProto]],
    output: str,
    examples: Mapping[str, Array],
) -> Run | None:
    """Load a part of a model; large initializers are fed, a model may not exceed 2 GiB."""
    nodes, initializers = part
    fed = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in initializers
        if tensor.ByteSize() > FED_BYTES
    }
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in {**examples, **fed}.items()
    ]
    result = helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, None)
    kept = [tensor for tensor in initializers if tensor.name not in fed]
    graph = helper.make_graph(nodes, "part", inputs, [result], kept)
    imports = [helper.make_opsetid("", opset_of(model))]
    piece = helper.make_model(graph, opset_imports=imports, ir_version=min(model.ir_version, 10))
    run = ready(piece)
    return None if run is None else lambda feeds: run({**feeds, **fed})


def _splice(graph: onnx.GraphProto, region: Region, batch: Batch) -> None:
    """Put the written nodes where the region's last node stood; the rest falls to dead code."""
    nodes = list(graph.node)
    old = onnx.NodeProto()
    old.CopyFrom(nodes[region.place])
    for at, name in enumerate(old.output):
        if name == region.result:
            old.output[at] = f"{batch.prefix}unused"
    batch.nodes[-1].output[0] = region.result
    replaced, _ = extract(graph, region.result, _leaves(region), nodes[: region.place + 1])
    marked(batch.nodes, numbers_inside(replaced))
    del graph.node[:]
    graph.node.extend([*nodes[: region.place], old, *batch.nodes, *nodes[region.place + 1 :]])
    graph.initializer.extend(batch.initializers)
