"""What counts as slow, per device, from what it measured before: fixed when it is enrolled.

Devices differ by far more than versions do, so each is held against its own past: the quantile of
its latency with the bundle it runs, drawn towards that of its stratum when it has answered little:

    ln tau_i = (n_i ln q_i + w ln q_s) / (n_i + w)      n_i own answers, w = SHRINK_ANSWERS
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from compiler.contract.telemetry import Sketch, sketch_from_row
from fleet.models import DeviceStats
from fleet.services.members import Member

SHRINK_ANSWERS: Final = 50
MIN_POOL_ANSWERS: Final = 20


@dataclass(frozen=True, slots=True)
class SlowLimit:
    """Latency above which an answer of a device is slow, milliseconds; None: not known."""

    slow_ms: float | None
    own_answers: int
    pool_answers: int


def slow_limits(members: Iterable[Member], *, quantile: float) -> dict[int, SlowLimit]:
    """Return device pk -> its slow limit. One query.

    Args:
        members: Devices to be enrolled.
        quantile: Of the latency with the bundle that a device runs now.
    """
    members = list(members)
    own = _sketches(members)
    pools: dict[str, Sketch] = {}
    everything = Sketch()
    for member in members:
        sketch = own.get(member.device.pk, Sketch())
        pools.setdefault(member.candidate.stratum, Sketch()).merge(sketch)
        everything.merge(sketch)
    return {
        member.device.pk: _limit(
            own.get(member.device.pk, Sketch()),
            _large_enough(pools[member.candidate.stratum], everything),
            quantile,
        )
        for member in members
    }


def _sketches(members: list[Member]) -> dict[int, Sketch]:
    running = {
        member.device.pk: member.device.running_bundle.manifest_sha256
        for member in members
        if member.device.running_bundle is not None  # only bundles known to be the device's
    }
    rows = DeviceStats.objects.filter(manifest_sha256__in=set(running.values()))
    return {
        device_pk: sketch_from_row(latency)
        for device_pk, manifest, latency in rows.values_list(
            "device_id", "manifest_sha256", "latency"
        )
        if running.get(device_pk) == manifest
    }


def _large_enough(pool: Sketch, everything: Sketch) -> Sketch:
    return pool if pool.count >= MIN_POOL_ANSWERS else everything


def _limit(own: Sketch, pool: Sketch, quantile: float) -> SlowLimit:
    pooled = pool.quantile(quantile) if pool.count >= MIN_POOL_ANSWERS else None
    mine = own.quantile(quantile)
    if pooled is None:
        return SlowLimit(None, own.count, pool.count)
    if mine is None:
        return SlowLimit(pooled, 0, pool.count)
    weight = own.count / (own.count + SHRINK_ANSWERS)
    value = math.exp(weight * math.log(mine) + (1 - weight) * math.log(pooled))
    return SlowLimit(value, own.count, pool.count)
