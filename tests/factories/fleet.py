"""Rows and simulated devices of the fleet app: real services, real documents, a fake clock."""

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from builds.common.auth import Actor
from builds.common.roles import Role
from builds.models import Bundle, Model, ModelVersion, Target
from compiler.contract.fingerprint import TARGET_LADDER
from compiler.contract.fingerprint import Fingerprint as FingerprintFacts
from compiler.contract.protocol import (
    Offer,
    OfferKind,
    PollAnswer,
    UpdateReport,
    UpdateState,
    parse_poll_answer,
)
from compiler.contract.telemetry import Sketch, TelemetryBatch
from fleet.cohorts import Goal
from fleet.edge.snapshot import Snapshot, snapshot_build
from fleet.models import Device, Fingerprint, Group, Heartbeat, Rollout
from fleet.services.plans import RolloutRequest
from fleet.services.reports import update_report
from fleet.services.rollouts import rollout_create, rollout_start
from fleet.services.running import Beat, heartbeats_store
from fleet.services.telemetry import telemetry_ingest
from fleet.services.tick import fleet_tick
from fleet.states import DeviceState
from tests.factories.builds import make_bundle, make_model, make_target, make_version

_numbers = itertools.count(1)
TARGETS = ("x86-64-v3", "x86-64-v2", "x86-64-v1")
MANAGER = Actor(name="release-manager", role=Role.RELEASE_MANAGER)
INSTALL_WAY = (
    UpdateState.DOWNLOADING,
    UpdateState.DOWNLOADED,
    UpdateState.APPLYING,
    UpdateState.STAGED,
    UpdateState.ACTIVATING,
    UpdateState.PROBATION,
    UpdateState.SUCCEEDED,
)
ROLLBACK_WAY = (UpdateState.ACTIVATING, UpdateState.SUCCEEDED)


class SteppedClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.at = datetime(2026, 11, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self.at

    def advance(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


def facts(target: str = "x86-64-v3", device_class: str = "pc") -> FingerprintFacts:
    """Return the facts of a device that gets this target."""
    features = next(row[2] for row in TARGET_LADDER if row[0] == target)
    return FingerprintFacts(
        machine="x86_64",
        soc="Test SoC",
        os="linux",
        isa_features=tuple(sorted(features)),
        cores=2,
        l1d_kb=32,
        l2_kb=512,
        l3_kb=0,
        ram_bucket_mb=4096,
        page_kb=4,
        accelerator="",
        driver="",
        device_class=device_class,
        agent_abi=1,
    )


def new_key() -> tuple[Ed25519PrivateKey, bytes]:
    """Return a private key and its raw public key."""
    key = Ed25519PrivateKey.generate()
    return key, key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def make_device(
    model: Model | None = None,
    target: Target | str = "x86-64-v3",
    *,
    running: Bundle | None = None,
    state: DeviceState = DeviceState.ACCEPTED,
    device_class: str = "pc",
    at: datetime | None = None,
    tags: Iterable[str] = (),
    serial: str = "",
) -> Device:
    """Return a member device, heard from just now; its serial decides its identity."""
    serial = serial or f"serial-{next(_numbers):05d}"
    target = make_target(target) if isinstance(target, str) else target
    document = facts(target.name, device_class)
    fingerprint, _ = Fingerprint.objects.get_or_create(
        sha256=document.sha256, defaults={"document": document.to_json()}
    )
    thumbprint = hashlib.sha256(serial.encode()).hexdigest()
    at = at or datetime(2026, 11, 1, tzinfo=UTC)
    device = Device.objects.create(
        device_id=thumbprint[:32],
        serial=serial,
        name=f"device {serial}",
        key_thumbprint=thumbprint,
        public_key=bytes(32),
        state=state.value,
        fingerprint=fingerprint,
        target=target,
        device_class=device_class,
        tags=list(tags),
        model=model or make_model(),
        running_bundle=running,
        running_manifest_sha256=running.manifest_sha256 if running else "",
        running_at=at if running else None,
        enrolled_at=at,
    )
    Heartbeat.objects.create(device=device, at=at)
    return device


def make_group(model: Model, **device_filter: object) -> Group:
    """Return a new group of all devices of the model, or of those that the filter lets in."""
    return Group.objects.create(
        name=f"group-{next(_numbers)}", model=model, filter=dict(device_filter)
    )


def make_release(
    model: Model, targets: Iterable[str] = TARGETS
) -> tuple[ModelVersion, dict[str, Bundle]]:
    """Return a new version with a bundle per target."""
    version = make_version(model)
    return version, {name: make_bundle(version, make_target(name)) for name in targets}


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a version answers; rates per answer, latency in milliseconds."""

    failure_rate: float = 0.0005
    latency_ms: float = 5.0
    latency_sigma: float = 0.3
    accuracy: float = 0.9
    install_fails: bool = False
    goes_silent: bool = False


GOOD = Behaviour()
BAD = Behaviour(failure_rate=0.05, latency_ms=18.0, latency_sigma=1.0, accuracy=0.4)


@dataclass(slots=True)
class SimulatedDevice:
    """An agent in a few lines: polls, walks through updates one state per step, answers."""

    pk: int
    running: str
    rng: np.random.Generator
    boot_id: str
    telemetry_seq: int = 0
    offer: Offer | None = None
    position: int = 0
    report_seq: int = 0
    is_on: bool = True
    previous: str = ""
    waiting_s: int = 0
    tag: tuple[int | None, str] = (None, "")
    sent: list[UpdateReport] = field(default_factory=list)

    def step(self, fleet: "SimulatedFleet", answer: PollAnswer) -> None:
        """Do what an agent does in one second, after its poll."""
        if answer.offer != self.offer:
            self.offer, self.position, self.report_seq = answer.offer, 0, 0
        if self.offer is not None:
            self._advance(fleet, self.offer)
        if self.running and fleet.answers_per_s:
            self.waiting_s += 1
            if self.waiting_s >= fleet.telemetry_s or self.tag != (answer.stage, answer.arm):
                self._answer(fleet, answer.rollout_id, answer.stage, answer.arm)
                self.waiting_s = 0
            self.tag = (answer.stage, answer.arm)

    def report(self, fleet: "SimulatedFleet", state: UpdateState, code: str = "") -> None:
        """Report where the update of the current offer stands."""
        assert self.offer is not None
        self.report_seq += 1
        fact = UpdateReport(
            update_id=self.offer.update_id,
            attempt=self.offer.attempt,
            seq=self.report_seq,
            state=state,
            running_manifest_sha256=self.running,
            downloaded_bytes=1_000,
            code=code,
            message="",
        )
        self.sent.append(fact)
        update_report(device_pk=self.pk, report=fact, clock=fleet.clock)

    def _advance(self, fleet: "SimulatedFleet", offer: Offer) -> None:
        behaviour = fleet.behaviour(offer.manifest_sha256)
        is_install = offer.kind == OfferKind.INSTALL
        way = INSTALL_WAY if is_install else ROLLBACK_WAY
        if self.position >= len(way):
            return
        state = way[self.position]
        self.position += 1
        if is_install and behaviour.install_fails and state == UpdateState.ACTIVATING:
            self.position = len(way)
            self.report(fleet, UpdateState.FAILED, "agent.selftest")
            return
        if state in (UpdateState.PROBATION, UpdateState.SUCCEEDED):
            if self.running != offer.manifest_sha256:
                self.previous = self.running
            self.running = offer.manifest_sha256
        self.report(fleet, state)
        if is_install and behaviour.goes_silent and state == UpdateState.PROBATION:
            self.is_on = False

    def _answer(
        self, fleet: "SimulatedFleet", rollout_id: int | None, stage: int | None, arm: str
    ) -> None:
        behaviour = fleet.behaviour(self.running)
        answers = int(self.rng.poisson(fleet.answers_per_s * max(1, self.waiting_s)))
        sketch = Sketch()
        for latency in self.rng.lognormal(
            np.log(behaviour.latency_ms), behaviour.latency_sigma, answers
        ):
            sketch.add(float(latency))
        batch = TelemetryBatch(
            boot_id=self.boot_id,
            seq=self.telemetry_seq,
            manifest_sha256=self.running,
            rollout_id=rollout_id,
            stage=stage,
            arm=arm,
            answers=answers,
            failures=int(self.rng.binomial(answers, behaviour.failure_rate)),
            scored=answers,
            correct=int(self.rng.binomial(answers, behaviour.accuracy)),
            degraded=0,
            latency_ms=sketch,
        )
        self.telemetry_seq += 1
        telemetry_ingest(device_pk=self.pk, batch=batch, clock=fleet.clock)


class SimulatedFleet:
    """Fifteen devices of three targets, and the platform's tick, second by second.

    What happens depends on `seed` alone, not on row numbers, which depend on the tests before:
    devices are who they are, and draw what they draw, by their serials, and rollouts order them by
    known salts. Two fleets in one test need two seeds.
    """

    def __init__(self, *, per_target: int = 5, seed: int = 1, running: bool = True) -> None:
        self.seed = seed
        self.rollouts = 0
        self.clock = SteppedClock()
        self.model = make_model()
        self.version, self.bundles = make_release(self.model)
        self.group = make_group(self.model)
        self.behaviours: dict[str, Behaviour] = {}
        self.answers_per_s = 4.0
        self.telemetry_s = 3
        self.devices: list[SimulatedDevice] = []
        for target in TARGETS:
            for _ in range(per_target):
                number = len(self.devices)
                bundle = self.bundles[target] if running else None
                serial = f"simulated-{seed}-{number:03d}"
                row = make_device(
                    self.model, target, running=bundle, at=self.clock.now(), serial=serial
                )
                self.devices.append(
                    SimulatedDevice(
                        pk=row.pk,
                        running=bundle.manifest_sha256 if bundle else "",
                        rng=np.random.default_rng([seed, number]),
                        boot_id=f"boot{number:08d}",
                    )
                )

    def behaviour(self, manifest_sha256: str) -> Behaviour:
        """Return how the bundle answers."""
        return self.behaviours.get(manifest_sha256, GOOD)

    def release(self, behaviour: Behaviour = GOOD) -> dict[str, Bundle]:
        """Return the bundles of a new version that behaves so."""
        self.version, bundles = make_release(self.model)
        for bundle in bundles.values():
            self.behaviours[bundle.manifest_sha256] = behaviour
        return bundles

    def rollout(
        self,
        percents: Iterable[float] = (20, 50, 100),
        gate: Mapping[str, object] | None = None,
        *,
        start: bool = True,
    ) -> Rollout:
        """Make (and start) a rollout of the newest version to everybody."""
        request = RolloutRequest(
            model=self.model.name,
            version=self.version.version,
            group=self.group.name,
            goals=[Goal(percent=percent) for percent in percents],
            gate={"profile": "lab", "delta_wait_s": 0, **(gate or {})},
        )
        rollout = rollout_create(actor=MANAGER, request=request, clock=self.clock)
        self.rollouts += 1
        rollout.salt = f"salt of rollout {self.rollouts}"
        rollout.save(update_fields=["salt"])
        if start:
            rollout_start(actor=MANAGER, rollout_id=rollout.pk, clock=self.clock)
            rollout.refresh_from_db()
        return rollout

    def run(
        self, seconds: int, *, until: Iterable[str] = (), rollout: Rollout | None = None
    ) -> int:
        """Let time pass; stop early when the rollout is in one of the states; return seconds."""
        ends = set(until)
        for second in range(1, seconds + 1):
            self.clock.advance(1)
            self.poll_all()
            fleet_tick(clock=self.clock)
            if rollout is not None and ends:
                rollout.refresh_from_db()
                if rollout.state in ends:
                    return second
        return seconds

    def poll_all(self) -> None:
        """Let every device that is on poll and act, in one snapshot."""
        live = [device for device in self.devices if device.is_on]
        heartbeats_store(
            beats=[Beat(device.pk, self.clock.now(), device.running) for device in live]
        )
        snapshot: Snapshot = snapshot_build()
        for device in live:
            answer = snapshot.answers.get(device.pk, snapshot.idle)
            device.step(self, parse_poll_answer(answer.body))

    def running_counts(self) -> dict[str, int]:
        """Return manifest -> number of devices that really run it."""
        counts: dict[str, int] = {}
        for device in self.devices:
            counts[device.running] = counts.get(device.running, 0) + 1
        return counts
