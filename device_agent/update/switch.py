"""Steps from the switch on: activate, probation, commit or roll back, clean up.

load the new bundle beside the old one -> one write makes it the running one, on trial -> swap
probation passed -> trial ends, the security floor rises
anything else    -> one write makes the old one the running one -> swap
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from device_agent.config import AgentConfig
from device_agent.errors import AgentError, BundleError, DamagedError, StateLostError
from device_agent.machine import StepResult, describe
from device_agent.runtime.bundle import read_manifest
from device_agent.runtime.engine import Engine
from device_agent.runtime.host import SessionHost
from device_agent.states import Event, SlotFact
from device_agent.storage.denied import DenyList, Failure
from device_agent.storage.floors import FloorStore
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer, Slots
from device_agent.update.context import UpdateContext
from device_agent.update.low_space import LowSpace
from device_agent.update.probation import Probation

log = logging.getLogger("device_agent.update")


@dataclass(frozen=True, slots=True)
class SwitchSteps:
    """What the steps work with.

    Attributes:
        require_wanted: Asks the server; raises when it withdrew the update.
    """

    config: AgentConfig
    store: ObjectStore
    slots: Slots
    floors: FloorStore
    denied: DenyList
    engine: Engine
    host: SessionHost
    probation_watch: Probation
    low_space: LowSpace
    require_wanted: Callable[[UpdateContext], None]

    def activate(self, context: UpdateContext) -> StepResult:
        """Self-test in a child, load, ask once more, make it the running bundle, swap.

        A bundle that was committed here before has shown that it computes what it should.
        """
        table = self.slots.table
        if slot_fact(self.slots, context.manifest_sha256) is SlotFact.NOT_RUNNING:
            staged = table.other
            if staged is None or staged.manifest_sha256 != context.manifest_sha256:
                raise DamagedError("the staged bundle is gone")
            if not staged.committed:
                self.engine.self_test(staged)
            answerer = self.engine.start(staged)
            try:
                self.require_wanted(context)
                self.slots.activate()
            except BaseException:
                answerer.close()
                raise
            self.probation_watch.begin(context.manifest_sha256)
            self.host.swap(answerer)
        elif table.current is not None and not self.host.manifest_sha256:
            self.host.swap(self.engine.start(table.current))  # mended; it had not loaded
        return StepResult(Event.ACTIVATED, context)

    def probation(self, context: UpdateContext) -> StepResult | None:
        """Wait until the bundle has shown enough."""
        self.probation_watch.begin(context.manifest_sha256)
        current = self.slots.table.current
        # What was committed here before has nothing left to prove.
        proven = current is not None and current.committed
        duration_s = 0.0 if proven else self.config.probation_s
        if not self.probation_watch.is_passed(duration_s):
            return None
        return StepResult(Event.PASSED, context)

    def commit(self, context: UpdateContext) -> StepResult:
        """End the trial; from here on the device does not return by itself."""
        self.slots.commit()
        if self.low_space.job is not None:  # what it was made of is gone
            self.slots.drop_other()
            self.low_space.keep()
        self.probation_watch.end()
        self.denied.lift(context.manifest_sha256)
        current = self.slots.table.current
        try:
            floors = self.floors.load()
        except StateLostError as error:
            log.warning("floors: %s", describe(error))
        else:
            epoch, seq = (
                (0, 0) if current is None else (current.security_epoch, current.release_seq)
            )
            raised = floors.raised(
                security_floor=max(context.security_floor, epoch), release_seq=seq
            )
            if raised != floors:
                self.floors.save(raised)
        return StepResult(Event.COMMITTED, context.succeeded())

    def roll_back(self, context: UpdateContext) -> StepResult:
        """Make the bundle before the running one again, if the new one is the running one."""
        self.probation_watch.end()
        if slot_fact(self.slots, context.manifest_sha256) is SlotFact.ON_TRIAL:
            self.slots.revert()
        self.low_space.restore()
        self.run_current()
        return StepResult(Event.RESTORED, context)

    def clean(self, context: UpdateContext) -> StepResult:
        """Write down a bundle that failed by its own fault; drop what no slot points to."""
        if context.is_denied:
            denial = self.denied.add(_failure(context))
            log.warning("%s is not tried again: %s", context.version, denial.code)
        if self.low_space.job is not None:  # it ended before it ran
            self.low_space.restore()
            self.run_current()
        self.slots.unstage(context.manifest_sha256)
        try:
            keep = set(self._kept())
        except BundleError as error:
            log.warning("nothing was dropped: %s", describe(error))
        else:
            self.store.collect(keep)
        return StepResult(Event.CLEANED, context)

    def run_current(self) -> None:
        """Make the bundle of the active slot answer, if it does not already.

        A bundle that cannot be loaded leaves nobody to answer; the server sees it at the next poll.
        """
        current = self.slots.table.current
        if current is None:
            self.host.swap(None)
        elif self.host.manifest_sha256 != current.manifest_sha256:
            try:
                self.host.swap(self.engine.start(current))
            except AgentError as error:
                log.warning("the bundle %s does not load: %s", current.version, describe(error))
                self.host.swap(None)

    def _kept(self) -> Iterator[str]:
        table = self.slots.table
        for pointer in (table.current, table.other):
            if pointer is not None:
                yield from bundle_objects(self.store, pointer)


def bundle_objects(store: ObjectStore, pointer: Pointer) -> Iterator[str]:
    """Yield the digests of everything that an installed bundle is made of.

    Raises:
        BundleError: Its manifest is missing or damaged.
    """
    yield pointer.manifest_sha256
    for section in read_manifest(store, pointer.manifest_sha256, pointer.size_bytes).sections:
        yield section.sha256


def _failure(context: UpdateContext) -> Failure:
    return Failure(
        manifest_sha256=context.manifest_sha256,
        version=context.version,
        code=context.code,
        message=context.message,
        assignment_seq=context.assignment_seq,
        event=f"{context.update_id}.{context.attempt}",
    )


def slot_fact(slots: Slots, manifest_sha256: str) -> SlotFact:
    """Return what the slots say about a bundle."""
    if not slots.table.runs(manifest_sha256):
        return SlotFact.NOT_RUNNING
    return SlotFact.ON_TRIAL if slots.table.on_trial else SlotFact.COMMITTED
