"""The policy of a bundle: made once per target, because the cost model takes a while to fit."""

from typing import Final

from compiler.contract.canonical import Json
from compiler.contract.policy import CELLS, FULL, Flags, parse_policy
from compiler.driver.cache import StageCache, cache_key
from compiler.driver.provenance import compiler_digest
from compiler.hardware.measured import measured_label
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


def policy_facts(target: Target, data: bytes) -> dict[str, Json]:
    """Return what a report says of a policy: where its model was measured, and what is in doubt."""
    policy = parse_policy(data)
    is_measured = bool(policy.flags & Flags.MEASURED)
    return {
        "measured_on": measured_label(target.id),
        "held_out_error": policy.residual / FULL if is_measured else None,
        "cells": CELLS,
        "cells_in_doubt": sum(1 for mask in policy.doubts if mask),
        "fixed": policy.is_fixed,
    }
