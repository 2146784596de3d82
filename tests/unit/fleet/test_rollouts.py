"""What people do to rollouts: roles, order of states, refusals, what each action leaves."""

from dataclasses import replace

import pytest

from builds.common.auth import Actor
from builds.common.errors import (
    ForbiddenError,
    IllegalTransitionError,
    InvalidInputError,
    NotFoundError,
)
from builds.common.roles import Role
from builds.models import AuditEvent, BuildJob, Delta
from builds.states import BuildState
from compiler.contract.protocol import OfferKind, UpdateState
from fleet.cohorts import EmptyStageError, Goal, NoControlError
from fleet.edge.snapshot import snapshot_build
from fleet.errors import ApprovalError, FirstInstallError, RolloutConflictError
from fleet.gates import GateSpecError
from fleet.gates.profiles import FIRST_INSTALL_PROFILE
from fleet.models import Enrolment, Rollout, RolloutTransition, Update
from fleet.services import rollouts as services
from fleet.services.groups import group_create
from fleet.services.plans import RolloutRequest, rollout_preview
from fleet.services.tick import fleet_tick, rollout_look
from fleet.states import RolloutState, StageState
from tests.factories.builds import make_bundle, make_target, make_version
from tests.factories.fleet import MANAGER, SimulatedFleet, make_device, make_group

pytestmark = pytest.mark.django_db
R = RolloutState


@pytest.fixture
def fleet() -> SimulatedFleet:
    fleet = SimulatedFleet(per_target=2)
    fleet.release()
    return fleet


def act(name, rollout, fleet, actor=MANAGER, **more):
    result = getattr(services, f"rollout_{name}")(
        actor=actor, rollout_id=rollout.pk, clock=fleet.clock, **more
    )
    rollout.refresh_from_db()
    return result


def test_it_enrols_before_it_offers_and_both_in_one_transaction(fleet):
    rollout = fleet.rollout()
    assert rollout.state == R.RUNNING
    first = rollout.stages.get(index=0)
    assert first.state == StageState.RUNNING
    treated = Enrolment.objects.filter(stage=first, arm="treatment")
    control = Enrolment.objects.filter(stage=first, arm="control")
    assert (treated.count(), control.count()) == (2, 4)
    updates = Update.objects.filter(rollout=rollout)
    assert {update.device_id for update in updates} == {row.device_id for row in treated}
    assert all(update.base_bundle_id for update in updates)
    offered = {pk for pk, a in snapshot_build().answers.items() if b'"offer":{' in a.body}
    assert offered <= {row.device_id for row in treated}
    assert (
        Delta.objects.count() == 6
    )  # of every target, there and back, not of the first stage only
    assert rollout.base_version.version == "1.0.0"


@pytest.mark.parametrize(
    ("action", "roles"),
    [
        ("start", {Role.RELEASE_MANAGER, Role.ADMIN}),
        ("pause", {Role.RELEASE_MANAGER, Role.APPROVER, Role.ADMIN}),
        ("halt", {Role.RELEASE_MANAGER, Role.APPROVER, Role.ADMIN}),
        ("rollback", {Role.RELEASE_MANAGER, Role.APPROVER, Role.ADMIN}),
        ("cancel", {Role.RELEASE_MANAGER, Role.ADMIN}),
        ("resume", {Role.RELEASE_MANAGER, Role.ADMIN}),
        ("approve", {Role.APPROVER, Role.ADMIN}),
    ],
)
def test_it_asks_for_the_role_before_anything_else(fleet, action, roles):
    rollout = fleet.rollout(start=False)
    for role in (*Role, None):
        actor = Actor(name="somebody", role=role)
        if role in roles:
            continue
        with pytest.raises(ForbiddenError):
            act(action, rollout, fleet, actor=actor)
    assert rollout.state == R.READY
    request = RolloutRequest("m", "v", "g", [Goal(percent=10)], {})
    with pytest.raises(ForbiddenError):
        services.rollout_create(actor=Actor("ci", Role.DEVELOPER), request=request)


def test_it_needs_somebody_elses_approval_when_asked(fleet):
    request = RolloutRequest(
        fleet.model.name,
        fleet.version.version,
        fleet.group.name,
        [Goal(percent=50)],
        {"profile": "lab"},
        needs_approval=True,
    )
    admin = Actor(name="admin", role=Role.ADMIN)
    rollout = services.rollout_create(actor=admin, request=request, clock=fleet.clock)
    assert rollout.state == R.AWAITING_APPROVAL
    with pytest.raises(ApprovalError):
        act("approve", rollout, fleet, actor=admin)
    act("start", rollout, fleet)  # as soon as it is ready
    assert rollout.state == R.AWAITING_APPROVAL
    act("approve", rollout, fleet, actor=Actor(name="approver", role=Role.APPROVER))
    assert rollout.state == R.READY
    fleet_tick(clock=fleet.clock)
    rollout.refresh_from_db()
    assert rollout.state == R.RUNNING


