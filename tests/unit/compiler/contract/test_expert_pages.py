"""The order of prefetch, load and use: what a tape may do, and whether it obeys its schedule."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from compiler.contract.expert_pages import check_pages
from compiler.contract.operands import OperandError
from compiler.contract.operations import Op
from compiler.contract.plan import Plan, PlanCall, PlanError, PlanProgram, parse_plan
from compiler.contract.schedule import Schedule, Step, parse_schedule
from compiler.contract.schedule_order import ScheduleError, planned_steps, verify_schedule
from compiler.emitters.plan import emit_plan
from compiler.emitters.schedule import obey, schedule_of, schedule_ops
from compiler.kernels.program import Module, ProgramError
from compiler.quant.module import pack_module
from tests.factories.modules import DecoderBuilder


@dataclass(frozen=True)
class Tape:
    """One call of a tape, in short."""

    op: Op
    weights: tuple[int, ...]
    params: dict[str, float] = field(default_factory=dict)


A, B, OTHER = (1, 2), (3, 4), (5, 6)
PREFETCH, LOAD, USE = Op.EXPERT_PREFETCH, Op.EXPERT_LOAD, Op.EXPERTS
FORESEE, ASKED = Op.EXPERT_FORESEE, (9, -1, 8, -1, -1)
FUSED = Tape(Op.MOE_LAYER, (9, -1, 8, -1, *A, *B))


@pytest.mark.parametrize(
    "tape",
    [
        [Tape(USE, A + B)],
        [Tape(LOAD, A + B), Tape(USE, A + B)],
        [Tape(PREFETCH, B), Tape(LOAD, A + B), Tape(USE, A + B)],
        [Tape(PREFETCH, A), Tape(PREFETCH, B), Tape(LOAD, A + B), FUSED],
        [Tape(LOAD, A + B), Tape(USE, A + B), Tape(LOAD, A + B), Tape(USE, A + B)],
        [Tape(LOAD, (1, 2, 3, 4), {"biases": 1}), Tape(USE, (1, 2, 3, 4), {"biases": 1})],
        [Tape(FORESEE, ASKED + A + B), Tape(LOAD, A + B), Tape(USE, A + B)],
        [Tape(PREFETCH, A), Tape(FORESEE, ASKED + A + B), Tape(LOAD, A + B), FUSED],
    ],
)
def test_it_lets_orders_pass_that_hold(tape: list[Tape]) -> None:
    check_pages(tape)


@pytest.mark.parametrize(
    ("tape", "message"),
    [
        ([Tape(USE, A + B), Tape(LOAD, A + B)], "before its load step"),
        ([Tape(LOAD, A), Tape(USE, A + B)], "before its load step"),
        ([Tape(PREFETCH, A + B), Tape(USE, A + B)], "before its load step"),
        ([Tape(LOAD, A + B), Tape(USE, A + B), Tape(USE, A + B)], "before its load step"),
        ([Tape(LOAD, (1, 2, 3, 4), {"biases": 1}), Tape(USE, A + B)], "before its load step"),
        ([Tape(LOAD, A + B), Tape(PREFETCH, A), Tape(USE, A + B)], "loaded already"),
        ([Tape(LOAD, A + B), Tape(LOAD, A + B), Tape(USE, A + B)], "loaded already"),
        ([Tape(PREFETCH, A), Tape(PREFETCH, A), Tape(LOAD, A), Tape(USE, A)], "prefetched twice"),
        ([Tape(PREFETCH, A + A), Tape(LOAD, A), Tape(USE, A)], "names an expert twice"),
        ([Tape(LOAD, A), Tape(USE, A), Tape(PREFETCH, A)], "never loaded"),
        ([Tape(PREFETCH, OTHER), Tape(LOAD, A), Tape(USE, A)], "never loaded"),
        ([Tape(LOAD, A + OTHER), Tape(USE, A)], "never used"),
        ([Tape(FORESEE, ASKED + A), Tape(USE, A)], "before its load step"),
        ([Tape(LOAD, A), Tape(FORESEE, ASKED + A), Tape(USE, A)], "loaded already"),
        ([*[Tape(FORESEE, ASKED + A)] * 2, Tape(LOAD, A), Tape(USE, A)], "foreseen twice"),
        ([Tape(LOAD, A), Tape(USE, A), Tape(FORESEE, ASKED + A)], "foreseen and never loaded"),
        ([Tape(FORESEE, ASKED + OTHER), Tape(LOAD, A), Tape(USE, A)], "foreseen and never loaded"),
    ],
)
def test_it_refuses_orders_that_do_not(tape: list[Tape], message: str) -> None:
    with pytest.raises(OperandError, match=message):
        check_pages(tape)


def decoder() -> Module:
    builder = DecoderBuilder(layers=3)
    builder.add_see()
    builder.add_step()
    return builder.module()


def scheduled(**options: int) -> tuple[Plan, Schedule]:
    module = decoder()
    ops = schedule_ops(module, **options)
    packed = pack_module(module).packed
    emitted = emit_plan(obey(module, ops), weights_packed=packed)
    return parse_plan(emitted.plan_bytes), schedule_of(ops)


@pytest.mark.parametrize("distance", [1, 2])
def test_an_emitted_plan_does_what_its_schedule_says(distance: int) -> None:
    plan, schedule = scheduled(distance=distance)
    verify_schedule(plan, schedule)
    step = next(program for program in plan.programs if program.name == "step")
    wanted = [Step(layer, "prefetch", distance) for layer in range(3 - distance)]
    assert list(planned_steps(step)) == wanted


def test_a_plan_that_asks_routers_early_says_so_in_its_schedule() -> None:
    plan, schedule = scheduled(foresee=True)
    verify_schedule(plan, schedule)
    step = next(program for program in plan.programs if program.name == "step")
    early = [one for one in planned_steps(step) if one.kind == "foresee"]
    assert early == [Step(0, "foresee", 0), Step(0, "foresee", 1), Step(1, "foresee", 1)]
    silent = calls_of(plan, lambda calls: [call for call in calls if call.op is not FORESEE])
    late = calls_of(plan, lambda calls: moved(calls, at(calls, FORESEE, 1), at(calls, USE)))
    for other in (silent, late):
        with pytest.raises(ScheduleError):
            verify_schedule(other, schedule)
    assert parse_schedule(schedule.to_bytes()) == schedule


def calls_of(plan: Plan, change: Callable[[list[PlanCall]], list[PlanCall]]) -> Plan:
    def changed(program: PlanProgram) -> PlanProgram:
        return replace(program, calls=tuple(change(list(program.calls))))

    return replace(plan, programs=tuple(changed(program) for program in plan.programs))


def at(calls: list[PlanCall], op: Op, number: int = 0) -> int:
    return [place for place, call in enumerate(calls) if call.op is op][number]


def moved(calls: list[PlanCall], start: int, to: int) -> list[PlanCall]:
    call = calls.pop(start)
    calls.insert(to, call)
    return calls


MUTANTS: dict[str, Callable[[list[PlanCall]], list[PlanCall]]] = {
    "prefetch gone": lambda c: c[: at(c, PREFETCH)] + c[at(c, PREFETCH) + 1 :],
    "prefetch one layer late": lambda c: moved(c, at(c, PREFETCH), at(c, USE)),
    "prefetch at the start": lambda c: moved(c, at(c, PREFETCH, 1), 0),
    "prefetches swapped": lambda c: moved(c, at(c, PREFETCH, 1), at(c, PREFETCH)),
    "a prefetch more": lambda c: [
        c[at(c, PREFETCH)], *c[:at(c, PREFETCH)], *c[at(c, PREFETCH) + 1 :], c[at(c, PREFETCH, 1)],
    ],
    "load a layer early": lambda c: moved(c, at(c, LOAD, 1), at(c, USE)),
    "all steps gone": lambda c: [call for call in c if call.op not in (PREFETCH, LOAD)],
    "experts of two layers": lambda c: [
        replace(call, weights=call.weights + c[at(c, PREFETCH, 1)].weights)
        if n == at(c, PREFETCH)
        else call
        for n, call in enumerate(c)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_plan_that_breaks_its_schedule_is_refused(name: str) -> None:
    plan, schedule = scheduled()
    with pytest.raises(ScheduleError):
        verify_schedule(calls_of(plan, MUTANTS[name]), schedule)


def test_a_schedule_that_does_not_belong_to_the_plan_is_refused() -> None:
    plan, schedule = scheduled()
    plain = emit_plan(decoder(), weights_packed=pack_module(decoder()).packed)
    steps = dict(schedule.programs)
    for wrong in (
        Schedule({**steps, "other": ()}),
        Schedule({"step": steps["step"]}),
        Schedule({**steps, "step": steps["step"][:1]}),
        Schedule({**steps, "step": (*steps["step"], Step(2, "defer", 1))}),
        Schedule({**steps, "step": (Step(0, "prefetch", 2), Step(1, "prefetch", 1))}),
    ):
        with pytest.raises(ScheduleError):
            verify_schedule(plan, wrong)
    with pytest.raises(ScheduleError, match="loads no expert"):
        verify_schedule(parse_plan(plain.plan_bytes), schedule)


def test_what_the_planner_cannot_do_it_refuses() -> None:
    module = decoder()
    ops = schedule_ops(module)
    with pytest.raises(ProgramError, match="no tape can defer"):
        obey(module, schedule_ops(module, defer=1))
    with pytest.raises(ProgramError, match="steps already"):
        obey(obey(module, ops), ops)
    with pytest.raises(ProgramError, match="worth prefetching"):
        obey(module, ops, {})
    with pytest.raises(ProgramError, match="no layer 3"):
        obey(module, [*schedule_ops(module, distance=1)[:1], _far("step")])
    with pytest.raises(ProgramError, match="no program"):
        obey(module, [_far("other")])
    assert schedule_ops(module, {})[1].entries() == []


def _far(program: str):
    from compiler.dialects.moe_schedule import ScheduleOp

    return ScheduleOp(program, [(2, "prefetch", 1)])


def test_reading_a_plan_checks_the_order() -> None:
    """Bytes whose first load step became a prefetch do not parse."""
    module = decoder()
    emitted = emit_plan(
        obey(module, schedule_ops(module)), weights_packed=pack_module(module).packed
    )
    data = bytearray(emitted.plan_bytes)
    needle = int(LOAD).to_bytes(2, "little") + bytes(4)
    place = bytes(data).index(needle)
    data[place : place + 2] = int(PREFETCH).to_bytes(2, "little")
    with pytest.raises(PlanError, match=r"prefetch|load"):
        parse_plan(bytes(data))
