"""Facts that a verified plan tells by itself: what a device needs, calls, kernels, weights.

Nothing here loads numpy or the front half of the compiler: an unchanged submission needs only this.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from compiler.contract.canonical import Json
from compiler.contract.expert_pages import PAGE_OPS
from compiler.contract.manifest import Requirements
from compiler.contract.plan import Plan
from compiler.contract.plan_format import Kind
from compiler.contract.steering_points import SECTION as STEERING
from compiler.contract.substitutes import SECTION as SUBSTITUTES
from compiler.hardware.targets import Target
from compiler.kernels.naming import kernel_name
from compiler.kernels.registry import KERNELS
from compiler.kernels.select import select_tile

RUNTIME_BYTES: Final = 8 * 1024 * 1024
"""What loading a plan needs besides weights, arena and cache: huge-page rounding, context, code."""
SLOTS: Final = 2
"""A device keeps the old bundle while it installs the new one."""
_BASE_NAMES: Final = ("plan", STEERING, SUBSTITUTES)
_WEIGHT_PREFIXES: Final = ("weights.", "adapter.", "expert.", "dense.")


def requirements(plan: Plan, sections: Mapping[str, bytes]) -> Requirements:
    """Return what a device must have: RAM to run, free storage to install beside the old bundle."""
    cache = plan.kv.size_bytes if plan.kv else 0
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
        used = {at for _, call in calls for at in call.weights if at >= 0 and op not in PAGE_OPS}
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


def base_parts(sections: Mapping[str, bytes] | None) -> dict[str, bytes]:
    """Return the sections that a new version may keep things of, the same for every target."""
    return {
        name: data
        for name, data in (sections or {}).items()
        if name in _BASE_NAMES or name.startswith(_WEIGHT_PREFIXES)
    }


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
