"""Experts within a budget, as a device keeps them: opened from the store, watched, reported.

    max_weight_bytes + plan -> `WeightPool.layout` -> PooledWeights over the store's files
    pressure of memory -(once a second)-> the pool; what it counted -> status, telemetry, rules

Every expert is verified in its slot against the manifest's digest before the first answer, and by
its tag on every later load (ADR 0015): an object that was damaged on disk is dropped, as by any
other read, and fetched anew with the next update. Without a budget none of this exists.
"""

import os
import resource
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from compiler.contract.expert_groups import parse_expert_groups
from compiler.contract.expert_pool import ExpertDamagedError, ExpertFile, ExpertPool
from compiler.contract.manifest import Section
from compiler.contract.native_errors import NativeError
from compiler.contract.native_library import KernelLibrary
from compiler.contract.pool_abi import HEAT_ONE, NO_GROUP, PoolKnob
from compiler.contract.pool_plan import PoolPlan, expert_place, external, internal
from compiler.contract.pooled_weights import PooledWeights
from compiler.contract.router_stats import PER_MILLE, parse_router_stats
from device_agent.errors import DamagedError
from device_agent.probe import sensors
from device_agent.probe.linux import largest_cache_kb
from device_agent.runtime.hotset import HotSetFile

LOOK_S: Final = 1.0
KEEP_S: Final = 300.0
"""Between two writes of the hot set, seconds."""
GROUPS: Final = "expert_groups"
ROUTER_STATS: Final = "router_stats"
SPARE_FILES: Final = 256
"""Descriptors that the rest of the agent may need."""
_PER_MILLE: Final = 1000
_PERCENT: Final = 100.0
Pressure = Callable[[], float | None]


@dataclass(frozen=True, slots=True)
class SectionSource:
    """Where the sections of a bundle are.

    Attributes:
        read: Returns the bytes of one, verified.
        open: Returns a file of one, unverified, of the signed length; the caller closes it.
        forget: Is told that one is damaged.
    """

    read: Callable[[Section], memoryview]
    open: Callable[[Section], int]
    forget: Callable[[Section], None]


