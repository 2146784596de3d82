"""A routed decoder that routes as a recorded trace says, as a compiled plan in a folder.

    decoder of `decode_plan`, smaller -(token t = logits of step t)-> plan of forced routes

Its experts are of the size that is measured, and their bytes are random. What must be real is who
is chosen: the first columns of the residual stream are set aside for the routers' logits. Token t's
embedding carries the logits of step t of the trace there, nothing ever adds to them (the rows of
attention and expert outputs that would are zero), and a router's row picks one of these columns. So
the product's kernels, pool and prefetch meet EdgeCard's own order of experts, at 6 MB each.

A stream that nothing changes would tell a router that is asked early exactly what it will say. So
these have matrices of their own, which pick columns with what EdgeCard's routers said early.

Norms divide all logits of a token by one number near 1: what is chosen does not change, and gates
change little.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.decode_graph import Shape
from benchmarks.decode_plan import lowered, write_folder
from benchmarks.runtime_trace import Trace
from benchmarks.synthetic import random_w4
from compiler.contract.bands import STEP
from compiler.contract.operations import Op
from compiler.kernels.program import Call, Module, Weight
from compiler.quant.w4 import GROUP, PANEL, PackedW4

EXPERT_WIDTH: Final = 3712
"""Width of an expert of 6 MB."""
TINY_SCALE: Final = 2.0**-24
"""Scale of products that are added to the residual stream: it stays what the embedding made it."""
ZERO_CODES: Final = 0x88
CARRIED: Final = 4.0
"""What a logit is divided by in the stream, so that it weighs no more than other columns."""
_SAID: Final = 2
"""What every router says, and what it says early."""
ROUTED_NORM, ROUTED_ROUTER, ROUTED_EXPERTS = 0, 2, 4
RESIDUAL_INPUTS: Final = 2


def runtime_shape(trace: Trace, layers: int = 3) -> Shape:
    """Return the decoder of a trace: its experts, its steps as vocabulary, 6 MB per expert."""
    steps, _, experts = trace.own.shape
    vocabulary = -(-steps // PANEL) * PANEL
    return Shape(layers=layers, experts=experts, hidden=EXPERT_WIDTH, vocabulary=vocabulary)


def write_routed_plan(
    shape: Shape, trace: Trace, target: str, step_tokens: int, folder: Path
) -> None:
    """Write plan, kernels and sections of a decoder whose token t routes as step t of `trace`.

    Args:
        shape: Its vocabulary holds the steps; layers and experts no more than the trace's.
        trace: Logits of its routers.
        target: Whom the kernels are for.
        step_tokens: The most tokens of one call.
        folder: Made here.

    Raises:
        ValueError: The trace and the shape do not fit.
    """
    steps, layers, experts = trace.own.shape
    if steps > shape.vocabulary or layers < shape.layers or experts != shape.experts:
        raise ValueError(f"a trace of {trace.own.shape} does not fit {shape}")
    module = lowered(shape, step_tokens)
    step = tuple(program for program in module.programs if program.name == STEP)
    module = with_early_routers(replace(module, programs=step))
    adding = set(_adding(module))
    packed = {
        weight.id: _packed(weight, is_adding=weight.id in adding, carried=shape)
        for weight in module.weights
        if weight.kind == "w4"
    }
    arrays = _arrays(module, shape, trace)
    weights = tuple(
        replace(weight, array=arrays.get(weight.id, weight.array)) for weight in module.weights
    )
    write_folder(replace(module, weights=weights), packed, target, folder)


def with_early_routers(module: Module) -> Module:
    """Return the module with a matrix of its own for every router that is asked early."""
    weights = list(module.weights)

    def parted(call: Call) -> Call:
        if call.op is not Op.EXPERT_FORESEE:
            return call
        own = list(call.weights)
        weights.append(replace(weights[own[ROUTED_ROUTER]], id=len(weights)))
        own[ROUTED_ROUTER] = weights[-1].id
        return replace(call, weights=tuple(own))

    programs = tuple(
        replace(program, calls=tuple(map(parted, program.calls))) for program in module.programs
    )
    return replace(module, programs=programs, weights=tuple(weights))


def _calls(module: Module) -> Iterator[Call]:
    for program in module.programs:
        yield from program.calls


def _adding(module: Module) -> Iterator[int]:
    """Yield the weights whose products are added to the residual stream."""
    for call in _calls(module):
        if call.op is Op.MOE_LAYER:
            yield from call.weights[ROUTED_EXPERTS + 1 :: 2]
        elif call.op is Op.LINEAR and len(call.inputs) == RESIDUAL_INPUTS and call.inputs[1] >= 0:
            yield call.weights[0]


def _packed(weight: Weight, *, is_adding: bool, carried: Shape) -> PackedW4:
    n, k = weight.array.shape
    drawn = random_w4(n, k, weight.id)
    if not is_adding:
        return drawn
    panels = -(-_SAID * carried.layers * carried.experts // PANEL)
    zeros = bytes([ZERO_CODES]) * (panels * (k // GROUP) * (PANEL * GROUP // 2))
    scales = np.full(n, TINY_SCALE, "<f4").tobytes()
    return replace(drawn, codes=zeros + drawn.codes[len(zeros) :], rows=scales)


def _arrays(module: Module, shape: Shape, trace: Trace) -> Mapping[int, np.ndarray]:
    """Return the f32 weights that route: embedding, norms before routers, routers."""
    carried = shape.layers * shape.experts
    found: dict[int, np.ndarray] = {}
    placed = {Op.MOE_LAYER: 0, Op.EXPERT_FORESEE: 0}
    for call in _calls(module):
        if call.op is Op.EMBED:
            table = np.array(module.weights[call.weights[0]].array, np.float32)
            for said, logits in enumerate((trace.own, trace.early)):
                rows = logits[:, : shape.layers].reshape(len(logits), carried)
                table[: len(rows), said * carried : (said + 1) * carried] = rows / CARRIED
            table /= np.sqrt(np.square(table).mean(axis=1, keepdims=True))
            found[call.weights[0]] = table
        elif call.op in placed:
            found[call.weights[ROUTED_NORM]] = np.ones(shape.width, np.float32)
            router = np.zeros((shape.experts, shape.width), np.float32)
            at = np.arange(shape.experts)
            said = carried if call.op is Op.EXPERT_FORESEE else 0
            router[at, said + placed[call.op] * shape.experts + at] = CARRIED
            found[call.weights[ROUTED_ROUTER]] = router
            placed[call.op] += 1
    return found
