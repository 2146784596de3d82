"""A small world for page tests: a model, three versions, devices, one good and one bad rollout.

Rows are made with the factories of the apps; the verdicts of the gate come from the gate itself.
"""

import hashlib
import itertools
import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.utils import timezone

from builds.common.audit import audit
from builds.models import (
    BuildJob,
    BuildLogLine,
    BuildTransition,
    Bundle,
    Delta,
    Model,
    ModelVersion,
    Target,
)
from builds.services.targets import targets_seed
from builds.states import BuildState, DeltaState, VersionState
from compiler.contract.fingerprint import TARGET_LADDER, Fingerprint
from compiler.contract.telemetry import Sketch
from fleet import models as fleet
from fleet.gates import PROFILES, ArmCounts, Evidence, GateSpec, Increment, InstallCounts, decide
from fleet.gates.evidence import Mode
from fleet.gates.spec import Metric
from tests.factories import builds as make

TARGETS = ("x86-64-v4-vnni", "x86-64-v3", "x86-64-v1")
CLAIM = {
    "schema": "sparsefleet.claim/1",
    "metric": "teacher_forced.answer_accuracy",
    "questions": 738,
    "runtime": "onnxruntime 1.32.0 f32",
}
LAB = PROFILES["lab"]
STEP = timedelta(seconds=2)


@dataclass
class World:
    """Everything that was made."""

    now: datetime
    model: Model
    versions: list[ModelVersion] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    bundles: dict[tuple[str, str], Bundle] = field(default_factory=dict)
    devices: list[fleet.Device] = field(default_factory=list)
    group: fleet.Group | None = None
    good: fleet.Rollout | None = None
    bad: fleet.Rollout | None = None
    failed_job: BuildJob | None = None


def make_world(*, devices: int = 12) -> World:
    """Make the whole world."""
    world = World(now=timezone.now(), model=make.make_model("edgecard"))
    Model.objects.filter(pk=world.model.pk).update(title="Questions about cards, vision and text")
    targets_seed()
    for name in TARGETS:
        world.targets.append(make.make_target(name))
    Target.objects.filter(name__in=TARGETS).update(verified_on="host")
    _versions(world)
    _bad_submission(world)
    _devices(world, devices)
    world.good = _good_rollout(world)
    world.bad = _bad_rollout(world)
    return world


def _versions(world: World) -> None:
    for number, (version, value) in enumerate(
        (("1.0.0", 0.8686), ("1.1.0", 0.8426), ("1.2.0", 0.8413))
    ):
        row = make.make_version(
            world.model, version, base_version=world.versions[-1] if number else None
        )
        ModelVersion.objects.filter(pk=row.pk).update(
            claim={**CLAIM, "value": value, "version": version},
            created_at=world.now - timedelta(minutes=40 - 12 * number),
            notes="Fine-tuned on 30 new words." if number == 1 else "",
        )
        world.versions.append(ModelVersion.objects.get(pk=row.pk))
        for target in world.targets:
            world.bundles[version, target.name] = _bundle(world, world.versions[-1], target, number)
    for target in world.targets:
        for old, new in (("1.0.0", "1.1.0"), ("1.1.0", "1.2.0")):
            base, bundle = world.bundles[old, target.name], world.bundles[new, target.name]
            Delta.objects.create(
                base=base,
                new=bundle,
                state=DeltaState.READY.value,
                sha256=hashlib.sha256(bundle.manifest_sha256.encode()).hexdigest(),
                size_bytes=bundle.total_bytes // 5,
                bsdiff4_bytes=bundle.total_bytes // 2,
            )


