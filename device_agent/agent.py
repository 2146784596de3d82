"""One agent: its folder, its parts, and how it starts.

State folder:

    identity/   device key, enrolment record        trust/    pinned roots, ngclient cache, floors,
                                                              bundles that failed here
    objects/    sections and manifests by digest    partial/  objects being written
    patching/   objects being patched in place
    slots/      which bundle runs                   journal   the update in progress
    spool/      telemetry batches                   run/      lock and status, not durable
"""

import logging
from collections.abc import Callable

from device_agent.api import DeviceApi
from device_agent.config import AgentConfig
from device_agent.enrolment import Enroller, Enrolment, load_enrolment
from device_agent.errors import AgentError, CrashLoopError, StateLostError
from device_agent.http import HttpClient
from device_agent.identity import DeviceKey, DeviceKeys
from device_agent.machine import Facts, Step, StepResult, UpdateMachine, describe
from device_agent.ports import Ports
from device_agent.runtime.host import SessionHost
from device_agent.states import State
from device_agent.storage.denied import DenyList
from device_agent.storage.floors import FloorStore
from device_agent.storage.guard import FolderLock
from device_agent.storage.journal import Journal
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Slots
from device_agent.storage.twin import TwinDocument
from device_agent.telemetry.counters import Counters
from device_agent.telemetry.spool import Spool
from device_agent.telemetry.upload import Uploader
from device_agent.update.context import UpdateContext
from device_agent.update.fetch import Fetcher
from device_agent.update.install import InstallSteps
from device_agent.update.loop import Poller, UpdateLoop
from device_agent.update.low_space import LowSpace
from device_agent.update.opening import Opener
from device_agent.update.probation import STUCK_TIMEOUTS, Probation
from device_agent.update.rules import RulesWatch
from device_agent.update.self_check import require_working_verifier
from device_agent.update.switch import SwitchSteps, slot_fact
from device_agent.update.verify import TrustFolder, Verifier

log = logging.getLogger("device_agent")


