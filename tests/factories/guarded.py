"""A compiled EdgeCard in an object store, guarded, and its answers by their bits."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compiler.contract.canonical import sha256_hex
from compiler.contract.fingerprint import target_of
from compiler.contract.native import NativePlan
from compiler.contract.pager import Pager, PagerSwitch
from device_agent.probe.linux import probe
from device_agent.runtime.answers import AnswerRecord, BundleAnswerer, Question
from device_agent.runtime.assembly import Assembly, scrubber_of
from device_agent.runtime.bundle import load_bundle
from device_agent.runtime.custody import Opened
from device_agent.runtime.guard import InferenceGuard
from device_agent.runtime.scrubber import ScrubCounts
from device_agent.runtime.weights import WeightPool
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer
from tests.factories.bundles import compiled

TIMEOUT_S = 30.0
"""Nothing here takes as long, on a machine however busy."""


@dataclass
class Installed:
    """EdgeCard in a store that lies in `folder`."""

    folder: Path
    store: ObjectStore
    pointer: Pointer


def installed(folder: Path) -> Installed:
    """Compile EdgeCard for this machine and put it in a store below `folder`."""
    bundle = compiled("v1", target_of(probe(device_class="pc")), folder)
    store = ObjectStore(Disk(), folder / "state", max_bytes=1 << 30)
    for data in bundle.sections.values():
        store.put(bytes(data), sha256_hex(bytes(data)))
    manifest = bundle.manifest.to_bytes()
    store.put(manifest, sha256_hex(manifest))
    return Installed(folder / "state", store, Pointer(sha256_hex(manifest), len(manifest), "1", 1))


@dataclass
class Guarded:
    """A guard over EdgeCard whose plans tell the bits of everything they put out.

    Attributes:
        banded: With the variant of fewer experts; without, every attempt has the same bits.
        pager: Asked about experts; None = all are in memory.
        wrap: Put around each plan that is loaded.
    """

    at: Installed
    banded: bool = False
    threads: int = 1
    timeout_s: float = TIMEOUT_S
    scrubbed: bool = True
    pager: Pager | None = None
    is_critical: Callable[[], bool] = lambda: False
    wrap: Callable[[NativePlan], object] = lambda plan: plan
    plans: list[NativePlan] = field(default_factory=list)
    scrubbed_counts: ScrubCounts = field(default_factory=ScrubCounts)
    bits: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def __post_init__(self) -> None:
        self.guard = InferenceGuard(self._open, self.timeout_s, lambda: self.is_critical())

    @property
    def plan(self) -> NativePlan:
        return self.plans[-1]

    def ask(self, question: Question) -> tuple[AnswerRecord, str]:
        """Return the record, and the hash of what the last attempt computed."""
        self.bits = hashlib.sha256()
        return self.guard.answer(question), self.bits.hexdigest()

    def _open(self) -> Opened:
        bundle = load_bundle(self.at.store, self.at.pointer, WeightPool())
        plan = bundle.runner
        assert isinstance(plan, NativePlan)
        plan.threads = self.threads
        self.plans.append(plan)
        runner: Any = self.wrap(plan)
        run = runner.run

        def told(program: str, inputs: Mapping[str, bytes]) -> Mapping[str, memoryview]:
            if program == "see":
                self.bits = hashlib.sha256()
            outputs = run(program, inputs)
            for role in sorted(outputs):
                self.bits.update(outputs[role])
            return outputs

        runner.run = told
        switch = None if self.pager is None else PagerSwitch(self._page)
        if switch is not None:
            plan.set_pager(switch)
        shown = replace(bundle, runner=runner)
        shown = shown if self.banded else replace(shown, bands=None)
        answerer = BundleAnswerer(Assembly(shown, pager=switch), self.timeout_s)
        scrubber = scrubber_of(bundle, self.scrubbed_counts)
        return Opened(answerer, scrubber if self.scrubbed else None)

    def _page(self, event: object, weight: int) -> bool:
        return self.pager is None or self.pager(event, weight)  # type: ignore[arg-type]
