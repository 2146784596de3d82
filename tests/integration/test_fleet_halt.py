"""Halt, measured on a real server process: offers end within a second, downloads are cut."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.engines import free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1.0
PIECE_BYTES = 64 * 1024
SLOW_S = 0.02
"""Between pieces: 3 MB/s, the line of the device."""
DRAIN_S = 0.005
"""After the halt: 13 MB/s. What lies in socket buffers is read soon, the whole blob takes 4 s."""


@dataclass
class Platform:
    """A server process and what its set-up printed."""

    port: int
    facts: dict[str, Any]

    def poll(self, client: httpx.Client, device_pk: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.facts['tokens'][device_pk]}"}
        return client.get("/d/v1/poll", headers=headers).raise_for_status().json()

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120, **more)

    def act(self, name: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.facts['api_token']}"}
        with self.client(headers=headers) as client:
            return client.post(f"/api/v1/rollouts/{self.facts['rollout']}/{name}")


@pytest.fixture
def platform(tmp_path: Path):
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SPARSEFLEET")},
        "SPARSEFLEET_STATE_DIR": str(tmp_path),
        "SPARSEFLEET_NO_BOOTSTRAP": "1",
        "DJANGO_SETTINGS_MODULE": "dashboards.conf.settings",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.halt_platform"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    port = free_port()
    command = [Path(sys.executable).with_name("granian"), "--interface", "wsgi"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--blocking-threads", "8", "--no-ws", "--log-level", "warning"]
    server = subprocess.Popen(
        [*command, "dashboards.conf.wsgi:application"],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        made = Platform(port, json.loads(done.stdout.splitlines()[-1]))
        wait_until_ready(made, server)
        yield made
    finally:
        server.terminate()
        server.wait(timeout=120)
        server.stdout.close()


def wait_until_ready(platform: Platform, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert server.poll() is None, server.stdout.read().decode()
        try:
            with platform.client() as client:
                client.get("/healthz").raise_for_status()
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError("the server does not answer")


@dataclass
class Poller(threading.Thread):
    """A device that polls as fast as it can and remembers when it was offered something."""

    platform: Platform
    device_pk: str
    stop: threading.Event
    offers: list[tuple[float, float]] = field(default_factory=list)
    polls: int = 0
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        with self.platform.client() as client:
            while not self.stop.is_set():
                asked = time.monotonic()
                try:
                    answer = self.platform.poll(client, self.device_pk)
                except httpx.HTTPError as error:
                    self.errors.append(str(error))
                    return
                self.polls += 1
                if answer["offer"] is not None:
                    self.offers.append((asked, time.monotonic()))
                time.sleep(0.01)

    __hash__ = threading.Thread.__hash__


@dataclass
class Download(threading.Thread):
    """A device on a slow line in the middle of a download."""

    platform: Platform
    device_pk: str
    received: int = 0
    after_halt: int = 0
    halted: threading.Event = field(default_factory=threading.Event)
    overslept_s: float = 0.0
    ended: str = ""
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        facts = self.platform.facts
        connection = http.client.HTTPConnection("127.0.0.1", self.platform.port, timeout=120)
        connection.sock = socket.socket()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
        connection.sock.settimeout(120)
        connection.sock.connect(("127.0.0.1", self.platform.port))
        path = f"/d/v1/blobs/{facts['blob']}?update={facts['updates'][self.device_pk]}"
        token = facts["tokens"][self.device_pk]
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        assert answer.status == 200
        assert int(answer.headers["Content-Length"]) == facts["blob_bytes"]
        try:
            while piece := answer.read(PIECE_BYTES):
                self.received += len(piece)
                is_halted = self.halted.is_set()
                self.after_halt += len(piece) if is_halted else 0
                asleep = time.monotonic()
                time.sleep(DRAIN_S if is_halted else SLOW_S)
                if is_halted:
                    self.overslept_s += time.monotonic() - asleep - DRAIN_S
            self.ended = "whole" if self.received == facts["blob_bytes"] else "cut"
        except (http.client.IncompleteRead, ConnectionError) as error:
            self.ended = f"cut: {type(error).__name__}"
        self.ended_at = time.monotonic()
        connection.close()

    __hash__ = threading.Thread.__hash__


def test_it_offers_nothing_and_sends_nothing_a_second_after_a_halt(platform):
    stop = threading.Event()
    treated = list(platform.facts["updates"])
    pollers = [Poller(platform, pk, stop) for pk in treated]
    download = Download(platform, treated[0])
    for thread in (*pollers, download):
        thread.start()
    wait_for(lambda: all(p.offers for p in pollers) and download.received > 4 * PIECE_BYTES)

    halted = platform.act("halt")
    at = time.monotonic()
    assert halted.status_code == 200, halted.text
    assert halted.json()["state"] == "stopped"
    download.halted.set()
    time.sleep(2 * LIMIT_S)
    stop.set()
    for thread in (*pollers, download):
        thread.join(timeout=120)

    assert not any(p.errors for p in pollers)
    assert all(p.polls > 10 for p in pollers)
    late = max(asked for p in pollers for asked, _ in p.offers) - at
    print(f"last offer asked for {late:.3f} s after the halt had returned")
    assert late <= LIMIT_S
    assert download.ended.startswith("cut"), download.ended
    took_s = download.ended_at - at - download.overslept_s  # a busy machine wakes us late
    print(f"download cut {took_s:.3f} s after it, {download.received} bytes in")
    assert took_s <= 2 * LIMIT_S
    assert download.received < platform.facts["blob_bytes"] / 2
    assert_gone(platform, treated)


def wait_for(what: Any, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def assert_gone(platform: Platform, devices: list[str]) -> None:
    """Neither assignments nor blobs may be had any more."""
    with platform.client() as client:
        for pk in devices:
            update = platform.facts["updates"][pk]
            headers = {"Authorization": f"Bearer {platform.facts['tokens'][pk]}"}
            for path in (
                f"/d/v1/updates/{update}/assignment?nonce={'ab' * 16}",
                f"/d/v1/blobs/{platform.facts['blob']}?update={update}",
            ):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 410
                assert answer.json()["code"] == "fleet.update_cancelled"
