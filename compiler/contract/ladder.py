"""The rungs of one bundle and the bytes of each: what a step must have of weights, at most.

    plan + bands -(planned_bytes)-> rung -> bytes      each rung needs less than the one above

Nothing of it is stored: compiler and device compute it from the plan, so a bundle cannot claim a
rung that saves nothing. The compiler refuses to write one, the device to load one. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final

from compiler.contract.bands import STEP, Bands
from compiler.contract.degrade import Rung, require_falling
from compiler.contract.expert_pages import PAGE_OPS, experts_of, first_expert_weight
from compiler.contract.operations import Op
from compiler.contract.plan import Plan, PlanCall, PlanProgram
from compiler.contract.substitutes import BY_RUNG, Substitute, substitutes_in, variant_name

_INDEX: Final = 1
"""Input of EXPERTS with the chosen experts, one column for each."""


@dataclass(frozen=True, slots=True)
class ProgramWork:
    """What one run needs: bytes of weights, and multiplications and additions per dynamic row."""

    weight_bytes: int
    operations: int


def planned_bytes(plan: Plan, bands: Bands | None) -> dict[Rung, int]:
    """Return what one step for one token needs of weights, by rung that the bundle has.

    Fetching ahead needs room for experts that are perhaps not chosen; a rung keeps what the one
    before gave up. A bundle without `step` has no rungs and no bytes.
    """
    programs = {program.name: program for program in plan.programs}
    if STEP not in programs:
        return {}
    found = {Rung.NORMAL: step_bytes(plan, programs[STEP], ahead=True)}
    if any(call.op is Op.EXPERT_PREFETCH for call in programs[STEP].calls):
        found[Rung.NO_PREFETCH] = step_bytes(plan, programs[STEP], ahead=False)
    if bands is not None and bands.programs:
        fewest = programs[bands.fewest]
        found[Rung.FEWER_EXPERTS] = step_bytes(plan, fewest, ahead=False)
    for rung, kind in BY_RUNG.items():
        variant = programs.get(variant_name(STEP, kind))
        if variant is not None:
            found[rung] = step_bytes(plan, variant, ahead=False)
    return found


def substitute_bytes(plan: Plan) -> dict[Substitute, int]:
    """Return what one step for one token needs of weights with each substitute of the plan."""
    programs = {program.name: program for program in plan.programs}
    return {
        kind: step_bytes(plan, programs[variant_name(STEP, kind)], ahead=False)
        for kind in substitutes_in(plan)
        if variant_name(STEP, kind) in programs
    }


def require_ladder(plan: Plan, bands: Bands | None) -> Mapping[Rung, int]:
    """Return the planned bytes of a bundle whose rungs all save some.

    Raises:
        ContractError: A rung does not.
    """
    found = planned_bytes(plan, bands)
    if found:
        require_falling(found)
    return found


def step_bytes(plan: Plan, program: PlanProgram, *, ahead: bool) -> int:
    """Return what a run for one token needs of weights, bytes: each once, the largest experts.

    Args:
        plan: Has the weights.
        program: Of the plan.
        ahead: Whether experts that are fetched ahead count.
    """
    held = {at for call in program.calls for at in _always(call) if at >= 0}
    total = sum(plan.weights[at].length for at in held)
    for call in program.calls:
        sizes = sorted(sum(plan.weights[at].length for at in one) for one in experts_of(call))
        if call.op in PAGE_OPS:
            total += sum(sizes) if ahead and call.op is Op.EXPERT_PREFETCH else 0
        elif sizes:
            total += sum(sizes[-_chosen(plan, call) :])
    return total


def program_work(plan: Plan) -> dict[str, ProgramWork]:
    """Return the work of each program: weights read once, each used once per row of the result."""
    return {
        program.name: ProgramWork(
            step_bytes(plan, program, ahead=False),
            sum(_operations(plan, call) for call in program.calls if call.op not in PAGE_OPS),
        )
        for program in plan.programs
    }


def _operations(plan: Plan, call: PlanCall) -> int:
    def products(weights: tuple[int, ...]) -> int:
        return sum(plan.weights[at].rows * plan.weights[at].cols for at in weights if at >= 0)

    result = plan.buffers[call.outputs[0]] if call.outputs else None
    rows = 1 if result is None or result.dynamic else result.rows
    experts = sorted(products(one) for one in experts_of(call))
    chosen = sum(experts[-_chosen(plan, call) :]) if experts else 0
    return 2 * rows * (products(_always(call)) + chosen)


def _always(call: PlanCall) -> tuple[int, ...]:
    """Return the weights of a call that every token needs."""
    experts = set(chain.from_iterable(experts_of(call)))
    first = first_expert_weight(call.op)
    return call.weights if first is None else tuple(at for at in call.weights if at not in experts)


def _chosen(plan: Plan, call: PlanCall) -> int:
    """Return how many experts a token takes in a call."""
    if call.op is Op.MOE_LAYER:
        return int(call.params["k"])
    return plan.buffers[call.inputs[_INDEX]].cols
