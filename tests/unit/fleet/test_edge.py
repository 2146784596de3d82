"""The hot paths: same answers as the slow way, no SQL, fresh, and downloads that can be cut off."""

import json
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.db import DatabaseError
from django.test import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builds.models import BundleSection, Delta
from builds.states import DeltaState
from compiler.contract.protocol import UpdateState, parse_poll_answer
from fleet.common.tokens import SessionToken, issue, token_key
from fleet.edge import holder as holder_module
from fleet.edge.app import Edge
from fleet.edge.blobs import CHUNK_BYTES
from fleet.edge.holder import BeatBuffer, SnapshotHolder
from fleet.edge.snapshot import snapshot_build
from fleet.edge.wire import ByteRange, byte_range
from fleet.errors import UpdateCancelledError
from fleet.models import Device, Enrolment, Heartbeat, Rollout, Stage, Update
from fleet.selectors.poll import device_explain, device_poll_answer
from fleet.services.rollouts import rollout_halt, rollout_pause
from fleet.services.versions import fleet_version_bump
from fleet.states import DeviceState, RolloutState, StageState
from tests.factories.builds import make_blob, make_bundle, make_version
from tests.factories.fleet import MANAGER, SimulatedFleet, make_device

pytestmark = pytest.mark.django_db


class Wire:
    """Calls the edge as a server does."""

    def __init__(self, clock: Any, max_age_s: float = 0.5) -> None:
        self.clock = clock
        self.holder = SnapshotHolder(max_age_s)
        self.beats = BeatBuffer()
        self.edge = Edge(
            self._behind, holder=self.holder, beats=self.beats, keeper=None, clock=clock
        )
        self.status = 0
        self.headers: dict[str, str] = {}

    def _behind(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("299 Django", [])
        return [b"django"]

    def token(self, device_pk: int, generation: int = 0, life_s: int = 60) -> str:
        expires_at = int(self.clock.now().timestamp()) + life_s
        key = token_key(django_settings.SECRET_KEY)
        return issue(key, SessionToken(device_pk, generation, expires_at))

    def open(self, path: str, device_pk: int | None = None, method: str = "GET", **headers: str):
        path, _, query = path.partition("?")
        environ: dict[str, Any] = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            **{f"HTTP_{name.upper()}": value for name, value in headers.items()},
        }
        if device_pk is not None and "HTTP_AUTHORIZATION" not in environ:
            environ["HTTP_AUTHORIZATION"] = f"Bearer {self.token(device_pk)}"

        def start_response(status: str, sent: list[tuple[str, str]]) -> None:
            self.status = int(status.split()[0])
            self.headers = dict(sent)

        return self.edge(environ, start_response)

    def get(self, path: str, device_pk: int | None = None, **headers: str) -> bytes:
        return b"".join(self.open(path, device_pk, **headers))

    def code(self, body: bytes) -> str:
        return json.loads(body)["code"]


@pytest.fixture(autouse=True)
def _one_connection(monkeypatch):
    """Keep the test's own transaction: outside tests no request of the edge is inside one."""
    monkeypatch.setattr("fleet.edge.app.close_old_connections", lambda: None)


@pytest.fixture
def fleet() -> SimulatedFleet:
    fleet = SimulatedFleet(per_target=2)
    fleet.answers_per_s = 0
    fleet.release()
    fleet.rollout()
    fleet.run(1)
    return fleet


@pytest.fixture
def wire(fleet: SimulatedFleet) -> Wire:
    return Wire(fleet.clock)


def offered(fleet: SimulatedFleet) -> Update:
    return Update.objects.select_related("bundle").order_by("pk").first()


