"""The engine port: test a bundle, start a bundle. The real one runs native code."""

import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from compiler.contract.errors import ContractError
from device_agent.errors import BundleError, SelfTestFailedError
from device_agent.runtime.affinity import AUTO
from device_agent.runtime.answers import Answerer, BundleAnswerer
from device_agent.runtime.assembly import Opening
from device_agent.runtime.bundle import LoadedBundle, load_bundle
from device_agent.runtime.children import run_module
from device_agent.runtime.custody import Opened
from device_agent.runtime.degrade_keeper import DEFAULT_RULES
from device_agent.runtime.energy import UNVERIFIED, EnergyMeter, EnergyModel
from device_agent.runtime.guard import Attempts, InferenceGuard
from device_agent.runtime.heat import CriticalHeat
from device_agent.runtime.rule_book import RuleBook
from device_agent.runtime.tuning import Tuned, tune
from device_agent.runtime.weights import WeightPool
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer

_PROCESS: Final = "device_agent.runtime.self_test_process"
MAX_OUTPUT_SHOWN: Final = 300


class Engine(Protocol):
    """Runs bundles."""

    @property
    def rules(self) -> RuleBook:
        """When a bundle does less."""

    @property
    def keeps_in_memory(self) -> bool:
        """Whether a bundle that runs needs its objects no more."""

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

    @property
    def keeps_in_memory(self) -> bool:
        """Whether all weights are in memory, so that the objects may change; see `Engine`."""
        return not self.weights.budget_bytes

    def self_test(self, pointer: Pointer) -> None:
        """Run the self-test in a child; see `Engine`."""
        arguments = [
            str(self.state_dir.resolve()),
            pointer.manifest_sha256,
            str(pointer.size_bytes),
            str(self.weights.budget_bytes),
        ]
        try:
            done = run_module(_PROCESS, arguments, self.self_test_timeout_s)
        except subprocess.TimeoutExpired:
            raise SelfTestFailedError(
                f"the self-test was not finished after {self.self_test_timeout_s:g} s"
            ) from None
        except OSError as error:
            raise SelfTestFailedError(f"the self-test cannot be started: {error}") from error
        _require_passed(done)

    def start(self, pointer: Pointer) -> InferenceGuard:
        """Load the bundle, guarded; see `Engine`."""
        opening = Opening(
            load=lambda: load_bundle(self.store, pointer, self.weights),
            tune=self.tune,
            rules=self.rules,
            energy=EnergyMeter(self.energy, tdp_watts=self.tdp_w or None),
            hotset=self.weights.hotset,
            steers=self.steers,
        )

        def open_answerer() -> Opened[Attempts]:
            opened = opening.open()
            try:
                answerer = BundleAnswerer(opened.answerer, self.answer_timeout_s)
            except ContractError as error:
                opened.answerer.close()
                raise BundleError(f"the bundle does not answer: {error}") from error
            return Opened(answerer, opened.scrubber)

        heat = CriticalHeat(time.monotonic)
        return InferenceGuard(open_answerer, self.answer_timeout_s, heat.is_critical)

    def tune(self, bundle: LoadedBundle) -> Tuned:
        """Give a loaded bundle its threads and its policy; see `tune`.

        Raises:
            ContractError: The plan ended with an error status.
        """
        return tune(bundle, self.threads, self.cpus)


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
