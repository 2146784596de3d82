"""Trying again what failed, and the facts that stand beside the state of an update."""

import json
from datetime import timedelta
from pathlib import Path

import pytest

from builds.common.auth import Actor
from builds.common.errors import ForbiddenError
from builds.common.roles import Role
from builds.services.signing import keys_generate, repositories_init
from compiler.contract.protocol import ReportFact, UpdateReport, UpdateState
from fleet.errors import RetryError
from fleet.models import Update, UpdateTransition
from fleet.selectors.poll import device_poll_answer
from fleet.services import retries
from fleet.services.assignments import update_assignment
from fleet.services.reports import update_report
from fleet.services.retries import rollout_retry
from fleet.services.rollouts import rollout_halt
from fleet.services.running import device_runs
from tests.factories.fleet import MANAGER, SimulatedFleet

pytestmark = pytest.mark.django_db
S = UpdateState
NONCE = "0" * 32


@pytest.fixture
def fleet() -> SimulatedFleet:
    fleet = SimulatedFleet(per_target=2)
    fleet.release()
    return fleet


@pytest.fixture
def update(fleet: SimulatedFleet, state_dir: Path) -> Update:
    """Return an update that waits for no delta."""
    keys_generate()
    repositories_init()
    updates = fleet.rollout().updates
    updates.update(is_offerable=True)
    return newest(updates.first())


def newest(update: Update) -> Update:
    rows = Update.objects.select_related("bundle", "base_bundle", "device", "rollout")
    return rows.filter(device_id=update.device_id).order_by("-pk").first()


def send(update: Update, state: UpdateState, seq: int, *, runs_new: bool = False, **more) -> None:
    bundle = update.bundle if runs_new else update.base_bundle
    report = UpdateReport(
        update.pk,
        update.attempt,
        seq,
        state,
        bundle.manifest_sha256,
        0,
        more.get("code", ""),
        "",
        more.get("fact", ReportFact.NONE),
    )
    update_report(device_pk=update.device_id, report=report)


def assigned(update: Update) -> dict:
    data = update_assignment(device_pk=update.device_id, update_id=update.pk, nonce=NONCE)
    (target,) = json.loads(data)["signed"]["targets"].values()
    return target["custom"]


def test_it_offers_a_new_attempt_that_says_retry(fleet, update):
    assert assigned(update)["retry_failed"] is False
    send(update, S.FAILED, 1, code="agent.self_test", fact=ReportFact.DENIED)
    assert device_poll_answer(device_pk=update.device_id).offer is None
    rollout_retry(actor=MANAGER, rollout_id=update.rollout_id, clock=fleet.clock)
    again = newest(update)
    assert (again.attempt, again.state, again.stage_id) == (2, S.QUEUED, update.stage_id)
    offer = device_poll_answer(device_pk=update.device_id).offer
    assert (offer.update_id, offer.attempt) == (again.pk, 2)
    assert assigned(again)["retry_failed"] is True
    send(again, S.SUCCEEDED, 1, runs_new=True)
    assert newest(update).state == S.SUCCEEDED


@pytest.mark.parametrize(
    ("state", "code", "is_retried"),
    [
        (S.FAILED, "agent.disk_full", True),
        (S.ROLLED_BACK, "agent.unfit", True),
        (S.REJECTED, "agent.denied", True),
        (S.REJECTED, "agent.incompatible", False),
    ],
)
def test_it_retries_what_may_come_out_differently(fleet, update, state, code, is_retried):
    send(update, state, 1, code=code)
    if is_retried:
        rollout_retry(actor=MANAGER, rollout_id=update.rollout_id, clock=fleet.clock)
        assert newest(update).attempt == 2
    else:
        with pytest.raises(RetryError):
            rollout_retry(actor=MANAGER, rollout_id=update.rollout_id, clock=fleet.clock)


def test_it_leaves_alone_who_did_not_fail(fleet, update):
    others = Update.objects.exclude(device_id=update.device_id)
    before = list(others.values_list("pk", flat=True))
    send(update, S.FAILED, 1)
    rollout_retry(actor=MANAGER, rollout_id=update.rollout_id, clock=fleet.clock)
    assert list(others.values_list("pk", flat=True)) == before
    with pytest.raises(RetryError):
        rollout_retry(actor=MANAGER, rollout_id=update.rollout_id, clock=fleet.clock)