class Agent:
    """Everything one device is, without its threads."""

    def __init__(self, config: AgentConfig, ports: Ports | None = None) -> None:
        """Take the state folder and read what is in it.

        Raises:
            StateBusyError: Another agent has it.
            DiskError: It cannot be read.
        """
        self.config = config
        self.ports = ports or Ports()
        disk, clock, folder = self.ports.disk, self.ports.clock, config.state_dir
        self._lock = FolderLock(disk, folder / "run" / "lock").acquire()
        for name in ("slots", "trust"):
            disk.make_dir(folder / name)
        self.fingerprint = self.ports.fingerprint(config)
        self.store = ObjectStore(
            disk,
            folder,
            max_bytes=config.max_store_bytes,
            reserve_bytes=config.reserve_bytes,
        )
        self.slots = Slots(disk, folder / "slots")
        self.slots.load()
        self.trust = TrustFolder(disk, folder / "trust")
        self.floors = FloorStore(disk, folder / "trust")
        self.denied = DenyList(disk, folder / "trust", config.denied_s, self.unix_time)
        self.http = HttpClient(config, clock, self.ports.transport)
        self.keys = DeviceKeys(disk, folder / "identity")
        self.api = DeviceApi(self.http, self.keys, clock)
        self.engine = self.ports.engine(self.store, config)
        self.patcher = self.ports.patcher(self.store, disk, config)
        self.low_space = LowSpace(
            disk, folder, self.patcher, is_allowed=config.patch_in_place == "on"
        )
        self.host = SessionHost(STUCK_TIMEOUTS * config.answer_timeout_s)
        self.counters = Counters()
        self.spool = Spool(disk, folder / "spool", config.max_spool_batches)
        self.uploader = Uploader(self.counters, self.spool, self.api.telemetry, self.host.running)
        self.in_flight_s: Callable[[], float] = lambda: 0.0
        self.probation = Probation(config, clock.monotonic, lambda: self.in_flight_s())
        self.poller = Poller(self.api, self.host, self.counters, config, clock)
        self._journal = Journal(disk, folder / "journal")
        self.machine: UpdateMachine | None = None
        self.loop: UpdateLoop | None = None
        self.rules: RulesWatch | None = None

    def unix_time(self) -> int:
        """Return the time, never before that of the last verified metadata, seconds."""
        return int(self.floors.time(self.ports.clock.now()).timestamp())

    @property
    def key(self) -> DeviceKey:
        """Return the key of this device; it may be replaced."""
        return self.api.key

    def enrolment(self) -> Enrolment:
        """Return the enrolment record.

        Raises:
            NotEnrolledError: There is none.
        """
        return load_enrolment(self.ports.disk, self.config.state_dir / "identity")

    def enrol(self, *, accept_state_loss: bool = False) -> Enrolment:
        """Introduce this device to the server; see `Enroller.enrol`."""
        folder = self.config.state_dir / "identity"
        enroller = Enroller(self.config, self.ports.disk, folder, self.trust, self.floors)
        return enroller.enrol(self.api, self.fingerprint, accept_state_loss=accept_state_loss)

    def rotate_key(self) -> str:
        """Replace the key of this device; return the thumbprint of the new one.

        Raises:
            NotEnrolledError: Enrol first.
            RefusedError: The server does not want that; the key stays.
            NetworkError: It is unknown what the server did; either key goes on working.
        """
        self.api.device_id = self.enrolment().device_id
        return self.api.rotate_key()

    def boot(self) -> UpdateLoop:
        """Start the installed bundle, take up an interrupted update, and return the update loop.

        A bundle on trial is counted before it is loaded, so that one that brings the agent down
        each time is given up.

        Raises:
            NotEnrolledError: Enrol first.
            TrustError: This agent does not refuse forged metadata; it must not run.
        """
        require_working_verifier()
        enrolment = self.enrolment()
        self.api.device_id = enrolment.device_id
        verifier = self._verifier(enrolment)
        self.rules = RulesWatch(
            verifier,
            self.engine.rules,
            TwinDocument(self.ports.disk, self.config.state_dir / "trust", "rules"),
            self.config.rules_s,
            self.ports.clock.monotonic,
        )
        machine = self._machine(verifier)
        self.machine, self.loop = (
            machine,
            UpdateLoop(machine, self.poller, self.api, self.ports.clock, self.unix_time),
        )
        if self.slots.was_damaged:
            log.warning("the slot table is damaged; beginning without a bundle")
        context = machine.context
        self._settle_patching(machine)
        error = self._start_current()
        if context is not None:
            machine.resume(slot_fact(self.slots, context.manifest_sha256), error)
        if machine.state is State.ROLLING_BACK:
            machine.advance()
        elif self.slots.table.on_trial and machine.state is State.IDLE:
            self._settle_orphan_trial()
        return self.loop

    def close(self) -> None:
        """Stop answering and let the folder go."""
        self.host.swap(None)
        self._journal.close()
        self.http.close()
        self._lock.release()

    def _start_current(self) -> AgentError | None:
        """Load the bundle of the active slot; return why a trial has to be given up."""
        table = self.slots.table
        if table.current is None:
            return None
        if self.low_space.blocks(table.current):
            log.warning("the bundle %s is being patched: nothing answers", table.current.version)
            return None
        if table.on_trial:
            starts = self.slots.count_start()
            if starts > self.config.activation_tries:
                return CrashLoopError(f"{starts} starts without passing probation")
        try:
            self.host.swap(self.engine.start(table.current))
        except AgentError as error:
            log.warning("the bundle %s does not load: %s", table.current.version, describe(error))
            if table.on_trial:
                return error
            self._fall_back()
        return None

    def _fall_back(self) -> None:
        """Run the bundle before, if it ran here once and its epoch allows it."""
        other = self.slots.table.other
        try:
            floor = self.floors.load().security_floor
        except StateLostError:
            return
        if other is None or not other.committed or other.security_epoch < floor:
            return
        try:
            answerer = self.engine.start(other)
        except AgentError as error:
            log.warning("the bundle before does not load either: %s", describe(error))
            return
        self.slots.revert()
        self.host.swap(answerer)
        log.warning("running %s again", other.version)

    def _settle_patching(self, machine: UpdateMachine) -> None:
        """End patching in place that no update knows of: back, or kept if the new bundle runs."""
        job, context = self.low_space.job, machine.context
        if job is None:
            return
        is_known = machine.state is not State.IDLE and context is not None
        if is_known and context is not None and context.manifest_sha256 == job.new_sha256:
            return
        if self.slots.table.runs(job.new_sha256):
            self.slots.commit()
            self.slots.drop_other()
            self.low_space.keep()
        else:
            self.low_space.restore()

    def _settle_orphan_trial(self) -> None:
        """End a trial that no journal knows of: back to what is known to run, if there is such."""
        other = self.slots.table.other
        if other is not None and other.committed:
            answerer = self.engine.start(other)
            self.slots.revert()
            self.host.swap(answerer)
        else:
            self.slots.commit()

    def _machine(self, verifier: Verifier) -> UpdateMachine:
        install, switch = self._install_steps(verifier), self._switch_steps()
        steps: dict[State, Step] = {
            State.VERIFYING: install.verify,
            State.DOWNLOADING: install.download,
            State.APPLYING: install.apply,
            State.STAGING: install.stage,
            State.ACTIVATING: switch.activate,
            State.PROBATION: switch.probation,
            State.COMMITTING: switch.commit,
            State.ROLLING_BACK: switch.roll_back,
            State.CLEANING: switch.clean,
        }
        facts = Facts(
            running_sha256=lambda: self.host.manifest_sha256,
            fetched_bytes=install.fetched_bytes,
            release_space=lambda _context: self.store.drop_partials(),
        )
        watched = {state: self._watched(state, step) for state, step in steps.items()}
        return UpdateMachine(self._journal, watched, facts)

    def _verifier(self, enrolment: Enrolment) -> Verifier:
        return Verifier(
            api=self.api,
            http=self.http,
            config=self.config,
            tuf_path=enrolment.tuf_path,
            trust=self.trust,
            floors=self.floors,
            known_manifest=self.store.known_bytes,
            fingerprint=lambda: self.fingerprint,
            clock=self.ports.clock,
        )

    def _install_steps(self, verifier: Verifier) -> InstallSteps:
        clock = self.ports.clock
        return InstallSteps(
            config=self.config,
            clock=clock,
            disk=self.ports.disk,
            store=self.store,
            slots=self.slots,
            denied=self.denied,
            verifier=verifier,
            fetcher=Fetcher(self.api, self.store, self.config, clock),
            opener=Opener(self.store, self.keys.seal, lambda: self.api.device_id),
            patcher=self.patcher,
            low_space=self.low_space,
            keeps_in_memory=self.engine.keeps_in_memory,
            answering=lambda: self.host.manifest_sha256,
            stop_answering=lambda: self.host.swap(None),
            require_wanted=self.poller.watch.require_wanted,
        )

    def _switch_steps(self) -> SwitchSteps:
        return SwitchSteps(
            config=self.config,
            store=self.store,
            slots=self.slots,
            floors=self.floors,
            denied=self.denied,
            engine=self.engine,
            host=self.host,
            probation_watch=self.probation,
            low_space=self.low_space,
            require_wanted=self.poller.watch.require_wanted_now,
        )

    def _watched(self, state: State, step: Step) -> Step:
        checkpoint = self.ports.checkpoint

        def run(context: UpdateContext) -> StepResult | None:
            checkpoint(f"{state.value}:before")
            result = step(context)
            checkpoint(f"{state.value}:after")
            return result

        return run
