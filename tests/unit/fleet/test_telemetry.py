"""Telemetry: counted once, where it belongs, whatever order it comes in."""

import json
import random

import pytest

from compiler.contract.telemetry import (
    MAX_REASONS,
    MAX_SUM,
    Sketch,
    TelemetryBatch,
    sketch_from_row,
)
from fleet.cohorts import Candidate
from fleet.models import (
    Device,
    DeviceStats,
    Enrolment,
    EnrolmentStats,
    Rollout,
    TelemetryRollup,
)
from fleet.selectors.device_pages import below_normal_count, device_page, device_rows
from fleet.selectors.listing import answers_summary, rollout_arms
from fleet.services import tick
from fleet.services.baselines import WINDOWS, Limit, limit_of, usual_of
from fleet.services.members import Member
from fleet.services.telemetry import batches_forget, telemetry_ingest
from fleet.services.tick import fleet_tick
from fleet.states import Arm
from tests.factories.builds import make_bundle, make_version
from tests.factories.fleet import SimulatedFleet

pytestmark = pytest.mark.django_db


def sketch(*values: float) -> Sketch:
    result = Sketch()
    for value in values:
        result.add(value)
    return result


def batch(manifest: str, seq: int = 0, **changes) -> TelemetryBatch:
    values = {
        "boot_id": "bootaaaa",
        "seq": seq,
        "manifest_sha256": manifest,
        "rollout_id": None,
        "stage": None,
        "arm": "",
        "answers": 10,
        "failures": 1,
        "scored": 8,
        "correct": 6,
        "degraded": 0,
        "latency_ms": sketch(1, 2, 3, 4, 5, 6, 7, 8, 9, 100),
        **changes,
    }
    return TelemetryBatch(**values)


@pytest.fixture
def fleet() -> SimulatedFleet:
    fleet = SimulatedFleet(per_target=2)
    fleet.run(6)
    fleet.release()
    fleet.rollout()
    return fleet


def enrolment(arm: Arm) -> Enrolment:
    return Enrolment.objects.filter(arm=arm.value).select_related("device").first()


def tagged(row: Enrolment, seq: int = 0, **changes) -> TelemetryBatch:
    values = {"rollout_id": row.rollout_id, "stage": 0, "arm": row.arm, **changes}
    return batch(values.pop("manifest", row.bundle_sha256), seq, **values)


def test_it_counts_a_batch_once(fleet):
    row = enrolment(Arm.CONTROL)
    before = DeviceStats.objects.get(device=row.device).answers
    assert telemetry_ingest(device_pk=row.device_id, batch=tagged(row), clock=fleet.clock)
    assert not telemetry_ingest(device_pk=row.device_id, batch=tagged(row), clock=fleet.clock)
    assert DeviceStats.objects.get(device=row.device).answers == before + 10
    stats = EnrolmentStats.objects.get(enrolment=row)
    assert (stats.answers, stats.failures, stats.scored, stats.correct) == (10, 1, 8, 6)


def test_the_newest_gauges_of_a_device_are_kept_and_shown(fleet):
    row = enrolment(Arm.CONTROL)
    gauges = {"threads": 2, "weight_bytes": 4096, "huge_weight_bytes": 1024}
    for seq, given in enumerate(({"threads": 1}, gauges, {})):
        told = tagged(row, seq, gauges=given)
        assert telemetry_ingest(device_pk=row.device_id, batch=told, clock=fleet.clock)
    assert DeviceStats.objects.get(device=row.device).gauges == gauges
    answers = device_page(device_pk=row.device_id).answers[0]
    assert (answers.threads, answers.huge_share) == (2, 0.25)


def test_a_device_says_on_which_rung_it_stands_and_why(fleet):
    row = enrolment(Arm.CONTROL)
    for seq, (rung, reasons) in enumerate(
        ((3, {"temperature": 4, "oom": 1}), (3, {"temperature": 2}), (None, {}))
    ):
        gauges = {"threads": 1} if rung is None else {"rung": rung, "rules_revision": 7}
        told = tagged(row, seq, degraded=4, gauges=gauges, degraded_by=reasons)
        assert telemetry_ingest(device_pk=row.device_id, batch=told, clock=fleet.clock)
        assert below_normal_count() == 1
    found = device_rows(signal="degraded", now=fleet.clock.now())
    assert [device.pk for device in found] == [row.device_id]
    answers = device_page(device_pk=row.device_id).answers[0]
    assert answers.degraded_by == (("temperature", 6), ("oom", 1))
    assert answers.rung is None, "the newest batch did not say"
    told = tagged(row, 3, gauges={"rung": 0, "energy_uj_per_answer": 1500, "energy_is_model": 1})
    telemetry_ingest(device_pk=row.device_id, batch=told, clock=fleet.clock)
    assert below_normal_count() == 0
    answers = device_page(device_pk=row.device_id).answers[0]
    assert (answers.rung, answers.energy_mj, answers.energy_is_model) == ("normal", 1.5, True)
    assert answers.drain is None