def test_it_offers_the_update_and_says_how_to_tag_telemetry(fleet, wire):
    update = offered(fleet)
    answer = parse_poll_answer(wire.get("/d/v1/poll", update.device_id, sparsefleet_running=""))
    assert wire.status == 200
    assert answer.offer is not None
    assert answer.offer.update_id == update.pk
    assert answer.offer.manifest_sha256 == update.bundle.manifest_sha256
    assert (answer.rollout_id, answer.stage, answer.arm) == (update.rollout_id, 0, "treatment")
    assert wire.headers["ETag"].endswith(f'-{update.pk}"')


def test_it_answers_304_until_something_changes(fleet, wire):
    update = offered(fleet)
    wire.get("/d/v1/poll", update.device_id)
    etag = wire.headers["ETag"]
    assert wire.get("/d/v1/poll", update.device_id, if_none_match=etag) == b""
    assert wire.status == 304
    rollout_halt(actor=MANAGER, rollout_id=update.rollout_id, clock=fleet.clock)
    wire.holder.refresh()
    answer = parse_poll_answer(wire.get("/d/v1/poll", update.device_id, if_none_match=etag))
    assert wire.status == 200
    assert answer.offer is None


def test_it_asks_no_database_while_the_snapshot_is_fresh(fleet, wire, django_assert_num_queries):
    update = offered(fleet)
    wire.holder = None
    wire.edge._holder = SnapshotHolder(60.0)
    wire.get("/d/v1/poll", update.device_id)
    with django_assert_num_queries(0):
        for _ in range(3):
            wire.get("/d/v1/poll", update.device_id, sparsefleet_running="a" * 64)
        wire.get("/d/v1/poll", 10**6)
    assert wire.status == 200


def test_it_builds_a_snapshot_in_seven_queries(fleet, django_assert_num_queries):
    with django_assert_num_queries(7):
        snapshot_build()


def test_it_looks_again_by_itself_when_its_thread_is_late(fleet, monkeypatch):
    wire = Wire(fleet.clock, max_age_s=0.5)
    update = offered(fleet)
    now = [100.0]
    monkeypatch.setattr(holder_module.time, "monotonic", lambda: now[0])
    wire.get("/d/v1/poll", update.device_id)
    rollout_halt(actor=MANAGER, rollout_id=update.rollout_id, clock=fleet.clock)
    now[0] += 0.4
    assert parse_poll_answer(wire.get("/d/v1/poll", update.device_id)).offer is not None
    now[0] += 0.2
    assert parse_poll_answer(wire.get("/d/v1/poll", update.device_id)).offer is None


def test_it_says_ask_again_rather_than_something_old(fleet, wire, monkeypatch):
    def broken() -> int:
        raise DatabaseError("gone")

    wire.edge._holder = SnapshotHolder(0.0)
    monkeypatch.setattr(holder_module, "version_read", broken)
    body = wire.get("/d/v1/poll", offered(fleet).device_id)
    assert (wire.status, wire.code(body)) == (503, "fleet.snapshot_stale")
    assert "Retry-After" in wire.headers


def test_it_refuses_tokens_that_are_wrong_old_or_taken_back(fleet, wire):
    device_pk = offered(fleet).device_id
    for text in ("", "Bearer", "Bearer x.y", f"Bearer {wire.token(device_pk, life_s=0)}"):
        body = wire.get("/d/v1/poll", device_pk, authorization=text)
        assert (wire.status, wire.code(body)) == (401, "fleet.token"), text
    Device.objects.filter(pk=device_pk).update(token_generation=1)
    fleet_version_bump()
    wire.holder.refresh()
    wire.get("/d/v1/poll", device_pk)
    assert wire.status == 401
    wire.get("/d/v1/poll", authorization=f"Bearer {wire.token(device_pk, generation=1)}")
    assert wire.status == 200


def test_it_answers_nobody_who_is_no_member(fleet, wire):
    rejected = make_device(fleet.model, state=DeviceState.REJECTED)
    fleet_version_bump()
    body = wire.get("/d/v1/poll", rejected.pk)
    assert (wire.status, wire.code(body)) == (403, "fleet.device_state")