def _bundle(world: World, version: ModelVersion, target: Target, number: int) -> Bundle:
    sections = {
        "plan": f"plan {version.version}".encode() * 40,
        "kernels": f"kernels {target.name} {number}".encode() * 900,
        "weights.shared": b"shared" * 9000,
        "pipeline": b"pipeline" * 30,
        "selftest": b"selftest" * 500,
    }
    for expert in range(8):
        changed = number if expert < 4 else 0
        sections[f"expert.L0.E{expert}"] = f"expert {expert} {changed}".encode() * 400
    bundle = make.make_bundle(version, target, sections)
    start = world.now - timedelta(minutes=39 - 12 * number)
    job = bundle.job
    BuildJob.objects.filter(pk=job.pk).update(
        started_at=start,
        finished_at=start + timedelta(seconds=41),
        attempt=1,
        progress=1.0,
        stage="signed",
        lease_owner="worker-1",
        created_at=start - timedelta(seconds=3),
        report={
            "target": target.name,
            "peak_ram_bytes": 11_534_336,
            "stages": [
                {"name": name, "took_ms": took, "cached": False}
                for name, took in (
                    ("read", 210.0),
                    ("raise", 95.4),
                    ("quantise", 5400.2),
                    ("emit", 33.1),
                    ("cc", 21400.0),
                    ("self-test", 2950.7),
                )
            ],
            "explain": [
                {
                    "op": "EXPERTS",
                    "layer": 0,
                    "kernel": "sf_experts_w4g32__v3",
                    "why": "fastest legal of 3",
                },
                {
                    "op": "LINEAR",
                    "layer": 0,
                    "kernel": "sf_linear_w4g32_16x1__v3",
                    "why": "panel 16 fits L1",
                },
            ],
        },
    )
    steps = ("queued", "leased", "compiling", "verifying", "signing", "ready")
    at = start
    for old, new in itertools.pairwise(steps):
        at += timedelta(seconds={"compiling": 1, "verifying": 33, "signing": 6}.get(new, 0.5))
        row = BuildTransition.objects.create(
            subject=job, old=old, event=new, new=new, actor="worker-1"
        )
        BuildTransition.objects.filter(pk=row.pk).update(at=at)
    for index, text in enumerate(
        (
            "vision.onnx: 212 nodes, decoder.onnx: 341 nodes",
            "raised 4 MoE blocks, 16 experts each, top-2",
            "quantised 71 matrices to W4-G32-S8",
            "self-test: 16 vectors, every expert reached, 0 differences",
        )
    ):
        BuildLogLine.objects.create(
            job=job, at=start + timedelta(seconds=9 * index), level="info", text=text
        )
    return bundle


def _bad_submission(world: World) -> None:
    row = make.make_version(world.model, "1.3.0-rc1", state=VersionState.INVALID)
    error = {
        "error_code": "compile.user.unsupported_op",
        "error_message": "operator ai.onnx::NonMaxSuppression at node “/head/nms” is not supported",
        "error_hint": "move it behind the model, or replace it by TopK; supported: Add, MatMul, TopK … (86 operators)",
    }
    ModelVersion.objects.filter(pk=row.pk).update(
        created_at=world.now - timedelta(minutes=3), **error
    )
    world.failed_job = make.make_job(row, world.targets[1], state=BuildState.FAILED_USER)
    BuildJob.objects.filter(pk=world.failed_job.pk).update(
        started_at=world.now - timedelta(minutes=3),
        finished_at=world.now - timedelta(minutes=2),
        attempt=1,
        **error,
    )
    BuildLogLine.objects.create(
        job=world.failed_job, at=world.now, level="error", text=error["error_message"]
    )
    running = make.make_job(row, world.targets[0], state=BuildState.COMPILING)
    BuildJob.objects.filter(pk=running.pk).update(
        started_at=world.now - timedelta(seconds=20),
        attempt=1,
        progress=0.46,
        stage="cc: 12 of 26 kernels",
        lease_owner="worker-1",
    )


