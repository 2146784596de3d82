"""Telemetry: counted once, where it belongs, whatever order it comes in."""

import json
import random

import pytest

from compiler.contract.telemetry import Sketch, TelemetryBatch
from fleet.models import DeviceStats, Enrolment, EnrolmentStats, TelemetryRollup
from fleet.services.telemetry import batches_forget, telemetry_ingest
from fleet.states import Arm
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


@pytest.mark.parametrize(
    "changes",
    [
        {"arm": "control"},
        {"stage": 1},
        {"rollout_id": 10**6},
        {"arm": "", "rollout_id": None, "stage": None},
        {"manifest": "a" * 64},
    ],
)
def test_it_counts_for_no_enrolment_what_does_not_belong_there(fleet, changes):
    row = enrolment(Arm.TREATMENT)
    telemetry_ingest(device_pk=row.device_id, batch=tagged(row, **changes), clock=fleet.clock)
    assert EnrolmentStats.objects.get(enrolment=row).answers == 0
    assert DeviceStats.objects.filter(device=row.device).count() == 2  # but for the device it does


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
    with django_assert_max_num_queries(11):  # seven and two savepoints
        telemetry_ingest(device_pk=row.device_id, batch=tagged(row, 1), clock=fleet.clock)


def test_it_forgets_the_keys_of_old_batches(fleet):
    row = enrolment(Arm.CONTROL)
    telemetry_ingest(device_pk=row.device_id, batch=tagged(row), clock=fleet.clock)
    fleet.clock.advance(100)
    assert batches_forget(before=fleet.clock.now()) > 0
