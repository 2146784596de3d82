"""Confidential bundles on a device: opened with its own key, refused with a typed error without."""

import base64
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import DeltaOffer, OfferKind, UpdateState
from compiler.contract.sealing import DELTA_COMPONENT, seal, wrap_key
from device_agent.errors import StateLostError
from device_agent.identity import SealKey
from device_agent.storage.disk import Disk
from tests.simulators.bundles import ToyBundle, ToySpec, sealed_toy, toy_bundle, toy_delta
from tests.simulators.device import Device, toy_ports
from tests.simulators.disk import PowerCut
from tests.simulators.release_server import ReleaseServer, Update

Start = Callable[..., Device]
KEY = bytes(range(32))
OTHER = bytes(32)


@pytest.fixture
def s1(server: ReleaseServer) -> ToyBundle:
    return server.publish(sealed_toy(toy_bundle(ToySpec()), KEY))


@pytest.fixture
def s2(server: ReleaseServer) -> ToyBundle:
    spec = ToySpec(version="2", release_seq=2, changed=40)
    return server.publish(sealed_toy(toy_bundle(spec), OTHER))


@pytest.fixture
def device(server: ReleaseServer, start: Start, s1: ToyBundle) -> Device:
    device = start()
    give(server, device, {s1.sha256: KEY})
    return device


def give(server: ReleaseServer, device: Device, keys: dict[str, bytes], **changes: Any) -> None:
    """Let the server wrap content keys for the device, by manifest; others get none."""
    public = device.agent.keys.seal.private.public_key()
    raw = changes.pop("public", public.public_bytes(Encoding.Raw, PublicFormat.Raw))
    whom = changes.pop("device_id", device.agent.api.device_id)

    def assign(update: Update, nonce: str) -> bytes:
        key = keys.get(update.bundle.sha256)
        wrapped = wrap_key(key, raw, whom, update.bundle.sha256) if key else b""
        text = base64.b64encode(wrapped).decode()
        return server._assign(update, nonce, content_key=text)

    server.assign = assign


def objects(device: Device) -> dict[str, int]:
    folder = device.agent.config.state_dir / "objects"
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


def sealed_delta(server: ReleaseServer, old: ToyBundle, new: ToyBundle, key: bytes) -> DeltaOffer:
    data = toy_delta(old, new)
    box = b"".join(seal(key, DELTA_COMPONENT, sha256_hex(data), [data]))
    server.blobs[sha256_hex(box)] = box
    return DeltaOffer(old.sha256, sha256_hex(box), len(box), sha256_hex(data), len(data))