def test_it_compiles_what_is_missing_and_then_starts_by_itself(fleet):
    version = make_version(fleet.model)
    fleet.version = version
    targets = [make_target(name) for name in fleet.bundles]
    for target in targets[1:]:
        make_bundle(version, target)
    rollout = fleet.rollout(percents=(50,), start=False)
    assert rollout.state == R.COMPILING
    job = BuildJob.objects.get(version=version, target=targets[0])
    act("start", rollout, fleet)
    assert rollout.state == R.COMPILING
    BuildJob.objects.filter(pk=job.pk).delete()
    make_bundle(version, targets[0])
    fleet_tick(clock=fleet.clock)
    rollout.refresh_from_db()
    assert rollout.state == R.RUNNING


def test_it_waits_until_every_bundle_is_published(fleet):
    version = make_version(fleet.model)
    fleet.version = version
    bundles = [make_bundle(version, make_target(name), published=False) for name in fleet.bundles]
    rollout = fleet.rollout(percents=(50,), start=False)
    act("start", rollout, fleet)
    for bundle in bundles:
        assert rollout.state == R.COMPILING
        assert rollout.updates.count() == 0
        bundle.published_at = fleet.clock.now()
        bundle.save()
        fleet_tick(clock=fleet.clock)
        rollout.refresh_from_db()
    assert rollout.state == R.RUNNING


def test_it_fails_when_a_build_fails(fleet):
    version = make_version(fleet.model)
    fleet.version = version
    rollout = fleet.rollout(percents=(50,), start=False)
    job = BuildJob.objects.filter(version=version).first()
    job.state = BuildState.FAILED_USER.value
    job.error_code = "build.user.unsupported_op"
    job.save()
    rollout_look(rollout_id=rollout.pk, clock=fleet.clock)
    rollout.refresh_from_db()
    assert rollout.state == R.FAILED
    assert "build.user.unsupported_op" in rollout.end_reason


def test_it_starts_one_rollout_of_a_model_at_a_time(fleet):
    first = fleet.rollout()
    second = fleet.rollout(start=False)
    with pytest.raises(RolloutConflictError):
        act("start", second, fleet)
    act("halt", first, fleet)
    act("start", second, fleet)
    assert second.state == R.RUNNING


def test_it_pauses_what_has_not_begun_and_lets_the_rest_go_on(fleet):
    rollout = fleet.rollout()
    begun = rollout.updates.order_by("pk").first()
    fleet.answers_per_s = 0
    device = next(device for device in fleet.devices if device.pk == begun.device_id)
    fleet.devices = [device]
    fleet.run(2)  # the first tick decides about the delta
    begun.refresh_from_db()
    assert begun.state == UpdateState.DOWNLOADING
    act("pause", rollout, fleet)
    assert set(snapshot_build().live) == {begun.pk}
    with pytest.raises(IllegalTransitionError):
        act("pause", rollout, fleet)
    act("resume", rollout, fleet)
    assert len(snapshot_build().live) == 2


def test_it_halts_at_once_and_for_good(fleet):
    rollout = fleet.rollout()
    fleet.answers_per_s = 0
    fleet.run(2)
    act("halt", rollout, fleet, reason="looks odd")
    assert rollout.state == R.STOPPED
    assert rollout.halted_at == fleet.clock.now()
    assert snapshot_build().live == {}
    assert snapshot_build().answers == {}
    assert {u.state for u in rollout.updates.all()} == {UpdateState.CANCELLED}
    assert [s.state for s in rollout.stages.all()] == ["held", "skipped", "skipped", "skipped"]
    assert AuditEvent.objects.filter(action="rollout.halt").get().detail == {"reason": "looks odd"}
    for action in ("halt", "pause", "resume", "start", "cancel"):
        with pytest.raises(IllegalTransitionError):
            act(action, rollout, fleet)


