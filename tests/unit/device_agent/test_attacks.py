"""Attacks of the update-security literature that `test_trust` has not: one case, one test.

Each ends in a typed error while the old bundle answers. Cases are those that TUF and Uptane name
and that devices in the field have met: stolen online keys, metadata that never ends or lies about
itself, a cache lost in part, a clock in the far future, files that are swapped behind the agent.
"""

import json
import os
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest

from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import UpdateState
from device_agent.clock import SystemClock
from device_agent.config import AgentConfig
from device_agent.errors import AgentError, BundleError
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.update import verify
from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle
from tests.simulators.device import Device, toy_ports
from tests.simulators.release_server import Fault, ReleaseServer
from tests.simulators.tuf_repository import ImageRepository, now

ROLES = ("timestamp", "snapshot", "targets", "bin")
LOST = list(chain.from_iterable(combinations(ROLES, n) for n in range(1, len(ROLES) + 1)))


@pytest.fixture
def device(start: Callable[..., Device], v1: ToyBundle) -> Device:
    device = start(update_deadline_s=0.5)
    device.install(v1)
    return device


def refused(device: Device, bundle: ToyBundle, *codes: str) -> None:
    """Check that an update to `bundle` ends with one of `codes` and changes nothing."""
    before = device.says()
    update = device.take(device.server.offer(bundle))
    assert update.outcome is UpdateState.FAILED
    assert device.code in codes
    assert device.says() == before


