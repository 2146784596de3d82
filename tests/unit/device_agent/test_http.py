from collections.abc import Callable, Iterator
from typing import Any

import pytest

from device_agent.clock import SystemClock
from device_agent.config import AgentConfig
from device_agent.errors import (
    ConfigurationError,
    DeadlineError,
    NetworkError,
    OversizedError,
    ProtocolError,
    RefusedError,
    ServerError,
    SlowTransferError,
    TruncatedError,
)
from device_agent.http import HttpClient, RetryPolicy, require_success, with_retries
from tests.simulators.release_server import Fault, ReleaseServer

PATH = "/tuf/image/metadata/timestamp.json"


class Clock(SystemClock):
    """Time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.at = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds


@pytest.fixture
def client(server: ReleaseServer) -> Iterator[Callable[..., HttpClient]]:
    """Return a function that makes a client; keywords change its limits."""
    made: list[HttpClient] = []

    def client(**changes: Any) -> HttpClient:
        config = AgentConfig(**{"server_url": server.url, **changes})
        made.append(HttpClient(config, SystemClock()))
        return made[-1]

    yield client
    for http in made:
        http.close()


def get(http: HttpClient, limit: int = 100_000) -> bytes:
    return http.send(http.build("GET", PATH, headers={}), limit_bytes=limit).body


def stream(http: HttpClient, limit: int = 100_000, deadline_s: float = 60.0) -> bytes:
    with http.stream(PATH, headers={}, limit_bytes=limit, deadline_s=deadline_s) as answer:
        return b"".join(answer.chunks)


def test_it_returns_the_whole_answer(server: ReleaseServer, client) -> None:
    expected = server.image.files["metadata/timestamp.json"]
    assert get(client()) == expected
    assert stream(client()) == expected


def test_it_stops_reading_at_the_limit(server: ReleaseServer, client) -> None:
    with pytest.raises(OversizedError):
        get(client(), limit=10)
    with pytest.raises(OversizedError):
        stream(client(), limit=10)


@pytest.mark.parametrize("fetch", [get, stream])
def test_it_notices_an_answer_that_ends_early(server: ReleaseServer, client, fetch) -> None:
    server.fail("tuf", Fault(cut=20), Fault(announce=10_000))
    for _ in range(2):
        with pytest.raises(TruncatedError):
            fetch(client())


def test_it_gives_up_an_answer_that_trickles(server: ReleaseServer, client) -> None:
    server.fail("tuf", Fault(rate=100))
    with pytest.raises(DeadlineError):
        get(client(request_deadline_s=0.2))
    server.fail("tuf", Fault(rate=100))
    with pytest.raises(SlowTransferError):
        stream(client(min_rate_bytes_s=10_000, min_rate_window_s=0.1))
    server.fail("tuf", Fault(rate=100))
    with pytest.raises(DeadlineError):
        stream(client(), deadline_s=0.2)


def test_it_says_when_the_server_is_away_or_silent(server: ReleaseServer, client) -> None:
    server.fail("tuf", Fault(drop=True))
    with pytest.raises(NetworkError):
        get(client())
    server.fail("tuf", Fault(delay_s=0.6))
    with pytest.raises(NetworkError):
        get(client(read_timeout_s=0.1))
    http = client()
    server.stop()
    with pytest.raises(NetworkError):
        get(http)


def test_it_tells_a_fault_from_a_refusal(server: ReleaseServer, client) -> None:
    server.fail("tuf", Fault(status=503), Fault(status=429), Fault(status=403))
    for _ in range(2):
        with pytest.raises(ServerError) as fault:
            get(client())
        assert fault.value.retryable
    with pytest.raises(RefusedError) as refusal:
        stream(client())
    assert (refusal.value.status, refusal.value.server_code) == (403, "simulated")
    assert not refusal.value.retryable


def test_it_refuses_a_content_coding(server: ReleaseServer, client) -> None:
    server.fail("tuf", Fault(headers={"Content-Encoding": "gzip"}))
    with pytest.raises(ProtocolError, match="content coding"):
        get(client())


def test_it_passes_a_refusal_without_a_problem_document(server: ReleaseServer, client) -> None:
    server.fail("tuf", Fault(status=404, change=lambda _body: b"<html>"))
    http = client()
    response = http.send(http.build("GET", PATH, headers={}), limit_bytes=1000)
    with pytest.raises(RefusedError, match="404"):
        require_success(response, PATH)


def test_it_names_a_certificate_file_that_cannot_be_used(client, tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="ca_file"):
        client(server_url="https://fleet.example", ca_file=str(tmp_path / "none.pem"))


class TestRetries:
    def test_it_tries_again_only_what_may_succeed_later(self) -> None:
        clock = Clock()
        errors = [NetworkError("a"), ServerError("b")]

        def call() -> str:
            if errors:
                raise errors.pop(0)
            return "done"

        assert with_retries(call, RetryPolicy(1.0, 8.0, 100.0), clock) == "done"
        assert len(clock.slept) == 2
        errors.append(ProtocolError("c"))
        with pytest.raises(ProtocolError):
            with_retries(call, RetryPolicy(1.0, 8.0, 100.0), clock)
        assert len(clock.slept) == 2

    def test_it_ends_with_the_deadline(self) -> None:
        clock = Clock()

        def call() -> str:
            raise NetworkError("away")

        with pytest.raises(NetworkError):
            with_retries(call, RetryPolicy(1.0, 4.0, 20.0), clock)
        assert sum(clock.slept) <= 20.0

    def test_it_doubles_up_to_the_limit(self) -> None:
        policy = RetryPolicy(0.5, 10.0, 100.0)
        assert [policy.delay_s(attempt, 1.0) for attempt in range(7)] == [
            0.5,
            1.0,
            2.0,
            4.0,
            8.0,
            10.0,
            10.0,
        ]
        assert policy.delay_s(10_000, 1.0) == 10.0

    def test_it_lets_the_caller_stop_between_tries(self) -> None:
        def call() -> str:
            raise NetworkError("away")

        def stop(_error: object) -> None:
            raise ProtocolError("stop")

        with pytest.raises(ProtocolError):
            with_retries(call, RetryPolicy(1.0, 4.0, 20.0), Clock(), before_wait=stop)