def test_reasons_are_bounded_whatever_a_device_makes_up(fleet):
    row = enrolment(Arm.CONTROL)
    for seq in range(4):
        made_up = {f"reason_{seq}_{at}": 1 for at in range(MAX_REASONS)}
        told = tagged(row, seq, degraded=1, degraded_by=made_up)
        telemetry_ingest(device_pk=row.device_id, batch=told, clock=fleet.clock)
    assert len(DeviceStats.objects.get(device=row.device).degraded_by) == MAX_REASONS


def test_it_counts_another_boot_with_the_same_number(fleet):
    row = enrolment(Arm.CONTROL)
    for boot in ("bootaaaa", "bootbbbb"):
        assert telemetry_ingest(
            device_pk=row.device_id, batch=tagged(row, boot_id=boot), clock=fleet.clock
        )
    assert EnrolmentStats.objects.get(enrolment=row).answers == 20


def test_it_leaves_the_warm_up_out_of_the_latency_comparison(fleet):
    row = enrolment(Arm.CONTROL)
    assert row.slow_ms is not None
    for seq in range(3):
        telemetry_ingest(device_pk=row.device_id, batch=tagged(row, seq), clock=fleet.clock)
    stats = EnrolmentStats.objects.get(enrolment=row)
    assert (stats.answers, stats.timed) == (30, 20)
    slow = sum(value > row.slow_ms * 1.03 for value in (1, 2, 3, 4, 5, 6, 7, 8, 9, 100))
    assert stats.slow == 2 * slow


def test_windows_in_which_the_battery_lost_more_than_usual_are_counted(fleet):
    row = enrolment(Arm.CONTROL)
    assert row.thirsty_above is None, "no device had counted anything"
    Enrolment.objects.filter(pk=row.pk).update(thirsty_above=8_000.0)
    for seq in range(3):
        told = tagged(row, seq, drain=sketch(0, 4_000, 7_500, 9_000))
        telemetry_ingest(device_pk=row.device_id, batch=told, clock=fleet.clock)
    stats = EnrolmentStats.objects.get(enrolment=row)
    assert (stats.drained, stats.thirsty) == (8, 2), "the first ten answers are warm-up"
    total = sketch_from_row(DeviceStats.objects.get(device=row.device).drain)
    assert (total.count, total.count_above(8_000)) == (12, 3)
    assert rollout_arms(row.rollout_id)["control"].counts["drained"] == 8


def test_what_no_battery_counted_is_in_no_arm(fleet):
    """A model's estimate comes as a gauge; it is shown, and the gate never sees it."""
    row = enrolment(Arm.CONTROL)
    Enrolment.objects.filter(pk=row.pk).update(thirsty_above=1.0)
    gauges = {"energy_uj_per_answer": 10**9, "energy_is_model": 1}
    gauges |= {"battery_millipercent_per_active_hour": 90_000}
    for seq in range(3):
        told = tagged(row, seq, gauges=gauges)
        telemetry_ingest(device_pk=row.device_id, batch=told, clock=fleet.clock)
    stats = EnrolmentStats.objects.get(enrolment=row)
    assert (stats.drained, stats.thirsty) == (0, 0)


def test_a_device_is_held_against_what_its_own_battery_lost():
    own, pool = sketch(*[4_000] * 18), sketch(*[4_000] * 18, *[16_000] * 42)
    found = limit_of(own, pool, 0.9, WINDOWS)
    assert found.above == pytest.approx(4_000**0.75 * 16_000**0.25, rel=0.02)
    assert (found.own, found.pool) == (18, 60)
    assert limit_of(sketch(), pool, 0.9, WINDOWS).above == pytest.approx(16_000, rel=0.02)
    assert limit_of(own, own, 0.9, WINDOWS).above is None, "18 windows are no stratum"


@pytest.mark.parametrize(
    "changes",
    [
        {"arm": "control"},
        {"stage": 1},
        {"rollout_id": 10**6},
        {"arm": "", "rollout_id": None, "stage": None},
    ],
)
def test_it_counts_for_no_enrolment_what_does_not_belong_there(fleet, changes):
    row = enrolment(Arm.TREATMENT)
    telemetry_ingest(device_pk=row.device_id, batch=tagged(row, **changes), clock=fleet.clock)
    assert EnrolmentStats.objects.get(enrolment=row).answers == 0
    assert DeviceStats.objects.filter(device=row.device).count() == 2  # but for the device it does


def test_it_drops_answers_of_a_bundle_that_the_device_cannot_run(fleet):
    row = enrolment(Arm.CONTROL)
    rows = DeviceStats.objects.count()
    foreign = make_bundle(make_version()).manifest_sha256
    for seq, manifest in enumerate(("a" * 64, foreign)):
        wrong = batch(manifest, seq)
        assert not telemetry_ingest(device_pk=row.device_id, batch=wrong, clock=fleet.clock)
    assert DeviceStats.objects.count() == rows
    assert not TelemetryRollup.objects.filter(manifest_sha256__in=("a" * 64, foreign)).exists()


