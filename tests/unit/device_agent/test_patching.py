"""Deltas are applied in a process of its own: its limits, its death, and what it may not do."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from compiler.contract.protocol import DeltaOffer, UpdateState
from device_agent.errors import DeltaUnusableError, DiskFullError, PatchProcessError
from device_agent.storage.objects import ObjectStore
from device_agent.update import patching
from device_agent.update.patching import PatchJob, ProcessPatcher, job_from_json, process_patcher
from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle, toy_delta
from tests.simulators.device import Device, toy_ports
from tests.simulators.disk import FastDisk
from tests.simulators.release_server import ReleaseServer

ROOT = Path(__file__).resolve().parents[3]
MEMORY_BYTES = 64 << 20
BROKEN = "tests.simulators.broken_patch"


def job_of(old: ToyBundle, new: ToyBundle, offer: DeltaOffer, **changes: bool) -> PatchJob:
    return PatchJob(
        offer.sha256,
        offer.size_bytes,
        old.sha256,
        len(old.manifest_bytes),
        new.sha256,
        len(new.manifest_bytes),
        **changes,
    )


class Ground:
    """A store with an old bundle, a new manifest and a delta, and who patches there."""

    def __init__(self, folder: Path, **limits: float) -> None:
        self.folder = folder
        self.store = ObjectStore(FastDisk(), folder, max_bytes=1 << 30)
        self.old = toy_bundle(ToySpec())
        self.new = toy_bundle(ToySpec(version="2", release_seq=2, changed=40))
        data = toy_delta(self.old, self.new)
        self.offer = self.put_delta(data)
        self.store.put(self.old.manifest_bytes, self.old.sha256)
        self.store.put(self.new.manifest_bytes, self.new.sha256)
        for sha256, section in self.old.blobs.items():
            self.store.put(section, sha256)
        self.job = job_of(self.old, self.new, self.offer)
        values = {"timeout_s": 120.0, "memory_bytes": MEMORY_BYTES, **limits}
        self.patcher = ProcessPatcher(self.store, folder, **values)

    def put_delta(self, data: bytes) -> DeltaOffer:
        from compiler.contract.canonical import sha256_hex

        self.store.put(data, sha256_hex(data))
        return DeltaOffer(self.old.sha256, sha256_hex(data), len(data))

    def missing(self) -> list[str]:
        return [sha for sha, data in self.new.blobs.items() if not self.store.has(sha, len(data))]


def test_it_makes_the_objects_in_a_child(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    assert ground.missing()
    ground.patcher.run(ground.job)
    assert ground.missing() == []
    for sha256, data in ground.new.blobs.items():
        assert bytes(ground.store.read_verified(sha256, len(data))) == data
    assert list((tmp_path / "partial").iterdir()) == []


def test_it_patches_in_place_and_back_in_a_child(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    job = job_of(ground.old, ground.new, ground.offer, in_place=True)
    ground.patcher.run(job)
    assert ground.missing() == []
    weights = ground.old.sections["weights.shared"]
    assert not ground.store.has(weights.sha256, len(weights.data))
    ground.patcher.run(job.reversed())
    assert bytes(ground.store.read_verified(weights.sha256, len(weights.data))) == weights.data


def test_a_job_survives_its_json(tmp_path: Path) -> None:
    job = job_of(*(Ground(tmp_path).__dict__[name] for name in ("old", "new", "offer")))
    assert job_from_json(job.to_json()) == job
    assert job_from_json(job.reversed().to_json()).reverse is True


@pytest.mark.parametrize("length", [0, 3, 100])
def test_a_delta_that_is_none_is_a_typed_error(tmp_path: Path, length: int) -> None:
    ground = Ground(tmp_path)
    offer = ground.put_delta(b"x" * length)
    with pytest.raises(DeltaUnusableError) as caught:
        ground.patcher.run(job_of(ground.old, ground.new, offer))
    assert not isinstance(caught.value, PatchProcessError)
    assert "agent.delta" in str(caught.value)


def test_a_store_without_room_is_a_full_disk(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    store = ObjectStore(FastDisk(), tmp_path, max_bytes=ground.store.used_bytes() + 100)
    with pytest.raises(DiskFullError):
        ProcessPatcher(store, tmp_path, 120.0, MEMORY_BYTES).run(ground.job)


def test_it_may_not_allocate_beyond_its_limit(tmp_path: Path) -> None:
    ground = Ground(tmp_path, memory_bytes=1)
    with pytest.raises(PatchProcessError):
        ground.patcher.run(ground.job)
    assert list((tmp_path / "partial").iterdir()) == []


def test_it_is_killed_when_time_is_over(tmp_path: Path) -> None:
    ground = Ground(tmp_path, timeout_s=0.01)
    with pytest.raises(PatchProcessError, match=r"not applied after 0\.01 s"):
        ground.patcher.run(ground.job)


@pytest.mark.parametrize(
    ("mode", "told"),
    [("hang", "not applied after"), ("segv", "SIGSEGV"), ("exit", "status 9: something broke")],
)
def test_its_death_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, told: str
) -> None:
    ground = Ground(tmp_path, timeout_s=1.0 if mode == "hang" else 120.0)
    (tmp_path / "mode").write_text(mode)
    monkeypatch.setattr(patching, "_PROCESS", BROKEN)
    with pytest.raises(PatchProcessError, match=told):
        ground.patcher.run(ground.job)


@pytest.mark.parametrize("mode", ["segv", "half"])
def test_the_update_goes_on_with_whole_sections(
    server: ReleaseServer,
    start: Callable[..., Device],
    v1: ToyBundle,
    v2: ToyBundle,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    device = start(ports=toy_ports(patcher=process_patcher))
    device.install(v1)
    (device.agent.config.state_dir / "mode").write_text(mode)
    monkeypatch.setattr(patching, "_PROCESS", BROKEN)
    update = device.take(server.offer(v2, delta=server.publish_delta(v1, v2)))
    assert update.outcome is UpdateState.SUCCEEDED
    assert update.states.count(UpdateState.DOWNLOADING) == 2
    assert device.says() == "2"


def test_an_update_by_delta_runs_through_a_child(
    server: ReleaseServer, start: Callable[..., Device], v1: ToyBundle, v2: ToyBundle
) -> None:
    device = start(ports=toy_ports(patcher=process_patcher))
    device.install(v1)
    update = device.take(server.offer(v2, delta=server.publish_delta(v1, v2)))
    assert update.outcome is UpdateState.SUCCEEDED
    assert update.states.count(UpdateState.DOWNLOADING) == 1


def in_child(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


GUARDED = """
import os, sys, socket, subprocess
from pathlib import Path
from device_agent.update.patch_process import Guard
folder = Path(sys.argv[1])
sys.addaudithook(Guard(folder))
{attempt}
print("done")
"""


@pytest.mark.parametrize(
    "attempt",
    [
        "open(folder / 'objects/a', 'wb').close()",
        "os.close(os.open(folder / 'partial/a', os.O_WRONLY | os.O_CREAT))",
        "open(folder / 'seen').read()",
        "os.rename(folder / 'objects/old', folder / 'partial/new')",
        "os.link(folder / 'objects/old', folder / 'patching/new')",
    ],
)
def test_the_child_may_do_its_work(tmp_path: Path, attempt: str) -> None:
    for name in ("objects", "partial", "patching"):
        (tmp_path / name).mkdir()
    (tmp_path / "objects" / "old").touch()
    (tmp_path / "seen").touch()
    done = in_child(GUARDED.format(attempt=attempt), str(tmp_path))
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize(
    "attempt",
    [
        "open(folder / 'slots', 'wb')",
        "open(folder / 'objects/../slots', 'r+b')",
        "os.open(folder / 'slots', os.O_RDWR | os.O_CREAT)",
        "os.rename(folder / 'objects/old', folder / 'journal')",
        "os.remove(folder / 'seen')",
        "os.mkdir(folder / 'more')",
        "socket.socket()",
        "subprocess.Popen(['true'])",
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "os.system('true')",
    ],
)
def test_the_child_may_do_nothing_else(tmp_path: Path, attempt: str) -> None:
    for name in ("objects", "partial", "patching"):
        (tmp_path / name).mkdir()
    (tmp_path / "objects" / "old").touch()
    (tmp_path / "seen").touch()
    done = in_child(GUARDED.format(attempt=attempt), str(tmp_path))
    assert done.stdout == ""
    assert "PermissionError" in done.stderr


FOLLOWING = """
import os, subprocess, sys, time
code = '''
import sys, time
from device_agent.update.patch_process import follow_parent
follow_parent(int(sys.argv[1]))
print("following", flush=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", code, str(os.getpid())])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_the_child_ends_with_its_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", FOLLOWING], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "following\n"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(600):
        if not _runs(child):
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("it lives on")


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"
