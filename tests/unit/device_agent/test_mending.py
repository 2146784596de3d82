"""A bundle whose sections were damaged on disk is fetched again with the next offer of it."""

from collections.abc import Callable

import pytest

from compiler.contract.protocol import OfferKind, UpdateState
from device_agent.errors import DamagedError
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from tests.simulators.bundles import ToyBundle
from tests.simulators.device import Device
from tests.simulators.release_server import ReleaseServer

HARM: dict[str, Callable[[bytes], bytes]] = {
    "changed": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "cut": lambda data: data[:-1],
    "emptied": lambda _data: b"",
}


def _harm(device: Device, bundle: ToyBundle, how: str) -> None:
    section = max(bundle.manifest.sections, key=lambda item: item.size_bytes)
    path = device.agent.store.path(section.sha256)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(HARM[how](data))


@pytest.mark.parametrize("kind", list(OfferKind))
@pytest.mark.parametrize("how", HARM)
def test_it_answers_again_after_the_next_offer(
    server: ReleaseServer,
    start: Callable[..., Device],
    v1: ToyBundle,
    how: str,
    kind: OfferKind,
) -> None:
    device = start()
    device.install(v1)
    _harm(device, v1, how)
    device.stop()
    device = start()
    assert device.agent.host.manifest_sha256 == ""
    update = device.take(server.offer(v1, kind=kind))
    assert update.outcome is UpdateState.SUCCEEDED
    assert device.says() == "1"
    current = device.agent.slots.table.current
    assert current is not None
    assert current.committed
    assert device.agent.slots.table.other is None
    device.stop()
    assert start().says() == "1"


def test_a_section_that_went_while_it_answers_is_fetched_too(
    server: ReleaseServer, start: Callable[..., Device], v1: ToyBundle, v2: ToyBundle
) -> None:
    device = start()
    device.install(v1)
    device.install(v2)
    section = max(v2.manifest.sections, key=lambda item: item.size_bytes)
    device.agent.store.forget(section.sha256)
    assert device.says() == "2"
    assert device.take(server.offer(v2)).outcome is UpdateState.SUCCEEDED
    assert device.agent.store.has(section.sha256, section.size_bytes)
    other = device.agent.slots.table.other
    assert other is not None
    assert other.version == "1"


def test_a_guest_leaves_what_is_damaged(start: Callable[..., Device], v1: ToyBundle) -> None:
    device = start()
    device.install(v1)
    section = max(v1.manifest.sections, key=lambda item: item.size_bytes)
    _harm(device, v1, "changed")
    guest = ObjectStore(Disk(), device.agent.config.state_dir, max_bytes=0, is_guest=True)
    with pytest.raises(DamagedError, match=r"is damaged$"):
        guest.read_verified(section.sha256, section.size_bytes)
    assert guest.has(section.sha256, section.size_bytes)
