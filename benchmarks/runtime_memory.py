"""Ways to hold the experts of `benchmarks.runtime`: each runs the same plan within the same budget.

    lru      glibc's malloc, least recently used goes, loads when needed (`runtime_baseline`)
    leaning  the same, and routers lean to what lies in memory
    pool     the product's pool: page runs, Least-Stale; loads when needed
    ahead    the same, and a thread reads what is likely
    single   the same, routers lean, but experts are read one by one, not in groups
    full     the same with groups: the product

Called by the benchmark and by the child that measures memory.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from benchmarks.decode_plan import FIRST_POSITION, KERNELS, PLAN, SECTIONS
from benchmarks.runtime_baseline import EXPERT_SECTION, LruExperts
from compiler.contract.expert_pool import ExpertFile
from compiler.contract.native import NativePlan
from compiler.contract.native_library import KernelLibrary
from compiler.contract.plan import Plan, parse_plan
from compiler.contract.pool_abi import PoolKnob
from compiler.contract.pool_plan import PoolPlan, plan_pool
from compiler.contract.pooled_weights import PooledWeights
from compiler.contract.session import STEP, step_inputs
from compiler.contract.steering import Steering
from device_agent.probe.linux import largest_cache_kb

LRU, LEANING, POOL, AHEAD = "lru", "leaning", "pool", "ahead"
SINGLE, FULL = "single", "full"
WAYS: Final = (LRU, POOL, AHEAD, FULL)
PARTS: Final = {
    FULL: "full system",
    AHEAD: "no steered router",
    LEANING: "no pool",
    SINGLE: "no groups",
}
"""The product, and the product without one of its parts."""
UNBOUNDED: Final = 1 << 40
_COUNTED: Final = (
    *("misses", "late", "hidden", "predicted", "foreseen", "cached"),
    *("loaded_bytes", "read_ns", "stall_ns"),
)
CONTEXT: Final = 512


@dataclass(frozen=True, slots=True)
class Loads:
    """What a way of holding experts did.

    Attributes:
        uses: Experts that batches used.
        misses: Uses that found nothing in memory and nothing on its way.
        late: Uses that waited for a read that was under way.
        hidden: Uses of an expert that was read ahead and there in time.
        predicted, foreseen: Experts named by the predictor, and those of them that were chosen.
        cached: Uses of an expert that the processor's largest cache holds with all used since.
        loaded_bytes: Read from storage.
        read_ns, stall_ns: Time of reads, and time that runs waited for them.
    """

    uses: int
    misses: int
    late: int = 0
    hidden: int = 0
    predicted: int = 0
    foreseen: int = 0
    cached: int = 0
    loaded_bytes: int = 0
    read_ns: int = 0
    stall_ns: int = 0


class Experts(Protocol):
    """A plan and how its experts are held."""

    plan: NativePlan

    def loads(self) -> Loads:
        """Return what was done since the last call."""

    def close(self) -> None:
        """Free everything."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A plan on disk, as `runtime_model` writes it.

    Attributes:
        path: The folder.
        target: Whom its kernels are for.
    """

    path: Path
    target: str

    @property
    def plan(self) -> Plan:
        """The plan, verified."""
        return parse_plan((self.path / PLAN).read_bytes())

    @property
    def kernels(self) -> Path:
        """Its code."""
        return self.path / KERNELS

    @property
    def sections(self) -> Path:
        """Folder of its weights."""
        return self.path / SECTIONS

    def layout(self, share: float) -> PoolPlan:
        """Return how the plan fits with a share of its experts' runs."""
        every = plan_pool(self.plan, UNBOUNDED)
        runs = int(share * every.runs)
        return plan_pool(self.plan, every.persistent_bytes + runs * every.run_bytes)


class ColdFiles:
    """Has the system drop what it keeps of the experts' files, so that loads read storage."""

    def __init__(self, folder: Folder) -> None:
        """Open the files."""
        paths = folder.sections.glob(f"{EXPERT_SECTION}*")
        self._files = [os.open(path, os.O_RDONLY) for path in paths]

    def forget(self) -> None:
        """Drop it; some tens of microseconds."""
        for file in self._files:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file)