class TestStolenKeys:
    def test_the_key_of_the_timestamp_brings_no_old_snapshot(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        image = server.image
        image.next_heads()
        device.install(v2)
        image.snapshot.signed.version -= 1
        image.timestamp.signed.version += 1
        image.sign_heads()
        refused(device, toy_bundle(ToySpec()), "agent.trust.replay")

    def test_the_keys_of_both_heads_bring_no_old_bin(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        device.install(v2)
        image = server.image
        name = image.roles.get_role_for_target(v2.path)
        image.snapshot.signed.meta[f"{name}.json"].version -= 1
        image.next_heads()
        refused(device, toy_bundle(ToySpec()), "agent.trust.replay")

    def test_all_online_keys_of_the_repository_install_nothing_without_the_director(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        evil = toy_bundle(ToySpec(version="2", release_seq=2, changed=1))
        server.blobs.update(evil.travels)
        server.image.add(v2.path, evil.manifest_bytes)
        refused(device, v2, "agent.trust.disagreement")

    def test_the_key_of_the_director_installs_nothing_without_the_repository(
        self, server: ReleaseServer, device: Device
    ) -> None:
        evil = toy_bundle(ToySpec(version="9", release_seq=9))
        server.blobs.update(evil.travels)
        refused(device, evil, "agent.trust.metadata")


class TestSignatures:
    def test_one_key_that_signs_twice_is_one_key(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        image = server.image
        path = _bin_path(image, v2)
        document = json.loads(image.files[path])
        document["signatures"] = [document["signatures"][0]] * 2
        image.files[path] = json.dumps(document).encode()
        refused(device, v2, "agent.trust.metadata", "agent.trust.signature")

    def test_one_key_of_two_is_not_enough(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        path = _bin_path(server.image, v2)
        document = json.loads(server.image.files[path])
        document["signatures"].pop()
        server.image.files[path] = json.dumps(document).encode()
        refused(device, v2, "agent.trust.signature")

    def test_the_signature_of_a_stranger_neither_counts_nor_harms(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        document = json.loads(server.image.files["metadata/timestamp.json"])
        document["signatures"].append({"keyid": "f" * 64, "sig": ""})
        server.image.files["metadata/timestamp.json"] = json.dumps(document).encode()
        device.install(v2)
        document["signatures"] = document["signatures"][-1:]
        document["signed"]["version"] += 1
        server.image.files["metadata/timestamp.json"] = json.dumps(document).encode()
        refused(device, toy_bundle(ToySpec()), "agent.trust.signature")


class TestMetadata:
    @pytest.mark.parametrize("name", ["root", "snapshot", "bin"])
    def test_it_must_end(
        self, server: ReleaseServer, device: Device, v2: ToyBundle, name: str
    ) -> None:
        image = server.image
        version = image.snapshot.signed.version
        paths = {"root": "metadata/2.root.json", "snapshot": f"metadata/{version}.snapshot.json"}
        image.files[paths.get(name) or _bin_path(image, v2)] = b" " * (6 << 20)
        refused(device, v2, "agent.trust.metadata")

    @pytest.mark.parametrize(
        "version", ["1e9999", "9" * 5000, "-1", "1.5", '"2"', "true", "null", "[" * 20_000]
    )
    def test_its_numbers_must_be_numbers(
        self, server: ReleaseServer, device: Device, v2: ToyBundle, version: str
    ) -> None:
        data = server.image.files["metadata/timestamp.json"].decode()
        mark = f'"version":{server.image.timestamp.signed.version}}}'
        assert mark in data
        changed = data.replace(mark, f'"version":{version}}}')
        server.image.files["metadata/timestamp.json"] = changed.encode()
        refused(device, v2, "agent.trust.metadata", "agent.trust.signature")

    @pytest.mark.parametrize("lost", LOST, ids="-".join)
    def test_an_old_repository_is_refused_whatever_of_the_cache_was_lost(
        self, server: ReleaseServer, device: Device, v2: ToyBundle, lost: tuple[str, ...]
    ) -> None:
        old = dict(server.image.files)
        server.image.next_heads()
        device.install(v2)
        for role in lost:
            found = [p for p in device.agent.trust.cache.rglob("*.json") if role in p.name]
            assert found
            for path in found:
                path.unlink()
        server.image.files = old
        refused(device, toy_bundle(ToySpec()), "agent.trust.replay")

    def test_an_old_repository_is_refused_by_the_next_process(
        self,
        server: ReleaseServer,
        start: Callable[..., Device],
        device: Device,
        v2: ToyBundle,
    ) -> None:
        old = dict(server.image.files)
        server.image.next_heads()
        device.install(v2)
        device.stop()
        server.image.files = old
        refused(start(update_deadline_s=0.5), toy_bundle(ToySpec()), "agent.trust.replay")


class _Settable(SystemClock):
    at: datetime | None = None

    def now(self) -> datetime:
        return self.at or super().now()


def test_a_clock_in_the_far_future_freezes_updates_and_bricks_nothing(
    server: ReleaseServer, start: Callable[..., Device], v1: ToyBundle, v2: ToyBundle
) -> None:
    clock = _Settable()
    device = start(ports=toy_ports(clock=clock), update_deadline_s=0.5)
    device.install(v1)
    clock.at = datetime(2100, 1, 1, tzinfo=UTC)
    update = server.offer(v2)
    device.take(update)
    assert (update.outcome, device.code) == (UpdateState.FAILED, "agent.trust.expired")
    assert device.says() == "1"
    clock.at = None
    device.install(v2)


def test_nothing_is_parsed_before_its_digest_is_known(
    server: ReleaseServer, device: Device, v2: ToyBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    original = verify.parse_manifest

    def remember(data: bytes) -> Any:
        parsed.append(bytes(data))
        return original(data)

    monkeypatch.setattr(verify, "parse_manifest", remember)
    folder, _, base = v2.path.rpartition("/")
    path = f"targets/{folder}/{v2.sha256}.{base}"
    good = server.image.files[path]
    server.image.files[path] = good.replace(b'"version":"2"', b'"version":"3"')
    refused(device, v2, "agent.trust.metadata", "agent.content")
    assert parsed == []
    server.image.files[path] = good
    device.install(v2)
    assert set(parsed) == {good}


def test_a_download_that_is_whole_already_is_not_asked_for(
    server: ReleaseServer, device: Device, v1: ToyBundle, v2: ToyBundle
) -> None:
    new = {sha256: data for sha256, data in v2.travels.items() if sha256 not in v1.travels}
    store = device.agent.store
    for sha256, data in new.items():
        partial = store.begin(sha256, len(data), resume=False)
        partial.append(data)
        partial.close()
        assert store.partial_bytes(sha256) == len(data)
    server.fail("blob", *[Fault(status=416)] * 20)
    device.install(v2)


def test_a_download_with_other_bytes_at_its_start_is_fetched_anew(
    server: ReleaseServer, device: Device, v1: ToyBundle, v2: ToyBundle
) -> None:
    new = [(name, data) for name, data in v2.travels.items() if name not in v1.travels]
    store = device.agent.store
    for sha256, data in new:
        partial = store.begin(sha256, len(data), resume=False)
        partial.append(bytes(len(data) // 2))
        partial.close()
    device.install(v2)


class TestFiles:
    def test_what_was_verified_is_what_is_used_though_the_name_leads_elsewhere(
        self, tmp_path: Path
    ) -> None:
        store, data = _store(tmp_path), b"good bytes" * 100
        sha256 = sha256_hex(data)
        store.put(data, sha256)
        view = store.read_verified(sha256, len(data))
        other = tmp_path / "other"
        other.write_bytes(b"evil bytes" * 100)
        other.replace(store.path(sha256))
        assert bytes(view) == data
        with pytest.raises(BundleError):
            store.read_verified(sha256, len(data))

    def test_no_link_stands_for_an_object(self, tmp_path: Path) -> None:
        store, data = _store(tmp_path), b"good bytes"
        sha256 = sha256_hex(data)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(data)
        store.path(sha256).symlink_to(elsewhere)
        with pytest.raises(AgentError):
            store.read_verified(sha256, len(data))
        assert not store.has(sha256, len(data))

    def test_files_get_no_mode_but_the_agent_s_own(self, device: Device, v2: ToyBundle) -> None:
        mask = os.umask(0)
        try:
            device.install(v2)
        finally:
            os.umask(mask)
        for path in device.agent.config.state_dir.rglob("*"):
            if path.is_file() and not path.is_symlink():
                assert path.stat().st_mode & 0o7077 == 0, path


def test_no_setting_switches_verification_off() -> None:
    words = ("verify", "insecure", "unsigned", "trust", "skip", "signature")
    names = {field.name for field in fields(AgentConfig)}
    assert not [name for name in names if any(word in name for word in words)]


def test_an_expired_repository_does_not_keep_a_device_from_following_a_new_root(
    server: ReleaseServer, device: Device, v2: ToyBundle
) -> None:
    image = server.image
    image.timestamp.signed.expires = now() - timedelta(seconds=1)
    image.timestamp.signed.version += 1
    image.sign_timestamp()
    refused(device, v2, "agent.trust.expired")
    image.timestamp.signed.expires = now() + timedelta(days=1)
    image.rotate_online_keys()
    device.install(v2)


def _bin_path(image: ImageRepository, bundle: ToyBundle) -> str:
    name = image.roles.get_role_for_target(bundle.path)
    return f"metadata/{image.bins[name].signed.version}.{name}.json"


def _store(folder: Path) -> ObjectStore:
    return ObjectStore(Disk(), folder / "store", max_bytes=1 << 20, reserve_bytes=0)