def make_device(
    number: int, target: Target, model: Model, bundle: Bundle | None, now: datetime
) -> fleet.Device:
    """Return an accepted device with a real fingerprint."""
    features = next(needed for name, _, needed in TARGET_LADDER if name == target.name)
    facts = Fingerprint(
        machine="x86_64",
        soc="Intel(R) Xeon(R) Processor",
        os="linux",
        isa_features=tuple(sorted(features | {"sse", "sse2", "fxsr"})),
        cores=2,
        l1d_kb=48,
        l2_kb=2048,
        l3_kb=107520,
        ram_bucket_mb=16384,
        page_kb=4,
        accelerator="",
        driver="",
        device_class="pc",
        agent_abi=1,
    )
    print_, _ = fleet.Fingerprint.objects.get_or_create(
        sha256=facts.sha256, defaults={"document": facts.to_json()}
    )
    key = hashlib.sha256(f"key {number}".encode()).hexdigest()
    device = fleet.Device.objects.create(
        device_id=key[:32],
        serial=f"SN-{number:05d}",
        name=f"edge-{number:02d}",
        key_thumbprint=key,
        public_key=bytes.fromhex(key),
        state="accepted",
        fingerprint=print_,
        target=target,
        device_class="pc",
        tags=["lab"] if number % 2 else [],
        model=model,
        running_bundle=bundle,
        running_manifest_sha256=bundle.manifest_sha256 if bundle else "",
        enrolled_at=now - timedelta(minutes=35),
        last_seen_at=now - timedelta(seconds=number % 7),
        assignment_seq=2,
    )
    fleet.Heartbeat.objects.create(device=device, at=now - timedelta(seconds=number % 5))
    return device


def _devices(world: World, count: int) -> None:
    for number in range(1, count + 1):
        target = world.targets[number % 3]
        bundle = world.bundles["1.1.0", target.name]
        device = make_device(number, target, world.model, bundle, world.now)
        device.previous_bundle = world.bundles["1.0.0", target.name]
        device.save()
        world.devices.append(device)
        for version, right in (("1.0.0", 0.866), ("1.1.0", 0.841)):
            digest = world.bundles[version, target.name].manifest_sha256
            fleet.DeviceStats.objects.create(
                device=device,
                manifest_sha256=digest,
                answers=700,
                failures=1,
                scored=690,
                correct=int(690 * right),
                latency=_sketch(number, 12.0, 300).to_json(),
            )
    for minute in range(30):
        fleet.TelemetryRollup.objects.create(
            manifest_sha256=world.bundles["1.1.0", TARGETS[0]].manifest_sha256, target=TARGETS[0],
            minute=(world.now - timedelta(minutes=minute)).replace(second=0, microsecond=0),
            answers=240, failures=1, scored=240, correct=202, devices=4, batches=12,
        )  # fmt: skip
    world.group = fleet.Group.objects.create(name="all", model=world.model, filter={})


def _sketch(seed: int, middle: float, count: int) -> Sketch:
    rng = random.Random(seed)
    sketch = Sketch()
    for _ in range(count):
        sketch.add(middle * rng.lognormvariate(0, 0.35))
    return sketch


def make_rollout(
    world: World,
    version: str,
    base: str,
    *,
    state: str,
    start: datetime,
    percents: tuple[float, ...] = (10, 50, 100),
    spec: GateSpec = LAB,
) -> fleet.Rollout:
    """Return a rollout with its stages, nobody enrolled yet."""
    rows = {row.version: row for row in world.versions}
    rollout = fleet.Rollout.objects.create(
        model=world.model,
        version=rows[version],
        base_version=rows[base],
        group=world.group,
        name=f"{version} to everyone",
        state=state,
        salt=f"salt {version}",
        gate=spec.to_json(),
        created_by="release-manager",
        started_at=start,
    )
    for index, percent in enumerate(percents):
        fleet.Stage.objects.create(
            rollout=rollout,
            index=index,
            percent=percent,
            is_release=index == len(percents) - 1,
            treatment_target=max(1, round(percent * len(world.devices) / 100)),
        )
    return rollout


def _enrol(
    world: World,
    rollout: fleet.Rollout,
    stage: fleet.Stage,
    devices: list[fleet.Device],
    arm: str,
    *,
    failing: float,
    middle: float,
) -> None:
    version = rollout.version.version if arm == "treatment" else rollout.base_version.version
    for device in devices:
        enrolment = fleet.Enrolment.objects.create(
            rollout=rollout, stage=stage, device=device, arm=arm, stratum=device.stratum,
            bundle_sha256=world.bundles[version, device.target.name].manifest_sha256, slow_ms=21.5, at=stage.opened_at,
        )  # fmt: skip
        answers = 220
        fleet.EnrolmentStats.objects.create(
            enrolment=enrolment, answers=answers, failures=int(answers * failing), scored=answers - 5,
            correct=int((answers - 5) * (0.25 if failing else 0.842)), timed=answers - 10, slow=int(answers * (0.3 if failing else 0.05)),
            latency=_sketch(device.pk, middle, answers).to_json(),
        )  # fmt: skip


