"""What calibration says about zeros: channels behind activations, and heads of attention.

A channel is dead if no calibration row had it, a head is weighed by its share of the energy that
goes into the output projection. Models with GELU or SiLU have next to no exact zeros, and the
figures say so. Nothing here is a proof: the pass `drop-dead-channels` removes only what the weights
prove.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from compiler.contract.operations import Op
from compiler.kernels.program import Module, call_params
from compiler.quant.record import CalibrationRecord

HISTOGRAM_BINS: Final = 10


@dataclass(frozen=True, slots=True)
class InputActivity:
    """Zeros among the inputs of one W4 weight.

    Attributes:
        weight: Its id.
        rows: Rows that calibration saw.
        zero_ratio: Share of zero activations.
        dead_channels: Channels that were zero in every row.
        histogram: Channels by share of zeros, over equal parts of 0..1.
        heads: Share of the energy per attention head, if attention feeds the weight.
    """

    weight: int
    rows: int
    zero_ratio: float
    dead_channels: int
    histogram: tuple[int, ...]
    heads: tuple[float, ...]


def input_activity(module: Module, record: CalibrationRecord) -> tuple[InputActivity, ...]:
    """Return a row per W4 weight with zeros among its inputs, or fed by attention, by id."""
    heads = _heads(module)
    found = []
    for weight in sorted(record.source_of):
        sample = record.sample(weight)
        if sample is None or not (sample.zeros.any() or weight in heads):
            continue
        ratio = sample.zero_ratio
        histogram, _ = np.histogram(ratio, bins=HISTOGRAM_BINS, range=(0.0, 1.0))
        energy = sample.energy.reshape(heads.get(weight, 1), -1).sum(axis=1)
        shares = energy / max(float(energy.sum()), 1e-30)
        found.append(
            InputActivity(
                weight=weight,
                rows=sample.seen,
                zero_ratio=float(ratio.mean()),
                dead_channels=int((sample.zeros == sample.seen).sum()),
                histogram=tuple(int(count) for count in histogram),
                heads=tuple(float(share) for share in shares) if weight in heads else (),
            )
        )
    return tuple(found)


def _heads(module: Module) -> dict[int, int]:
    """Return the number of heads by id of the weight that reads an attention's result."""
    found = {}
    for program in module.programs:
        made = {
            call.outputs[0]: int(call_params(call)["heads"])
            for call in program.calls
            if call.op is Op.ATTENTION and call.outputs
        }
        for call in program.calls:
            if call.op is Op.LINEAR and call.inputs[0] in made:
                found[call.weights[0]] = made[call.inputs[0]]
    return found
