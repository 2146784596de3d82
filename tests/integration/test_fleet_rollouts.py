"""Whole rollouts over a simulated fleet: real services and gate, a fake clock, every message lost.

Nothing here calls a task: the queue of the tests is deaf, so only the tick drives the rollouts.
"""

import pytest

from builds.models import AuditEvent
from compiler.contract.protocol import UpdateState
from fleet.models import GateLook, Rollout, Update
from fleet.selectors.listing import rollout_arms, rollout_counts
from fleet.services.replays import rollout_replay
from fleet.states import RolloutState, StageState
from tests.factories.fleet import BAD, Behaviour, SimulatedFleet

pytestmark = pytest.mark.django_db
ENDS = ("succeeded", "rolled_back", "failed", "stopped")


@pytest.fixture
def fleet() -> SimulatedFleet:
    fleet = SimulatedFleet(per_target=3)
    fleet.answers_per_s = 12
    fleet.run(6)
    return fleet


def manifests(bundles):
    return {bundle.manifest_sha256 for bundle in bundles.values()}


def test_it_promotes_a_good_version_to_everybody(fleet):
    new = fleet.release()
    rollout = fleet.rollout()
    fleet.run(240, until=ENDS, rollout=rollout)
    assert rollout.state == RolloutState.SUCCEEDED
    stages = list(rollout.stages.order_by("index"))
    assert [stage.state for stage in stages] == ["passed"] * 4
    assert [stage.treatment_target for stage in stages] == [2, 5, 8, 9]
    assert set(fleet.running_counts()) == manifests(new)
    assert rollout_counts(rollout.pk).devices_exposed == 9
    promotions = rollout.looks.filter(action="promote")
    assert promotions.count() == 4
    for look in promotions[:3]:
        assert look.evidence["control"]["answers"] >= 60
        assert look.evidence["mode"] == "compare"
    assert all(replay.is_same for replay in rollout_replay(rollout_id=rollout.pk))


def test_it_catches_a_bad_version_in_the_first_stage_and_sends_it_back(fleet):
    old = manifests(fleet.bundles)
    bad = fleet.release(BAD)
    rollout = fleet.rollout()
    downloaded = {}
    for _ in range(60):
        fleet.run(1)
        rollout.refresh_from_db()
        if rollout.state == RolloutState.ROLLING_BACK and not downloaded:
            downloaded = {d.pk: len(d.sent) for d in fleet.devices}
        if rollout.state in ENDS:
            break
    assert rollout.state == RolloutState.ROLLED_BACK
    first = rollout.stages.get(index=0)
    assert first.state == StageState.FAILED
    assert (first.decided_at - first.opened_at).total_seconds() < 30
    assert rollout_counts(rollout.pk).devices_exposed == 2
    assert set(fleet.running_counts()) == old
    assert not manifests(bad) & set(fleet.running_counts())
    backs = rollout.updates.filter(kind="rollback")
    assert {update.state for update in backs} == {UpdateState.SUCCEEDED}
    assert {update.bundle.manifest_sha256 for update in backs} <= old
    fail = rollout.looks.get(decision="fail")
    assert fail.action == "roll_back"
    assert fail.verdict["log_evidence"] > 4.6
    arms = rollout_arms(rollout.pk)
    assert arms["treatment"].latency_ms["p50"] > 2 * arms["control"].latency_ms["p50"]
    assert AuditEvent.objects.filter(action="rollout.gate_failed").count() == 1
    assert all(replay.is_same for replay in rollout_replay(rollout_id=rollout.pk))
    # and they answer again
    before = sum(device.telemetry_seq for device in fleet.devices)
    fleet.run(4)
    assert sum(device.telemetry_seq for device in fleet.devices) > before