def _update(
    world: World,
    rollout: fleet.Rollout,
    stage: fleet.Stage,
    device: fleet.Device,
    *,
    state: str,
    kind: str = "install",
    code: str = "",
) -> fleet.Update:
    new = rollout.version.version if kind == "install" else rollout.base_version.version
    base = rollout.base_version.version if kind == "install" else rollout.version.version
    at = stage.opened_at
    update = fleet.Update.objects.create(
        device=device, rollout=rollout, stage=stage, kind=kind, state=state,
        bundle=world.bundles[new, device.target.name], base_bundle=world.bundles[base, device.target.name],
        used_delta=kind == "install", downloaded_bytes=21_400 if kind == "install" else 0, code=code, message="exit status 132" if code else "",
        queued_at=at, offered_at=at, activated_at=at + STEP * 3, reported_at=at + STEP * 5,
        finished_at=at + STEP * 6 if state not in ("probation", "activating") else None,
    )  # fmt: skip
    steps = [
        "queued",
        "offered",
        "downloading",
        "applying",
        "staged",
        "activating",
        "probation",
        state,
    ]
    for index, (old, event) in enumerate(itertools.pairwise(steps)):
        row = fleet.UpdateTransition.objects.create(
            subject=update, old=old, event=event, new=event, actor=f"device:{device.device_id}"
        )
        fleet.UpdateTransition.objects.filter(pk=row.pk).update(at=at + STEP * index)
    return update


def _step(
    log: type,
    subject: object,
    at: datetime,
    old: str,
    new: str,
    reason: str = "",
    actor: str = "system",
) -> None:
    row = log.objects.create(
        subject=subject, old=old, event=new, new=new, actor=actor, reason=reason
    )
    log.objects.filter(pk=row.pk).update(at=at)


def make_looks(
    rollout: fleet.Rollout,
    stage: fleet.Stage,
    *,
    failing: float,
    looks: int,
    action: str,
    devices: tuple[int, int],
    spec: GateSpec = LAB,
) -> None:
    """Let the gate look at a stage in which treatment fails at the rate `failing`, every two seconds."""
    rng = random.Random(rollout.pk * 100 + stage.index)
    harm: dict = {}
    safe: dict = {}
    answers = failures = slow = slow_c = 0
    for index in range(looks):
        new = 6 * devices[0]
        bad = sum(rng.random() < failing for _ in range(new))
        late, late_c = (
            sum(rng.random() < rate for _ in range(new)) for rate in (0.05 + 4 * failing, 0.05)
        )
        answers, failures, slow, slow_c = (
            answers + new,
            failures + bad,
            slow + late,
            slow_c + late_c,
        )
        counts = InstallCounts(devices[0], devices[0], devices[0], 0, devices[0])
        evidence = Evidence(
            mode=Mode.COMPARE, stage=stage.index, stage_age_s=2.0 * index, holding_s=0.0,
            treatment=ArmCounts(devices[0], devices[0], 0, answers, failures, answers, slow, answers, int(answers * 0.84)),
            control=ArmCounts(devices[1], devices[1], 0, answers, 0, answers, slow_c, answers, int(answers * 0.84)),
            fresh_answers=answers, installs=counts, installs_total=counts,
            increments=(
                Increment(Metric.FAILURES, "x86-64-v3/pc", bad, 0, new, new),
                Increment(Metric.SLOW, "x86-64-v3/pc", late, late_c, new, new),
            ),
            harm_ledger=harm, safe_ledger=safe,
        )  # fmt: skip
        verdict = decide(spec, evidence)
        harm, safe = dict(verdict.harm_ledger), dict(verdict.safe_ledger)
        is_last = index == looks - 1 or verdict.decision.value in ("fail", "pass")
        fleet.GateLook.objects.create(
            rollout=rollout, stage=stage, at=stage.opened_at + STEP * index, spec=spec.to_json(), evidence=evidence.to_json(),
            verdict=verdict.to_json(), decision=verdict.decision.value, log_evidence=verdict.log_evidence, action=action if is_last else "",
        )  # fmt: skip
        if is_last:
            break


