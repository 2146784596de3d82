"""Bundles that failed here: not tried again, by nobody's accident, and not for ever."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from compiler.contract.protocol import OfferKind, ReportFact, UpdateState
from device_agent.clock import SystemClock
from device_agent.errors import (
    BundleError,
    CancelledError,
    CrashLoopError,
    DamagedError,
    DiskFullError,
    NetworkError,
    SelfTestFailedError,
    SupersededError,
    UnfitError,
    WrongContentError,
)
from device_agent.states import State
from device_agent.status import read_status
from device_agent.storage.denied import MAX_DENIED, MAX_DOUBLINGS, DenyList, Failure
from device_agent.storage.disk import Disk
from device_agent.update.blame import speaks_against
from device_agent.update.context import UpdateContext
from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle
from tests.simulators.device import Device, toy_ports
from tests.simulators.release_server import Fault, ReleaseServer, Update

DAY_S = 86_400
CONTEXT = UpdateContext(1, 1, OfferKind.INSTALL, "2", "a" * 64, manifest_size=10)


class Times:
    def __init__(self) -> None:
        self.now_s = 1_800_000_000

    def __call__(self) -> int:
        return self.now_s


def failure(number: int = 1, event: str = "1.1") -> Failure:
    return Failure(f"{number:064x}", "2", "agent.self_test", "bits differ", 7, event)


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
def open_list(tmp_path: Path, times: Times) -> Callable[[], DenyList]:
    return lambda: DenyList(Disk(), tmp_path, 7 * DAY_S, times)


class TestList:
    def test_it_keeps_reason_count_expiry_and_sequence(self, open_list, times) -> None:
        open_list().add(failure())
        entry = open_list().find(failure().manifest_sha256)
        assert entry is not None
        assert (entry.code, entry.count, entry.assignment_seq) == ("agent.self_test", 1, 7)
        assert (entry.since_s, entry.until_s) == (times.now_s, times.now_s + 7 * DAY_S)

    def test_it_counts_a_failure_once_and_each_further_one_for_longer(
        self, open_list, times
    ) -> None:
        listed = open_list()
        assert listed.add(failure()) == listed.add(failure())
        lengths = []
        for number in range(2, 10):
            entry = listed.add(failure(event=f"{number}.1"))
            assert entry.count == number
            lengths.append((entry.until_s - times.now_s) // DAY_S)
        assert lengths[:3] == [14, 28, 56]
        assert max(lengths) == 7 * 2**MAX_DOUBLINGS

    def test_it_lets_go_when_time_is_over_and_remembers_the_count(self, open_list, times) -> None:
        listed = open_list()
        listed.add(failure())
        times.now_s += 7 * DAY_S - 1
        assert listed.find(failure().manifest_sha256) is not None
        times.now_s += 1
        assert listed.find(failure().manifest_sha256) is None
        assert listed.entries == ()
        assert listed.add(failure(event="2.1")).count == 2

    def test_a_clock_that_goes_back_makes_no_entry_longer(self, open_list, times) -> None:
        times.now_s += 74 * 365 * DAY_S
        open_list().add(failure())
        times.now_s -= 74 * 365 * DAY_S
        listed = open_list()
        assert listed.find(failure().manifest_sha256) is not None
        times.now_s += 7 * DAY_S
        assert listed.find(failure().manifest_sha256) is None

    def test_it_is_bounded_and_forgets_what_expires_first(self, open_list, times) -> None:
        listed = open_list()
        for number in range(MAX_DENIED + 10):
            times.now_s += 1
            listed.add(failure(number))
        assert len(open_list().entries) == MAX_DENIED
        assert listed.find(f"{9:064x}") is None
        assert listed.find(f"{10:064x}") is not None

    def test_it_forgets_what_was_committed(self, open_list) -> None:
        open_list().add(failure())
        open_list().lift(failure().manifest_sha256)
        assert open_list().entries == ()

    @pytest.mark.parametrize("junk", [b"", b"junk", b"SFT1 9 2 a3d95a3c\n{}", b"SFT1 1 1 0\n["])
    def test_it_begins_anew_when_it_cannot_be_read(
        self, tmp_path: Path, open_list, junk: bytes
    ) -> None:
        for copy in ("denied.0", "denied.1"):
            (tmp_path / copy).write_bytes(junk)
        listed = open_list()
        assert listed.entries == ()
        listed.add(failure())
        assert len(open_list().entries) == 1


@pytest.mark.parametrize(
    ("error", "states"),
    [
        (SelfTestFailedError("x"), {State.ACTIVATING, State.PROBATION}),
        (BundleError("x"), {State.ACTIVATING, State.PROBATION}),
        (UnfitError("x"), {State.ACTIVATING, State.PROBATION}),
        (
            CrashLoopError("x"),
            {
                State.DOWNLOADING,
                State.APPLYING,
                State.STAGING,
                State.ACTIVATING,
                State.PROBATION,
            },
        ),
        (DamagedError("x"), set()),
        (NetworkError("x"), set()),
        (DiskFullError("x"), set()),
        (CancelledError("x"), set()),
        (SupersededError("x"), set()),
        (WrongContentError("x"), set()),
    ],
)
def test_it_blames_a_bundle_only_for_its_own_faults(error, states) -> None:
    assert {state for state in State if speaks_against(error, state, CONTEXT)} == states


@pytest.fixture
def device(start: Callable[..., Device], v1: ToyBundle) -> Device:
    device = start()
    device.install(v1)
    return device


@pytest.fixture
def bad(server: ReleaseServer) -> ToyBundle:
    return server.publish(
        toy_bundle(ToySpec(version="2", release_seq=2, behaviour={"self_test": "fail"}))
    )


def refused(device: Device, update: Update) -> None:
    """Check that an update was refused for what happened before, without any download."""
    before = device.server.sent_bytes.get("blob", 0)
    device.take(update)
    assert (update.outcome, device.code) == (UpdateState.REJECTED, "agent.denied")
    assert update.states == [UpdateState.REJECTED]
    assert device.server.sent_bytes.get("blob", 0) == before
    assert device.says() == "1"


class TestUpdates:
    def test_it_does_not_try_again_what_failed_and_says_so(
        self, server: ReleaseServer, device: Device, bad: ToyBundle
    ) -> None:
        first = device.take(server.offer(bad))
        assert first.reports[-1].fact is ReportFact.DENIED
        assert [report.fact for report in first.reports[:-1]] == [ReportFact.NONE] * 5
        for _ in range(3):
            refused(device, server.offer(bad))
        assert device.agent.denied.entries[0].count == 1

    def test_it_tries_again_when_a_higher_assignment_says_so(
        self, server: ReleaseServer, device: Device, bad: ToyBundle
    ) -> None:
        device.take(server.offer(bad))
        retry = server.offer(bad)
        retry.retry_failed = True
        device.take(retry)
        assert (retry.outcome, device.code) == (UpdateState.FAILED, "agent.self_test")
        assert device.agent.denied.entries[0].count == 2
        refused(device, server.offer(bad))

    def test_an_order_to_retry_that_is_not_newer_than_the_failure_does_not_count(
        self, server: ReleaseServer, device: Device, bad: ToyBundle
    ) -> None:
        device.take(server.offer(bad))
        again = server.offer(bad)
        again.retry_failed = True
        entry = device.agent.denied.entries[0]
        server.assignment_seq = entry.assignment_seq - 1
        device.take(again)
        assert (again.outcome, device.code) == (UpdateState.REJECTED, "agent.denied")

    def test_it_lifts_the_entry_of_a_bundle_that_is_committed(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        engine = device.agent.engine
        self_test, engine.self_test = engine.self_test, fail_self_test
        device.take(server.offer(v2))
        engine.self_test = self_test
        retry = server.offer(v2)
        retry.retry_failed = True
        assert device.take(retry).outcome is UpdateState.SUCCEEDED
        assert device.agent.denied.entries == ()

    def test_it_tries_again_when_the_entry_has_expired(
        self, server: ReleaseServer, start: Callable[..., Device], v1: ToyBundle, bad: ToyBundle
    ) -> None:
        clock = MovableClock()
        device = start(ports=toy_ports(clock=clock), denied_s=3_600.0)
        device.install(v1)
        device.take(server.offer(bad))
        refused(device, server.offer(bad))
        clock.ahead += timedelta(hours=1)
        assert device.take(server.offer(bad)).outcome is UpdateState.FAILED

    def test_it_remembers_over_restarts_and_a_wipe_of_every_cache(
        self,
        server: ReleaseServer,
        device: Device,
        start: Callable[..., Device],
        v1: ToyBundle,
        bad: ToyBundle,
    ) -> None:
        device.take(server.offer(bad))
        device.stop()
        folder = device.agent.config.state_dir
        for name in ("objects", "partial", "slots", "trust/image"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "journal").unlink()
        device = start()
        device.install(v1)
        refused(device, server.offer(bad))

    def test_status_shows_it(self, server: ReleaseServer, device: Device, bad: ToyBundle) -> None:
        device.take(server.offer(bad))
        shown = read_status(device.agent.config).document["denied"][bad.sha256[:16]]
        assert (shown["version"], shown["code"], shown["count"]) == ("2", "agent.self_test", 1)
        assert datetime.fromisoformat(shown["until"]) > datetime.now(UTC)

    def test_it_denies_after_wrong_bytes_from_the_delta_and_from_the_whole(
        self, server: ReleaseServer, device: Device, v1: ToyBundle, v2: ToyBundle
    ) -> None:
        """A result that differs by one byte: fall back to full once, then deny."""
        delta = server.publish_delta(v1, v2)
        other = toy_bundle(ToySpec(version="2", release_seq=2, changed=41))
        wrong = server.publish_delta(v1, other)
        server.blobs[delta.sha256] = server.blobs[wrong.sha256]
        delta = type(delta)(delta.base_manifest_sha256, wrong.sha256, wrong.size_bytes)
        for sha256, data in v2.blobs.items():
            if sha256 not in v1.blobs:
                server.blobs[sha256] = bytes([data[0] ^ 1]) + data[1:]
        update = device.take(server.offer(v2, delta=delta))
        assert (update.outcome, device.code) == (UpdateState.FAILED, "agent.wrong_content")
        assert update.states.count(UpdateState.DOWNLOADING) == 2
        assert update.reports[-1].fact is ReportFact.DENIED
        refused(device, server.offer(v2))

    def test_it_does_not_deny_for_the_network_or_for_a_withdrawal(
        self, server: ReleaseServer, start: Callable[..., Device], v1: ToyBundle, v2: ToyBundle
    ) -> None:
        device = start(update_deadline_s=0.2)
        device.install(v1)
        server.fail("blob", *([Fault(drop=True)] * 500))
        assert device.take(server.offer(v2)).outcome is UpdateState.FAILED
        server.heal()
        assert device.agent.denied.entries == ()
        assert device.take(server.offer(v2)).outcome is UpdateState.SUCCEEDED


class TestFacts:
    def test_it_says_once_that_it_is_unconfirmed(
        self, server: ReleaseServer, start: Callable[..., Device], v1: ToyBundle, v2: ToyBundle
    ) -> None:
        clock = MovableClock()
        device = start(ports=toy_ports(clock=clock))
        device.install(v1)
        object.__setattr__(device.agent.config, "probation_s", 60.0)
        update = server.offer(v2)
        update.confirm_deadline = int(clock.now().timestamp()) + 3_600
        device.run(lambda: device.state is State.PROBATION)
        device.run(lambda: len(update.reports) == 6)
        clock.ahead += timedelta(hours=2)
        device.run(lambda: len(update.reports) == 7)
        for _ in range(3):
            device.agent.loop.turn()
        last = update.reports[-1]
        assert (last.fact, last.state, last.seq) == (
            ReportFact.UNCONFIRMED,
            UpdateState.PROBATION,
            7,
        )
        object.__setattr__(device.agent.config, "probation_s", 0.0)
        device.take(update)
        assert update.outcome is UpdateState.SUCCEEDED
        facts = [report.fact for report in update.reports]
        assert facts.count(ReportFact.UNCONFIRMED) == 1

    def test_it_answers_too_late_and_comes_to_its_end(
        self, server: ReleaseServer, start: Callable[..., Device], v1: ToyBundle, v2: ToyBundle
    ) -> None:
        device = start()
        device.install(v1)
        object.__setattr__(device.agent.config, "probation_s", 60.0)
        update = server.offer(v2)
        device.run(lambda: device.state is State.PROBATION)
        update.live = False
        device.run(lambda: update.reports[-1].fact is ReportFact.TOO_LATE)
        object.__setattr__(device.agent.config, "probation_s", 0.0)
        device.run(lambda: update.outcome is not None)
        assert update.outcome is UpdateState.SUCCEEDED
        facts = [report.fact for report in update.reports]
        assert facts.count(ReportFact.TOO_LATE) == 1
        assert device.says() == "2"


class MovableClock(SystemClock):
    """The clock of this machine, as far ahead as a test says."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def now(self) -> datetime:
        return super().now() + self.ahead


def fail_self_test(_pointer: object) -> None:
    raise SelfTestFailedError("bits differ")