def test_it_keeps_its_seal_key(tmp_path) -> None:
    first = SealKey.load_or_make(Disk(), tmp_path)
    assert SealKey.load_or_make(Disk(), tmp_path).public_base64 == first.public_base64
    assert (tmp_path / "seal.key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "seal.key").write_bytes(b"junk")
    with pytest.raises(StateLostError, match="cannot be read"):
        SealKey.load_or_make(Disk(), tmp_path)


def test_it_installs_a_confidential_bundle(
    server: ReleaseServer, device: Device, s1: ToyBundle
) -> None:
    update = device.install(s1)
    assert update.outcome is UpdateState.SUCCEEDED
    # plain, under the plain digests, for the owner only; nothing sealed is left
    assert objects(device) == dict.fromkeys([s1.sha256, *s1.blobs], 0o600)
    folder = device.agent.config.state_dir
    for sha256, data in s1.blobs.items():
        assert (folder / "objects" / sha256).read_bytes() == data
    fetched = {path.rpartition("/")[2] for kind, path in server.requests if kind == "blob"}
    assert fetched == set(s1.travels)


def test_it_fetches_only_what_is_new(
    server: ReleaseServer, device: Device, s1: ToyBundle, s2: ToyBundle
) -> None:
    device.install(s1)
    give(server, device, {s2.sha256: OTHER})
    server.requests.clear()
    device.install(s2)
    fetched = {path.rpartition("/")[2] for kind, path in server.requests if kind == "blob"}
    changed = [row for row in s2.manifest.sections if row.sha256 not in s1.blobs]
    assert fetched == {row.travels.sha256 for row in changed}
    assert len(changed) < len(s2.manifest.sections)


def test_it_takes_a_sealed_delta(
    server: ReleaseServer, device: Device, s1: ToyBundle, s2: ToyBundle
) -> None:
    device.install(s1)
    give(server, device, {s2.sha256: OTHER})
    delta = sealed_delta(server, s1, s2, OTHER)
    server.sent_bytes.clear()
    update = device.take(server.offer(s2, delta=delta))
    assert (update.outcome, device.says()) == (UpdateState.SUCCEEDED, "2")
    assert server.sent_bytes["blob"] == delta.size_bytes
    assert set(objects(device)) == {s1.sha256, *s1.blobs, s2.sha256, *s2.blobs}


def test_it_fetches_whole_when_a_delta_opens_to_something_else(
    server: ReleaseServer, device: Device, s1: ToyBundle, s2: ToyBundle
) -> None:
    device.install(s1)
    give(server, device, {s2.sha256: OTHER})
    delta = sealed_delta(server, s1, s2, OTHER)
    wrong = DeltaOffer(
        delta.base_manifest_sha256, delta.sha256, delta.size_bytes, "0" * 64, delta.plain_bytes
    )
    update = device.take(server.offer(s2, delta=wrong))
    assert update.reports[-1].code == "agent.content_key"
    assert device.says() == "1"


def test_it_returns_to_a_confidential_bundle_without_a_key(
    server: ReleaseServer, device: Device, s1: ToyBundle, s2: ToyBundle
) -> None:
    device.install(s1)
    give(server, device, {s2.sha256: OTHER})
    device.install(s2)
    give(server, device, {})
    update = device.take(server.offer(s1, kind=OfferKind.ROLLBACK))
    assert (update.outcome, device.says()) == (UpdateState.SUCCEEDED, "1")


REFUSED: dict[str, Callable[[ReleaseServer, Device, ToyBundle], None]] = {
    "no key": lambda server, device, _s1: give(server, device, {}),
    "another release's key": lambda server, device, s1: give(server, device, {s1.sha256: OTHER}),
    "another device's id": lambda server, device, s1: give(
        server, device, {s1.sha256: KEY}, device_id="0" * 32
    ),
    "another device's key": lambda server, device, s1: give(
        server,
        device,
        {s1.sha256: KEY},
        public=X25519PrivateKey.generate()
        .public_key()
        .public_bytes(Encoding.Raw, PublicFormat.Raw),
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_it_says_that_it_has_no_key(
    server: ReleaseServer, start: Start, v1: ToyBundle, how: str
) -> None:
    device = start()
    device.install(v1)
    spec = ToySpec(version="2", release_seq=2, changed=9)
    secret = server.publish(sealed_toy(toy_bundle(spec), KEY))
    REFUSED[how](server, device, secret)
    update = device.take(server.offer(secret))
    assert (update.outcome, update.reports[-1].code) == (
        UpdateState.FAILED,
        "agent.content_key",
    )
    assert device.says() == "1"
    assert set(objects(device)) == {v1.sha256, *v1.blobs}
    assert list((device.agent.config.state_dir / "partial").iterdir()) == []


def test_it_drops_a_sealed_section_that_was_made_wrong(
    server: ReleaseServer, device: Device, s1: ToyBundle
) -> None:
    """The platform's own fault: signed, and sealed as another section."""
    plain = toy_bundle(ToySpec())
    swapped = sealed_toy(plain, OTHER)
    bad = server.publish(swapped)
    give(server, device, {bad.sha256: KEY})
    update = device.take(server.offer(bad))
    assert update.reports[-1].code == "agent.content_key"
    assert objects(device) == {}


CHECKPOINTS = ["downloading:before", "downloading:after", "applying:before", "staging:after"]


@pytest.mark.parametrize("where", CHECKPOINTS)
def test_it_goes_on_after_it_was_killed(
    server: ReleaseServer, start: Start, s1: ToyBundle, where: str
) -> None:
    left = [where]

    def checkpoint(name: str) -> None:
        if name in left:
            left.remove(name)
            raise PowerCut(name)

    device = start(ports=toy_ports(checkpoint=checkpoint))
    give(server, device, {s1.sha256: KEY})
    update = server.offer(s1, device.agent.api.device_id)
    with pytest.raises(PowerCut):
        device.take(update)
    device.stop()
    again = start()
    again.take(update)
    assert (update.outcome, again.says()) == (UpdateState.SUCCEEDED, "1")


@pytest.fixture(autouse=True)
def _no_key_in_journals(tmp_path) -> Iterator[None]:
    """Whatever a test does, no content key is ever written down."""
    yield
    for path in tmp_path.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert KEY not in data, path
            assert base64.b64encode(KEY) not in data, path