def _good_rollout(world: World) -> fleet.Rollout:
    start = world.now - timedelta(minutes=20)
    rollout = make_rollout(world, "1.1.0", "1.0.0", state="succeeded", start=start)
    sizes = [stage.treatment_target for stage in rollout.stages.all()]
    for index, stage in enumerate(rollout.stages.order_by("index")):
        opened = start + timedelta(minutes=2 * index)
        before = sizes[index - 1] if index else 0
        fleet.Stage.objects.filter(pk=stage.pk).update(
            state="passed", opened_at=opened, decided_at=opened + timedelta(minutes=2)
        )
        stage.refresh_from_db()
        treated = world.devices[before : sizes[index]]
        control = [] if stage.is_release else world.devices[-2:]
        _enrol(world, rollout, stage, treated, "treatment", failing=0.0, middle=12.0)
        _enrol(world, rollout, stage, control, "control", failing=0.0, middle=12.4)
        for device in treated:
            _update(world, rollout, stage, device, state="succeeded")
        if control:
            make_looks(
                rollout,
                stage,
                failing=0.0,
                looks=60,
                action="promote",
                devices=(max(1, len(treated)), 2),
            )
        _step(fleet.StageTransition, stage, opened, "pending", "running")
        _step(fleet.StageTransition, stage, opened + timedelta(minutes=2), "soaking", "passed")
    _step(fleet.RolloutTransition, rollout, start, "ready", "running", actor="release-manager")
    _step(fleet.RolloutTransition, rollout, start + timedelta(minutes=6), "running", "succeeded")
    fleet.Rollout.objects.filter(pk=rollout.pk).update(finished_at=start + timedelta(minutes=6))
    audit(actor="release-manager", action="rollout.start", obj=rollout, version="1.1.0")
    return rollout


def _bad_rollout(world: World) -> fleet.Rollout:
    start = world.now - timedelta(minutes=2)
    rollout = make_rollout(world, "1.2.0", "1.1.0", state="rolling_back", start=start)
    stage = rollout.stages.get(index=0)
    fleet.Stage.objects.filter(pk=stage.pk).update(
        state="failed", opened_at=start, decided_at=world.now, treatment_target=3
    )
    stage.refresh_from_db()
    treated, control = world.devices[:3], world.devices[3:7]
    _enrol(world, rollout, stage, treated, "treatment", failing=0.05, middle=31.0)
    _enrol(world, rollout, stage, control, "control", failing=0.0, middle=12.2)
    for device, state, code in zip(
        treated,
        ("succeeded", "succeeded", "rolled_back"),
        ("", "", "agent.probation_failures"),
        strict=True,
    ):
        _update(world, rollout, stage, device, state=state, code=code)
    _update(world, rollout, stage, treated[0], state="succeeded", kind="rollback")
    _update(world, rollout, stage, treated[1], state="activating", kind="rollback")
    make_looks(rollout, stage, failing=0.06, looks=40, action="roll_back", devices=(3, 4))
    _step(fleet.RolloutTransition, rollout, start, "ready", "running", actor="release-manager")
    look = rollout.looks.order_by("-pk").first()
    reason = "; ".join(look.verdict["reasons"])
    _step(fleet.StageTransition, stage, start, "pending", "running")
    _step(fleet.StageTransition, stage, look.at, "running", "failed", reason)
    _step(fleet.RolloutTransition, rollout, look.at, "running", "rolling_back", reason)
    fleet.Rollout.objects.filter(pk=rollout.pk).update(end_reason=reason[:1].upper() + reason[1:])
    audit(actor="release-manager", action="rollout.start", obj=rollout, version="1.2.0")
    audit(actor="system", action="rollout.roll_back", obj=rollout, evidence="over 100 : 1")
    rollout.refresh_from_db()
    return rollout
