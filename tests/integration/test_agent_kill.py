"""`kill -9` at every boundary of an update: old or new afterwards, it answers, and it finishes."""

import itertools
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from compiler.contract.protocol import DeltaOffer, UpdateState
from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle
from tests.simulators.device import Device, toy_config, toy_ports
from tests.simulators.disk import FastDisk
from tests.simulators.release_server import ReleaseServer, Update

ROOT = Path(__file__).resolve().parents[2]
# Checkpoint, how many times it is passed before the kill, versions that may answer afterwards.
OLD, NEW = {"1"}, {"2"}
MATRIX = [
    ("verifying:before", 1, OLD),
    ("rename:trust", 1, OLD),
    ("verifying:after", 1, OLD),
    ("downloading:before", 1, OLD),
    ("write:partial", 1, OLD),
    ("write:partial", 3, OLD),
    ("rename:objects", 2, OLD),
    ("downloading:after", 1, OLD),
    ("applying:before", 1, OLD),
    ("applying:after", 1, OLD),
    ("staging:before", 1, OLD),
    ("rename:slots", 1, OLD),
    ("staging:after", 1, OLD),
    ("activating:before", 1, OLD),
    ("rename:slots", 2, OLD),
    ("activating:after", 1, NEW),
    ("probation:before", 1, NEW),
    ("probation:after", 1, NEW),
    ("committing:before", 1, NEW),
    ("rename:slots", 3, NEW),
    ("committing:after", 1, NEW),
    ("cleaning:before", 1, NEW),
    ("cleaning:after", 1, NEW),
    ("write:journal", 2, OLD),
    ("write:journal", 7, OLD | NEW),
]
# verifying, downloading, applying, staging, activating, probation, committing, cleaning, idle
STATE_RECORDS = 9
DELTA_MATRIX = [
    ("applying:before", 1, OLD),
    ("write:partial", 4, OLD),
    ("rename:objects", 3, OLD),
    ("applying:after", 1, OLD),
]


@dataclass
class Scene:
    """A device that runs version 1, as it lies on the disk."""

    server: ReleaseServer
    folder: Path
    v2: ToyBundle
    delta: DeltaOffer

    def copy(self) -> Path:
        target = self.folder / "victim"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.folder / "start", target, symlinks=True)
        return target


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    server = ReleaseServer().start()
    folder = tmp_path_factory.mktemp("kill")
    v1 = server.publish(toy_bundle(ToySpec()))
    v2 = server.publish(toy_bundle(ToySpec(version="2", release_seq=2, changed=40)))
    config = toy_config(server, folder / "start", serial="victim")
    device = Device.start(server, config, toy_ports(disk=FastDisk()))
    device.install(v1)
    device.stop()
    yield Scene(server, folder, v2, server.publish_delta(v1, v2))
    server.stop()


def run_victim(
    scene: Scene, folder: Path, update: Update, checkpoint: str, count: int
) -> tuple[int, list[str]]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.simulators.victim", scene.server.url, str(folder)),
            *(str(update.update_id), checkpoint, str(count)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def kill_and_recover(
    scene: Scene, update: Update, checkpoint: str, count: int, allowed: set[str]
) -> None:
    folder = scene.copy()
    status, lines = run_victim(scene, folder, update, checkpoint, count)
    assert status == -signal.SIGKILL, f"{checkpoint} was not reached: {lines}"
    recover(scene, folder, update, allowed)


def recover(scene: Scene, folder: Path, update: Update, allowed: set[str]) -> None:
    config = toy_config(scene.server, folder, serial="victim")
    device = Device.start(scene.server, config, toy_ports(disk=FastDisk()))
    try:
        assert device.says() in allowed
        if update.outcome is None:
            device.take(update)
        assert update.outcome is UpdateState.SUCCEEDED
        assert device.says() == "2"
    finally:
        device.stop()


@pytest.mark.parametrize(("checkpoint", "count", "allowed"), MATRIX)
def test_it_survives_a_kill(scene: Scene, checkpoint: str, count: int, allowed: set[str]) -> None:
    kill_and_recover(scene, scene.server.offer(scene.v2), checkpoint, count, allowed)


def test_it_survives_a_kill_at_the_last_record(scene: Scene) -> None:
    update, folder = scene.server.offer(scene.v2), scene.copy()
    before = len((folder / "journal").read_bytes().splitlines())
    assert run_victim(scene, folder, update, "never", 1)[0] == 0
    records = len((folder / "journal").read_bytes().splitlines()) - before
    assert records >= STATE_RECORDS
    kill_and_recover(scene, scene.server.offer(scene.v2), "write:journal", records, NEW)


@pytest.mark.full
def test_it_survives_a_kill_at_every_record(scene: Scene, record_property) -> None:
    """Until an update ends before the kill: how many reports share a record depends on timing."""
    for count in itertools.count(1):
        update, folder = scene.server.offer(scene.v2), scene.copy()
        status, lines = run_victim(scene, folder, update, "write:journal", count)
        if status == 0:
            break
        assert status == -signal.SIGKILL, lines
        recover(scene, folder, update, OLD | NEW)
    assert lines[-1] == "outcome succeeded"
    assert count > STATE_RECORDS
    record_property("kills", count - 1)


@pytest.mark.parametrize(("checkpoint", "count", "allowed"), DELTA_MATRIX)
def test_it_survives_a_kill_while_applying_a_delta(
    scene: Scene, checkpoint: str, count: int, allowed: set[str]
) -> None:
    update = scene.server.offer(scene.v2, delta=scene.delta)
    kill_and_recover(scene, update, checkpoint, count, allowed)


def test_it_answers_from_the_first_moment_to_the_last(scene: Scene) -> None:
    update = scene.server.offer(scene.v2, delta=scene.delta)
    status, lines = run_victim(scene, scene.copy(), update, "never", 1)
    assert status == 0
    assert lines == ["answered 1", "answered 2", "outcome succeeded"]
