"""The agent and the platform together: keys that are replaced, and clocks that are wrong."""

import base64
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from builds.models import AuditEvent
from builds.services.signing import keys_generate, repositories_init
from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import PATH_ENROL, PATH_ROTATE, PATH_TIME, PATH_TOKEN
from device_agent.agent import Agent
from device_agent.clock import SystemClock
from device_agent.config import AgentConfig
from device_agent.errors import NetworkError, RefusedError, ServerError, UnauthorizedError
from device_agent.storage.disk import Disk
from fleet.apis.device import _time_rates
from fleet.common.rates import MAX_ADDRESSES, Rates
from fleet.common.time_nonces import LIFE_S, is_fresh, issue
from fleet.errors import RotationError
from fleet.models import Device, IdentityAlert, ReplacedKey
from fleet.services.claims import claim_create
from fleet.services.device_keys import device_key_rotate
from fleet.services.enrolment import device_admit
from fleet.states import DeviceEvent
from tests.factories.builds import make_model
from tests.factories.fleet import MANAGER, facts
from tests.factories.signing import signed_headers
from tests.simulators.device import toy_ports
from tests.simulators.disk import FastDisk, PowerCut, PowerCutDisk
from tests.simulators.platform_wire import URL, PlatformWire
from tests.unit.fleet.test_enrolment import Newcomer

pytestmark = pytest.mark.django_db
ROTATION_CUTS = 16


class WrongClock(SystemClock):
    """A clock that is off by so much."""

    def __init__(self, at: datetime) -> None:
        self.off = at - datetime.now(UTC)

    def now(self) -> datetime:
        return super().now() + self.off


@pytest.fixture(autouse=True)
def _platform(state_dir: Any) -> Iterator[None]:
    keys_generate()
    repositories_init()
    make_model("toy")
    _time_rates.cache_clear()
    yield
    _time_rates.cache_clear()


@pytest.fixture
def wire() -> PlatformWire:
    return PlatformWire()