def test_it_stops_after_so_many_attempts(fleet, update, monkeypatch):
    monkeypatch.setattr(retries, "MAX_ATTEMPTS", 3)
    for _ in range(2):
        send(newest(update), S.FAILED, 1)
        rollout_retry(actor=MANAGER, rollout_id=update.rollout_id, clock=fleet.clock)
    send(newest(update), S.FAILED, 1)
    with pytest.raises(RetryError):
        rollout_retry(actor=MANAGER, rollout_id=update.rollout_id, clock=fleet.clock)


def test_it_needs_the_role_and_a_rollout_that_offers(fleet, update):
    send(update, S.FAILED, 1)
    with pytest.raises(ForbiddenError):
        rollout_retry(actor=Actor("v", Role.VIEWER), rollout_id=update.rollout_id)
    rollout_halt(actor=MANAGER, rollout_id=update.rollout_id, clock=fleet.clock)
    with pytest.raises(RetryError):
        rollout_retry(actor=MANAGER, rollout_id=update.rollout_id)


def test_it_keeps_what_a_report_says_beside_the_state(update):
    send(update, S.PROBATION, 1, runs_new=True)
    send(update, S.PROBATION, 2, runs_new=True, fact=ReportFact.UNCONFIRMED)
    first = newest(update).unconfirmed_at
    send(update, S.PROBATION, 3, runs_new=True, fact=ReportFact.UNCONFIRMED)
    send(update, S.ROLLED_BACK, 4, code="agent.unfit", fact=ReportFact.DENIED)
    row = newest(update)
    assert row.unconfirmed_at == first is not None
    assert row.denied_at is not None
    assert row.facts == ("not tried again by itself", "unconfirmed at its deadline")
    assert [report.fact for report in row.reports.all()] == [
        "",
        "unconfirmed",
        "unconfirmed",
        "denied",
    ]


def test_it_gives_one_deadline_for_every_question(fleet, update):
    first = assigned(update)["confirm_deadline"]
    offered = newest(update).offered_at
    assert first == int((offered + timedelta(days=1)).timestamp())
    assert assigned(newest(update))["confirm_deadline"] == first


@pytest.mark.parametrize("state", [S.PROBATION, S.SUCCEEDED])
def test_it_knows_when_it_was_too_late_to_withdraw(fleet, update, state):
    send(update, S.STAGED, 1)
    rollout_halt(actor=MANAGER, rollout_id=update.rollout_id, clock=fleet.clock)
    assert newest(update).state == S.CANCELLED
    send(update, state, 2, runs_new=True)
    row = newest(update)
    assert row.state == S.CANCELLED, "an end is final"
    assert row.too_late_at is not None
    assert row.activated_at is not None, "it counts as exposed"
    assert row.device.running_bundle_id == row.bundle_id


def test_a_device_that_leaves_the_bundle_after_success_regressed(fleet, update):
    send(update, S.SUCCEEDED, 1, runs_new=True)
    assert newest(update).regressed_at is None
    later = newest(update).device.running_at + timedelta(seconds=1)
    manifest = update.base_bundle.manifest_sha256
    device_runs(device_pk=update.device_id, manifest_sha256=manifest, at=later)
    row = newest(update)
    assert (row.state, row.regressed_at) == (S.SUCCEEDED, later)
    step = UpdateTransition.objects.filter(subject=row).order_by("pk").last()
    assert (step.event, step.new) == ("regressed", "succeeded")


def test_a_way_back_that_was_ordered_is_no_regression(fleet):
    rollout = fleet.rollout()
    fleet.run(seconds=20)
    from fleet.services.rollouts import rollout_rollback

    rollout_rollback(actor=MANAGER, rollout_id=rollout.pk, clock=fleet.clock)
    fleet.run(seconds=20)
    assert set(rollout.updates.filter(kind="rollback").values_list("state", flat=True)) == {
        "succeeded"
    }
    assert not rollout.updates.exclude(regressed_at=None).exists()
