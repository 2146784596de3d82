"""A loaded bundle made ready to answer: its runners in order, and who looks after it, put together.

    dialogue -> substitutes -> bands -> sentinel -> work -> deadline -> steering -> native plan
    before an answer: rung, way, energy counter       after it: policy, steering, energy, rung

The one place that knows this order. `answers.BundleAnswerer` answers whole questions with an
`Assembly`, `course.Course` token by token; `Opening` makes one as often as a guard asks for it, and
what was counted outlives a plan that is built anew. It decides nothing: which rung says
`degrade_keeper`, which way says a remedy.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from compiler.contract.bands import BandedRunner
from compiler.contract.degrade import Rule, Rung
from compiler.contract.errors import ContractError
from compiler.contract.pager import PagerSwitch
from compiler.contract.pipeline import Pipeline
from compiler.contract.policy import PLAIN
from compiler.contract.session import Buffer, PlanRunner, RunnerBefore
from device_agent.errors import BundleError
from device_agent.runtime.bundle import ClosableRunner, LoadedBundle
from device_agent.runtime.custody import Opened
from device_agent.runtime.degrade import Counter, Observation
from device_agent.runtime.degrade_keeper import (
    DEFAULT_RULES,
    DegradeKeeper,
    machine_gauges,
    rungs_of,
)
from device_agent.runtime.energy import EnergyMeter, Work
from device_agent.runtime.faults import AS_ASKED, Way
from device_agent.runtime.hotset import HotSetFile
from device_agent.runtime.residency import Residency, residency_of
from device_agent.runtime.rule_book import RuleBook
from device_agent.runtime.rungs import standing_of, take_rung
from device_agent.runtime.scrubber import Scrubber, ScrubCounts
from device_agent.runtime.sentinel import SentinelRunner
from device_agent.runtime.signals import no_pool
from device_agent.runtime.steering_keeper import SteeringKeeper, steering_keeper
from device_agent.runtime.tuning import Tuned
from device_agent.runtime.work import WorkRunner

SUBSTITUTED: Final = "substituted"
"""Why an answer is degraded that did without an expert which might not be loaded."""
_UNTUNED: Final = Tuned({}, None)


class TimeoutRunner(RunnerBefore):
    """A plan that stops between two native calls when the answer takes too long."""

    def __init__(self, runner: PlanRunner, monotonic: Callable[[], float]) -> None:
        super().__init__(runner)
        self._monotonic = monotonic
        self.deadline = float("inf")

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run one program.

        Raises:
            TimeoutError: The deadline has passed.
            ContractError: The plan ended with an error status.
        """
        if self._monotonic() > self.deadline:
            raise TimeoutError
        return self._runner.run(program, inputs)


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known of an answer when it has ended.

    Attributes:
        reasons: Why it is degraded by what came on the way.
        drain: See `energy.Energy`.
    """

    reasons: tuple[str, ...] = ()
    drain: float | None = None


class Assembly:
    """The runners of one loaded bundle and its keepers; used by one thread at a time."""

    def __init__(
        self,
        bundle: LoadedBundle,
        monotonic: Callable[[], float] = time.perf_counter,
        tuned: Tuned = _UNTUNED,
        degrade: DegradeKeeper | None = None,
        pager: PagerSwitch | Residency | None = None,
        energy: EnergyMeter | None = None,
        steering: SteeringKeeper | None = None,
    ) -> None:
        """Put it together; nothing runs yet.

        Args:
            bundle: Loaded; closed with this.
            monotonic: Clock in seconds.
            tuned: How it runs here, and who keeps its policy.
            degrade: Keeper of the rung.
            pager: Where experts come from, if they are paged; already told to the plan.
            energy: Says what answers cost.
            steering: Keeper of the bundle's routers.
        """
        self.manifest_sha256: Final = bundle.manifest_sha256
        self.pipeline: Final[Pipeline] = bundle.pipeline
        self.monotonic: Final = monotonic
        self._tuned, self._degrade, self._pager = tuned, degrade, pager
        self._energy, self._steering = energy, steering
        self._ladder, self._bands = bundle.ladder, bundle.bands
        self._native: ClosableRunner = bundle.runner
        nearest: PlanRunner = bundle.runner if steering is None else steering.runner
        self._timed = TimeoutRunner(nearest, monotonic)
        self._work = WorkRunner(self._timed, bundle.pipeline, bundle.work)
        watched = SentinelRunner(self._work, bundle.pipeline)
        self._banded = None if bundle.bands is None else BandedRunner(watched, bundle.bands)
        nearest = self._banded or watched
        self._standing, self._substitutes = standing_of(nearest, bundle), bundle.substitutes
        self.runner: Final[PlanRunner] = self._standing.runner if self._standing else nearest

    @property
    def facts(self) -> Mapping[str, object]:
        """Return what `status` shows of the running code."""
        facts = dict(self._tuned.facts)
        if self._tuned.keeper is not None:
            facts["policy_now"] = self._tuned.keeper.facts()
        if self._degrade is not None:
            facts["rung"] = int(self._degrade.present)
            facts["rules_revision"] = self._degrade.revision
            facts["degrade"] = {
                **self._degrade.facts(),
                "planned_bytes": {rung.name.lower(): size for rung, size in self._ladder.items()},
            }
        if self._banded is not None:
            facts["steps"] = dict(self._banded.ran)
        if self._standing is not None:
            facts["substitutes"] = self._standing.facts()
        if self._energy is not None:
            facts["energy"] = self._energy.facts()
            facts |= self._energy.gauges()
        if isinstance(self._pager, Residency):
            facts.update(self._pager.facts())
        if self._steering is not None:
            facts |= {"steering": self._steering.facts(), **self._steering.gauges()}
        return facts

    @property
    def lost_threads(self) -> int:
        """Lent threads that have died."""
        return self._native.lost_threads

    @property
    def rungs(self) -> frozenset[Rung]:
        """Return the rungs that this bundle has here; a way beyond them changes nothing."""
        is_paged = self._pager is not None
        return frozenset(rungs_of(self._bands, self._substitutes, is_paged=is_paged))

    @property
    def has_fallback(self) -> bool:
        """Whether it can do without routers here."""
        return self._standing is not None and self._standing.fallback is not None

    @property
    def is_stale(self) -> bool:
        """Whether a picture in the cache came of other layers than those that answer now."""
        return self._standing is not None and self._standing.runner.is_stale

    def begin(self, way: Way = AS_ASKED, deadline: float = float("inf")) -> tuple[str, ...]:
        """Set the plan up for an answer: on the present rung, or by `way`.

        Args:
            way: How this attempt runs.
            deadline: By the clock; runs after it raise `TimeoutError`.

        Returns:
            Why the answer is degraded from the start; empty if it is not.
        """
        rung = Rung.NORMAL if self._degrade is None else self._degrade.rung()
        take_rung(rung, self._banded, self._pager, self._steering, way, self._standing)
        if self._energy is not None:
            self._energy.begin()
        self._timed.deadline = deadline
        return self._degrade.reasons() if self._degrade and rung.changes_answers else ()

    def ended(self, seconds: float) -> Ending:
        """Count an answer that took so long."""
        if self._tuned.keeper is not None:
            self._tuned.keeper.answered()
        work = Work(seconds, *self._work.take())
        drain = None if self._energy is None else self._energy.answered(work).drain
        replaced = self._steering is not None and self._steering.answered()
        return Ending((SUBSTITUTED,) if replaced else (), drain)

    def judged(self, *, failed: bool, latency_ms: float | None) -> None:
        """Tell the rung how an answer went; latency is that of a whole one, milliseconds."""
        if self._degrade is not None:
            self._degrade.answered(failed=failed, latency_ms=latency_ms)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run on the caller's thread and by the plain policy; afterwards as before."""
        threads, present = self._native.threads, None
        if self._native.policy.is_supported:
            present = self._native.policy.present
            self._native.policy.publish(PLAIN.variants)
        self._native.threads = 1
        try:
            yield
        finally:
            self._native.threads = threads
            if present is not None:
                self._native.policy.use(present)

    def close(self) -> None:
        """Free the native memory; what was learned of experts is kept."""
        if isinstance(self._pager, Residency):
            self._pager.keep()
        self._native.close()


