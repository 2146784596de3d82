"""Updates from offer to outcome, with a server that does what it should, and one that does not."""

import threading
from collections.abc import Callable

import pytest

from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import OfferKind, UpdateState
from device_agent.states import State
from device_agent.storage.slots import Pointer
from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle
from tests.simulators.device import Device
from tests.simulators.release_server import Fault, ReleaseServer

Start = Callable[..., Device]
WHOLE = [
    UpdateState.DOWNLOADING,
    UpdateState.DOWNLOADED,
    UpdateState.APPLYING,
    UpdateState.STAGED,
    UpdateState.ACTIVATING,
    UpdateState.PROBATION,
    UpdateState.SUCCEEDED,
]


@pytest.fixture
def device(start: Start, v1: ToyBundle) -> Device:
    device = start()
    device.install(v1)
    return device


def keeps(device: Device, *bundles: ToyBundle) -> None:
    """Check that exactly these bundles are on the device."""
    expected = {bundle.sha256 for bundle in bundles}
    expected |= {sha256 for bundle in bundles for sha256 in bundle.blobs}
    folder = device.agent.config.state_dir
    assert {path.name for path in (folder / "objects").iterdir()} == expected
    assert list((folder / "partial").iterdir()) == []


def test_it_installs_its_first_bundle(server: ReleaseServer, start: Start, v1: ToyBundle) -> None:
    device = start()
    assert server.running() == ""
    update = device.install(v1)
    assert update.states == WHOLE
    assert [report.seq for report in update.reports] == list(range(1, 8))
    assert update.reports[-1].running_manifest_sha256 == v1.sha256
    assert update.reports[-1].downloaded_bytes == v1.manifest.total_bytes
    device.run(lambda: server.running() == v1.sha256)
    keeps(device, v1)


def test_it_takes_a_delta(
    server: ReleaseServer, device: Device, v1: ToyBundle, v2: ToyBundle
) -> None:
    delta = server.publish_delta(v1, v2)
    server.sent_bytes.clear()
    update = device.take(server.offer(v2, delta=delta))
    assert update.states == WHOLE
    assert device.says() == "2"
    assert server.sent_bytes["blob"] == delta.size_bytes == update.reports[-1].downloaded_bytes
    assert delta.size_bytes < v2.manifest.total_bytes / 10
    keeps(device, v1, v2)


def test_it_fetches_only_what_it_does_not_have(
    server: ReleaseServer, device: Device, v1: ToyBundle, v2: ToyBundle
) -> None:
    server.sent_bytes.clear()
    device.install(v2)
    changed = sum(len(data) for sha256, data in v2.blobs.items() if sha256 not in v1.blobs)
    assert server.sent_bytes["blob"] == changed < v2.manifest.total_bytes


def test_it_returns_without_downloading_anything(
    server: ReleaseServer, device: Device, v1: ToyBundle, v2: ToyBundle
) -> None:
    device.install(v2)
    server.sent_bytes.clear()
    server.requests.clear()
    update = device.take(server.offer(v1, kind=OfferKind.ROLLBACK))
    assert update.outcome is UpdateState.SUCCEEDED
    assert device.says() == "1"
    assert "blob" not in server.sent_bytes
    assert update.reports[-1].downloaded_bytes == 0
    assert not any("/targets/" in path for _, path in server.requests)
    keeps(device, v1, v2)


def test_it_keeps_two_bundles_and_no_more(
    server: ReleaseServer, device: Device, v2: ToyBundle
) -> None:
    device.install(v2)
    v3 = server.publish(toy_bundle(ToySpec(version="3", release_seq=3, changed=80)))
    device.install(v3)
    keeps(device, v2, v3)


def test_it_succeeds_at_once_with_what_it_runs(
    server: ReleaseServer, device: Device, v1: ToyBundle
) -> None:
    update = device.take(server.offer(v1))
    assert update.states == [UpdateState.SUCCEEDED]


def test_it_repeats_an_outcome_that_the_server_did_not_hear(
    server: ReleaseServer, device: Device, v2: ToyBundle
) -> None:
    update = device.take(server.offer(v2))
    update.reports.clear()
    requests = len(server.requests)
    device.take(update)
    assert update.states == [UpdateState.SUCCEEDED]
    assert not any(kind in ("assignment", "blob") for kind, _ in server.requests[requests:])


