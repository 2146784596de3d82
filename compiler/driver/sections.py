"""Facts of a compiled model: the `pipeline` section, what a device needs, rows of the report."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from compiler.contract.canonical import Json
from compiler.contract.manifest import Requirements
from compiler.contract.pipeline import (
    ImageSpec,
    Pipeline,
    Port,
    ProgramSpec,
    TokenSpec,
)
from compiler.contract.plan import Plan, PlanProgram
from compiler.contract.plan_format import DTYPE_NAMES, Direction, Kind
from compiler.emitters.memory import MemoryPlan
from compiler.hardware.targets import Target
from compiler.kernels.naming import kernel_name
from compiler.kernels.program import Module
from compiler.kernels.registry import KERNELS
from compiler.kernels.select import select_tile
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.quant.w4 import PackedW4, dequantise_w4, unpack_w4

RUNTIME_BYTES: Final = 8 * 1024 * 1024
"""What loading a plan needs besides weights, arena and cache: huge-page rounding, context, code."""
SLOTS: Final = 2
"""A device keeps the old bundle while it installs the new one."""
NO_NOISE_DB: Final = 200.0


def pipeline_section(spec: PipelineSpec, plan: Plan) -> Pipeline:
    """Return what a device must know besides the plan."""
    image, tokens = spec.image, spec.tokens
    return Pipeline(
        family=spec.family,
        image=ImageSpec(image.height, image.width, image.channels) if image else None,
        tokens=TokenSpec(
            vocabulary=tokens.vocabulary,
            eos=tokens.eos,
            position_base=tokens.position_base,
            prompts=dict(tokens.prompts),
            max_answer_tokens=tokens.max_answer_tokens,
        )
        if tokens
        else None,
        max_context=plan.kv.capacity if plan.kv else 0,
        max_step_tokens=plan.max_tokens,
        programs={program.name: _program_spec(plan, program) for program in plan.programs},
    )


def _program_spec(plan: Plan, program: PlanProgram) -> ProgramSpec:
    ports: dict[Direction, dict[str, Port]] = {Direction.INPUT: {}, Direction.OUTPUT: {}}
    for port in program.ports:
        buffer = plan.buffers[port.buffer]
        ports[port.direction][port.role] = Port(
            buffer.rows, buffer.cols, DTYPE_NAMES[buffer.dtype], buffer.dynamic
        )
    return ProgramSpec(ports[Direction.INPUT], ports[Direction.OUTPUT])


def requirements(plan: Plan, sections: Mapping[str, bytes]) -> Requirements:
    """Return what a device must have: RAM to run, free storage to install beside the old bundle."""
    kv = plan.kv
    cache = 2 * 4 * kv.layers * kv.heads * kv.head_dim * kv.capacity if kv else 0
    weights = sum(section.length for section in plan.sections)
    total = sum(len(data) for data in sections.values())
    return Requirements(
        ram_bytes=weights + plan.arena_bytes + cache + RUNTIME_BYTES,
        free_bytes=SLOTS * total,
    )


def operation_counts(plan: Plan) -> dict[str, Json]:
    """Return calls per operation, by program."""
    return {
        program.name: dict(sorted(Counter(call.op.name for call in program.calls).items()))
        for program in plan.programs
    }


def explain_rows(plan: Plan, target: Target) -> list[Json]:
    """Return, per operation, which kernel does it and why, with the weights it reads per pass."""
    tile = select_tile(target.isa)
    rows: list[Json] = []
    for op in sorted(plan.ops):
        calls = [
            (program.name, call)
            for program in plan.programs
            for call in program.calls
            if call.op is op
        ]
        used = {at for _, call in calls for at in call.weights if at >= 0}
        tiled = KERNELS[op].tiled
        rows.append(
            {
                "operation": op.name,
                "kernel": kernel_name(op, tile),
                "calls": dict(sorted(Counter(name for name, _ in calls).items())),
                "weight_bytes": sum(plan.weights[at].length for at in used),
                "why": f"tile {tile.isa}: best that {target.id} has"
                if tiled
                else f"portable C, built for {target.id}",
            }
        )
    return rows


def sqnr_rows(module: Module, packed: Mapping[int, PackedW4]) -> dict[str, Json]:
    """Return signal to quantisation noise, dB, per W4 weight (`section#number`)."""
    counts: Counter[str] = Counter()
    rows: dict[str, Json] = {}
    for weight in module.weights:
        if weight.kind != "w4":
            continue
        name = f"{weight.section}#{counts[weight.section]}"
        counts[weight.section] += 1
        stored = dequantise_w4(unpack_w4(packed[weight.id]))
        rows[name] = round(_sqnr_db(weight.array, stored), 2)
    return rows


def _sqnr_db(original: np.ndarray, stored: np.ndarray) -> float:
    signal = float(np.square(original, dtype=np.float64).sum())
    noise = float(np.square(original.astype(np.float64) - stored).sum())
    if noise == 0.0:
        return NO_NOISE_DB
    return 10.0 * float(np.log10(signal / noise)) if signal else -NO_NOISE_DB


def expert_place(section: str) -> tuple[int, int]:
    """Return (layer, expert) of a section `expert.L<layer>.E<expert>`."""
    _, layer, expert = section.split(".")
    return int(layer[1:]), int(expert[1:])


def expert_sections(names: Iterable[str]) -> list[str]:
    """Return the expert sections among `names`, by layer and expert."""
    return sorted((name for name in names if name.startswith("expert.")), key=expert_place)


def weight_kinds(plan: Plan) -> dict[str, Json]:
    """Return bytes of weights per storage kind."""
    sizes: Counter[str] = Counter()
    for weight in plan.weights:
        sizes[Kind(weight.kind).name.lower()] += weight.length
    return dict(sorted(sizes.items()))


def memory_rows(memory: MemoryPlan) -> dict[str, Json]:
    """Return planned bytes: the arena, its lower bound, the cache, and each program's share."""
    return {
        "arena_bytes": memory.arena_bytes,
        "max_live_bytes": memory.max_live_bytes,
        "kv_bytes": memory.kv_bytes,
        "in_place": len(memory.in_place),
        "programs": {
            name: {"arena_bytes": part.arena_bytes, "max_live_bytes": part.max_live_bytes}
            for name, part in memory.programs.items()
        },
    }
