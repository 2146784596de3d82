import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from compiler.contract.canonical import canonical_bytes
from compiler.contract.errors import ContractError
from compiler.contract.protocol import PollAnswer
from compiler.contract.telemetry import parse_batch
from device_agent.errors import NetworkError, RefusedError, ServerError, UnauthorizedError
from device_agent.runtime.answers import AnswerRecord, Outcome
from device_agent.telemetry.counters import Counters, Tags, tags_of
from device_agent.telemetry.spool import Spool
from device_agent.telemetry.upload import Uploader
from tests.simulators.device import Device
from tests.simulators.disk import FastDisk
from tests.simulators.release_server import Fault, ReleaseServer

V1, V2 = "1" * 64, "2" * 64


def record(
    manifest: str = V1, outcome: Outcome = Outcome.ENDED, correct: bool | None = True
) -> AnswerRecord:
    return AnswerRecord(manifest, (), outcome, correct, 12.0)


class TestCounters:
    def test_it_counts_by_bundle_and_arm(self) -> None:
        counters = Counters()
        counters.record(record())
        counters.tag(Tags(7, 1, "treatment"))
        counters.record(record(outcome=Outcome.CUT_OFF, correct=False))
        counters.record(record(V2, Outcome.ERROR, None))
        first, second, third = counters.cut("", {})
        assert (first.rollout_id, first.answers, first.correct) == (None, 1, 1)
        assert (second.arm, second.failures, second.scored, second.correct) == (
            "treatment",
            1,
            1,
            0,
        )
        assert (third.manifest_sha256, third.failures, third.scored) == (V2, 1, 0)
        assert [batch.seq for batch in (first, second, third)] == [0, 1, 2]
        for batch in (first, second, third):
            assert parse_batch(batch.to_bytes()) == batch
        assert counters.cut("", {}) == []

    def test_what_a_battery_lost_is_counted_by_window(self) -> None:
        counters = Counters()
        for drain in (None, 6.0, None, 0.0, 12.0):
            counters.record(replace(record(), drain=drain))
        (batch,) = counters.cut("", {})
        assert parse_batch(batch.to_bytes()) == batch
        assert (batch.answers, batch.drain.count) == (5, 3)
        assert batch.drain.quantile(0.5) == pytest.approx(6_000, rel=0.011)
        told = json.loads(batch.to_bytes())
        with pytest.raises(ContractError, match="contradict"):
            parse_batch(canonical_bytes({**told, "drain": [[400, 6]]}))
        counters.record(record())
        assert b"drain" not in counters.cut("", {})[0].to_bytes()

    def test_the_running_bundle_says_how_it_runs(self) -> None:
        counters = Counters()
        for manifest in (V1, V2):
            counters.record(record(manifest))
        facts = {
            "threads": 2,
            "weight_bytes": 64,
            "huge_weight_bytes": None,
            "threads_measured": {},
        }
        first, second = counters.cut(V2, facts)
        assert first.gauges == {}
        assert second.gauges == {"threads": 2, "weight_bytes": 64}

    def test_it_loses_nothing_between_two_threads(self) -> None:
        counters = Counters()
        threads = [
            threading.Thread(target=lambda: [counters.record(record()) for _ in range(500)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        total = 0
        while any(thread.is_alive() for thread in threads):
            total += sum(batch.answers for batch in counters.cut("", {}))
        total += sum(batch.answers for batch in counters.cut("", {}))
        assert total == 2000
        assert counters.summary()["answers"] == 2000

    def test_it_takes_an_unknown_arm_for_none(self) -> None:
        assert tags_of(PollAnswer(1.0, None, 1, 2, "sideways")) == Tags(1, 2, "")


class TestSpool:
    def test_it_drops_the_oldest_when_it_is_full(self, tmp_path: Path) -> None:
        spool = Spool(FastDisk(), tmp_path, 3)
        counters = Counters()
        for _ in range(5):
            counters.record(record())
            spool.put(counters.cut("", {})[0])
        assert [parse_batch(data).seq for _, data in spool.waiting()] == [2, 3, 4]
        assert spool.dropped == 2

    def test_it_outlives_a_restart(self, tmp_path: Path) -> None:
        counters = Counters()
        counters.record(record())
        Spool(FastDisk(), tmp_path, 3).put(counters.cut("", {})[0])
        ((_, data),) = Spool(FastDisk(), tmp_path, 3).waiting()
        assert parse_batch(data).boot_id == counters.boot_id


class TestUploader:
    @pytest.mark.parametrize("error", [NetworkError("x"), ServerError("x")])
    def test_it_keeps_what_could_not_be_sent(self, tmp_path: Path, error: Exception) -> None:
        sent: list[bytes] = []
        failing = [error]

        def send(data: bytes) -> None:
            if failing:
                raise failing.pop()
            sent.append(data)

        counters, spool = Counters(), Spool(FastDisk(), tmp_path, 10)
        uploader = Uploader(counters, spool, send, lambda: ("", {}))
        counters.record(record())
        assert uploader.run_once() == 0
        counters.record(record())
        assert uploader.run_once() == 2
        assert [parse_batch(data).seq for data in sent] == [0, 1]
        assert list(spool.waiting()) == []

    def test_it_drops_what_the_server_refuses_and_goes_on(self, tmp_path: Path) -> None:
        errors: list[Exception | None] = [RefusedError("no", status=422), None]

        def send(_data: bytes) -> None:
            error = errors.pop(0)
            if error is not None:
                raise error

        counters, spool = Counters(), Spool(FastDisk(), tmp_path, 10)
        for _ in range(2):
            counters.record(record())
            spool.put(counters.cut("", {})[0])
        assert Uploader(counters, spool, send, lambda: ("", {})).run_once() == 1
        assert spool.dropped == 1

    def test_it_keeps_everything_while_it_is_not_let_in(self, tmp_path: Path) -> None:
        def send(_data: bytes) -> None:
            raise UnauthorizedError("who", status=401)

        counters, spool = Counters(), Spool(FastDisk(), tmp_path, 10)
        counters.record(record())
        assert Uploader(counters, spool, send, lambda: ("", {})).run_once() == 0
        assert len(list(spool.waiting())) == 1


def test_it_is_counted_once_when_the_answer_was_lost(server: ReleaseServer, start, v1) -> None:
    """The server took the batch, the device did not hear it, and sends it again."""
    device: Device = start()
    device.install(v1)
    device.agent.counters.record(record())
    taken = []
    send = device.agent.api.telemetry

    def lose_the_answer(batch: bytes) -> None:
        send(batch)
        taken.append(batch)
        if len(taken) == 1:
            raise NetworkError("the answer was lost")

    device.agent.uploader._send = lose_the_answer
    device.agent.uploader.run_once()
    device.agent.uploader.run_once()
    assert len(taken) == 2
    assert len(server.batches) == 1


def test_it_is_tagged_with_what_the_poll_says(server: ReleaseServer, start, v1) -> None:
    device: Device = start()
    server.arm = (3, 1, "control")
    device.install(v1)
    device.agent.counters.record(record())
    server.fail("telemetry", Fault(status=500))
    device.agent.uploader.run_once()
    device.agent.uploader.run_once()
    (batch,) = server.batches.values()
    assert (batch.rollout_id, batch.stage, batch.arm) == (3, 1, "control")
