"""The `substitutes` section, and what a plan with substitutes has to hold."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from compiler.contract.degrade import Rung
from compiler.contract.errors import ContractError
from compiler.contract.ladder import planned_bytes, require_ladder, substitute_bytes
from compiler.contract.plan import Plan, PlanProgram, parse_plan
from compiler.contract.planes import require_component
from compiler.contract.session import Buffer
from compiler.contract.substitutes import (
    SECTION,
    Substitute,
    SubstituteRunner,
    Substitutes,
    SubstitutesError,
    Trial,
    parse_substitutes,
    substitutes_in,
    verify_substitutes,
)
from tests.factories.modules import DecoderBuilder
from tests.factories.substitutes import FOUND, case_of, substituted

VECTORS = Path(__file__).parents[3] / "contract" / "vectors"
NARROW = Substitute.NARROW_DENSE
VARIANTS = {"step.shared", "step.narrow", "step.full", "see.shared", "see.narrow", "see.full"}


def test_it_reads_the_vector() -> None:
    data = (VECTORS / "sections" / "substitutes.json").read_bytes()
    assert parse_substitutes(data) == FOUND
    assert FOUND.to_bytes() == data
    assert FOUND.kinds == tuple(Substitute)
    assert require_component(SECTION) == SECTION
    assert require_component("dense.L12") == "dense.L12"
    for wrong in ("dense.L", "dense.L01", "dense.L1.E1", "substitutes.x"):
        with pytest.raises(ContractError):
            require_component(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(FOUND, rows=()),
        replace(FOUND, rows=FOUND.rows[::-1]),
        replace(FOUND, rows=FOUND.rows[:1] * 2),
        replace(FOUND, rows=(Trial(NARROW, 25, 0),)),
        replace(FOUND, rows=(Trial(NARROW, 60, 41),)),
        replace(FOUND, right=101),
        replace(FOUND, questions=0),
        replace(FOUND, max_loss=1_000_001),
    ],
)
def test_figures_that_contradict_each_other_are_refused(wrong: Substitutes) -> None:
    with pytest.raises(ContractError):
        parse_substitutes(wrong.to_bytes())


def test_other_bytes_are_refused() -> None:
    good = FOUND.to_bytes()
    for wrong in (
        good + b" ",
        good.replace(b"substitutes/1", b"substitutes/2"),
        good.replace(b"narrow_dense", b"narrow_dance"),
        good.replace(b'"right":90', b'"right":90.0'),
        good.replace(b'"worse":2', b'"worse":2,"x":1'),
    ):
        with pytest.raises(ContractError):
            parse_substitutes(wrong)


@pytest.fixture(scope="module")
def plan() -> Plan:
    builder = DecoderBuilder(5, hidden=64)
    builder.add_see()
    builder.add_step()
    return parse_plan(case_of(substituted(builder.module())).emitted.plan_bytes)


def test_a_plan_has_the_variants_of_its_section(plan: Plan) -> None:
    assert {program.name for program in plan.programs} == {"see", "step"} | VARIANTS
    assert substitutes_in(plan) == tuple(Substitute)
    verify_substitutes(plan, FOUND)
    for found in (None, replace(FOUND, rows=FOUND.rows[:2])):
        with pytest.raises(SubstitutesError):
            verify_substitutes(plan, found)


def edited(plan: Plan, of: str, **changes: object) -> Plan:
    programs = (replace(p, **changes) if p.name == of else p for p in plan.programs)
    return replace(plan, programs=tuple(programs))


def program(plan: Plan, name: str) -> PlanProgram:
    return next(one for one in plan.programs if one.name == name)


def test_a_variant_that_does_something_else_is_refused(plan: Plan) -> None:
    narrow, full = program(plan, "step.narrow"), program(plan, "step.full")
    chosen = tuple(
        replace(call, params={**call.params, "k": 2}) if call.op.name == "ROUTE" else call
        for call in full.calls
    )
    for wrong in (
        edited(plan, "see.narrow", name="see.other"),
        edited(plan, "step.narrow", ports=tuple(p for p in narrow.ports if p.role != "token")),
        edited(plan, "step.narrow", ports=tuple(p for p in narrow.ports if p.role != "positions")),
        edited(
            plan, "step.narrow", calls=tuple(c for c in narrow.calls if c.op.name != "ATTENTION")
        ),
        edited(plan, "step.narrow", calls=full.calls),
        edited(plan, "step.full", calls=chosen),
    ):
        with pytest.raises(SubstitutesError):
            verify_substitutes(wrong, FOUND)


def test_rungs_below_need_less(plan: Plan) -> None:
    """Shared experts alone need less than a narrow layer, so a bundle has one of the two."""
    found, sizes = planned_bytes(plan, None), substitute_bytes(plan)
    assert found[Rung.NARROW_DENSE] == sizes[NARROW] < found[Rung.NO_PREFETCH]
    assert found[Rung.SHARED_ONLY] == sizes[Substitute.SHARED_ONLY] < sizes[NARROW]
    assert sizes[Substitute.FULL_DENSE] > found[Rung.NO_PREFETCH]
    with pytest.raises(ContractError, match="NARROW_DENSE needs"):
        require_ladder(plan, None)
    without = tuple(p for p in plan.programs if not p.name.endswith("shared"))
    require_ladder(replace(plan, programs=without), None)


class Named:
    """Says what was run."""

    def __init__(self) -> None:
        self.kv_length = 0
        self.ran: list[str] = []

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        self.ran.append(program)
        return {}


def test_a_switch_takes_effect_with_the_next_run() -> None:
    named = Named()
    runner = SubstituteRunner(named, (NARROW,), ("see", "step", "step.narrow", "see.narrow"))
    for taken, name in (
        (None, "see"), (None, "step"), (NARROW, "step"), (Substitute.SHARED_ONLY, "step"),
        (NARROW, "see"), (NARROW, "prefill"),
    ):  # fmt: skip
        runner.taken = taken
        runner.run(name, {})
    assert named.ran == ["see", "step", "step.narrow", "step", "see.narrow", "prefill"]
    assert runner.ran == {"step.narrow": 1, "see.narrow": 1}


def test_a_picture_that_other_layers_saw_is_stale() -> None:
    runner = SubstituteRunner(Named(), (NARROW,), ("see", "step", "step.narrow", "see.narrow"))
    runner.run("see", {})
    assert not runner.is_stale
    runner.taken = NARROW
    assert runner.is_stale
    runner.run("step", {})
    assert runner.is_stale
    runner.run("see", {})
    assert not runner.is_stale
    runner.taken = None
    assert runner.is_stale
