"""Adapters that were merged: seeds before weights are packed, factors and facts afterwards."""

from collections import Counter
from collections.abc import Mapping

from compiler.contract.canonical import Json, sha256_hex
from compiler.contract.plan import Plan
from compiler.contract.plan_format import Kind
from compiler.contract.planes import Plane
from compiler.delta.lowrank import Factors
from compiler.delta.replay_file import pack_replays
from compiler.driver.sections import named_weights
from compiler.kernels.program import Module
from compiler.quant.merge import Seeds, seed_of


def merge_seeds(module: Module, base: Mapping[str, bytes], release_seq: int) -> Seeds:
    """Return the seeds of weights that adapters were merged into; none for release 0."""
    merged = [weight for weight in module.weights if weight.merged is not None]
    if not release_seq or not merged:
        return {}
    names = {weight.section for weight in merged} & base.keys()
    digests = {name: sha256_hex(base[name]) for name in names}
    seeds: dict[int, bytes] = {}
    numbers: Counter[str] = Counter()
    for weight in merged:
        if weight.section in digests:
            number = numbers[weight.section]
            seeds[weight.id] = seed_of(digests[weight.section], number, release_seq)
            numbers[weight.section] += 1
    return seeds


def merge_replays(
    plan: Plan, planes: Mapping[str, tuple[Plane, ...]], factors: Mapping[int, Factors]
) -> bytes:
    """Return the file of factors by where codes stand in the end; empty without any.

    A weight that is not stored densely has no plane of codes that a device could replay.
    """
    found: dict[tuple[str, int], Factors] = {}
    for weight, added in factors.items():
        row = plan.weights[weight]
        name = plan.sections[row.section].name
        if row.kind is Kind.W4:
            starts = [plane.offset for plane in planes[name]]
            found[name, starts.index(row.offset)] = added
    return pack_replays(found) if found else b""


def merge_rows(module: Module, factors: Mapping[int, Factors]) -> dict[str, Json]:
    """Return how adapters were merged, by weight: `replay` on the base's codes, or in `f32`."""
    return {
        name: {
            "merged": "replay" if weight.id in factors else "f32",
            "rank": int(weight.merged.left.shape[1]),
        }
        for name, weight in named_weights(module)
        if weight.merged is not None
    }