def test_it_lets_what_is_being_switched_on_come_to_its_end_after_a_halt(fleet):
    rollout = fleet.rollout()
    fleet.answers_per_s = 0
    fleet.run(6)
    assert {u.state for u in rollout.updates.all()} == {UpdateState.ACTIVATING}
    act("halt", rollout, fleet)
    assert {u.state for u in rollout.updates.all()} == {UpdateState.ACTIVATING}
    assert snapshot_build().live == {}


def test_it_finishes_a_halt_that_was_cut_off(fleet):
    rollout = fleet.rollout()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "updates_withdraw", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            act("halt", rollout, fleet)
    rollout.refresh_from_db()
    assert rollout.state == R.STOPPED
    assert snapshot_build().live == {}
    fleet_tick(clock=fleet.clock)
    assert {u.state for u in rollout.updates.all()} == {UpdateState.CANCELLED}


def test_it_sends_devices_back_when_an_operator_says_so(fleet):
    rollout = fleet.rollout(gate={"min_answers": 10**6})
    fleet.run(10)
    assert {u.state for u in rollout.updates.all()} == {UpdateState.SUCCEEDED}
    act("halt", rollout, fleet)
    act("rollback", rollout, fleet, reason="customers complain")
    assert rollout.state == R.ROLLING_BACK
    backs = rollout.updates.filter(kind=OfferKind.ROLLBACK.value)
    assert backs.count() == 2
    fleet.run(6, until=["rolled_back"], rollout=rollout)
    assert rollout.state == R.ROLLED_BACK
    assert "customers complain" in rollout.end_reason
    running = fleet.running_counts()
    assert set(running) == {bundle.manifest_sha256 for bundle in fleet.bundles.values()}


def test_it_drops_a_rollout_that_has_not_started(fleet):
    rollout = fleet.rollout(start=False)
    act("cancel", rollout, fleet)
    assert rollout.state == R.STOPPED
    with pytest.raises(IllegalTransitionError):
        act("start", rollout, fleet)


def test_it_passes_a_held_stage_by_hand_with_a_reason_only(fleet):
    rollout = fleet.rollout(gate={"min_answers": 10**6, "max_wait_s": 10})
    fleet.run(13)
    stage = rollout.stages.get(index=0)
    assert stage.state == StageState.HELD
    with pytest.raises(InvalidInputError):
        act("promote", rollout, fleet, reason=" ")
    act("promote", rollout, fleet, reason="seen enough")
    stage.refresh_from_db()
    assert stage.state == StageState.PASSED
    assert "by hand by release-manager: seen enough" in stage.reason
    assert rollout.stages.get(index=1).state == StageState.RUNNING
    with pytest.raises(NotFoundError):
        act("promote", rollout, fleet, reason="again")


def test_it_installs_a_first_version_only_where_nothing_runs():
    fleet = SimulatedFleet(per_target=2, running=False)
    with pytest.raises(FirstInstallError, match="nothing to compare"):
        fleet.rollout()
    wrong = fleet.rollout(percents=(50,), gate={"profile": FIRST_INSTALL_PROFILE}, start=False)
    with pytest.raises(FirstInstallError, match="one stage"):
        act("start", wrong, fleet)
    rollout = fleet.rollout(percents=(100,), gate={"profile": FIRST_INSTALL_PROFILE})
    fleet.run(20, until=["succeeded"], rollout=rollout)
    assert rollout.state == R.SUCCEEDED
    reasons = rollout.looks.last().verdict["reasons"]
    assert "no control was possible" in reasons[0]
    fleet.release()
    again = fleet.rollout(percents=(100,), gate={"profile": FIRST_INSTALL_PROFILE}, start=False)
    with pytest.raises(FirstInstallError, match="run a version already"):
        act("start", again, fleet)


def test_it_ends_a_first_installation_that_fails_without_a_way_back():
    fleet = SimulatedFleet(per_target=2, running=False)
    for bundle in fleet.bundles.values():
        fleet.behaviours[bundle.manifest_sha256] = replace(
            fleet.behaviour(bundle.manifest_sha256), install_fails=True
        )
    rollout = fleet.rollout(percents=(100,), gate={"profile": FIRST_INSTALL_PROFILE})
    fleet.run(15, until=["failed", "succeeded"], rollout=rollout)
    assert rollout.state == R.FAILED
    assert "no device had a bundle to go back to" in rollout.end_reason


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "no-such"}, NotFoundError),
        ({"version": "9.9"}, NotFoundError),
        ({"group": "no-such"}, NotFoundError),
        ({"goals": []}, InvalidInputError),
        ({"goals": [Goal()]}, InvalidInputError),
        ({"goals": [Goal(percent=1, count=1)]}, InvalidInputError),
        ({"goals": [Goal(percent=101)]}, InvalidInputError),
        ({"goals": [Goal(count=0)]}, InvalidInputError),
        ({"gate": {"alpha": 5}}, GateSpecError),
    ],
)
def test_it_refuses_an_impossible_request(fleet, change, error):
    request = RolloutRequest(
        fleet.model.name, fleet.version.version, fleet.group.name, [Goal(percent=20)], {}
    )
    with pytest.raises(error):
        services.rollout_create(actor=MANAGER, request=replace(request, **change))
    assert not Rollout.objects.exists()


