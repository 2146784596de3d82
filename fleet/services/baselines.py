"""What counts as slow and as thirsty, per device, by what it measured before: fixed at enrolment.

Devices differ by far more than versions do, so each is held against its own past: the quantile of
its latency with the bundle it runs, and of what its battery lost per active hour, drawn towards
that of its stratum when it has measured little:

    ln tau_i = (n_i ln q_i + w ln q_s) / (n_i + w)      n_i own values, w = `Shrink.weight`

Drain is what batteries counted: who has no counter measured nothing and has no limit.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from compiler.contract.telemetry import Sketch, sketch_from_row
from fleet.models import DeviceStats
from fleet.services.members import Member


@dataclass(frozen=True, slots=True)
class Shrink:
    """How little is too little.

    Attributes:
        weight: Values of its own with which a device counts as much as its stratum.
        least: Values that a stratum needs; with fewer, all devices together are its stratum.
    """

    weight: int
    least: int


ANSWERS: Final = Shrink(weight=50, least=20)
WINDOWS: Final = Shrink(weight=6, least=20)
DRAIN_QUANTILE: Final = 0.9
"""Of the windows with the bundle that a device runs: above it, one is thirsty."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What a device usually stays below; None: not known. And from how many values it follows."""

    above: float | None
    own: int
    pool: int


@dataclass(frozen=True, slots=True)
class Usual:
    """Of one device: latency of an answer, milliseconds, and drain, thousandths of a percent."""

    slow: Limit
    drain: Limit


def usual_of(members: Iterable[Member], *, quantile: float) -> dict[int, Usual]:
    """Return device pk -> what is usual for it. One query.

    Args:
        members: Devices to be enrolled.
        quantile: Of the latency with the bundle that a device runs now.
    """
    members = list(members)
    measured = _sketches(members)
    slow = _limits(members, {pk: each[0] for pk, each in measured.items()}, quantile, ANSWERS)
    drain = _limits(
        members, {pk: each[1] for pk, each in measured.items()}, DRAIN_QUANTILE, WINDOWS
    )
    return {pk: Usual(slow[pk], drain[pk]) for pk in slow}


def _limits(
    members: Sequence[Member], own: Mapping[int, Sketch], quantile: float, shrink: Shrink
) -> dict[int, Limit]:
    pools: dict[str, Sketch] = {}
    everything = Sketch()
    for member in members:
        sketch = own.get(member.device.pk, Sketch())
        pools.setdefault(member.candidate.stratum, Sketch()).merge(sketch)
        everything.merge(sketch)
    found = {}
    for member in members:
        pool = pools[member.candidate.stratum]
        pool = pool if pool.count >= shrink.least else everything
        found[member.device.pk] = limit_of(
            own.get(member.device.pk, Sketch()), pool, quantile, shrink
        )
    return found


def _sketches(members: Sequence[Member]) -> dict[int, tuple[Sketch, Sketch]]:
    running = {
        member.device.pk: member.device.running_bundle.manifest_sha256
        for member in members
        if member.device.running_bundle is not None  # only bundles known to be the device's
    }
    rows = DeviceStats.objects.filter(manifest_sha256__in=set(running.values()))
    return {
        device_pk: (sketch_from_row(latency), sketch_from_row(drain))
        for device_pk, manifest, latency, drain in rows.values_list(
            "device_id", "manifest_sha256", "latency", "drain"
        )
        if running.get(device_pk) == manifest
    }


def limit_of(own: Sketch, pool: Sketch, quantile: float, shrink: Shrink) -> Limit:
    """Return the limit of one device; pure.

    Args:
        own: What it measured.
        pool: What its stratum measured, itself included.
        quantile: Of what was measured.
        shrink: How little is too little.
    """
    pooled = pool.quantile(quantile) if pool.count >= shrink.least else None
    mine = own.quantile(quantile)
    if pooled is None:
        return Limit(None, own.count, pool.count)
    if mine is None:
        return Limit(pooled, 0, pool.count)
    weight = own.count / (own.count + shrink.weight)
    value = math.exp(weight * math.log(mine) + (1 - weight) * math.log(pooled))
    return Limit(value, own.count, pool.count)