@pytest.fixture
def start(wire: PlatformWire, tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Return a function that starts (or restarts) an agent against this process's platform."""
    claim = claim_create(actor=MANAGER, name="lab", uses=99)[1]
    running: list[Agent] = []

    def start(name: str = "device", *, disk: Disk | None = None, clock: Any = None) -> Agent:
        for agent in running:
            agent.close()
        config = AgentConfig(
            server_url=URL, state_dir=tmp_path / name, claim=claim, serial=name, model="toy"
        )
        ports = toy_ports(
            transport=wire,
            disk=disk or FastDisk(),
            clock=clock or SystemClock(),
            fingerprint=lambda _config: facts(),
        )
        agent = Agent(config, ports)
        running[:] = [agent]
        if not (config.state_dir / "identity" / "enrolment.json").exists():
            agent.enrol()
        agent.boot()
        return agent

    yield start
    for agent in running:
        agent.close()


def works(agent: Agent) -> bool:
    return agent.api.poll("").offer is None


# --- keys that are replaced -----------------------------------------------------------------------


def test_it_replaces_its_key_and_stays_the_same_device(start):
    agent = start()
    works(agent)
    before, old = Device.objects.get(), agent.key.thumbprint
    new = agent.rotate_key()
    after = Device.objects.get()
    assert new == agent.key.thumbprint == after.key_thumbprint != old
    assert (after.pk, after.device_id) == (before.pk, before.device_id)
    assert after.token_generation == before.token_generation + 1
    assert works(agent)
    again = start()  # restarted
    assert (again.key.thumbprint, again.api.device_id) == (new, before.device_id)
    assert works(again)
    assert again.enrol().device_id == before.device_id
    assert again.rotate_key() not in (old, new)
    assert works(again)
    assert (
        ReplacedKey.objects.count() == AuditEvent.objects.filter(action="device.key").count() == 2
    )


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_it_gets_on_with_either_key_when_the_network_fails(start, wire, lost, restarted, again):
    agent = start()
    old = agent.key.thumbprint
    getattr(wire, f"lose_{lost}").add(PATH_ROTATE)
    with pytest.raises(NetworkError):
        agent.rotate_key()
    assert (Device.objects.get().key_thumbprint == old) == (lost == "request")
    agent = start() if restarted else agent
    if again:
        agent.rotate_key()
    assert works(agent)
    assert agent.key.thumbprint == Device.objects.get().key_thumbprint
    assert (agent.key.thumbprint == old) == (lost == "request" and not again)
    assert ReplacedKey.objects.count() == (lost == "answer" or again)


@pytest.mark.parametrize("cut_at", range(1, ROTATION_CUTS))
@pytest.mark.parametrize("seed", range(3))
def test_it_survives_a_power_cut_at_every_write_of_a_rotation(start, tmp_path, cut_at, seed):
    agent = start()
    disk = PowerCutDisk(tmp_path / "device", cut_at)
    agent.api._keys._disk = disk
    try:
        agent.rotate_key()
    except PowerCut:
        disk.lose(seed)
    agent = start()
    assert works(agent)
    assert agent.key.thumbprint == Device.objects.get().key_thumbprint
    agent.rotate_key()
    assert works(agent)


def test_it_cuts_the_power_at_every_write_of_a_rotation(start, tmp_path):
    agent = start()
    disk = PowerCutDisk(tmp_path / "device", 10**6)
    agent.api._keys._disk = disk
    agent.rotate_key()
    assert 8 < disk.count < ROTATION_CUTS


def test_it_keeps_its_key_when_the_server_wants_no_other(start):
    agent = start()
    old = agent.key.thumbprint
    device_admit(actor=MANAGER, device_pk=Device.objects.get().pk, event=DeviceEvent.QUARANTINE)
    with pytest.raises(RefusedError) as refusal:
        agent.rotate_key()
    assert refusal.value.server_code == "fleet.device_state"
    assert (agent.key.thumbprint, agent.api._keys.next) == (old, None)
    assert not ReplacedKey.objects.exists()


def test_it_has_the_new_key_when_only_the_refusal_of_its_twin_arrives(start, monkeypatch):
    """The same request twice at once: one replaced the key, the other is told that it was late."""

    def late(**how: Any) -> Device:
        device_key_rotate(**how)
        raise RotationError("the key was replaced in the meantime")

    agent = start()
    old = agent.key.thumbprint
    monkeypatch.setattr("fleet.apis.device.device_key_rotate", late)
    new = agent.rotate_key()
    assert new == Device.objects.get().key_thumbprint != old
    assert works(agent)


def test_it_keeps_both_keys_when_the_server_knows_neither(start):
    agent = start()
    Device.objects.update(key_thumbprint="0" * 64, public_key=Newcomer().public)
    with pytest.raises(UnauthorizedError):
        agent.rotate_key()
    assert agent.api._keys.next is not None


def test_it_shuts_out_the_backup_with_the_old_key(start, tmp_path):
    agent = start()
    key_file = tmp_path / "device" / "identity" / "device.key"
    backup = key_file.read_bytes()
    agent.rotate_key()
    key_file.write_bytes(backup)
    restored = start()
    with pytest.raises(UnauthorizedError):
        works(restored)
    with pytest.raises(RefusedError) as refusal:
        restored.enrol()
    assert refusal.value.server_code == "fleet.key_taken"
    assert IdentityAlert.objects.get().serial == "device"


@pytest.mark.parametrize("without", ["old", "new"])
def test_it_takes_a_new_key_only_from_who_holds_both(without):
    make_model("doc-reader")
    device, thief = Newcomer(), Newcomer()
    device.enrol(claim_create(actor=MANAGER, name="x", uses=1)[1])
    row = Device.objects.get()
    body = b'{"device_id":"%s","public_key":"%s"}' % (
        row.device_id.encode(),
        base64.b64encode(thief.public),
    )
    url = URL + PATH_ROTATE
    signer = device if without == "new" else thief
    public = device.public if without == "new" else thief.public
    headers = signed_headers(signer.key, public, url=url, body=body)
    answer = device.send(PATH_ROTATE, body, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (401, "fleet.signature")
    assert Device.objects.get().key_thumbprint == sha256_hex(device.public)


# --- clocks that are wrong ------------------------------------------------------------------------

CLOCKS = [datetime(1970, 1, 1, 0, 0, 9, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)]


@pytest.mark.parametrize("at", CLOCKS, ids=["1970", "2100"])
def test_it_enrols_polls_and_rotates_with_a_wrong_clock(start, wire, at):
    agent = start(clock=WrongClock(at))
    assert works(agent)
    expected = (at - datetime.now(UTC)) / timedelta(seconds=1)
    assert Device.objects.get().clock_skew_s == pytest.approx(expected, abs=60)
    assert agent.api.clock_skew_s == pytest.approx(expected, abs=60)
    assert wire.paths.count(PATH_TIME) == 2
    assert wire.paths.count(PATH_ENROL) == wire.paths.count(PATH_TOKEN) == 2
    agent.rotate_key()
    assert works(agent)


def test_it_asks_for_no_time_with_a_right_clock(start, wire):
    agent = start()
    works(agent)
    assert PATH_TIME not in wire.paths
    assert abs(Device.objects.get().clock_skew_s) < 60


def test_it_takes_a_nonce_once_and_only_its_own():
    make_model("doc-reader")
    device = Newcomer()
    device.enrol(claim_create(actor=MANAGER, name="x", uses=1)[1])
    nonce = Client().get(PATH_TIME).json()["nonce"]
    past = datetime(2001, 1, 1, tzinfo=UTC)
    forged = [f"{nonce[:-1]}{'0' if nonce[-1] != '0' else '1'}", "t.1.2.3" + "0" * 20, "0" * 32]
    for wrong in forged:
        answer = device.token(created=past, nonce=wrong)
        assert (answer.status_code, answer.json()["code"]) == (401, "fleet.clock")
    assert device.token(created=past, nonce=nonce).status_code == 200
    assert device.token(created=past, nonce=nonce).json()["code"] == "fleet.replay"
    assert device.token(nonce=nonce).json()["code"] == "fleet.replay"


def test_it_believes_a_nonce_for_a_minute():
    key, now = b"k" * 32, 1_800_000_000.5
    nonce = issue(key, now, b"r" * 8)
    assert len(nonce) <= 64
    assert is_fresh(key, nonce, now)
    assert is_fresh(key, nonce, now + LIFE_S)
    assert not is_fresh(key, nonce, now + LIFE_S + 1)
    assert not is_fresh(key, nonce, now - 1)
    assert not is_fresh(b"x" * 32, nonce, now)


def test_it_tells_the_time_not_too_often(settings):
    settings.SPARSEFLEET = settings.SPARSEFLEET.model_copy(update={"time_nonces_per_minute": 3})
    client = Client()
    answers = [client.get(PATH_TIME) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[-1].json()["code"] == "fleet.too_often"
    assert answers[-1]["Retry-After"]
    assert client.get(PATH_TIME, REMOTE_ADDR="10.0.0.9").status_code == 200
    assert client.post(PATH_TIME).status_code == 405


def test_it_refills_buckets_and_forgets_old_ones():
    rates = Rates(per_minute=2)
    assert [rates.allows("a", 0.0) for _ in range(3)] == [True, True, False]
    assert not rates.allows("a", 29.0)
    assert rates.allows("a", 59.5)
    for number in range(MAX_ADDRESSES):
        rates.allows(str(number), 60.0)
    assert len(rates._buckets) == MAX_ADDRESSES
    assert rates.allows("a", 60.0)


def test_it_goes_on_when_the_time_is_refused_to_it(start, wire, settings):
    agent = start(clock=WrongClock(CLOCKS[0]))
    settings.SPARSEFLEET = settings.SPARSEFLEET.model_copy(update={"time_nonces_per_minute": 1})
    _time_rates.cache_clear()
    Client().get(PATH_TIME)
    agent.api._token = ""
    with pytest.raises(ServerError):  # retryable: asked again with the next turn
        works(agent)
    assert ServerError.retryable