def test_it_tries_again_in_a_new_attempt(
    server: ReleaseServer, device: Device, v2: ToyBundle
) -> None:
    blobs, server.blobs = server.blobs, {}
    update = device.take(server.offer(v2))
    assert (update.outcome, device.code) == (UpdateState.FAILED, "agent.refused")
    server.blobs = blobs
    update.attempt = 2
    update.reports.clear()
    assert device.take(update).outcome is UpdateState.SUCCEEDED


class TestNetwork:
    def test_it_resumes_where_it_stopped(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        server.sent_bytes.clear()
        server.fail("blob", Fault(cut=1000), Fault(cut=500), Fault(drop=True), Fault(status=503))
        device.install(v2)
        changed = sum(len(v2.sections[name].data) for name in v2.sections if "." in name)
        changed += len(v2.sections["plan"].data) + len(v2.sections["pipeline"].data)
        assert server.sent_bytes["blob"] == changed

    def test_it_begins_anew_when_the_server_ignores_the_range(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        server.fail("blob", Fault(cut=1000), Fault(ignore_range=True))
        device.install(v2)

    @pytest.mark.parametrize(
        "headers",
        [
            {"Content-Range": "bytes 0-4351/4352"},
            {"Content-Range": "bytes 1000-4351/9999"},
            {"Content-Range": "nonsense"},
        ],
    )
    def test_it_does_not_join_what_does_not_belong_together(
        self, server: ReleaseServer, device: Device, v2: ToyBundle, headers: dict[str, str]
    ) -> None:
        server.fail("blob", Fault(cut=1000), Fault(headers=headers))
        device.install(v2)

    @pytest.mark.parametrize(
        "fault",
        [
            Fault(change=lambda body: bytes([body[0] ^ 1]) + body[1:]),
            Fault(change=lambda body: body[:-1]),
            Fault(change=lambda body: body + b"x"),
            Fault(change=lambda _body: b""),
            Fault(announce=10),
            Fault(announce=1 << 40),
            Fault(status=416),
            Fault(headers={"Content-Encoding": "gzip"}),
        ],
    )
    def test_it_takes_no_other_bytes_than_were_signed_for(
        self, server: ReleaseServer, device: Device, v2: ToyBundle, fault: Fault
    ) -> None:
        server.fail("blob", *([fault] * 40))
        update = device.take(server.offer(v2))
        assert update.outcome is UpdateState.FAILED
        assert device.code in (
            "agent.wrong_content",
            "agent.oversized",
            "agent.protocol",
            "agent.truncated",
        )
        assert device.says() == "1"

    def test_it_recovers_from_a_flipped_bit_on_the_way(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        server.fail("blob", Fault(change=lambda body: bytes([body[0] ^ 1]) + body[1:]))
        device.install(v2)

    def test_it_waits_for_a_server_that_is_away(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        for kind in ("poll", "assignment", "tuf", "blob", "report"):
            server.fail(kind, Fault(drop=True), Fault(status=500))
        device.install(v2)

    def test_it_gives_up_when_time_is_over_and_answers_on(
        self, server: ReleaseServer, start: Start, v1: ToyBundle, v2: ToyBundle
    ) -> None:
        device = start(update_deadline_s=0.3)
        device.install(v1)
        server.fail("blob", *([Fault(drop=True)] * 500))
        update = device.take(server.offer(v2))
        assert (update.outcome, device.code) == (UpdateState.FAILED, "agent.network")
        assert device.says() == "1"

    @pytest.mark.parametrize("kind", ["poll", "assignment", "tuf", "blob", "report"])
    def test_it_lives_through_a_server_that_hangs(
        self, server: ReleaseServer, start: Start, v1: ToyBundle, v2: ToyBundle, kind: str
    ) -> None:
        first = start()
        first.install(v1)
        first.stop()
        device = start(read_timeout_s=0.3)
        server.fail(kind, *[Fault(delay_s=0.5)] * 2)
        update = server.offer(v2)
        device.take(update)
        assert update.outcome is UpdateState.SUCCEEDED
        assert device.says() == "2"

    @pytest.mark.parametrize(
        ("kind", "code"),
        [("assignment", "agent.network"), ("tuf", "agent.network"), ("blob", "agent.network")],
    )
    def test_it_gives_up_a_server_that_always_hangs(
        self,
        server: ReleaseServer,
        start: Start,
        v1: ToyBundle,
        v2: ToyBundle,
        kind: str,
        code: str,
    ) -> None:
        first = start()
        first.install(v1)
        first.stop()
        device = start(read_timeout_s=0.1, update_deadline_s=0.3)
        server.fail(kind, *[Fault(delay_s=0.2)] * 100)
        update = device.take(server.offer(v2))
        assert (update.outcome, device.code) == (UpdateState.FAILED, code)
        assert device.says() == "1"

    def test_it_keeps_its_reports_in_order_while_the_server_is_away(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        server.fail("report", *([Fault(status=503)] * 5))
        update = device.take(server.offer(v2))
        assert update.states == WHOLE

    def test_it_goes_on_when_a_report_is_refused(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        server.fail("report", Fault(status=409), Fault(status=422))
        update = device.take(server.offer(v2))
        assert update.states == WHOLE[2:]


class TestCancelling:
    def test_it_stops_when_the_server_says_gone(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        update = server.offer(v2)
        seen: list[str] = []

        def withdraw(sha256: str) -> None:
            seen.append(sha256)
            update.live = len(seen) < 2

        server.on_blob = withdraw
        device.run(lambda: update.outcome is not None)
        assert (update.outcome, device.code) == (UpdateState.CANCELLED, "agent.cancelled")
        assert len(seen) == 2
        assert device.says() == "1"

    def test_it_stops_when_the_poll_does_not_show_the_update(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        update = server.offer(v2)
        server.fail("blob", *[Fault(rate=2000)] * 20)
        withdraw = threading.Timer(0.3, lambda: setattr(update, "live", False))
        server.on_blob = lambda _sha256: withdraw.start() if not withdraw.is_alive() else None
        device.run(lambda: update.outcome is not None)
        withdraw.cancel()
        assert update.outcome is UpdateState.CANCELLED
        assert server.sent_bytes["blob"] > 0
        assert device.says() == "1"

    def test_it_does_not_activate_what_was_withdrawn_during_the_self_test(
        self, server: ReleaseServer, device: Device, v1: ToyBundle, v2: ToyBundle
    ) -> None:
        update = server.offer(v2)
        engine = device.agent.engine
        self_test = engine.self_test

        def withdraw_meanwhile(pointer: Pointer) -> None:
            self_test(pointer)
            update.live = False

        engine.self_test = withdraw_meanwhile
        device.run(lambda: update.outcome is not None)
        assert update.outcome is UpdateState.CANCELLED
        assert UpdateState.PROBATION not in update.states
        assert device.agent.engine.started.count("2") == 1, "it was loaded, and never ran"
        assert device.says() == "1"
        keeps(device, v1)

    def test_it_activates_when_the_server_is_away_at_that_moment(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        update = server.offer(v2)
        engine = device.agent.engine
        self_test = engine.self_test

        def go_away(pointer: Pointer) -> None:
            self_test(pointer)
            server.fail("poll", Fault(drop=True))

        engine.self_test = go_away
        assert device.take(update).outcome is UpdateState.SUCCEEDED

    def test_it_takes_the_newer_offer_instead(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        v3 = server.publish(toy_bundle(ToySpec(version="3", release_seq=3)))
        first = server.offer(v2)
        second = []
        server.on_blob = lambda _sha256: second or second.append(server.offer(v3))
        device.run(lambda: bool(second) and second[0].outcome is not None)
        assert first.outcome is UpdateState.CANCELLED
        assert device.says() == "3"


class TestProbation:
    def test_it_returns_by_itself_from_a_bundle_that_fails(
        self, server: ReleaseServer, start: Start, v1: ToyBundle
    ) -> None:
        device = start(probation_s=30.0, questions_per_s=1.0)
        device.agent.probation._config = device.agent.config
        first = server.offer(v1, device.agent.key.device_id)
        device.run(lambda: device.state is State.PROBATION)
        answer(device, 3)
        device.agent.probation._seen.since -= 60
        device.take(first)
        bad = server.publish(
            toy_bundle(ToySpec(version="2", release_seq=2, behaviour={"answer": "error"}))
        )
        update = server.offer(bad)
        device.run(lambda: device.state is State.PROBATION)
        assert device.says() == "2"
        answer(device, 5)
        device.take(update)
        assert (update.outcome, device.code) == (UpdateState.ROLLED_BACK, "agent.unfit")
        assert update.states == [*WHOLE[:-1], UpdateState.ROLLED_BACK]
        assert device.says() == "1"
        keeps(device, v1)

    def test_it_leaves_probation_for_another_offer(
        self, server: ReleaseServer, start: Start, v1: ToyBundle, v2: ToyBundle
    ) -> None:
        device = start()
        device.install(v1)
        object.__setattr__(device.agent.config, "probation_s", 60.0)
        update = server.offer(v2)
        device.run(lambda: device.state is State.PROBATION)
        back = server.offer(v1, kind=OfferKind.ROLLBACK)
        device.take(back)
        assert update.outcome is UpdateState.ROLLED_BACK
        assert back.states == [UpdateState.SUCCEEDED]
        assert device.says() == "1"

    @pytest.mark.parametrize(
        ("behaviour", "code"),
        [({"self_test": "fail"}, "agent.self_test"), ({"load": "fail"}, "agent.bundle")],
    )
    def test_it_never_activates_what_does_not_pass_its_self_test(
        self, server: ReleaseServer, device: Device, v1: ToyBundle, behaviour: dict, code: str
    ) -> None:
        bad = server.publish(toy_bundle(ToySpec(version="2", release_seq=2, behaviour=behaviour)))
        update = device.take(server.offer(bad))
        assert (update.outcome, device.code) == (UpdateState.FAILED, code)
        assert device.says() == "1"
        keeps(device, v1)

    def test_it_runs_nothing_when_its_first_bundle_fails(
        self, server: ReleaseServer, start: Start
    ) -> None:
        bad = server.publish(toy_bundle(ToySpec(behaviour={"self_test": "fail"})))
        device = start()
        update = device.take(server.offer(bad))
        assert update.outcome is UpdateState.FAILED
        assert device.agent.slots.table.current is None
        assert device.agent.host.manifest_sha256 == ""


class TestRestart:
    def test_it_runs_the_same_after_a_restart(
        self, server: ReleaseServer, device: Device, start: Start, v2: ToyBundle
    ) -> None:
        device.install(v2)
        device.stop()
        assert start().says() == "2"

    def test_it_gives_up_a_bundle_that_never_survives_a_start(
        self, server: ReleaseServer, start: Start, v1: ToyBundle, v2: ToyBundle
    ) -> None:
        device = start(activation_tries=2)
        device.install(v1)
        object.__setattr__(device.agent.config, "probation_s", 60.0)
        update = server.offer(v2)
        device.run(lambda: device.state is State.PROBATION)
        for _ in range(2):
            device.stop()
            device = start(activation_tries=2, probation_s=60.0)
            assert device.says() == "2"
            assert device.state is State.PROBATION
        device.stop()
        device = start(activation_tries=2, probation_s=60.0)
        assert device.says() == "1"
        device.take(update)
        assert (update.outcome, device.code) == (UpdateState.ROLLED_BACK, "agent.crash_loop")

    def test_it_falls_back_when_the_running_bundle_rots(
        self, server: ReleaseServer, device: Device, start: Start, v1: ToyBundle, v2: ToyBundle
    ) -> None:
        device.install(v2)
        rotten = next(sha256 for sha256 in v2.blobs if sha256 not in v1.blobs)
        device.agent.store.path(rotten).write_bytes(b"rot")
        device.stop()
        device = start()
        assert device.says() == "1"
        device.install(v2)

    def test_it_fetches_again_what_rots_before_staging(
        self, server: ReleaseServer, device: Device, v1: ToyBundle, v2: ToyBundle
    ) -> None:
        shared = next(sha256 for sha256 in v2.blobs if sha256 in v1.blobs)
        path = device.agent.store.path(shared)
        path.write_bytes(b"\0" * path.stat().st_size)
        update = device.take(server.offer(v2))
        assert update.outcome is UpdateState.SUCCEEDED
        assert sha256_hex(path.read_bytes()) == shared


def answer(device: Device, count: int) -> None:
    """Let the device answer as the answering loop would."""
    from tests.simulators.device import QUESTION

    for _ in range(count):
        device.agent.probation.record(device.agent.host.answer(QUESTION))
