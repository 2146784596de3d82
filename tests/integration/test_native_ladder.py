"""The rungs of a bundle: bytes from its plan; a rung that saves nothing is refused."""

from dataclasses import replace

import pytest

from compiler.contract.bands import STEP, Band, Bands
from compiler.contract.degrade import Rung
from compiler.contract.errors import ContractError
from compiler.contract.expert_pages import experts_of
from compiler.contract.ladder import planned_bytes, program_work, require_ladder
from compiler.contract.operations import Op
from compiler.contract.plan import Plan, parse_plan
from compiler.emitters.bands import with_entropy, with_variants
from compiler.emitters.schedule import obey, schedule_ops
from tests.factories.kernels import Case
from tests.factories.modules import small_decoder

NARROW = "step.band0"
BANDS = Bands(
    1, 0, 800, 700, 5000, 0, 0,
    (Band(0, NARROW, 1, 500, 0, 0, ""), Band(100, STEP, 2, 500, 0, 0, "")),
)  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = with_variants(with_entropy(small_decoder(5)), {NARROW: (1, 1)})
    return parse_plan(Case.of(obey(made, schedule_ops(made))).emitted.plan_bytes)


def test_each_rung_saves_what_it_says(plan: Plan) -> None:
    found = require_ladder(plan, BANDS)
    assert list(found) == [Rung.NORMAL, Rung.NO_PREFETCH, Rung.FEWER_EXPERTS]
    step = next(program for program in plan.programs if program.name == STEP)

    def size(expert: tuple[int, ...]) -> int:
        return sum(plan.weights[at].length for at in expert)

    ahead = sum(
        size(one)
        for call in step.calls
        if call.op is Op.EXPERT_PREFETCH
        for one in experts_of(call)
    )
    assert found[Rung.NORMAL] - found[Rung.NO_PREFETCH] == ahead > 0
    layers = [call for call in step.calls if call.op in (Op.EXPERTS, Op.MOE_LAYER)]
    fewer = sum(sorted(size(one) for one in experts_of(call))[-2] for call in layers)
    assert found[Rung.NO_PREFETCH] - found[Rung.FEWER_EXPERTS] == fewer > 0


def test_a_bundle_has_the_rungs_that_its_plan_has(plan: Plan) -> None:
    assert set(planned_bytes(plan, None)) == {Rung.NORMAL, Rung.NO_PREFETCH}
    flat = parse_plan(Case.of(small_decoder(5)).emitted.plan_bytes)
    assert set(planned_bytes(flat, None)) == {Rung.NORMAL}
    nothing = replace(flat, programs=tuple(p for p in flat.programs if p.name != STEP))
    assert require_ladder(nothing, None) == {}


def test_a_rung_that_saves_nothing_is_refused(plan: Plan) -> None:
    step = next(program for program in plan.programs if program.name == STEP)
    programs = tuple(
        replace(step, name=NARROW) if program.name == NARROW else program
        for program in plan.programs
        if program.name == NARROW or program is step
    )
    lying = replace(
        plan,
        programs=tuple(
            replace(p, calls=tuple(c for c in p.calls if c.op is not Op.EXPERT_PREFETCH))
            for p in programs
        ),
    )
    with pytest.raises(ContractError, match="FEWER_EXPERTS needs"):
        require_ladder(lying, BANDS)


def test_the_work_of_a_program_is_that_of_its_weights(plan: Plan) -> None:
    work = program_work(plan)
    assert set(work) == {program.name for program in plan.programs}
    found = require_ladder(plan, BANDS)
    assert work[STEP].weight_bytes == found[Rung.NO_PREFETCH]
    assert work[NARROW].weight_bytes == found[Rung.FEWER_EXPERTS]
    layers = [
        call
        for program in plan.programs
        if program.name == STEP
        for call in program.calls
        if call.op in (Op.EXPERTS, Op.MOE_LAYER)
    ]
    one = sum(
        max(sum(plan.weights[at].rows * plan.weights[at].cols for at in expert) for expert in named)
        for named in map(experts_of, layers)
    )
    assert work[STEP].operations - work[NARROW].operations == 2 * one
