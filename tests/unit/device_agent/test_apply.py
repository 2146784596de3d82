"""Applying a delta to the object store: ranges are read, nothing is mapped, few files are open."""

import os
from pathlib import Path

import pytest

from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import DeltaOffer
from device_agent.errors import BundleError, DeltaUnusableError
from device_agent.storage.disk import Disk
from device_agent.storage.objects import HASH_BLOCK_BYTES, ObjectStore
from device_agent.update import apply
from device_agent.update.apply import BaseObjects, apply_offer
from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle, toy_delta


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(Disk(), tmp_path, max_bytes=1 << 26)


def put(store: ObjectStore, bundle: ToyBundle) -> None:
    for digest, data in bundle.blobs.items():
        store.put(data, digest)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- a count of names, not of paths


def test_it_reads_an_object_by_ranges(store: ObjectStore) -> None:
    data = bytes(range(256)) * (2 * HASH_BLOCK_BYTES // 256) + b"end"
    store.put(data, sha256_hex(data))
    found = store.verify(sha256_hex(data), len(data))
    assert found.read(5, 10) == data[10:15]
    assert found.read(100, len(data) - 3) == b"end"
    found.close()


def test_it_drops_an_object_that_is_damaged(store: ObjectStore) -> None:
    data = b"section" * 1000
    store.put(data, sha256_hex(data))
    store.path(sha256_hex(data)).write_bytes(b"s3ction" * 1000)
    before = open_files()
    with pytest.raises(BundleError, match="damaged"):
        store.verify(sha256_hex(data), len(data))
    assert not store.has(sha256_hex(data), len(data))
    assert open_files() == before


def test_it_opens_few_sections_at_a_time(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "MAX_OPEN", 3)
    bundle = toy_bundle(ToySpec(experts=8))
    put(store, bundle)
    before = open_files()
    base = BaseObjects(store, bundle.manifest)
    for _ in range(2):
        for name, section in bundle.sections.items():
            assert base.pread(name, 20, 7) == section.data[7:27]
            assert open_files() <= before + 3
    assert base.pread("expert.L9.E9", 20, 0) == b""
    base.close()
    assert open_files() == before


def test_it_makes_the_new_sections_and_leaves_nothing_open(store: ObjectStore) -> None:
    old = toy_bundle(ToySpec(experts=80))
    new = toy_bundle(ToySpec(experts=80, version="2", release_seq=2, changed=40))
    put(store, old)
    delta = toy_delta(old, new)
    store.put(delta, sha256_hex(delta))
    before = open_files()
    offer = DeltaOffer(old.sha256, sha256_hex(delta), len(delta))
    apply_offer(store, offer, old.manifest, new.manifest)
    for section in new.manifest.sections:
        store.read_verified(section.sha256, section.size_bytes).release()
    assert open_files() == before


def test_a_damaged_base_makes_the_delta_unusable(store: ObjectStore) -> None:
    old = toy_bundle(ToySpec())
    new = toy_bundle(ToySpec(version="2", release_seq=2, changed=40))
    put(store, old)
    delta = toy_delta(old, new)
    store.put(delta, sha256_hex(delta))
    section = old.manifest.section("expert.L0.E1")
    store.path(section.sha256).write_bytes(bytes(section.size_bytes))
    before = open_files()
    with pytest.raises(DeltaUnusableError):
        apply_offer(
            store, DeltaOffer(old.sha256, sha256_hex(delta), len(delta)), old.manifest, new.manifest
        )
    assert open_files() == before
