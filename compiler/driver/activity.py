"""Rows of the report about work and zeros: FLOPs per run, activity of channels and heads."""

from collections.abc import Mapping

from compiler.contract.canonical import Json
from compiler.contract.pipeline import PREFILL
from compiler.contract.session import STEP
from compiler.driver.sections import named_weights
from compiler.kernels.program import Module
from compiler.quant.activity import input_activity
from compiler.quant.flops import PRUNING, RunSize, count_flops, pruned_from
from compiler.quant.record import CalibrationRecord


def activity_facts(module: Module, record: CalibrationRecord | None) -> dict[str, Json]:
    """Return `flops`, and `activity` if there is a record."""
    sizes = _sizes(module, record)
    flops: dict[str, Json] = {}
    for program in module.programs:
        size = sizes.get(program.name, RunSize())
        found = count_flops(module, program, size, record)
        flops[program.name] = {
            "tokens": size.tokens,
            "context": size.context,
            "counted": found.counted,
            "dense": found.dense,
            "saved_ratio": round(found.saved_ratio, 4),
            "zero_operands": found.zero,
        }
    return {"flops": flops, "activity": None if record is None else _activity(module, record)}


def _sizes(module: Module, record: CalibrationRecord | None) -> Mapping[str, RunSize]:
    """Return the size of each program's run: the mean picture, and one token right behind it."""
    whole = pruned_from(module)
    pruned = [
        module.buffers[call.outputs[0]].rows
        for program in module.programs
        for call in program.calls
        if call.op in PRUNING
    ]
    kept = max(pruned, default=0)
    if record is not None and record.routers and PREFILL in {p.name for p in module.programs}:
        seen = record.routers[0]
        runs = len(set(seen.run[seen.vision].tolist()))
        kept = round(int(seen.vision.sum()) / runs) if runs else kept
    return {
        PREFILL: RunSize(max(1, kept), 0, max(1, whole), 0),
        STEP: RunSize(1, kept, 1, whole),
    }


def _activity(module: Module, record: CalibrationRecord) -> Json:
    names = {weight.id: name for name, weight in named_weights(module)}
    return {
        names[row.weight]: {
            "rows": row.rows,
            "zero_ratio": round(row.zero_ratio, 4),
            "dead_channels": row.dead_channels,
            "histogram": list(row.histogram),
            "heads": [round(share, 4) for share in row.heads],
        }
        for row in input_activity(module, record)
    }
