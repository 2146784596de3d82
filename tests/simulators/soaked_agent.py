"""The agent's own way to answer, over a part of the experts, with everything that can disturb it.

host -> guard -> answerer -> bands, sentinel, deadline -> native plan -> pool of experts in files

Clock, heat, sensors and what a native call meets are the test's; everything else is what a device
runs. A run tells the digest of what it put out.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from compiler.contract.degrade import parse_rules, rules_bytes
from compiler.contract.native import NativePlan
from compiler.contract.operations import ExpertEvent
from compiler.contract.plan import parse_plan
from compiler.contract.pooled_weights import PooledWeights
from compiler.contract.session import SEE, Buffer
from device_agent.errors import BundleError
from device_agent.runtime.answers import BundleAnswerer
from device_agent.runtime.assembly import Assembly, scrubber_of
from device_agent.runtime.bundle import load_bundle
from device_agent.runtime.custody import Counts, Opened
from device_agent.runtime.degrade_keeper import DegradeKeeper, rungs_of
from device_agent.runtime.guard import InferenceGuard
from device_agent.runtime.host import SessionHost
from device_agent.runtime.residency import Residency
from device_agent.runtime.scrubber import ScrubCounts
from device_agent.runtime.weights import WeightPool
from device_agent.storage.slots import Pointer
from tests.factories.pools import budget_of
from tests.factories.soaked import BANDS, TOKENS, Installed, Steered, digest_of

TIMEOUT_S = 30.0
BETWEEN_S = 5.0
"""Seconds between two answers, of the test's clock."""
_FIRST = TOKENS.position_base.to_bytes(4, "little")
RULES = parse_rules(
    rules_bytes(
        [
            {
                "name": "hot",
                "when": "temperature > 90 C",
                "leave": "temperature < 80 C",
                "rung": "fewer_experts",
                "priority": 50,
                "cooldown_s": 0,
            },
            {
                "name": "short of memory",
                "when": "memory_pressure > 95 %",
                "leave": "memory_pressure < 90 %",
                "rung": "no_prefetch",
                "priority": 10,
                "cooldown_s": 0,
            },
        ]
    )
)


@dataclass
class Machine:
    """What a device has around the plan.

    Attributes:
        now: Seconds; moves when the test says so.
        is_critical: Whether heat is about to switch it off.
    """

    now: float = 0.0
    celsius: float = 40.0
    pressure: float = 20.0
    is_critical: bool = False

    def monotonic(self) -> float:
        return self.now

    def gauges(self) -> dict[str, float | None]:
        return {"temperature": self.celsius, "memory_pressure": self.pressure}


@dataclass
class Meets:
    """What the next answer meets: called before a run, or told what a run asks for."""

    run: Callable[[], None] = lambda: None
    page: Callable[[ExpertEvent, int], bool] = lambda _event, _weight: True


@dataclass
class SoakedAgent:
    """One device, its machine, and what its plan put out.

    Attributes:
        threads: Of the plan that runs and of those that are built anew.
        steered: What routers go by; published again when a plan is built anew.
        steps: Digests of the steps of the last attempt.
        runs: Runs of programs that began, of every attempt.
        seen: Faults and reasons that guards counted which do not run any more.
    """

    at: Installed
    share: float
    machine: Machine = field(default_factory=Machine)
    meets: Meets = field(default_factory=Meets)
    threads: int = 1
    steered: Steered | None = None
    steps: list[bytes] = field(default_factory=list)
    runs: int = 0
    plans: int = 0
    swaps: int = 0
    seen: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        plan = parse_plan(self.at.case.emitted.plan_bytes)
        self.weights = WeightPool(budget_of(plan, self.share))
        self.host = SessionHost()
        self._plan: NativePlan | None = None
        self.guard: InferenceGuard
        self.swap()

    @property
    def plan(self) -> NativePlan:
        assert self._plan is not None
        return self._plan

    def swap(self) -> None:
        """Have the other bundle run.

        Raises:
            BundleError: It does not load; the one before goes on.
        """
        before = self._plan
        try:
            guard = self._start()
        except BundleError:
            self._plan = before
            raise
        if before is not None:
            self._keep_counts()
        self.host.swap(guard)
        self.guard = guard

    def _start(self) -> InferenceGuard:
        pointer = self.at.pointers[self.swaps % len(self.at.pointers)]
        self.swaps += 1
        degrade = DegradeKeeper(
            RULES, rungs_of(BANDS, is_paged=True), self.machine.monotonic, self.machine.gauges
        )
        counts = ScrubCounts()
        return InferenceGuard(
            lambda: self._open(pointer, degrade, counts),
            TIMEOUT_S,
            lambda: self.machine.is_critical,
            self.machine.monotonic,
        )

    def _keep_counts(self) -> None:
        for name in ("faults", "degraded"):
            getattr(self.seen, name).update(getattr(self.guard.counts, name))
        for name in ("recovered", "restarts", "stuck"):
            setattr(self.seen, name, getattr(self.seen, name) + getattr(self.guard.counts, name))

    @property
    def counts(self) -> tuple[Counter[Any], Counter[str]]:
        """What all guards counted: faults, and reasons of degraded answers."""
        now = self.guard.counts
        return self.seen.faults + now.faults, self.seen.degraded + now.degraded

    @property
    def pool(self) -> PooledWeights:
        weights = self.plan.weights
        assert isinstance(weights, PooledWeights)
        return weights

    def steer(self, steered: Steered | None) -> None:
        """Have routers go by a record from the next run on."""
        self.steered = steered
        if steered is None:
            self.plan.steering.clear()
        else:
            self.plan.steering.publish(steered.steering, steered.residency)

    def close(self) -> None:
        """Free the native memory."""
        self._keep_counts()
        self.host.swap(None)
        self._plan = None
        del self.guard

    def _open(self, pointer: Pointer, degrade: DegradeKeeper, counts: ScrubCounts) -> Opened:
        self._plan = None  # nobody but the guard keeps a plan, so its weights go with it
        bundle = load_bundle(self.at.store, pointer, self.weights)
        plan = bundle.runner
        assert isinstance(plan, NativePlan)
        self.plans += 1
        plan.threads = self.threads
        plan.set_pager(lambda event, weight: self.meets.page(event, weight))
        residency = Residency(
            plan.weights.pool, self.machine.monotonic, lambda: self.machine.pressure
        )
        shown: Any = _Told(plan, self)
        assembly = Assembly(
            replace(bundle, runner=shown), self.machine.monotonic, degrade=degrade, pager=residency
        )
        self._plan = plan
        if self.steered is not None:
            self.steer(self.steered)
        return Opened(BundleAnswerer(assembly, TIMEOUT_S), scrubber_of(bundle, counts))


class _Told:
    """A plan that tells the agent's test of every run; all else is the plan's."""

    def __init__(self, plan: NativePlan, agent: SoakedAgent) -> None:
        self._plan, self._agent = plan, agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    @property
    def threads(self) -> int:
        return self._plan.threads

    @threads.setter
    def threads(self, threads: int) -> None:
        self._plan.threads = threads

    @property
    def kv_length(self) -> int:
        return self._plan.kv_length

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        self._plan.kv_length = length

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        agent = self._agent
        if program == SEE or inputs["positions"][:4] == _FIRST:
            agent.steps = []
        agent.runs += 1
        agent.meets.run()
        outputs = self._plan.run(program, inputs)
        if program != SEE and agent._plan is self._plan:  # and not one that was given up
            agent.steps.append(digest_of(outputs))
        return outputs
