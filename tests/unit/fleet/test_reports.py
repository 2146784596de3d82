"""Reports: ordered by (attempt, seq), repeated and late ones harmless, ends final."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builds.common.errors import InvalidInputError, NotFoundError
from compiler.contract.protocol import TERMINAL_STATES, UpdateReport, UpdateState
from fleet.errors import ReportContradictsError
from fleet.models import Device, FleetVersion, Update, UpdateReportRow, UpdateTransition
from fleet.services.reports import update_report
from fleet.services.running import Beat, device_runs, heartbeats_store
from fleet.states import PROGRESS
from tests.factories.builds import make_model
from tests.factories.fleet import SimulatedFleet, make_device, make_release

pytestmark = pytest.mark.django_db
S = UpdateState


@pytest.fixture
def update() -> Update:
    fleet = SimulatedFleet(per_target=2)
    fleet.release()
    return fleet.rollout().updates.select_related("bundle", "base_bundle", "device").first()


def send(update, state, seq, *, running="base", attempt=1, device_pk=None, clock=None, **more):
    manifests = {
        "base": update.base_bundle.manifest_sha256,
        "new": update.bundle.manifest_sha256,
        "": "",
    }
    return update_report(
        device_pk=device_pk or update.device_id,
        report=UpdateReport(
            update_id=update.pk,
            attempt=attempt,
            seq=seq,
            state=state,
            running_manifest_sha256=manifests.get(running, running),
            downloaded_bytes=more.get("downloaded_bytes", 0),
            code=more.get("code", ""),
            message=more.get("message", ""),
        ),
        clock=clock,
    )


def test_it_follows_the_way_of_an_update(update):
    for seq, state in enumerate(PROGRESS[3:], start=1):
        running = "new" if state in (S.PROBATION, S.SUCCEEDED) else "base"
        outcome = send(update, state, seq, running=running, downloaded_bytes=10 * seq)
        assert outcome.was_applied
    update.refresh_from_db()
    assert update.state == S.SUCCEEDED
    assert update.downloaded_bytes == 70
    assert update.activated_at is not None
    assert update.finished_at is not None
    device = Device.objects.get(pk=update.device_id)
    assert device.running_bundle_id == update.bundle_id
    assert device.previous_bundle_id == update.base_bundle_id
    steps = UpdateTransition.objects.filter(subject=update).order_by("pk")
    assert [step.new for step in steps][-1] == S.SUCCEEDED


def test_it_ignores_a_repeated_report(update):
    assert send(update, S.DOWNLOADING, 1).was_new
    again = send(update, S.DOWNLOADING, 1)
    assert not again.was_new
    assert UpdateReportRow.objects.count() == 1
    assert UpdateTransition.objects.filter(subject=update).count() == 1


def test_it_keeps_a_late_report_but_moves_nothing_back(update):
    send(update, S.APPLYING, 5)
    late = send(update, S.DOWNLOADING, 2, downloaded_bytes=99)
    assert late.was_new
    assert not late.was_applied
    update.refresh_from_db()
    assert update.state == S.APPLYING
    assert update.seq == 5


def test_it_lets_a_delta_that_does_not_apply_be_fetched_whole(update):
    send(update, S.APPLYING, 1)
    assert send(update, S.DOWNLOADING, 2).was_applied
    send(update, S.ACTIVATING, 3)
    assert not send(update, S.DOWNLOADING, 4).was_applied


def test_it_leaves_no_end(update):
    send(update, S.FAILED, 1, code="agent.digest", message="bad section")
    update.refresh_from_db()
    assert (update.state, update.code) == (S.FAILED, "agent.digest")
    assert not send(update, S.DOWNLOADING, 2).was_applied
    assert not send(update, S.SUCCEEDED, 3, running="new").was_applied
    update.refresh_from_db()
    assert update.state == S.FAILED
    # but what the device says it runs is believed
    assert Device.objects.get(pk=update.device_id).running_bundle_id == update.bundle_id


def test_it_calls_a_failure_after_activation_what_it_is(update):
    send(update, S.PROBATION, 1, running="new")
    send(update, S.FAILED, 2)
    update.refresh_from_db()
    assert update.state == S.ROLLED_BACK


def test_it_refuses_a_report_that_contradicts_itself(update):
    with pytest.raises(ReportContradictsError):
        send(update, S.SUCCEEDED, 1, running="base")
    assert UpdateReportRow.objects.count() == 0


@pytest.mark.parametrize("state", [S.QUEUED, S.OFFERED, S.SUPERSEDED, S.TIMED_OUT, S.SKIPPED])
def test_it_refuses_states_that_only_the_server_may_set(update, state):
    with pytest.raises(InvalidInputError):
        send(update, state, 1)


def test_it_refuses_reports_about_the_updates_of_others(update):
    other = make_device()
    with pytest.raises(NotFoundError):
        send(update, S.DOWNLOADING, 1, device_pk=other.pk)
    with pytest.raises(InvalidInputError):
        send(update, S.DOWNLOADING, 1, attempt=2)


def test_it_tells_the_edge_only_when_an_answer_changes(update):
    before = FleetVersion.objects.get().number
    send(update, S.DOWNLOADING, 1)
    assert FleetVersion.objects.get().number == before
    send(update, S.FAILED, 2)
    assert FleetVersion.objects.get().number == before + 1


REPORTABLE = [S.DOWNLOADING, S.DOWNLOADED, S.APPLYING, S.STAGED, S.ACTIVATING, S.PROBATION]


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(order=st.permutations(range(6)), repeats=st.lists(st.integers(0, 5), max_size=4))
def test_it_ends_the_same_whatever_order_reports_come_in(update, order, repeats):
    Update.objects.filter(pk=update.pk).update(state="queued", seq=0, activated_at=None)
    UpdateReportRow.objects.all().delete()
    for place in itertools.chain(order, repeats):
        state = REPORTABLE[place]
        running = "new" if state == S.PROBATION else "base"
        send(update, state, place + 1, running=running)
    update.refresh_from_db()
    assert update.state == S.PROBATION
    assert update.seq == 6
    assert UpdateReportRow.objects.count() == 6
    assert S(update.state) not in TERMINAL_STATES


def test_it_orders_what_devices_run_by_the_servers_clock(clock):
    model = make_model()
    _, bundles = make_release(model)
    device = make_device(model, running=bundles["x86-64-v3"], at=clock.now())
    old = bundles["x86-64-v3"]
    new = make_release(model)[1]["x86-64-v3"]
    late = clock.now()
    clock.advance(5)
    assert device_runs(device_pk=device.pk, manifest_sha256=new.manifest_sha256, at=clock.now())
    heartbeats_store(beats=[Beat(device.pk, late, old.manifest_sha256)])
    device.refresh_from_db()
    assert device.running_bundle_id == new.pk
    clock.advance(5)
    heartbeats_store(beats=[Beat(device.pk, clock.now(), "f" * 64)])
    device.refresh_from_db()
    assert device.running_bundle_id == new.pk  # no bundle of ours: not believed
    heartbeats_store(beats=[Beat(device.pk, clock.now(), None), Beat(10**9, clock.now(), "")])
    device.refresh_from_db()
    assert device.running_manifest_sha256 == new.manifest_sha256
    assert device.heartbeat.at == clock.now()


def test_it_stores_heartbeats_in_three_queries(django_assert_num_queries, clock):
    model = make_model()
    beats = [Beat(make_device(model).pk, clock.now(), "") for _ in range(5)]
    with django_assert_num_queries(5):  # savepoint, devices, trails, upsert, release
        heartbeats_store(beats=beats)
