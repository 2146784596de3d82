"""Who may press which button when, with and without JavaScript."""

import json
from collections.abc import Callable
from itertools import product

import pytest
from django.test import Client

from builds.common.auth import Actor
from builds.common.roles import Permission, Role
from builds.models import BuildJob, Target
from builds.states import BuildState
from dashboards.actions import ROLLOUT_ACTIONS, rollout_buttons
from fleet.models import Device, Rollout, Stage, Update
from fleet.services.ledgers import ledger_open
from fleet.states import ROLLOUT_TRANSITIONS, RolloutState
from tests.unit.dashboards.world import World, make_rollout

pytestmark = pytest.mark.django_db

SignIn = Callable[[Role], Client]


@pytest.fixture
def running(world: World) -> Rollout:
    """Return a running rollout with one update that is downloading."""
    assert world.bad is not None
    Update.objects.filter(rollout=world.bad).delete()
    Rollout.objects.filter(pk=world.bad.pk).delete()
    rollout = make_rollout(world, "1.2.0", "1.1.0", state="running", start=world.now)
    stage = rollout.stages.get(index=0)
    Stage.objects.filter(pk=stage.pk).update(state="running", opened_at=world.now)
    device = world.devices[0]
    Update.objects.create(
        device=device,
        rollout=rollout,
        stage=stage,
        bundle=world.bundles["1.2.0", device.target.name],
        state="downloading",
        is_offerable=True,
        queued_at=world.now,
    )
    return rollout


@pytest.mark.parametrize(("state", "role"), [*product(RolloutState, Role)])
def test_it_enables_what_table_and_role_allow(state: RolloutState, role: Role) -> None:
    actor = Actor("somebody", role)
    rollout = Rollout(pk=1, state=state.value, created_by="ci")
    for button in rollout_buttons(rollout, actor, "/rollouts/1"):
        row = ROLLOUT_ACTIONS[button.name]
        is_wish = button.name == "start" and button.label == "Start when ready"
        is_legal = is_wish or (state, row.event) in ROLLOUT_TRANSITIONS
        assert button.is_enabled == (is_legal and actor.may(row.needs))
        assert button.is_enabled == (button.reason == "")


@pytest.mark.parametrize("state", RolloutState)
def test_it_always_shows_halt_in_the_last_place(state: RolloutState) -> None:
    actor = Actor("somebody", Role.ADMIN)
    buttons = rollout_buttons(Rollout(pk=1, state=state.value), actor, "/rollouts/1")
    assert buttons[-1].name == "halt"
    assert buttons[-1].css == "danger"


def test_it_says_why_a_button_is_disabled() -> None:
    rollout = Rollout(pk=1, state="awaiting_approval", created_by="mara")
    by_name = {row.name: row for row in rollout_buttons(rollout, Actor("mara", Role.ADMIN), "/r")}
    assert by_name["approve"].reason == "Whoever made a rollout may not approve it"
    assert "only while running or paused" in by_name["halt"].reason
    by_name = {row.name: row for row in rollout_buttons(rollout, Actor("x", Role.VIEWER), "/r")}
    assert "release manager" in by_name["halt"].reason


def test_it_halts_with_one_post_and_without_a_question(
    running: Rollout, release_manager: Client
) -> None:
    response = release_manager.post(f"/rollouts/{running.pk}/halt", follow=True)
    running.refresh_from_db()
    assert running.state == RolloutState.STOPPED
    assert running.halted_at is not None
    assert Update.objects.get(rollout=running).state == "cancelled"
    text = response.content.decode()
    assert response.redirect_chain == [(f"/rollouts/{running.pk}", 302)]
    assert "Halted: offers stopped" in text


def test_it_needs_the_csrf_token_to_halt(running: Rollout, release_manager: Client) -> None:
    browser = Client(enforce_csrf_checks=True)
    browser.cookies = release_manager.cookies
    assert browser.post(f"/rollouts/{running.pk}/halt").status_code == 403
    text = browser.get(f"/rollouts/{running.pk}").content.decode()
    token = text.split('name="csrfmiddlewaretoken" value="')[1].split('"')[0]
    answer = browser.post(f"/rollouts/{running.pk}/halt", {"csrfmiddlewaretoken": token})
    assert answer.status_code == 302
    running.refresh_from_db()
    assert running.state == RolloutState.STOPPED


@pytest.mark.parametrize("role", [Role.VIEWER, Role.DEVELOPER])
@pytest.mark.parametrize("name", ["halt", "pause", "start", "cancel", "rollback", "promote"])
def test_it_refuses_roles_that_may_not_act_and_names_those_that_may(
    running: Rollout, sign_in: SignIn, role: Role, name: str
) -> None:
    response = sign_in(role).post(f"/rollouts/{running.pk}/{name}", {"reason": "x"})
    assert response.status_code == 403
    text = response.content.decode()
    assert "release_manager" in text
    assert "app.forbidden" in text
    running.refresh_from_db()
    assert running.state == RolloutState.RUNNING


def test_it_pauses_and_resumes(running: Rollout, release_manager: Client) -> None:
    for name, state in (("pause", "paused"), ("resume", "running")):
        release_manager.post(f"/rollouts/{running.pk}/{name}")
        running.refresh_from_db()
        assert running.state == state


