"""The engine port: test a bundle, start a bundle. The real one runs native code."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from compiler.contract.errors import ContractError
from device_agent.errors import BundleError, SelfTestFailedError
from device_agent.runtime.affinity import AUTO
from device_agent.runtime.answers import Answerer, BundleAnswerer
from device_agent.runtime.bundle import LoadedBundle, load_bundle
from device_agent.runtime.degrade import Counter, Observation
from device_agent.runtime.degrade_keeper import (
    DEFAULT_RULES,
    DegradeKeeper,
    machine_gauges,
    rungs_of,
)
from device_agent.runtime.energy import UNVERIFIED, EnergyMeter, EnergyModel
from device_agent.runtime.guard import InferenceGuard, Opened
from device_agent.runtime.heat import CriticalHeat
from device_agent.runtime.residency import Residency, residency_of
from device_agent.runtime.rule_book import RuleBook
from device_agent.runtime.scrubber import Scrubber, ScrubCounts
from device_agent.runtime.signals import no_pool
from device_agent.runtime.steering_keeper import steering_keeper
from device_agent.runtime.tuning import Tuned, tune
from device_agent.runtime.weights import WeightPool
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer

_PROCESS: Final = "device_agent.runtime.self_test_process"
_PACKAGE_ROOT: Final = Path(__file__).resolve().parents[2]
MAX_OUTPUT_SHOWN: Final = 300


class Engine(Protocol):
    """Runs bundles."""

    @property
    def rules(self) -> RuleBook:
        """When a bundle does less."""

    def self_test(self, pointer: Pointer) -> None:
        """Check that the bundle computes here what it computed at its birth.

        Raises:
            SelfTestFailedError: It does not, or it crashed, hung, or does not load.
        """

    def start(self, pointer: Pointer) -> Answerer:
        """Load the bundle.

        Raises:
            BundleError: It is incomplete, damaged, or does not load.
        """


@dataclass(frozen=True, slots=True)
class NativeEngine:
    """Runs the native code of a bundle; the self-test in a child process.

    Attributes:
        store: Holds the sections.
        state_dir: The folder of `store`, for the child.
        self_test_timeout_s: The child is killed after this, seconds.
        answer_timeout_s: Limit of one answer, seconds.
        threads: Threads of one answer; 0 = as many as help, at most one per core.
        cpus: Where lent threads run: `auto`, `off` or a list of cores.
        weights: Those in memory, and how many there may be: a bundle that changes only code or tape
            shares them with the one that runs, so it starts without copying them.
        rules: When a bundle does less.
        tdp_w: Power budget of the device, watts; 0 = it was not told.
        energy: Estimates what answers take where no counter is.
        steers: Whether routers go by what lies in memory, and by how sure they are.
    """

    store: ObjectStore
    state_dir: Path
    self_test_timeout_s: float
    answer_timeout_s: float
    threads: int = 0
    cpus: str = AUTO
    weights: WeightPool = field(default_factory=WeightPool)
    rules: RuleBook = field(default_factory=lambda: RuleBook(DEFAULT_RULES))
    tdp_w: float = 0.0
    energy: EnergyModel = UNVERIFIED
    steers: bool = True

    def self_test(self, pointer: Pointer) -> None:
        """Run the self-test in a child; see `Engine`."""
        command = [
            sys.executable,
            "-m",
            _PROCESS,
            str(self.state_dir.resolve()),
            pointer.manifest_sha256,
            str(pointer.size_bytes),
            str(self.weights.budget_bytes),
        ]
        try:
            done = subprocess.run(  # noqa: S603 -- our own module
                command,
                cwd=_PACKAGE_ROOT,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.self_test_timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SelfTestFailedError(
                f"the self-test was not finished after {self.self_test_timeout_s:g} s"
            ) from None
        except OSError as error:
            raise SelfTestFailedError(f"the self-test cannot be started: {error}") from error
        _require_passed(done)

    def start(self, pointer: Pointer) -> InferenceGuard:
        """Load the bundle, guarded; see `Engine`."""
        opening = _Opening(self, pointer)
        heat = CriticalHeat(time.monotonic)
        return InferenceGuard(opening.open, self.answer_timeout_s, heat.is_critical)

    def tune(self, bundle: LoadedBundle) -> Tuned:
        """Give a loaded bundle its threads and its policy; see `tune`.

        Raises:
            ContractError: The plan ended with an error status.
        """
        return tune(bundle, self.threads, self.cpus)


class _Opening:
    """Loads one bundle, as often as it takes; the rung outlives a plan that is built anew."""

    def __init__(self, engine: NativeEngine, pointer: Pointer) -> None:
        self._engine, self._pointer = engine, pointer
        self._degrade: DegradeKeeper | None = None
        self._energy = EnergyMeter(engine.energy, tdp_watts=engine.tdp_w or None)
        self._residency: Residency | None = None
        self._scrubbed = ScrubCounts()
        self._stalls = 0

    def open(self) -> Opened:
        """Load it.

        Raises:
            BundleError: It is incomplete, damaged, or does not answer.
        """
        engine = self._engine
        bundle = load_bundle(engine.store, self._pointer, engine.weights)
        try:
            tuned = engine.tune(bundle)
            self._watch(residency_of(bundle.runner.weights, time.monotonic, engine.weights.hotset))
            is_paged = self._residency is not None
            keeper = None
            if engine.steers:
                keeper = steering_keeper(bundle, time.monotonic, is_paged=is_paged)
            if self._degrade is None:
                rungs = rungs_of(bundle.bands, is_paged=is_paged)
                self._degrade = DegradeKeeper(
                    engine.rules, rungs, time.monotonic, self._gauges, self._observe_pool
                )
            answerer = BundleAnswerer(
                bundle,
                engine.answer_timeout_s,
                facts=tuned.facts,
                keeper=tuned.keeper,
                degrade=self._degrade,
                pager=self._residency,
                energy=self._energy,
                steering=keeper,
            )
        except ContractError as error:
            bundle.runner.close()
            raise BundleError(f"the bundle does not answer: {error}") from error
        return Opened(answerer, scrubber_of(engine.store, bundle, self._scrubbed))

    def _gauges(self) -> dict[str, float | None]:
        return {**machine_gauges(), "power": self._energy.watts()}

    def _watch(self, residency: Residency | None) -> None:
        """Go on with the pool of a plan that was built anew; what was counted stays counted."""
        self._stalls += 0 if self._residency is None else self._residency.stalls
        self._residency = residency

    def _observe_pool(self) -> Observation:
        if self._residency is None:
            return no_pool()
        stalls = Counter(self._stalls + self._residency.stalls)
        return Observation(self._residency.gauges(), {"stalls": stalls})


def scrubber_of(store: ObjectStore, bundle: LoadedBundle, counts: ScrubCounts) -> Scrubber:
    """Return who watches the weights of a loaded bundle against its manifest."""
    digests = {name: sha256 for name, (sha256, _) in bundle.sections.items()}

    def read(name: str) -> memoryview:
        return store.read_verified(*bundle.sections[name])

    return Scrubber(bundle.runner.weights, digests, read, counts)


def _require_passed(done: "subprocess.CompletedProcess[bytes]") -> None:
    if done.returncode == 0:
        return
    if done.returncode < 0:
        raise SelfTestFailedError(f"the self-test was ended by signal {-done.returncode}")
    shown = done.stderr.decode("utf-8", "replace").strip()[-MAX_OUTPUT_SHOWN:]
    try:
        report = json.loads(done.stdout)
        shown = f"{report['failed_vectors']} of {report['vectors']} vectors differ"
    except (ValueError, KeyError, TypeError):
        pass
    raise SelfTestFailedError(f"self-test status {done.returncode}: {shown}")
