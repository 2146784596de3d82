"""Which weights are stored neuron by neuron, by the zeros that calibration saw behind a ReLU.

    CalibrationRecord -> `layout` of weights, rows of the report

Called by the driver behind recording, before the plan is emitted. The kernels then leave out the up
rows and columns of neurons that are zero, exactly: nothing is predicted, no bit changes, so a wrong
guess costs time only. Chosen are the storages whose measured gain (`compiler.analysis.skip_points`)
at the share of zeros seen is at least `LEAST_GAIN`:

    experts with reglu   up_rows and columns, if dead gates are many enough
    experts with relu    columns
    LINEAR               columns, where its operand has zeros for another reason too

Left dense: what calibration did not reach, weights that store zeros of their own, weights too small
to be read as a stream, weights that some call with many rows at once reads (with many rows few
neurons are dead in all of them), and weights whose operand is checked by groups. A number of rows
that is known at run time counts as one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from compiler.analysis import skip_points
from compiler.contract.moe_rules import expert_kinds
from compiler.contract.operations import ExpertAct, Op
from compiler.kernels.program import COLUMNS, DENSE, UP_ROWS, Call, Module, Weight, call_params
from compiler.quant.record import CalibrationRecord

LEAST_GAIN: Final = 1.05
"""What must be gained: points are measured on another machine than the device."""
LEAST_BYTES: Final = 128 * 1024
"""Bytes of codes below which a weight stays in the cache and streams are no concern."""
MOST_ROWS: Final = 4
_ROUTED: Final = (Op.EXPERTS, Op.MOE_LAYER)


@dataclass(frozen=True, slots=True)
class NeuronChoice:
    """One weight, or all matrices of one routed layer, considered for single neurons.

    Attributes:
        program, call: The first call that reads them.
        operation: LINEAR, EXPERTS or MOE_LAYER.
        weights: Ids of the weights that change, or would.
        zero_ratio: Share of zero neurons that calibration saw; None if it saw none of them.
        gain: What the measured points say leaving them out gains; None if that does not matter.
        chosen: Layouts given, in order of use; empty if dense it stays.
        why: On what grounds.
    """

    program: str
    call: int
    operation: str
    weights: tuple[int, ...]
    zero_ratio: float | None
    gain: float | None
    chosen: tuple[str, ...]
    why: str


def choose_neurons(
    module: Module, record: CalibrationRecord | None
) -> tuple[Module, tuple[NeuronChoice, ...]]:
    """Return the module with the layouts that are worth it, and a row for each considered."""
    rows = tuple(_choices(module, record))
    layouts: dict[int, str] = {}
    for row in rows:
        if row.chosen:
            layouts |= _given(row)
    weights = tuple(
        replace(weight, layout=layouts.get(weight.id, weight.layout)) for weight in module.weights
    )
    return (replace(module, weights=weights) if layouts else module), rows


def _given(row: NeuronChoice) -> dict[int, str]:
    """Return layouts by weight; those of an expert's two matrices alternate."""
    return {weight: row.chosen[at % len(row.chosen)] for at, weight in enumerate(row.weights)}


def _choices(module: Module, record: CalibrationRecord | None) -> Iterator[NeuronChoice]:
    many, seen = _read_otherwise(module), set[tuple[int, ...]]()
    for program in module.programs:
        for at, call in enumerate(program.calls):
            weights, layouts = _candidates(call)
            if not weights or weights in seen or module.weights[weights[0]].kind != "w4":
                continue
            seen.add(weights)
            row = _choice(module, (program.name, at, call.op), weights, layouts, record, many)
            if call.op is not Op.LINEAR or (row.zero_ratio or 0.0) >= skip_points.DEAD[0]:
                yield row


def _candidates(call: Call) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the weights of a call that could be stored by neurons, and how."""
    if call.op is Op.LINEAR:
        return (call.weights[0],), (COLUMNS,)
    if call.op not in _ROUTED:
        return (), ()
    params = call_params(call)
    stride = len(expert_kinds(int(params.get("biases", 0))))
    experts = call.weights[4 if call.op is Op.MOE_LAYER else 0 :]
    pairs = [experts[at : at + 2] for at in range(0, len(experts), stride)]
    if params["act"] == ExpertAct.REGLU:
        return tuple(weight for pair in pairs for weight in pair), (UP_ROWS, COLUMNS)
    if params["act"] == ExpertAct.RELU:
        return tuple(pair[1] for pair in pairs), (COLUMNS,)
    return (), ()


def _choice(
    module: Module,
    place: tuple[str, int, Op],
    weights: tuple[int, ...],
    layouts: tuple[str, ...],
    record: CalibrationRecord | None,
    many: frozenset[int],
) -> NeuronChoice:
    zeros = _zero_ratio(weights[len(layouts) - 1 :: len(layouts)], record)
    points = skip_points.BOTH if len(layouts) > 1 else skip_points.COLUMNS
    gain = None if zeros is None else float(np.interp(zeros, skip_points.DEAD, points))
    stored = [module.weights[at] for at in weights]
    reasons = (
        (zeros is None, "dense: calibration did not reach it"),
        (gain is not None and gain < LEAST_GAIN, "dense: too few zeros"),
        (any(weight.layout != DENSE for weight in stored), "dense: zeros of the weights left out"),
        (min(map(_code_bytes, stored)) < LEAST_BYTES, "dense: small enough for a cache"),
        (
            bool(many.intersection(weights)),
            "dense: read by many rows at once, or checked by groups",
        ),
    )
    refused = next((why for holds, why in reasons if holds), "")
    program, at, op = place
    return NeuronChoice(
        program,
        at,
        op.name,
        weights,
        None if zeros is None else round(zeros, 4),
        None if gain is None else round(gain, 3),
        () if refused else layouts,
        refused or "calibration saw neurons dead often enough",
    )


def _zero_ratio(weights: tuple[int, ...], record: CalibrationRecord | None) -> float | None:
    """Return the share of zeros among the operands of weights, over the rows that reached them."""
    samples = [record.sample(weight) for weight in weights] if record is not None else []
    found = [sample for sample in samples if sample is not None]
    if not found:
        return None
    total = sum(sample.seen for sample in found)
    return float(sum(sample.zero_ratio.mean() * sample.seen for sample in found) / total)


def _code_bytes(weight: Weight) -> int:
    return int(weight.array.size) // 2


def _read_otherwise(module: Module) -> frozenset[int]:
    """Return the weights of calls with many rows, known now, or with a check of whole groups."""
    return frozenset(
        weight
        for program in module.programs
        for call in program.calls
        if call.op in (Op.LINEAR, *_ROUTED)
        for buffer in (module.buffers[call.inputs[0]],)
        if (not buffer.dynamic and buffer.rows > MOST_ROWS) or call_params(call).get("check")
        for weight in call.weights
    )
