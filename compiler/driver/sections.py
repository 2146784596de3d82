"""Facts of a compiled model that need more than its plan: the `pipeline` section, SQNR."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Final

import numpy as np

from compiler.contract.canonical import Json
from compiler.contract.pipeline import (
    ImageSpec,
    Pipeline,
    Port,
    ProgramSpec,
    TokenSpec,
)
from compiler.contract.plan import Plan, PlanProgram
from compiler.contract.plan_format import DTYPE_NAMES, Direction
from compiler.emitters.memory import MemoryPlan
from compiler.kernels.index_bounds import IndexCheck, index_checks
from compiler.kernels.program import KvCache, Module, Weight
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.passes.plan_kv import window_of
from compiler.quant.grid_search import OutputError
from compiler.quant.w4 import PackedW4, dequantise_w4, unpack_w4

NO_NOISE_DB: Final = 200.0


def pipeline_section(spec: PipelineSpec, plan: Plan) -> Pipeline:
    """Return what a device must know besides the plan."""
    return Pipeline(
        family=spec.family,
        image=image_spec(spec),
        tokens=token_spec(spec),
        max_context=_longest_context(spec, plan),
        max_step_tokens=plan.max_tokens,
        programs={program.name: _program_spec(plan, program) for program in plan.programs},
    )


def image_spec(spec: PipelineSpec) -> ImageSpec | None:
    """Return the size of a picture as a device knows it, None if the model sees none."""
    return spec.image.size if spec.image else None


def token_spec(spec: PipelineSpec) -> TokenSpec | None:
    """Return vocabulary and prompts as a device knows them, None if the model speaks no words."""
    tokens = spec.tokens
    if tokens is None:
        return None
    return TokenSpec(
        vocabulary=tokens.vocabulary,
        eos=tokens.eos,
        position_base=tokens.position_base,
        prompts=dict(tokens.prompts),
        max_answer_tokens=tokens.max_answer_tokens,
    )


def _longest_context(spec: PipelineSpec, plan: Plan) -> int:
    """Return the most rows of a context: those of the cache, unless a window lets it go on."""
    if plan.kv is None:
        return 0
    return plan.kv.capacity if window_of(spec) is None else spec.max_context


def _program_spec(plan: Plan, program: PlanProgram) -> ProgramSpec:
    ports: dict[Direction, dict[str, Port]] = {Direction.INPUT: {}, Direction.OUTPUT: {}}
    for port in program.ports:
        buffer = plan.buffers[port.buffer]
        ports[port.direction][port.role] = Port(
            buffer.rows, buffer.cols, DTYPE_NAMES[buffer.dtype], buffer.dynamic
        )
    return ProgramSpec(ports[Direction.INPUT], ports[Direction.OUTPUT])


def sqnr_rows(module: Module, packed: Mapping[int, PackedW4]) -> dict[str, Json]:
    """Return signal to quantisation noise, dB, per W4 weight (`section#number`)."""
    return {
        name: round(_sqnr_db(weight.array, dequantise_w4(unpack_w4(packed[weight.id]))), 2)
        for name, weight in named_weights(module)
    }


def calibration_rows(module: Module, errors: Mapping[int, OutputError]) -> dict[str, Json]:
    """Return output errors on the calibration rows per W4 weight, beside those of plain scales.

    A weight that calibration never reached has no row.
    """
    return {
        name: {
            "rows": error.rows,
            "plain_mse": float(f"{error.plain:.4g}"),
            "mse": float(f"{error.found:.4g}"),
            "reduction": round(error.reduction, 4),
        }
        for name, weight in named_weights(module)
        if (error := errors.get(weight.id)) is not None
    }


def named_weights(module: Module) -> Iterable[tuple[str, Weight]]:
    """Yield the W4 weights with the names that reports give them, `section#number`."""
    counts: Counter[str] = Counter()
    for weight in module.weights:
        if weight.kind == "w4":
            yield f"{weight.section}#{counts[weight.section]}", weight
            counts[weight.section] += 1


def _sqnr_db(original: np.ndarray, stored: np.ndarray) -> float:
    signal = float(np.square(original, dtype=np.float64).sum())
    noise = float(np.square(original.astype(np.float64) - stored).sum())
    if noise == 0.0:
        return NO_NOISE_DB
    return 10.0 * float(np.log10(signal / noise)) if signal else -NO_NOISE_DB


def memory_rows(memory: MemoryPlan, kv: KvCache | None = None) -> dict[str, Json]:
    """Return planned bytes: arena, its lower bound, cache, and what each program needs of them.

    See `ProgramMemory` for the fields of a program.
    """
    return {
        "arena_bytes": memory.arena_bytes,
        "max_live_bytes": memory.max_live_bytes,
        "kv_bytes": memory.kv_bytes,
        "kv_kind": kv.kind.name.lower() if kv else None,
        "in_place": len(memory.in_place),
        "programs": {name: asdict(part) for name, part in memory.programs.items()},
    }


def index_check_rows(module: Module) -> dict[str, Json]:
    """Return the run-time index checks: how many cannot fail, and the proof or the reason of each.

    Native code keeps all of them: a device trusts no plan, and the proof speaks of this module.
    """
    checks = index_checks(module)
    internal = [check for check in checks if check.is_internal]
    return {
        "internal": len(internal),
        "internal_proved": sum(check.is_proved for check in internal),
        "external": len(checks) - len(internal),
        "checks": {check.id: _check_row(module, check) for check in checks},
    }


def _check_row(module: Module, check: IndexCheck) -> Json:
    calls = next(p.calls for p in module.programs if p.name == check.program)
    chain: list[Json] = [f"#{at} {calls[at].op.name}" for at in (*check.known.calls, check.call)]
    return {
        "verdict": "proved, check kept as defence" if check.is_proved else "kept",
        "reason": check.reason,
        "required": list(check.required),
        "chain": chain,
    }
