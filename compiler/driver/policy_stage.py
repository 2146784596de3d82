"""The policy of a bundle: made once per target, because the cost model takes a while to fit."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from compiler.contract.canonical import Json
from compiler.contract.plan import Plan
from compiler.contract.policy import (
    CELLS,
    DENSITIES,
    FULL,
    LEGAL,
    CallKind,
    Cell,
    Flags,
    Policy,
    parse_policy,
)
from compiler.contract.policy_calls import call_cell
from compiler.contract.selftest import SelfTest
from compiler.driver.cache import StageCache, cache_key
from compiler.driver.explain.costs import Situation
from compiler.driver.explain.document import situations
from compiler.driver.provenance import compiler_digest
from compiler.hardware.targets import Target

POLICY: Final = "policy"


def policy_section(target: Target, cache: StageCache, *, fixed: bool) -> bytes:
    """Return the policy of every bundle for a target, from the cache if it was made before.

    Args:
        target: What is compiled for.
        cache: Where `policy` entries are.
        fixed: Leave the device nothing to measure or adapt: constant-time plans.
    """
    facts: dict[str, Json] = {"target": target.id, "compiler": compiler_digest(), "fixed": fixed}
    key = cache_key(POLICY, facts)
    stored = cache.get(POLICY, key)
    if stored is not None:
        return stored[POLICY]
    from compiler.kernels.policy_model import seed_policy  # numpy loads here only

    data = seed_policy(target.id, fixed=fixed).to_bytes()
    cache.put(POLICY, key, {POLICY: data})
    return data


def policy_facts(
    data: bytes, plan: Plan, selftest: SelfTest, measured_on: str | None
) -> dict[str, Json]:
    """Return what a report says of a policy: what it rests on, what it says, what is in doubt.

    Args:
        data: The section.
        plan: Whose calls it is for.
        selftest: Says how many tokens the programs run with.
        measured_on: Where the products were measured that its model was fitted to.
    """
    policy = parse_policy(data)
    is_measured = bool(policy.flags & Flags.MEASURED)
    densities: list[Json] = [Cell(CallKind.OTHER, 0, 0, at).density_name for at in range(DENSITIES)]
    return {
        "measured_on": measured_on,
        "densities": densities,
        "classes": _classes(policy, plan, situations(plan, selftest)),
        "held_out_error": policy.residual / FULL if is_measured else None,
        "cells": CELLS,
        "cells_in_doubt": sum(1 for mask in policy.doubts if mask),
        "fixed": policy.is_fixed,
    }


def _classes(policy: Policy, plan: Plan, looked_at: Mapping[str, Situation]) -> list[Json]:
    """Return a row per class of the plan's calls: its variant at each density, and where calls are.

    A kind that knows one variant only is left out: nothing is chosen for it.
    """
    calls: defaultdict[Cell, Counter[str]] = defaultdict(Counter)
    places: defaultdict[Cell, set[int]] = defaultdict(set)
    for program in plan.programs:
        tokens = looked_at.get(program.name, Situation()).tokens
        for call in program.calls:
            cell = call_cell(plan, call, tokens)
            if len(LEGAL[cell.kind]) > 1:
                group = replace(cell, density=0)
                calls[group][program.name] += 1
                places[group].add(cell.density)
    return [_class_row(policy, cell, calls[cell], places[cell]) for cell in sorted(calls)]


def _class_row(policy: Policy, group: Cell, calls: Counter[str], places: set[int]) -> Json:
    cells = [replace(group, density=at) for at in range(DENSITIES)]
    return {
        "kind": group.kind.name,
        "size": group.size_name,
        "rows": group.rows_name,
        "calls": dict(calls),
        "variants": [policy.variant(cell).name for cell in cells],
        "in_doubt": [bool(policy.candidates(cell)) for cell in cells],
        "used": [at in places for at in range(DENSITIES)],
    }