def test_it_stops_sums_where_they_can_still_be_read(fleet):
    row = enrolment(Arm.CONTROL)
    stats = EnrolmentStats.objects.filter(enrolment=row)
    stats.update(answers=2**63 - 2, timed=MAX_SUM - 1, latency=[[32, 2**53]])
    telemetry_ingest(device_pk=row.device_id, batch=tagged(row), clock=fleet.clock)
    found = stats.get()
    assert (found.answers, found.timed) == (MAX_SUM, MAX_SUM)
    assert dict(found.latency)[32] == MAX_SUM


def test_it_starts_and_drives_rollouts_over_poisoned_rows():
    fleet = SimulatedFleet(per_target=2)
    fleet.run(4)
    damaged = [[[0, 2**53 + 1]], [[0, 2**70]], [[10**9, 3]], [["x"], 7, [0, -1]], {"no": "list"}]
    for device, latency in zip(fleet.devices, damaged, strict=False):
        DeviceStats.objects.filter(device_id=device.pk).update(latency=latency)
    fleet.release()
    fleet.rollout()
    assert Enrolment.objects.exists()
    assert fleet_tick(clock=fleet.clock) == 1
    for device in fleet.devices:
        assert device_page(device_pk=device.pk).answers
        assert answers_summary(DeviceStats.objects.filter(device_id=device.pk).first())


def test_it_takes_no_baseline_from_what_is_no_bundle_of_the_device(fleet):
    device = Device.objects.get(pk=enrolment(Arm.CONTROL).device_id)
    DeviceStats.objects.create(device=device, manifest_sha256="a" * 64, latency=[[0, 10**6]])
    device.running_bundle, device.running_manifest_sha256 = None, "a" * 64
    bundle = make_bundle(make_version())
    member = Member(device, bundle, Candidate(device.device_id, device.stratum, can_control=False))
    usual = usual_of([member], quantile=0.9)[device.pk]
    assert usual.slow == usual.drain == Limit(None, 0, 0)


def test_it_drives_the_other_rollouts_when_one_breaks(fleet, monkeypatch, caplog):
    first = Rollout.objects.get()
    other = SimulatedFleet(per_target=1, seed=2)
    other.clock = fleet.clock
    other.release()
    second = other.rollout(gate={"profile": "lab"})
    looked = []

    def broken(*, rollout_id: int, clock: object) -> None:
        looked.append(rollout_id)
        if rollout_id == first.pk:
            raise ZeroDivisionError("a bad row")

    def forgetful(**_: object) -> int:
        raise RuntimeError("no nonces")

    monkeypatch.setattr(tick, "rollout_look", broken)
    monkeypatch.setattr(tick, "nonces_forget", forgetful)
    with caplog.at_level("ERROR"):
        assert fleet_tick(clock=fleet.clock) == 2
    assert looked == [first.pk, second.pk]
    assert "ZeroDivisionError: a bad row" in caplog.text
    assert "RuntimeError: no nonces" in caplog.text


def test_it_counts_nothing_of_a_treatment_device_before_its_update(fleet):
    row = enrolment(Arm.TREATMENT)
    old = row.device.running_manifest_sha256
    telemetry_ingest(device_pk=row.device_id, batch=tagged(row, manifest=old), clock=fleet.clock)
    assert EnrolmentStats.objects.get(enrolment=row).answers == 0


def test_it_adds_up_the_same_in_any_order_and_with_repeats(fleet):
    row = enrolment(Arm.CONTROL)
    batches = [tagged(row, seq, failures=seq % 3) for seq in range(8)]
    shuffled = [*batches, *batches[:4]]
    random.Random(7).shuffle(shuffled)
    for item in shuffled:
        telemetry_ingest(device_pk=row.device_id, batch=item, clock=fleet.clock)
    stats = EnrolmentStats.objects.get(enrolment=row)
    assert stats.answers == 80
    assert stats.failures == sum(item.failures for item in batches)
    total = Sketch()
    for item in batches:
        total.merge(item.latency_ms)
    assert stats.latency == json.loads(json.dumps(total.to_json()))
    minutes = TelemetryRollup.objects.filter(arm="control")
    assert sum(minute.answers for minute in minutes) == 80
    assert {minute.devices for minute in minutes} <= {0, 1}


def test_it_takes_at_most_ten_queries(fleet, django_assert_max_num_queries):
    row = enrolment(Arm.CONTROL)
    telemetry_ingest(device_pk=row.device_id, batch=tagged(row), clock=fleet.clock)
    with django_assert_max_num_queries(12):  # eight and two savepoints
        telemetry_ingest(device_pk=row.device_id, batch=tagged(row, 1), clock=fleet.clock)


def test_it_forgets_the_keys_of_old_batches(fleet):
    row = enrolment(Arm.CONTROL)
    telemetry_ingest(device_pk=row.device_id, batch=tagged(row), clock=fleet.clock)
    fleet.clock.advance(100)
    assert batches_forget(before=fleet.clock.now()) > 0
