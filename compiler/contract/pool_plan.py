"""How the weights of a plan fit a budget: what stays, which experts have slots, how much is enough.

    plan + budget -> PoolPlan: persistent sections, experts by layer, run size, number of runs

A section is an expert's if every weight in it is used as part of one expert and as nothing else;
all other sections are persistent. The bound is proved before anything is loaded: a call reads its
experts in batches of at most k, so the persistent sections and the k largest experts of one call
are enough for any routing. Pure; formulas of waste and fragmentation are `internal` and `external`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from compiler.contract.expert_pages import ROUTED, experts_of, first_expert_weight
from compiler.contract.native_errors import NativeError
from compiler.contract.operations import Op
from compiler.contract.plan import Plan, PlanCall
from compiler.contract.plan_format import align
from compiler.contract.pool_abi import LEAST_RUN_BYTES
from compiler.contract.substitutes import Substitute

RUN_BYTES: Final = 512 * 1024
"""Bytes of a run, unless the experts are so small that too much of it would be wasted."""
MOST_WASTE: Final = 0.04
_NAME: Final = re.compile(r"expert\.L(\d+)\.E(\d+)")


class BudgetError(NativeError):
    """The weights that must be in memory at one moment are more than may be: nothing was loaded."""

    code: ClassVar[str] = "contract.native.budget"


@dataclass(frozen=True, slots=True)
class PooledExpert:
    """A section with a slot of its own.

    Attributes:
        name: Of the section.
        length: Bytes of it.
        layer: Number of its layer among those with experts, from 0.
    """

    name: str
    length: int
    layer: int


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What a pool is opened with.

    Attributes:
        persistent: Sections that stay, in the order of the plan.
        persistent_bytes: What they take.
        experts: Sections with slots, by layer and number.
        run_bytes: Bytes of a run.
        runs: The most runs in memory.
        least_runs: With fewer not every routing could be computed.
    """

    persistent: tuple[str, ...]
    persistent_bytes: int
    experts: tuple[PooledExpert, ...]
    run_bytes: int
    runs: int
    least_runs: int

    @property
    def most_bytes(self) -> int:
        """The most bytes of weights in memory."""
        return self.persistent_bytes + self.runs * self.run_bytes

    @property
    def least_bytes(self) -> int:
        """The smallest budget that the plan can run in."""
        return self.persistent_bytes + self.least_runs * self.run_bytes


def plan_pool(plan: Plan, budget_bytes: int, run_bytes: int | None = None) -> PoolPlan:
    """Return how a plan's weights fit `budget_bytes`.

    Args:
        plan: A verified plan.
        budget_bytes: The most bytes of weights in memory, persistent sections among them.
        run_bytes: Bytes of a run, a power of two; None chooses.

    Raises:
        BudgetError: They do not; the message has the numbers.
    """
    names = paged_sections(plan)
    lengths = {section.name: section.length for section in plan.sections}
    size = run_bytes or choose_run_bytes([lengths[name] for name in names])
    persistent = tuple(section.name for section in plan.sections if section.name not in names)
    held = sum(align(lengths[name]) for name in persistent)
    least = least_runs(plan, names, size)
    if budget_bytes < held + least * size:
        raise BudgetError(
            f"{held} bytes of weights stay in memory and one call reads {least * size} bytes of "
            f"experts: {held + least * size} in all, {budget_bytes} may be used",
            hint="raise max_weight_bytes, or build the model with smaller experts",
        )
    layers = sorted({expert_place(name)[0] for name in names})
    experts = tuple(
        PooledExpert(name, lengths[name], layers.index(expert_place(name)[0]))
        for name in sorted(names, key=expert_place)
    )
    every = sum(runs_of(expert.length, size) for expert in experts)
    return PoolPlan(
        persistent, held, experts, size, min(every, (budget_bytes - held) // size), least
    )


def paged_sections(plan: Plan) -> frozenset[str]:
    """Return the sections that hold one expert each and nothing else."""
    used: dict[int, set[tuple[int, ...]]] = {}
    refused: set[int] = set()
    for call in _calls(plan):
        first = first_expert_weight(call.op)
        plain = call.weights if first is None else call.weights[:first]
        refused |= {plan.weights[at].section for at in plain if at >= 0}
        for expert in experts_of(call):
            sections = {plan.weights[at].section for at in expert}
            refused |= sections if len(sections) > 1 else set()
            for section in sections:
                used.setdefault(section, set()).add(expert)
    found = (at for at, experts in used.items() if at not in refused and len(experts) == 1)
    names = (plan.sections[at].name for at in found)
    return frozenset(name for name in names if _NAME.fullmatch(name))


def least_runs(plan: Plan, names: frozenset[str], run_bytes: int) -> int:
    """Return the runs of the k largest experts of the call that reads most.

    Programs that take all experts of a layer do not count: a device runs them where they fit.
    """
    sizes = {
        number: runs_of(section.length, run_bytes)
        for number, section in enumerate(plan.sections)
        if section.name in names
    }
    least = 0
    full = f".{Substitute.FULL_DENSE.suffix}"
    programs = (program for program in plan.programs if not program.name.endswith(full))
    for call in (call for program in programs for call in program.calls):
        if call.op in ROUTED:
            runs = [sizes.get(plan.weights[expert[0]].section, 0) for expert in experts_of(call)]
            least = max(least, sum(sorted(runs, reverse=True)[: _chosen(plan, call)]))
    return least


def choose_run_bytes(lengths: Sequence[int]) -> int:
    """Return the largest run up to `RUN_BYTES` that wastes at most `MOST_WASTE` of the slots."""
    size = RUN_BYTES
    while size > LEAST_RUN_BYTES and _waste(lengths, size) > MOST_WASTE:
        size //= 2
    return size


def runs_of(length: int, run_bytes: int) -> int:
    """Return how many runs hold `length` bytes."""
    return -(-length // run_bytes)


def internal(asked_bytes: int, given_bytes: int) -> float:
    """Return internal fragmentation: the share of what was given that nobody asked for."""
    return 1 - asked_bytes / given_bytes if given_bytes else 0.0


def external(largest_free: int, total_free: int) -> float:
    """Return external fragmentation: the share of what is free that one request cannot have."""
    return 1 - largest_free / total_free if total_free else 0.0


def _waste(lengths: Sequence[int], run_bytes: int) -> float:
    return internal(sum(lengths), sum(runs_of(length, run_bytes) for length in lengths) * run_bytes)


def _calls(plan: Plan) -> Iterable[PlanCall]:
    return (call for program in plan.programs for call in program.calls)


def _chosen(plan: Plan, call: PlanCall) -> int:
    """Return k: how many experts a row of the call has."""
    return int(call.params["k"]) if call.op is Op.MOE_LAYER else plan.buffers[call.inputs[1]].cols


def expert_place(name: str) -> tuple[int, int]:
    """Return (layer, expert) of a section `expert.L<layer>.E<expert>`; (0, 0) of any other."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else (0, 0)