class _OpenFiles:
    """Descriptors that close when nobody holds this any more."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._close = weakref.finalize(self, _close_all, self.numbers)


def _close_all(numbers: list[int]) -> None:
    for number in numbers:
        os.close(number)


def pooled_weights(
    kernels: bytes,
    layout: PoolPlan,
    views: Mapping[str, memoryview],
    sections: Mapping[str, Section],
    source: SectionSource,
    hotset: HotSetFile | None = None,
) -> PooledWeights:
    """Open the experts of a bundle and verify each in memory.

    Args:
        kernels: Of the bundle, verified.
        layout: How its weights fit the budget.
        views: Verified bytes of the sections that stay.
        sections: All sections, by component.
        source: Where the experts are.
        hotset: How often each was used before; else the bundle's router statistics say how likely
            each is.

    Raises:
        DamagedError: An expert is missing or damaged; the damaged one was dropped.
        NativeError: The kernels have no pools, or the system gives no memory or descriptors.
    """
    require_files(len(layout.experts))
    held = _OpenFiles()
    files = []
    for expert in layout.experts:
        section = sections[expert.name]
        held.numbers.append(source.open(section))
        files.append(ExpertFile(held.numbers[-1], expert.length, section.sha256, expert.layer))
    files = with_statistics(files, layout, views, hotset)
    try:
        return PooledWeights(KernelLibrary(kernels), layout, views, files, keeps=held)
    except ExpertDamagedError as error:
        section = sections[layout.experts[error.number].name]
        source.forget(section)
        raise DamagedError(f"object {section.sha256[:16]} is damaged and was dropped") from error


def with_statistics(
    files: Sequence[ExpertFile],
    layout: PoolPlan,
    views: Mapping[str, memoryview],
    hotset: HotSetFile | None,
) -> list[ExpertFile]:
    """Return the files with the heat and the group of each expert, where these are known.

    Raises:
        ContractError: A section of statistics is malformed.
    """
    places = [expert_place(expert.name) for expert in layout.experts]
    heats = (None if hotset is None else hotset.read(files)) or _usual_heats(places, views)
    groups = parse_expert_groups(bytes(views[GROUPS])).groups if GROUPS in views else ()
    found = []
    for file, heat, (_, number) in zip(files, heats, places, strict=True):
        row = groups[file.layer] if file.layer < len(groups) else ()
        group = row[number] if number < len(row) else NO_GROUP
        found.append(replace(file, heat=heat, group=group))
    return found


def _usual_heats(
    places: Sequence[tuple[int, int]], views: Mapping[str, memoryview]
) -> tuple[int, ...]:
    """Return how likely a step uses each expert, as calibration saw rows of text choose."""
    if ROUTER_STATS not in views:
        return (0,) * len(places)
    layers = {item.layer: item for item in parse_router_stats(bytes(views[ROUTER_STATS])).layers}
    return tuple(
        min(
            HEAT_ONE, layers[layer].usage_text[number] * layers[layer].top_k * HEAT_ONE // PER_MILLE
        )
        if layer in layers and number < layers[layer].experts
        else 0
        for layer, number in places
    )


def require_files(count: int) -> None:
    """Have room for `count` open files, one per expert, beside what the agent needs.

    Raises:
        NativeError: The system allows fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = count + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise NativeError(
            f"{count} experts need {need} open files, the system allows {hard}",
            hint="raise the limit of open files (RLIMIT_NOFILE)",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def machine_pressure() -> float | None:
    """Return the memory pressure of the machine, percent; None if no sensor says."""
    return sensors.memory_pressure()


class Residency:
    """Watches one pool; used by the thread that answers."""

    def __init__(
        self,
        pool: ExpertPool,
        monotonic: Callable[[], float],
        pressure: Pressure = machine_pressure,
        hotset: HotSetFile | None = None,
        cache_kb: int = 0,
    ) -> None:
        """Begin; the pool holds what it holds.

        Args:
            pool: Of the running plan.
            monotonic: Clock in seconds.
            pressure: Share of memory that is not available, percent.
            hotset: Where heats are kept for the next start.
            cache_kb: Of the largest cache of the processor; 0 = unknown.
        """
        if cache_kb:
            pool.set(PoolKnob.CACHE_KB, cache_kb)
        self._hotset, self._kept_at = hotset, monotonic()
        self._pool, self._monotonic, self._pressure = pool, monotonic, pressure
        self._looked_at: float | None = None
        self._before = self._start = pool.counts()
        self._misses: float | None = None
        self._is_fetching_ahead = True

    @property
    def is_fetching_ahead(self) -> bool:
        """Whether experts that no row chose yet are loaded."""
        return self._is_fetching_ahead

    @is_fetching_ahead.setter
    def is_fetching_ahead(self, value: bool) -> None:
        if value is not self._is_fetching_ahead:
            self._pool.set(PoolKnob.PREFETCH, int(value))
            self._is_fetching_ahead = value

    def look(self) -> None:
        """Tell the pool how short of memory the machine is, once a second at most."""
        now = self._monotonic()
        if self._looked_at is not None and now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        percent = self._pressure()
        if percent is not None:
            per_mille = round(min(max(percent, 0.0), _PERCENT) * _PER_MILLE / _PERCENT)
            self._pool.set(PoolKnob.PRESSURE, per_mille)
        self._misses = self._share_of_misses()
        if now - self._kept_at >= KEEP_S:
            self.keep()

    def keep(self) -> None:
        """Write the hot set, if any expert was used."""
        self._kept_at = self._monotonic()
        if self._hotset is not None and self._pool.counts()["chosen"] > self._start["chosen"]:
            self._hotset.write(self._pool.files, self._pool.heats())

    def gauges(self) -> dict[str, float | None]:
        """Return what degrade rules see: fragmentation of the memory given, share of misses, %."""
        found = self._pool.counts()
        lost = internal(found["asked_bytes"], found["given_bytes"])
        return {"fragmentation": _PERCENT * lost, "expert_misses": self._misses}

    @property
    def stalls(self) -> int:
        """How often an answer waited in vain for the thread that reads ahead, since this began."""
        return self._pool.counts()["timeouts"] - self._start["timeouts"]

    def facts(self) -> dict[str, int]:
        """Return what `status` and telemetry show; names are those of `GAUGES`."""
        found = self._pool.counts()
        free = found["free_bytes"]
        return {
            "resident_bytes": self._pool.persistent_bytes + found["committed_bytes"],
            "expert_hits": found["hits"],
            "expert_misses": found["misses"],
            "expert_late": found["late"],
            "expert_hidden": found["hidden"],
            "expert_cached": found["cached"],
            "expert_predicted": found["predicted"],
            "expert_foreseen": found["foreseen"],
            "expert_read_bytes": found["loaded_bytes"],
            "expert_stalls": found["timeouts"],
            "expert_damaged": found["corrupt"] + found["failed"],
            "fragmentation_internal_per_mille": round(
                _PER_MILLE * internal(found["asked_bytes"], found["given_bytes"])
            ),
            "fragmentation_external_per_mille": round(_PER_MILLE * external(free, free)),
        }

    def _share_of_misses(self) -> float | None:
        """Return misses of lookups since the last look, percent; as before if there were none."""
        now, before = self._pool.counts(), self._before
        missed = sum(now[name] - before[name] for name in ("misses", "late"))
        lookups = missed + now["hits"] - before["hits"]
        if not lookups:
            return self._misses
        self._before = now
        return _PERCENT * missed / lookups


def residency_of(
    weights: object, monotonic: Callable[[], float], hotset: HotSetFile | None = None
) -> Residency | None:
    """Return who watches the pool of a plan's weights; None if all of them are in memory."""
    if not isinstance(weights, PooledWeights):
        return None
    return Residency(weights.pool, monotonic, hotset=hotset, cache_kb=largest_cache_kb())
