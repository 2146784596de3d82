"""Put the schedule on the tape: likely experts of the record, load steps, the `schedule` section.

    CalibrationRecord -> likely experts -> moe.schedule -> tape with its steps, section beside it

Called between packing and emitting. A module without routed layers stays as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from compiler.contract.canonical import Json
from compiler.contract.expert_pages import PAGE_OPS, ROUTED, experts_of
from compiler.contract.pipeline import PREFILL, SEE
from compiler.contract.plan import Plan
from compiler.contract.schedule import parse_schedule
from compiler.contract.schedule_order import verify_schedule
from compiler.emitters.schedule import (
    PREFETCH_BYTES,
    Likely,
    obey,
    schedule_of,
    schedule_ops,
)
from compiler.kernels.program import Call, Module
from compiler.quant.record import CalibrationRecord
from compiler.quant.router_stats import likely_experts

SCHEDULE: Final = "schedule"
_PICTURES: Final = (SEE, PREFILL)
WHAT_IT_DOES: Final = (
    f"where all experts are in memory a load step waits for nothing and a prefetch reads the first "
    f"{PREFETCH_BYTES} bytes of each matrix ahead; on a device with a budget a prefetch reads the "
    f"expert ahead, and a foresight those that a router names before its layer; a caller with a "
    f"pager is told of all"
)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A module whose tape obeys its schedule.

    Attributes:
        sections: `schedule`, if the module has routed layers.
        facts: Rows of the report.
    """

    module: Module
    sections: Mapping[str, bytes]
    facts: Mapping[str, Json]

    def verify(self, plan: Plan) -> None:
        """Check that the plan that was emitted does what the section says.

        Raises:
            ContractError: It does not: a defect of the emitter.
        """
        if SCHEDULE in self.sections:
            verify_schedule(plan, parse_schedule(self.sections[SCHEDULE]))


def schedule_module(
    module: Module,
    record: CalibrationRecord | None,
    likely: Mapping[str, Likely] | None = None,
    is_constant_time: bool = False,
) -> Scheduled:
    """Return the module with load steps, and with prefetches of what calibration found likely.

    Args:
        module: A lowered module, its variants for entropy bands included.
        record: What calibration saw.
        likely: Experts of programs for which more is known than what all rows of their kind chose.
        is_constant_time: No router is asked early: what it names would be an address.
    """
    likely = {**_likely(module, record), **(likely or {})}
    ops = schedule_ops(module, likely, foresee=not is_constant_time)
    if not ops:
        return Scheduled(module, {}, {"schedule": None})
    planned = obey(module, ops, likely)
    programs: dict[str, Json] = {program.name: _rows(program.calls) for program in planned.programs}
    facts: dict[str, Json] = {"schedule": {"does": WHAT_IT_DOES, "programs": programs}}
    return Scheduled(planned, {SCHEDULE: schedule_of(ops).to_bytes()}, facts)


def _likely(module: Module, record: CalibrationRecord | None) -> dict[str, Likely]:
    if record is None:
        return {}
    kinds = {vision: likely_experts(record, vision=vision) for vision in (False, True)}
    return {program.name: kinds[program.name in _PICTURES] for program in module.programs}


def _rows(calls: tuple[Call, ...]) -> Json:
    """Return the steps of a tape: where, what, how many experts of how many."""
    sizes = {
        expert: len(experts_of(call))
        for call in calls
        if call.op in ROUTED
        for expert in experts_of(call)
    }
    rows: list[Json] = []
    for at, call in enumerate(calls):
        if call.op in PAGE_OPS:
            named, kind = experts_of(call), call.op.name.removeprefix("EXPERT_").lower()
            rows.append({"call": at, "step": kind, "experts": len(named), "of": sizes[named[0]]})
    return rows
