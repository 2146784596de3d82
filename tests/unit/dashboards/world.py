"""A small world for page tests: a model, three versions, devices, one good and one bad rollout.

Rows are made with the factories of the apps; the verdicts of the gate come from the gate itself.
"""

import itertools
import random
from datetime import datetime, timedelta

from django.utils import timezone

from builds.common.audit import audit
from builds.models import (
    Model,
    Target,
)
from builds.services.targets import targets_seed
from fleet import models as fleet
from fleet.gates import PROFILES, ArmCounts, Evidence, GateSpec, Increment, InstallCounts, decide
from fleet.gates.evidence import Mode
from fleet.gates.spec import Metric
from tests.factories import builds as make
from tests.unit.dashboards.world_rows import (
    TARGETS,
    World,
    bad_submission_make,
    devices_make,
    make_device,
    sketch_of,
    versions_make,
)

__all__ = ["World", "make_device", "make_looks", "make_rollout", "make_world"]
LAB = PROFILES["lab"]
STEP = timedelta(seconds=2)


def make_world(*, devices: int = 12) -> World:
    """Make the whole world."""
    world = World(now=timezone.now(), model=make.make_model("edgecard"))
    Model.objects.filter(pk=world.model.pk).update(title="Questions about cards, vision and text")
    targets_seed()
    for name in TARGETS:
        world.targets.append(make.make_target(name))
    Target.objects.filter(name__in=TARGETS).update(verified_on="host")
    versions_make(world)
    bad_submission_make(world)
    devices_make(world, devices)
    world.good = _good_rollout(world)
    world.bad = _bad_rollout(world)
    return world


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
            rollout=rollout,
            stage=stage,
            device=device,
            arm=arm,
            stratum=device.stratum,
            bundle_sha256=world.bundles[version, device.target.name].manifest_sha256,
            slow_ms=21.5,
            at=stage.opened_at,
        )
        answers = 220
        fleet.EnrolmentStats.objects.create(
            enrolment=enrolment,
            answers=answers,
            failures=int(answers * failing),
            scored=answers - 5,
            correct=int((answers - 5) * (0.25 if failing else 0.842)),
            timed=answers - 10,
            slow=int(answers * (0.3 if failing else 0.05)),
            latency=sketch_of(device.serial, middle, answers).to_json(),
        )


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
        device=device,
        rollout=rollout,
        stage=stage,
        kind=kind,
        state=state,
        bundle=world.bundles[new, device.target.name],
        base_bundle=world.bundles[base, device.target.name],
        used_delta=kind == "install",
        downloaded_bytes=21_400 if kind == "install" else 0,
        code=code,
        message="exit status 132" if code else "",
        queued_at=at,
        offered_at=at,
        activated_at=at + STEP * 3,
        reported_at=at + STEP * 5,
        finished_at=at + STEP * 6 if state not in ("probation", "activating") else None,
    )
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
    """Let the gate look at a stage in which treatment fails at the rate `failing`."""
    rng = random.Random(f"{rollout.name} {stage.index} {failing}")
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
            mode=Mode.COMPARE,
            stage=stage.index,
            stage_age_s=2.0 * index,
            holding_s=0.0,
            treatment=ArmCounts(
                devices[0],
                devices[0],
                0,
                answers,
                failures,
                answers,
                slow,
                answers,
                int(answers * 0.84),
            ),
            control=ArmCounts(
                devices[1], devices[1], 0, answers, 0, answers, slow_c, answers, int(answers * 0.84)
            ),
            fresh_answers=answers,
            installs=counts,
            installs_total=counts,
            increments=(
                Increment(Metric.FAILURES, "x86-64-v3/pc", bad, 0, new, new),
                Increment(Metric.SLOW, "x86-64-v3/pc", late, late_c, new, new),
            ),
            harm_ledger=harm,
            safe_ledger=safe,
        )
        verdict = decide(spec, evidence)
        harm, safe = dict(verdict.harm_ledger), dict(verdict.safe_ledger)
        is_last = index == looks - 1 or verdict.decision.value in ("fail", "pass")
        fleet.GateLook.objects.create(
            rollout=rollout,
            stage=stage,
            at=stage.opened_at + STEP * index,
            spec=spec.to_json(),
            evidence=evidence.to_json(),
            verdict=verdict.to_json(),
            decision=verdict.decision.value,
            log_evidence=verdict.log_evidence,
            action=action if is_last else "",
        )
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