def test_it_leaves_everything_else_to_django(fleet, wire):
    assert wire.get("/d/v1/enrol") == b"django"
    assert wire.get("/d/v1/updates/1/assignment") == b"django"


@pytest.mark.parametrize("path", ["/d/v1/poll", f"/d/v1/blobs/{'0' * 64}?update=1"])
def test_it_says_which_methods_it_knows(wire, path):
    body = b"".join(wire.open(path, 1, method="POST"))
    assert (wire.status, wire.code(body)) == (405, "fleet.method")
    assert wire.headers["Allow"] == "GET, HEAD"


def test_it_notes_polls_and_writes_them_in_one_go(fleet, wire):
    device_pk = offered(fleet).device_id
    fleet.clock.advance(30)
    wire.get("/d/v1/poll", device_pk, sparsefleet_running="c" * 64)
    wire.get("/d/v1/poll", device_pk)
    body = wire.get("/d/v1/poll", device_pk, sparsefleet_running="zz")
    assert wire.status == 422, body
    assert wire.beats.flush() == 1
    assert wire.beats.flush() == 0
    beat = Heartbeat.objects.get(device_id=device_pk)
    assert beat.at == fleet.clock.now()


def test_it_stores_what_a_device_says_it_runs(fleet, wire):
    update = offered(fleet)
    fleet.clock.advance(30)
    wire.get("/d/v1/poll", update.device_id, sparsefleet_running=update.bundle.manifest_sha256)
    wire.beats.flush()
    device = Device.objects.get(pk=update.device_id)
    assert device.running_manifest_sha256 == update.bundle.manifest_sha256
    assert device.running_bundle_id == update.bundle_id


def test_it_does_not_believe_that_a_device_runs_what_it_cannot_have(fleet, wire):
    before = Device.objects.get(pk=offered(fleet).device_id)
    foreign = make_bundle(make_version())
    others = fleet.bundles["x86-64-v1"], fleet.bundles["x86-64-v2"], fleet.bundles["x86-64-v3"]
    wrong = [bundle for bundle in others if bundle.target_id != before.target_id]
    for manifest in ("c" * 64, foreign.manifest_sha256, wrong[0].manifest_sha256):
        fleet.clock.advance(30)
        wire.get("/d/v1/poll", before.pk, sparsefleet_running=manifest)
        assert wire.status == 200
        wire.beats.flush()
        device = Device.objects.select_related("heartbeat").get(pk=before.pk)
        assert device.running_manifest_sha256 == before.running_manifest_sha256 != ""
        assert device.running_bundle_id == before.running_bundle_id
        assert device.heartbeat.at == fleet.clock.now()


# --- the same answers as the slow way -------------------------------------------------------


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_it_answers_what_the_slow_view_answers(fleet, wire, data):
    """Throw rows into any combination of states, possible or not, and compare every device."""
    pick = data.draw
    rollout = Rollout.objects.get()
    Rollout.objects.filter(pk=rollout.pk).update(state=pick(st.sampled_from(RolloutState)))
    for stage in Stage.objects.all():
        Stage.objects.filter(pk=stage.pk).update(state=pick(st.sampled_from(StageState)))
    for update in Update.objects.all():
        Update.objects.filter(pk=update.pk).update(
            state=pick(st.sampled_from(UpdateState)),
            kind=pick(st.sampled_from(("install", "rollback"))),
            is_offerable=pick(st.booleans()),
        )
    for device in Device.objects.all():
        Device.objects.filter(pk=device.pk).update(state=pick(st.sampled_from(DeviceState)))
    second = Stage.objects.get(index=1)
    for row in Enrolment.objects.filter(arm="control"):
        where = pick(st.sampled_from([row.stage, second]))
        Enrolment.objects.filter(pk=row.pk).update(stage=where)
    fleet_version_bump()
    wire.holder.refresh()
    for device in Device.objects.all():
        fast = wire.get("/d/v1/poll", device.pk)
        slow = device_poll_answer(device_pk=device.pk)
        if slow is None:
            assert wire.status == 403
        else:
            assert parse_poll_answer(fast) == slow
        live = wire.holder.current().live
        assert (device.pk in live.values()) == (slow is not None and slow.offer is not None) or (
            slow is None
        )
        explained = device_explain(device_pk=device.pk)
        assert explained.answer == slow
        assert explained.reasons