class PooledExperts:
    """Experts in the product's pool."""

    def __init__(
        self,
        folder: Folder,
        share: float,
        *,
        threads: int = 1,
        ahead: bool = False,
        steering: Steering | None = None,
        heats: Sequence[int] = (),
    ) -> None:
        """Open the pool; every expert is read and verified once, those that fit stay."""
        layout = folder.layout(share)
        self._files = [
            os.open(folder.sections / expert.name, os.O_RDONLY) for expert in layout.experts
        ]
        files = [
            ExpertFile(file, expert.length, "", expert.layer, heat=heat)
            for file, expert, heat in zip(
                self._files, layout.experts, heats or [0] * len(self._files), strict=True
            )
        ]
        kept = {name: (folder.sections / name).read_bytes() for name in layout.persistent}
        self.weights = PooledWeights(
            KernelLibrary(folder.kernels), layout, kept, files, reads_ahead=ahead
        )
        self.weights.pool.set(PoolKnob.CACHE_KB, largest_cache_kb())
        plan = (folder.path / PLAN).read_bytes()
        self.plan = NativePlan(folder.kernels, plan, self.weights, threads=threads)
        if steering is not None:
            self.plan.steering.publish(steering)
        self._before = self.weights.pool.counts()

    def loads(self) -> Loads:
        """Return what was done since the last call."""
        now = self.weights.pool.counts()
        made = {name: now[name] - self._before[name] for name in now}
        self._before = now
        return Loads(
            uses=made["hits"] + made["late"] + made["misses"],
            **{name: made[name] for name in _COUNTED},
        )

    def empty(self) -> None:
        """Let every expert go, as after a start that found nothing worth keeping."""
        pool, layout = self.weights.pool, self.weights.layout
        pool.set(PoolKnob.RUNS, 0)
        pool.set(PoolKnob.RUNS, layout.runs)

    def close(self) -> None:
        """Free everything."""
        self.plan.close()
        for file in self._files:
            os.close(file)


class CachedExperts:
    """Experts in the cache that we compare with."""

    def __init__(
        self,
        folder: Folder,
        share: float,
        *,
        threads: int = 1,
        steering: Steering | None = None,
    ) -> None:
        """Load the plan, and take its experts over."""
        layout = folder.layout(share)
        data = {path.name: path.read_bytes() for path in folder.sections.iterdir()}
        plan = (folder.path / PLAN).read_bytes()
        self.plan = NativePlan(folder.kernels, plan, data, threads=threads)
        budget = layout.runs * layout.run_bytes
        self._cache = LruExperts(self.plan, folder.sections, budget, folder.target)
        if steering is not None:
            self.plan.steering.publish(steering, self._cache.residency)

    def loads(self) -> Loads:
        """Return what was done since the last call."""
        hits, misses = self._cache.counts()
        return Loads(uses=hits + misses, misses=misses)

    def close(self) -> None:
        """Free everything."""
        self._cache.close()
        self.plan.close()


def open_experts(
    way: str, folder: Folder, share: float, steering: Steering, threads: int = 1
) -> Experts:
    """Return a way of holding experts by its name."""
    record = steering if way in (LEANING, SINGLE, FULL) else None
    if way in (LRU, LEANING):
        return CachedExperts(folder, share, threads=threads, steering=record)
    is_ahead = way in (AHEAD, SINGLE, FULL)
    found = PooledExperts(folder, share, threads=threads, ahead=is_ahead, steering=record)
    found.weights.pool.set(PoolKnob.GROUPS, int(way != SINGLE))
    return found


class Walker:
    """Feeds a plan the tokens of the trace, one after another, forever."""

    def __init__(self, experts: Experts, steps: int) -> None:
        """Begin with the first step."""
        self.experts = experts
        self._steps, self._at = steps, 0

    def walk(self, tokens: int, cold: ColdFiles | None = None) -> float:
        """Run so many tokens; return seconds. With `cold` files are forgotten before each."""
        spent = 0.0
        plan = self.experts.plan
        for _ in range(tokens):
            if cold is not None:
                cold.forget()
            if plan.kv_length >= CONTEXT - FIRST_POSITION - 1:
                plan.kv_length = 0
            start = time.perf_counter()
            plan.run(STEP, step_inputs([self._at], FIRST_POSITION + plan.kv_length))
            spent += time.perf_counter() - start
            self._at = (self._at + 1) % self._steps
        return spent
