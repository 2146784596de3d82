"""How weights fit a budget: which sections have slots, the bound, the size of runs."""

import dataclasses

import pytest

from compiler.contract.plan import Plan, parse_plan
from compiler.contract.plan_format import align
from compiler.contract.pool_plan import (
    MOST_WASTE,
    RUN_BYTES,
    BudgetError,
    choose_run_bytes,
    external,
    internal,
    least_runs,
    paged_sections,
    plan_pool,
    runs_of,
)
from compiler.emitters.plan import emit_plan
from compiler.quant.module import pack_module
from tests.factories.modules import SHARED, DecoderBuilder

RUN = 4096


@pytest.fixture(scope="module")
def plan() -> Plan:
    builder = DecoderBuilder(1, layers=3, experts=6, hidden=200)
    builder.add_step()
    module = builder.module()
    packed = pack_module(module)
    return parse_plan(emit_plan(module, weights_packed=packed.packed).plan_bytes)


def test_it_gives_slots_to_experts_and_keeps_the_rest(plan: Plan) -> None:
    layout = plan_pool(plan, 1 << 30, RUN)
    lengths = {section.name: section.length for section in plan.sections}
    assert layout.persistent == (SHARED,)
    assert layout.persistent_bytes == align(lengths[SHARED])
    assert [expert.name for expert in layout.experts] == [
        f"expert.L{layer}.E{expert}" for layer in range(3) for expert in range(6)
    ]
    assert [expert.layer for expert in layout.experts] == sorted(list(range(3)) * 6)
    assert layout.runs == sum(runs_of(e.length, RUN) for e in layout.experts)


def test_the_bound_is_what_stays_and_the_largest_choice_of_one_layer(plan: Plan) -> None:
    layout = plan_pool(plan, 1 << 30, RUN)
    per = runs_of(layout.experts[0].length, RUN)
    assert layout.least_runs == 2 * per
    assert layout.least_bytes == layout.persistent_bytes + 2 * per * RUN
    tight = plan_pool(plan, layout.least_bytes, RUN)
    assert tight.runs == tight.least_runs
    assert tight.most_bytes == layout.least_bytes
    with pytest.raises(BudgetError) as caught:
        plan_pool(plan, layout.least_bytes - 1, RUN)
    for number in (layout.persistent_bytes, 2 * per * RUN, layout.least_bytes - 1):
        assert str(number) in str(caught.value)
    assert caught.value.code == "contract.native.budget"


def test_a_section_with_anything_else_in_it_stays(plan: Plan) -> None:
    names = paged_sections(plan)
    number = next(at for at, s in enumerate(plan.sections) if s.name == "expert.L1.E2")
    linear = next(
        call for call in plan.programs[0].calls if call.op.name == "LINEAR" and call.weights
    )
    weights = list(plan.weights)
    weights[linear.weights[0]] = dataclasses.replace(weights[linear.weights[0]], section=number)
    moved = dataclasses.replace(plan, weights=tuple(weights))
    assert paged_sections(moved) == names - {"expert.L1.E2"}
    smaller = least_runs(moved, paged_sections(moved), RUN)
    assert smaller == least_runs(plan, names, RUN)


def test_an_expert_in_two_sections_stays(plan: Plan) -> None:
    first = next(at for at, s in enumerate(plan.sections) if s.name == "expert.L0.E0")
    second = next(at for at, s in enumerate(plan.sections) if s.name == "expert.L0.E1")
    at = next(n for n, weight in enumerate(plan.weights) if weight.section == first)
    weights = list(plan.weights)
    weights[at] = dataclasses.replace(weights[at], section=second)
    split = dataclasses.replace(plan, weights=tuple(weights))
    assert not paged_sections(split) & {"expert.L0.E0", "expert.L0.E1"}


def test_runs_are_as_large_as_little_waste_allows() -> None:
    assert choose_run_bytes([6 << 20] * 48) == RUN_BYTES
    small = choose_run_bytes([100_000] * 8)
    assert internal(800_000, 8 * runs_of(100_000, small) * small) <= MOST_WASTE
    assert 8 * runs_of(100_000, 2 * small) * 2 * small * (1 - MOST_WASTE) > 800_000
    assert choose_run_bytes([10]) == 4096
    assert choose_run_bytes([]) == RUN_BYTES


def test_fragmentation_has_one_definition() -> None:
    assert external(30, 100) == pytest.approx(0.7)
    assert external(0, 0) == 0.0
    assert internal(96, 100) == pytest.approx(0.04)
    assert internal(0, 0) == 0.0