def test_it_is_held_against_the_view_that_django_has(fleet, wire):
    device_pk = offered(fleet).device_id
    headers = {"authorization": f"Bearer {Wire(RealClock()).token(device_pk)}"}
    slow = Client().get("/d/v1/poll", headers=headers)
    assert slow.content == wire.get("/d/v1/poll", device_pk)
    assert Client().get("/d/v1/poll").status_code == 401


class RealClock:
    def now(self):
        from datetime import UTC, datetime

        return datetime.now(UTC)


# --- blobs -----------------------------------------------------------------------------------

DATA = bytes(range(256)) * 1_024  # four chunks


@pytest.fixture
def blob(fleet: SimulatedFleet) -> str:
    sha256 = make_blob(DATA).sha256
    BundleSection.objects.create(
        bundle=offered(fleet).bundle, component="large", sha256=sha256, size_bytes=len(DATA)
    )
    return sha256


def test_it_serves_a_blob_whole_and_in_parts(fleet, wire, blob):
    update = offered(fleet)
    path = f"/d/v1/blobs/{blob}?update={update.pk}"
    assert wire.get(path, update.device_id) == DATA
    assert wire.headers["Content-Length"] == str(len(DATA))
    assert wire.headers["ETag"] == f'"{blob}"'
    rest = wire.get(path, update.device_id, range="bytes=1000-", if_range=f'"{blob}"')
    assert wire.status == 206
    assert rest == DATA[1_000:]
    assert wire.headers["Content-Range"] == f"bytes 1000-{len(DATA) - 1}/{len(DATA)}"
    assert wire.get(path, update.device_id, range="bytes=-5") == DATA[-5:]
    assert wire.get(path, update.device_id, range="bytes=9-", if_range='"other"') == DATA
    assert wire.status == 200
    wire.get(path, update.device_id, range=f"bytes={len(DATA)}-")
    assert wire.status == 416
    assert wire.headers["Content-Range"] == f"bytes */{len(DATA)}"
    assert b"".join(wire.open(path, update.device_id, method="HEAD")) == b""
    assert wire.headers["Content-Length"] == str(len(DATA))


def test_it_gives_blobs_only_for_an_update_of_the_device_that_may_proceed(fleet, wire, blob):
    update = offered(fleet)
    other = Device.objects.exclude(pk=update.device_id).first()
    cases = [
        (f"/d/v1/blobs/{blob}?update={update.pk}", other.pk, 410, "fleet.update_cancelled"),
        (f"/d/v1/blobs/{blob}?update=999999", update.device_id, 410, "fleet.update_cancelled"),
        (f"/d/v1/blobs/{blob}", update.device_id, 422, "app.invalid_input"),
        (f"/d/v1/blobs/{blob}?update=x", update.device_id, 422, "app.invalid_input"),
        (f"/d/v1/blobs/{'0' * 64}?update={update.pk}", update.device_id, 404, "app.not_found"),
        (f"/d/v1/blobs/../../etc?update={update.pk}", update.device_id, 404, "app.not_found"),
        (f"/d/v1/blobs/{blob}?update={update.pk}", None, 401, "fleet.token"),
    ]
    for path, device_pk, status, code in cases:
        body = wire.get(path, device_pk)
        assert (wire.status, wire.code(body)) == (status, code), path