@dataclass(slots=True)
class Opening:
    """Loads one bundle, as often as it takes; rung and counts outlive a plan that is built anew.

    Attributes:
        load: Loads it.
        tune: Gives it its threads and its policy.
        rules: When it does less; or who says so.
        monotonic: Clock in seconds.
        energy: Says what answers cost; None = nobody.
        hotset: Where the use of experts is kept.
        steers: Whether routers go by what lies in memory, and by how sure they are.
    """

    load: Callable[[], LoadedBundle]
    tune: Callable[[LoadedBundle], Tuned] = lambda _bundle: _UNTUNED
    rules: Sequence[Rule] | RuleBook | DegradeKeeper = DEFAULT_RULES
    monotonic: Callable[[], float] = time.monotonic
    energy: EnergyMeter | None = None
    hotset: HotSetFile | None = None
    steers: bool = True
    _degrade: DegradeKeeper | None = None
    _residency: Residency | None = None
    _scrubbed: ScrubCounts = field(default_factory=ScrubCounts)
    _stalls: int = 0

    def open(self) -> Opened[Assembly]:
        """Load it.

        Raises:
            BundleError: It is incomplete, damaged, or does not run here.
        """
        bundle = self.load()
        try:
            tuned = self.tune(bundle)
            weights = getattr(bundle.runner, "weights", None)
            self._watch(residency_of(weights, self.monotonic, self.hotset))
            assembly = self._assembled(bundle, tuned)
        except ContractError as error:
            bundle.runner.close()
            raise BundleError(f"the bundle does not run: {error}", hint=error.hint) from error
        except BaseException:
            bundle.runner.close()
            raise
        return Opened(assembly, scrubber_of(bundle, self._scrubbed))

    def _assembled(self, bundle: LoadedBundle, tuned: Tuned) -> Assembly:
        is_paged = self._residency is not None
        steering = None
        if self.steers:
            steering = steering_keeper(bundle, self.monotonic, is_paged=is_paged)
        if self._degrade is None:
            self._degrade = self._keeper(
                rungs_of(bundle.bands, bundle.substitutes, is_paged=is_paged)
            )
        return Assembly(
            bundle,
            self.monotonic,
            tuned,
            self._degrade,
            self._residency,
            self.energy,
            steering,
        )

    def _keeper(self, rungs: Sequence[Rung]) -> DegradeKeeper:
        if isinstance(self.rules, DegradeKeeper):
            return self.rules
        return DegradeKeeper(self.rules, rungs, self.monotonic, self._gauges, self._observe_pool)

    def _gauges(self) -> dict[str, float | None]:
        watts = None if self.energy is None else self.energy.watts()
        return {**machine_gauges(), "power": watts}

    def _watch(self, residency: Residency | None) -> None:
        """Go on with the pool of a plan that was built anew; what was counted stays counted."""
        self._stalls += 0 if self._residency is None else self._residency.stalls
        self._residency = residency

    def _observe_pool(self) -> Observation:
        if self._residency is None:
            return no_pool()
        stalls = Counter(self._stalls + self._residency.stalls)
        return Observation(self._residency.gauges(), {"stalls": stalls})


def scrubber_of(bundle: LoadedBundle, counts: ScrubCounts) -> Scrubber | None:
    """Return who watches the weights of a loaded bundle; None if nothing is signed for them."""
    if not bundle.sections:
        return None
    digests = {name: sha256 for name, (sha256, _) in bundle.sections.items()}
    return Scrubber(bundle.runner.weights, digests, bundle.read, counts)
