"""A release server and devices, made per test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle
from tests.simulators.device import Device, toy_config, toy_ports
from tests.simulators.release_server import ReleaseServer


@pytest.fixture
def server() -> Iterator[ReleaseServer]:
    server = ReleaseServer().start()
    yield server
    server.stop()


@pytest.fixture
def start(server: ReleaseServer, tmp_path: Path) -> Iterator[Callable[..., Device]]:
    """Return a function that starts (or restarts) a device; keywords change its configuration."""
    running: list[Device] = []

    def start(name: str = "device", ports: Any = None, **changes: Any) -> Device:
        config = toy_config(server, tmp_path / name, **changes)
        running.append(Device.start(server, config, ports or toy_ports()))
        return running[-1]

    yield start
    for device in running:
        device.stop()


@pytest.fixture
def v1(server: ReleaseServer) -> ToyBundle:
    return server.publish(toy_bundle(ToySpec()))


@pytest.fixture
def v2(server: ReleaseServer) -> ToyBundle:
    return server.publish(toy_bundle(ToySpec(version="2", release_seq=2, changed=40)))