def test_it_gives_no_blob_that_is_not_of_the_update(fleet, wire):
    update = offered(fleet)
    mine = set(update.bundle.sections.values_list("sha256", flat=True))
    foreign = make_bundle(make_version(), sections={"plan": b"another model"})
    source = next(
        row["sha256"] for row in update.rollout.version.files if row["name"] == "model.onnx"
    )
    for sha256 in (foreign.sections.get().sha256, source):
        assert sha256 not in mine
        body = wire.get(f"/d/v1/blobs/{sha256}?update={update.pk}", update.device_id)
        assert (wire.status, wire.code(body)) == (404, "app.not_found")
    for sha256 in mine:
        wire.get(f"/d/v1/blobs/{sha256}?update={update.pk}", update.device_id)
        assert wire.status == 200


def test_it_gives_the_delta_of_the_update_and_no_other(fleet, wire, django_assert_num_queries):
    update = offered(fleet)
    blob, other = make_blob(b"a delta"), make_blob(b"another delta")
    delta, _ = Delta.objects.update_or_create(
        base=update.base_bundle,
        new=update.bundle,
        defaults={"state": DeltaState.BUILDING.value, "sha256": blob.sha256, "size_bytes": 7},
    )
    Update.objects.filter(pk=update.pk).update(delta=delta)
    path = f"/d/v1/blobs/{blob.sha256}?update={update.pk}"
    wire.get(path, update.device_id)
    assert wire.status == 404
    Delta.objects.filter(pk=delta.pk).update(state=DeltaState.READY.value)
    assert wire.get(path, update.device_id) == b"a delta"  # late: the snapshot is from before
    fleet_version_bump()
    wire.edge._holder = SnapshotHolder(60.0)
    wire.edge._holder.refresh()
    with django_assert_num_queries(0):
        assert wire.get(path, update.device_id) == b"a delta"
    wire.get(f"/d/v1/blobs/{other.sha256}?update={update.pk}", update.device_id)
    assert wire.status == 404


def test_it_keeps_one_set_of_sections_per_bundle(fleet):
    fleet.run(1)
    bundles = dict(Update.objects.values_list("pk", "bundle_id"))
    snapshot = snapshot_build()
    assert snapshot.downloads.keys() == snapshot.live.keys() != set()
    sets = {(bundles[pk], id(row.sections)) for pk, row in snapshot.downloads.items()}
    assert len(sets) == len({bundles[pk] for pk in snapshot.downloads})


def test_it_cuts_a_download_when_the_rollout_is_halted(fleet, wire, blob):
    update = offered(fleet)
    body = iter(wire.open(f"/d/v1/blobs/{blob}?update={update.pk}", update.device_id))
    assert len(next(body)) == CHUNK_BYTES
    rollout_halt(actor=MANAGER, rollout_id=update.rollout_id, clock=fleet.clock)
    wire.holder.refresh()
    with pytest.raises(UpdateCancelledError):
        next(body)
    wire.get(f"/d/v1/blobs/{blob}?update={update.pk}", update.device_id)
    assert wire.status == 410


def test_it_lets_a_download_go_on_while_the_rollout_is_paused(fleet, wire, blob):
    update = offered(fleet)
    fleet.run(1)
    body = iter(wire.open(f"/d/v1/blobs/{blob}?update={update.pk}", update.device_id))
    next(body)
    rollout_pause(actor=MANAGER, rollout_id=update.rollout_id, clock=fleet.clock)
    wire.holder.refresh()
    assert b"".join(body) == DATA[CHUNK_BYTES:]


@given(st.text(max_size=40), st.integers(0, 1_000))
def test_it_never_reads_outside_the_file(header, size):
    part = byte_range(header, size)
    assert part is None or 0 <= part.start <= part.end <= size


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 40))
def test_it_reads_ranges_as_the_standard_says(first, last, size):
    part = byte_range(f"bytes={first}-{last}", size)
    if first > last:
        assert part == ByteRange(0, size, is_part=False)
    elif first >= size:
        assert part is None
    else:
        assert part == ByteRange(first, min(last + 1, size), is_part=True)