def test_it_shows_the_new_state_when_the_page_was_older(
    running: Rollout, release_manager: Client
) -> None:
    release_manager.post(f"/rollouts/{running.pk}/halt")
    response = release_manager.post(f"/rollouts/{running.pk}/pause", follow=True)
    text = response.content.decode()
    assert "is not possible in state" in text
    assert "Halted" in text


def test_it_changes_nothing_by_get(running: Rollout, release_manager: Client) -> None:
    assert release_manager.get(f"/rollouts/{running.pk}/halt").status_code == 405
    running.refresh_from_db()
    assert running.state == RolloutState.RUNNING


def test_it_knows_no_other_action(running: Rollout, release_manager: Client) -> None:
    assert release_manager.post(f"/rollouts/{running.pk}/explode").status_code == 404
    assert release_manager.post("/rollouts/999999/halt").status_code == 404


def test_it_passes_a_held_stage_by_hand_only_with_a_reason(
    running: Rollout, release_manager: Client
) -> None:
    stage = running.stages.get(index=0)
    Stage.objects.filter(pk=stage.pk).update(
        state="held",
        reason="24 h without proof",
        ledger=ledger_open(stage, harm={}).to_json(),
    )
    page = release_manager.get(f"/rollouts/{running.pk}").content.decode()
    assert "Stage 1 is held" in page
    assert "24 h without proof" in page
    address = f"/rollouts/{running.pk}/promote"
    text = release_manager.post(address, {"reason": "  "}, follow=True).content.decode()
    assert "A reason is needed" in text
    release_manager.post(address, {"reason": "looked at every device"})
    assert running.stages.get(index=0).state == "passed"


def test_it_retries_a_failed_build(world: World, sign_in: SignIn, viewer: Client) -> None:
    assert world.failed_job is not None
    address = f"/builds/{world.failed_job.pk}/retry"
    assert viewer.post(address).status_code == 403
    sign_in(Role.DEVELOPER).post(address)
    assert BuildJob.objects.get(pk=world.failed_job.pk).state == BuildState.QUEUED


def test_it_offers_a_retry_only_where_one_can_help(world: World, sign_in: SignIn) -> None:
    assert world.failed_job is not None
    developer = sign_in(Role.DEVELOPER)
    address, button = f"/builds/{world.failed_job.pk}", f"/builds/{world.failed_job.pk}/retry"
    page = developer.get(address).content.decode()
    assert f'action="{button}"' not in page
    assert "change the model as said above and submit it as a new version" in page
    ours = {"state": BuildState.FAILED_APP.value, "error_code": "build.app.toolchain"}
    BuildJob.objects.filter(pk=world.failed_job.pk).update(**ours)
    page = developer.get(address).content.decode()
    assert f'action="{button}"' in page
    assert "change the model" not in page


def test_it_gives_the_whole_report_of_a_build(world: World, viewer: Client) -> None:
    job = world.bundles["1.0.0", "x86-64-v3"].job
    answer = viewer.get(f"/builds/{job.pk}/report.json")
    assert json.loads(answer.content) == BuildJob.objects.get(pk=job.pk).report
    assert answer["Content-Disposition"] == f'attachment; filename="build-{job.pk}-report.json"'
    page = viewer.get(f"/builds/{job.pk}").content.decode()
    assert f"/builds/{job.pk}/report.json" in page
    assert viewer.get("/builds/999999/report.json").status_code == 404


def test_it_does_not_retry_a_build_that_is_ready(world: World, sign_in: SignIn) -> None:
    job = world.bundles["1.0.0", "x86-64-v3"].job
    response = sign_in(Role.DEVELOPER).post(f"/builds/{job.pk}/retry")
    assert response.status_code == 409
    assert BuildJob.objects.get(pk=job.pk).state == BuildState.READY


def test_it_activates_a_target(world: World, release_manager: Client, viewer: Client) -> None:
    assert viewer.post("/targets/x86-64-v2/activate").status_code == 403
    release_manager.post("/targets/x86-64-v2/activate")
    assert Target.objects.get(name="x86-64-v2").active
    assert release_manager.post("/targets/riscv/activate").status_code == 404


def test_it_retires_a_device(world: World, release_manager: Client, viewer: Client) -> None:
    device = world.devices[-1]
    assert viewer.post(f"/devices/{device.pk}/retire").status_code == 403
    release_manager.post(f"/devices/{device.pk}/retire")
    assert Device.objects.get(pk=device.pk).state == "retired"
    text = release_manager.post(f"/devices/{device.pk}/accept", follow=True).content.decode()
    assert "is not possible in state" in text


def test_it_keeps_the_audit_log_from_those_who_may_not_see_it(
    world: World, sign_in: SignIn, viewer: Client
) -> None:
    assert viewer.get("/audit").status_code == 403
    assert "Audit log" not in viewer.get("/").content.decode()
    assert sign_in(Role.APPROVER).get("/audit").status_code == 200


def test_it_shows_and_checks_the_audit_chain(world: World, release_manager: Client) -> None:
    text = release_manager.get("/audit?check=1").content.decode()
    assert "rollout.roll_back" in text
    assert "The chain is whole" in text


def test_it_gives_a_user_without_a_role_nothing(world: World) -> None:
    from django.contrib.auth.models import User

    browser = Client()
    browser.force_login(User.objects.create_user("nobody"))
    response = browser.get("/")
    assert response.status_code == 403
    assert Permission.VIEW.value in response.content.decode()