def test_it_refuses_stages_that_the_fleet_cannot_fill(fleet):
    for percents, error in (((10, 15), EmptyStageError), ((90, 95), EmptyStageError)):
        rollout = fleet.rollout(percents=percents, start=False)
        with pytest.raises(error):
            act("start", rollout, fleet)
        assert rollout.state == R.READY
    lonely = make_group(fleet.model, device_class="car")
    fleet.group = lonely
    empty = fleet.rollout(start=False)
    with pytest.raises(EmptyStageError):
        act("start", empty, fleet)
    make_device(fleet.model, running=fleet.bundles["x86-64-v3"], device_class="car")
    with pytest.raises(NoControlError):
        act("start", empty, fleet)


def test_it_previews_what_it_would_do_and_changes_nothing(fleet):
    make_device(fleet.model, "aarch64")
    stages, members = rollout_preview(
        model=fleet.model.name,
        version=fleet.version.version,
        group=fleet.group.name,
        goals=[Goal(percent=20), Goal(percent=50), Goal(percent=100)],
        gate={"profile": "lab"},
    )
    assert [(stage.total, stage.is_release) for stage in stages] == [
        (2, False),
        (3, False),
        (5, False),
        (6, True),
    ]
    assert members.left_out == {"no_bundle": 1}
    assert not Rollout.objects.exists()


def test_it_filters_groups_and_leaves_out_who_must_not_get_the_version(fleet):
    group, _ = group_create(
        actor=MANAGER,
        name="tagged",
        model=fleet.model.name,
        device_filter={"tags": ["beta"], "target": "x86-64-v3"},
    )
    old = fleet.bundles["x86-64-v3"]
    make_device(fleet.model, running=old, tags=["beta", "x"])
    make_device(fleet.model, running=old, tags=["beta"])
    make_device(fleet.model, running=old, tags=["alpha"])
    make_device(fleet.model, "x86-64-v1", running=old, tags=["beta"])
    new = fleet.release()["x86-64-v3"]
    make_device(fleet.model, running=new, tags=["beta"])
    version, fleet.version = fleet.version, make_version(fleet.model)
    make_bundle(fleet.version, make_target("x86-64-v3"))
    newest = make_device(fleet.model, tags=["beta"])
    newest.running_bundle = make_bundle(fleet.version, make_target("x86-64-v2"))
    newest.save()
    _, members = rollout_preview(
        model=fleet.model.name,
        version=version.version,
        group=group.name,
        goals=[Goal(percent=50)],
        gate={"profile": "lab"},
    )
    assert len(members.by_id) == 2
    assert members.left_out == {"already_installed": 1, "runs_newer": 1}


@pytest.mark.parametrize(
    "wrong", [{"colour": "red"}, {"tags": "beta"}, {"tags": [1]}, {"target": 3}]
)
def test_it_refuses_a_filter_that_it_does_not_know(fleet, wrong):
    with pytest.raises(InvalidInputError):
        group_create(actor=MANAGER, name="g", model=fleet.model.name, device_filter=wrong)


def test_it_writes_every_change_of_state_down(fleet):
    rollout = fleet.rollout()
    act("halt", rollout, fleet)
    rows = RolloutTransition.objects.filter(subject=rollout).order_by("pk")
    assert [(row.event, row.new) for row in rows] == [
        ("submit", "compiling"),
        ("bundles_ready", "awaiting_approval"),
        ("waive_approval", "ready"),
        ("start", "running"),
        ("halt", "stopped"),
    ]
    assert rows.last().actor == "release-manager"


def test_it_looks_twice_without_doing_anything_twice(fleet):
    rollout = fleet.rollout()
    fleet.answers_per_s = 0
    fleet.run(2)
    looks = rollout.looks.count()
    for _ in range(3):
        rollout_look(rollout_id=rollout.pk, clock=fleet.clock)
    assert rollout.looks.count() == looks
    assert Update.objects.filter(rollout=rollout).count() == 2
