"""Rows of the small world of the page tests: a model, its versions and builds, devices."""

import hashlib
import itertools
import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta

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
from builds.states import BuildState, DeltaState, VersionState
from compiler.contract.fingerprint import TARGET_LADDER, Fingerprint
from compiler.contract.telemetry import Sketch
from fleet import models as fleet
from tests.factories import builds as make
from tests.factories.explained import explained_report

TARGETS = ("x86-64-v4-vnni", "x86-64-v3", "x86-64-v1")
CLAIM = {
    "schema": "sparsefleet.claim/1",
    "metric": "teacher_forced.answer_accuracy",
    "questions": 738,
    "runtime": "onnxruntime 1.32.0 f32",
}


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


def versions_make(world: World) -> None:
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
                {"name": name, "seconds": seconds, "cached": cached}
                for name, seconds, cached in (
                    ("import", 2.388, False),
                    ("raise", 6.502, True),
                    ("quantise", 2.105, False),
                    ("kernels", 15.542, False),
                    ("selftest", 9.71, False),
                )
            ],
            "sizes": {"plan": 13_312, "kernels": 92_000, "weights.shared": 984_064},
            "selftest_vectors": 18,
            "explain": [
                {
                    "operation": "EXPERTS",
                    "kernel": "sf_experts_w4g32s8_rm_i8_1x16__avx2",
                    "calls": {"see": 3, "step": 4},
                    "weight_bytes": 1_179_648,
                    "why": f"tile avx2: best that {target.name} has",
                },
                {
                    "operation": "EMBED",
                    "kernel": "sf_embed_rm_f32_1x8__avx2",
                    "calls": {"step": 1},
                    "weight_bytes": 49_152,
                    "why": f"portable C, built for {target.name}",
                },
            ],
            "notes": ["raise-linear: 65", "raise-moe-native: 8"],
            **explained_report(),
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


def bad_submission_make(world: World) -> None:
    row = make.make_version(world.model, "1.3.0-rc1", state=VersionState.INVALID)
    error = {
        "error_code": "compile.user.unsupported_op",
        "error_message": "operator ai.onnx::NonMaxSuppression at node “/head/nms” is not supported",
        "error_hint": "move it behind the model, or replace it by TopK; 86 operators are supported",
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


def devices_make(world: World, count: int) -> None:
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
                latency=sketch_of(number, 12.0, 300).to_json(),
            )
    for minute in range(30):
        fleet.TelemetryRollup.objects.create(
            manifest_sha256=world.bundles["1.1.0", TARGETS[0]].manifest_sha256,
            target=TARGETS[0],
            minute=(world.now - timedelta(minutes=minute)).replace(second=0, microsecond=0),
            answers=240,
            failures=1,
            scored=240,
            correct=202,
            devices=4,
            batches=12,
        )
    world.group = fleet.Group.objects.create(name="all", model=world.model, filter={})


def sketch_of(seed: int | str, middle: float, count: int) -> Sketch:
    rng = random.Random(seed)
    sketch = Sketch()
    for _ in range(count):
        sketch.add(middle * rng.lognormvariate(0, 0.35))
    return sketch
