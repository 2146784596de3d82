"""Whether a plan obeys the `schedule` section beside it.

    section: beside layer l, prefetch(d)         tape: EXPERT_PREFETCH of experts of layer l + d,
                                                       between layer l - 1 and layer l
    section: beside layer l, foresee(d)          tape: EXPERT_FORESEE of experts of layer l + d,
                                                       likewise
    every routed layer                           tape: its EXPERT_LOAD directly behind the layer
                                                       before it, whatever else stands between

Layers are the routed calls of a program, in order. Called by the compiler on what it emits and by
the device on what it received, after both parsed. Pure.
"""

from bisect import bisect_left
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final

from compiler.contract.errors import ContractError
from compiler.contract.expert_pages import PAGE_OPS, ROUTED, experts_of, is_scheduled
from compiler.contract.operations import Op
from compiler.contract.plan import Plan, PlanProgram
from compiler.contract.schedule import Schedule, Step

_KINDS: Final[Mapping[Op, str]] = MappingProxyType(
    {Op.EXPERT_PREFETCH: "prefetch", Op.EXPERT_FORESEE: "foresee"}
)


class ScheduleError(ContractError):
    """Plan and schedule of a bundle contradict each other: drop both."""

    code: ClassVar[str] = "contract.schedule"


def verify_schedule(plan: Plan, schedule: Schedule) -> None:
    """Check that a plan does, beside each layer, what its schedule says, and nothing else.

    Args:
        plan: A plan that `parse_plan` accepted.
        schedule: What `parse_schedule` returned.

    Raises:
        ScheduleError: They differ; the message names program and layer.
    """
    programs = {program.name: program for program in plan.programs}
    unknown = set(schedule.programs) - set(programs)
    if unknown:
        raise ScheduleError(f"the schedule is about {min(unknown)!r}, the plan has no such program")
    for name, program in programs.items():
        _check(program, schedule.programs.get(name))


def planned_steps(program: PlanProgram) -> tuple[Step, ...]:
    """Return the steps that a program's tape carries out, in order of layer.

    Raises:
        ScheduleError: A load step does not stand beside its layer.
    """
    calls = program.calls
    layers = [at for at, call in enumerate(calls) if call.op in ROUTED]
    steps = []
    for at, call in enumerate(calls):
        if call.op not in PAGE_OPS:
            continue
        beside = bisect_left(layers, at)
        named = {*experts_of(call)}
        used = next(
            (n for n in range(beside, len(layers)) if named <= {*experts_of(calls[layers[n]])}),
            None,
        )
        if used is None:
            raise ScheduleError(f"{program.name!r}: call {at} is about experts of several layers")
        if call.op in _KINDS:
            steps.append(Step(beside, _KINDS[call.op], used - beside))
        elif used != beside:
            raise ScheduleError(f"{program.name!r}: layer {used} is loaded beside layer {beside}")
    return tuple(steps)


def _check(program: PlanProgram, wanted: tuple[Step, ...] | None) -> None:
    if wanted is None:
        if is_scheduled(program.calls):
            raise ScheduleError(f"{program.name!r} loads experts and has no schedule")
        return
    if not is_scheduled(program.calls) and any(call.op in ROUTED for call in program.calls):
        raise ScheduleError(f"{program.name!r} has a schedule and loads no expert")
    found = planned_steps(program)
    for some, other, what in ((wanted, found, "is not done"), (found, wanted, "is not asked for")):
        extra = [step for step in some if step not in other]
        if extra:
            step = extra[0]
            raise ScheduleError(
                f"{program.name!r}: {step.kind}({step.amount}) beside layer {step.layer} {what}"
            )
    if found != wanted:
        raise ScheduleError(
            f"{program.name!r}: the steps of the tape are in another order, or twice"
        )