def test_it_catches_a_version_that_silences_its_devices(fleet):
    fleet.release(Behaviour(goes_silent=True))
    rollout = fleet.rollout(gate={"silence_s": 6})
    fleet.run(40, until=[*ENDS, "rolling_back"], rollout=rollout)
    assert rollout.state == RolloutState.ROLLING_BACK
    assert "went silent" in rollout.end_reason
    assert rollout_counts(rollout.pk).devices_exposed == 2
    fleet.run(10)
    rollout.refresh_from_db()
    assert rollout.state == RolloutState.ROLLING_BACK  # nobody has said that he is back
    for device in fleet.devices:
        device.is_on = True
    fleet.run(10, until=ENDS, rollout=rollout)
    assert rollout.state == RolloutState.ROLLED_BACK


def test_it_blames_nobody_for_an_outage_of_everything(fleet):
    fleet.release()
    rollout = fleet.rollout(gate={"silence_s": 6, "min_answers": 10**6})
    fleet.run(12)
    assert {u.state for u in rollout.updates.all()} == {UpdateState.SUCCEEDED}
    for device in fleet.devices:
        device.is_on = False
    fleet.run(20)
    rollout.refresh_from_db()
    assert rollout.state == RolloutState.RUNNING
    assert rollout.looks.last().decision == "inconclusive"


def test_it_catches_installations_that_fail_and_touches_nobody_else(fleet):
    old = manifests(fleet.bundles)
    fleet.release(Behaviour(install_fails=True))
    rollout = fleet.rollout(percents=(50, 100))
    fleet.run(40, until=ENDS, rollout=rollout)
    assert rollout.state == RolloutState.ROLLED_BACK
    counts = rollout_counts(rollout.pk)
    assert counts.installs == {"failed": 5}
    assert counts.rollbacks == {}
    assert set(fleet.running_counts()) == old


def test_it_holds_and_never_promotes_without_data(fleet):
    fleet.release()
    fleet.answers_per_s = 0
    rollout = fleet.rollout(gate={"max_wait_s": 15})
    fleet.run(30)
    first = rollout.stages.get(index=0)
    assert first.state == StageState.HELD
    assert {look.decision for look in rollout.looks.all()} == {"no_data"}
    fleet.answers_per_s = 12  # when data comes after all, the stage goes on by itself
    fleet.run(30)
    first.refresh_from_db()
    assert first.state == StageState.PASSED


def test_it_times_out_a_device_that_stops_in_the_middle(fleet):
    fleet.release()
    rollout = fleet.rollout(gate={"step_timeout_s": 10})
    fleet.run(4)
    stuck = Update.objects.filter(rollout=rollout).first()
    next(d for d in fleet.devices if d.pk == stuck.device_id).is_on = False
    fleet.run(12)
    stuck.refresh_from_db()
    assert stuck.state == UpdateState.TIMED_OUT
    assert Rollout.objects.get().state == RolloutState.RUNNING
    last = GateLook.objects.last()
    assert last.evidence["installs"]["failed"] == 1


def test_it_finds_a_device_that_switched_while_it_was_cancelled(fleet):
    """The report of the switch was under way when the rollout was turned around."""
    fleet.release(BAD)
    rollout = fleet.rollout()
    fleet.run(20)
    late = next(d for d in fleet.devices if not Update.objects.filter(device=d.pk).exists())
    fleet.run(30, until=ENDS, rollout=rollout)
    assert rollout.state == RolloutState.ROLLED_BACK
    install = rollout.updates.filter(kind="install").first()
    straggler = next(d for d in fleet.devices if d.pk == install.device_id)
    straggler.running = install.bundle.manifest_sha256  # it says that it runs the bad one again
    fleet.run(4)
    assert straggler.running == install.base_bundle.manifest_sha256
    assert rollout.updates.filter(kind="rollback", device_id=straggler.pk).count() == 2
    assert late.running in manifests(fleet.bundles)


def test_it_still_serves_devices_that_were_away_when_the_rollout_ended(fleet):
    away = fleet.devices[0]
    away.is_on = False
    new = fleet.release()
    rollout = fleet.rollout(gate={"min_heard_ratio": 0.5})
    fleet.run(300, until=ENDS, rollout=rollout)
    assert rollout.state == RolloutState.SUCCEEDED
    assert away.running not in manifests(new)
    away.is_on = True
    fleet.run(10)
    assert away.running in manifests(new)
