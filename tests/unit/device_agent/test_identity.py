from pathlib import Path

import pytest

from device_agent.errors import (
    ConfigurationError,
    NotEnrolledError,
    RefusedError,
    StateLostError,
    TrustError,
)
from device_agent.identity import DeviceKey
from device_agent.storage.disk import Disk
from tests.simulators.device import Device, toy_config, toy_ports
from tests.simulators.release_server import Fault, ReleaseServer
from tests.simulators.tuf_repository import ImageRepository


def test_it_keeps_its_key(tmp_path: Path) -> None:
    first = DeviceKey.load_or_make(Disk(), tmp_path)
    assert DeviceKey.load_or_make(Disk(), tmp_path).thumbprint == first.thumbprint
    assert (tmp_path / "device.key").stat().st_mode & 0o777 == 0o600
    assert first.device_id == first.thumbprint[:32]


def test_it_does_not_replace_a_key_that_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "device.key").write_bytes(b"-----BEGIN PRIVATE KEY-----\nAAAA")
    with pytest.raises(StateLostError):
        DeviceKey.load_or_make(Disk(), tmp_path)


def test_it_is_the_same_device_when_it_enrols_again(server: ReleaseServer, start) -> None:
    device = start()
    first = device.agent.enrolment()
    assert device.agent.enrol() == first
    assert len(server.keys) == 1


def test_it_is_refused_with_a_serial_of_another_key(server: ReleaseServer, start) -> None:
    start("one", serial="same")
    with pytest.raises(RefusedError) as refusal:
        start("two", serial="same")
    assert refusal.value.server_code == "fleet.serial"


def test_it_needs_a_claim_and_a_serial(server: ReleaseServer, start) -> None:
    with pytest.raises(RefusedError):
        start("one", claim="")
    with pytest.raises(ConfigurationError):
        start("two", serial="")


def test_it_does_not_start_before_it_enrolled(server: ReleaseServer, tmp_path: Path) -> None:
    from device_agent.agent import Agent

    agent = Agent(toy_config(server, tmp_path / "new"), toy_ports())
    with pytest.raises(NotEnrolledError):
        agent.boot()
    agent.close()


def test_it_exchanges_its_key_for_a_new_token_when_the_old_one_is_refused(
    server: ReleaseServer, start
) -> None:
    device: Device = start()
    device.agent.api.poll("")
    server.tokens.clear()
    device.agent.api.poll("")
    assert [kind for kind, _ in server.requests].count("token") == 2


def test_it_refuses_roots_that_are_not_those_it_was_told(
    server: ReleaseServer, start, tmp_path: Path
) -> None:
    (tmp_path / "root.json").write_bytes(server.image.trust_anchor)
    start("right", image_root=str(tmp_path / "root.json"))
    (tmp_path / "other.json").write_bytes(ImageRepository(1).trust_anchor)
    with pytest.raises(TrustError, match="another root"):
        start("wrong", image_root=str(tmp_path / "other.json"))


def test_it_keeps_the_roots_of_its_first_enrolment(server: ReleaseServer, start) -> None:
    device: Device = start()
    pinned = device.agent.trust.root("image_root.json")
    server.image = ImageRepository(1)
    device.agent.enrol()
    assert device.agent.trust.root("image_root.json") == pinned


def test_it_begins_anew_only_when_told_to(server: ReleaseServer, start, v1) -> None:
    device: Device = start()
    device.install(v1)
    for path in (device.agent.config.state_dir / "trust").glob("floors.*"):
        path.write_bytes(b"junk")
    with pytest.raises(StateLostError):
        device.agent.enrol()
    device.agent.enrol(accept_state_loss=True)
    assert device.agent.floors.load().assignment_seq == 0


def test_it_survives_a_server_that_is_busy_during_enrolment(
    server: ReleaseServer, tmp_path: Path
) -> None:
    import threading

    from device_agent.agent import Agent
    from device_agent.farm import enrol_patiently

    server.fail("enrol", Fault(status=503))
    agent = Agent(toy_config(server, tmp_path / "patient"), toy_ports())
    stop = threading.Event()
    stop.wait = lambda timeout=None: False  # type: ignore[method-assign]
    enrolment = enrol_patiently(agent, stop)
    assert enrolment is not None
    assert enrolment.state == "accepted"
    agent.close()
