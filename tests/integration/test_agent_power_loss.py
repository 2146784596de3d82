"""Cut the power before every operation on the disk: old bundle or new one, never a mixture."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compiler.contract.protocol import DeltaOffer, OfferKind, UpdateState
from device_agent.errors import AgentError, DiskError, DiskFullError
from device_agent.storage.disk import Disk
from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle
from tests.simulators.device import Device, toy_config, toy_ports
from tests.simulators.disk import CountingDisk, FastDisk, FullDisk, PowerCut, PowerCutDisk
from tests.simulators.release_server import ReleaseServer, Update

STEP = 9  # every 9th operation in the everyday tier


@dataclass
class Scene:
    """A device that runs version 1, copied for every cut, and what it is offered."""

    server: ReleaseServer
    folder: Path
    v1: ToyBundle
    v2: ToyBundle
    delta: DeltaOffer

    def device(self, name: str, disk: Disk, **changes: Any) -> Device:
        config = toy_config(self.server, self.folder / name, poll_s=0.0001, serial="x", **changes)
        return Device.start(
            self.server, config, toy_ports(disk=disk, transport=self.server.transport())
        )

    def copy(self, name: str, source: str = "start") -> Path:
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.folder / source, target, symlinks=True)
        return target

    def offer(self, kind: str) -> Update:
        if kind == "rollback":
            return self.server.offer(self.v1, kind=OfferKind.ROLLBACK)
        return self.server.offer(self.v2, delta=self.delta if kind == "delta" else None)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    server = ReleaseServer()
    server.poll_after_s = 0.001
    v1 = server.publish(toy_bundle(ToySpec()))
    v2 = server.publish(toy_bundle(ToySpec(version="2", release_seq=2, changed=40)))
    folder = tmp_path_factory.mktemp("power")
    scene = Scene(server, folder, v1, v2, server.publish_delta(v1, v2))
    device = scene.device("start", FastDisk())
    device.install(v1)
    device.stop()
    scene.copy("start2")
    device = scene.device("start2", FastDisk())
    device.install(v2)
    device.stop()
    return scene


def operations(scene: Scene, kind: str) -> int:
    """Return how many disk operations an update takes."""
    scene.copy("count", "start2" if kind == "rollback" else "start")
    disk = CountingDisk()
    device = scene.device("count", disk)
    device.take(scene.offer(kind))
    device.stop()
    return disk.count


def cut_once(scene: Scene, kind: str, cut_at: int, seed: int) -> None:
    folder = scene.copy("cut", "start2" if kind == "rollback" else "start")
    disk = PowerCutDisk(folder, cut_at)
    update = scene.offer(kind)
    agent = None
    try:
        device = scene.device("cut", disk)
        agent = device.agent
        device.take(update)
    except PowerCut:
        pass
    finally:
        if agent is not None:
            agent._lock.release()
            agent.http.close()
    disk.lose(seed)
    again = scene.device("cut", FastDisk())
    try:
        assert again.says() in ("1", "2"), "somebody must answer at once"
        check_whole(again)
        if update.outcome is None:
            again.take(update)
        assert update.outcome is UpdateState.SUCCEEDED
        assert again.says() == ("1" if kind == "rollback" else "2")
        check_whole(again)
    finally:
        again.stop()


def check_whole(device: Device) -> None:
    """Check that every section of the running bundle has the bytes that were signed."""
    current = device.agent.slots.table.current
    assert current is not None
    assert current.manifest_sha256 == device.agent.host.manifest_sha256
    device.agent.engine.start(current).close()


@pytest.mark.parametrize(("kind", "least"), [("whole", 80), ("delta", 80), ("rollback", 30)])
def test_it_survives_a_power_cut_at_sampled_operations(scene: Scene, kind: str, least: int) -> None:
    total = operations(scene, kind)
    assert total > least
    for cut_at in range(1 + len(kind) % STEP, total + 1, STEP):
        cut_once(scene, kind, cut_at, seed=cut_at)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["whole", "delta", "rollback"])
def test_it_survives_a_power_cut_at_every_operation(
    scene: Scene, kind: str, seed: int, record_property: Any
) -> None:
    total = operations(scene, kind)
    for cut_at in range(1, total + 1):
        cut_once(scene, kind, cut_at, seed=1000 * seed + cut_at)
    record_property("cuts", total)


@pytest.mark.parametrize("kind", ["whole", "delta"])
def test_it_notices_when_a_sync_is_left_out(
    scene: Scene, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The campaign itself must bite: without syncing objects, some cut leaves damage behind."""
    monkeypatch.setattr(PowerCutDisk, "sync", lambda self, file: self.before("sync", file.path))
    total = operations(scene, kind)

    def campaign() -> None:
        for cut_at in range(total - 40, total + 1, 2):
            cut_once(scene, kind, cut_at, seed=cut_at)

    with pytest.raises((AssertionError, AgentError)):
        campaign()


def test_it_survives_cuts_in_a_row(scene: Scene) -> None:
    """Cut again and again, each time a little later, without ever finishing in one go."""
    folder = scene.copy("row")
    update = scene.offer("delta")
    for cut_at in range(8, 120, 16):
        disk = PowerCutDisk(folder, cut_at)
        agent = None
        try:
            device = scene.device("row", disk)
            agent = device.agent
            device.take(update)
            break
        except PowerCut:
            disk.lose(seed=cut_at)
        finally:
            if agent is not None:
                agent._lock.release()
                agent.http.close()
    last = scene.device("row", FastDisk())
    if update.outcome is None:
        last.take(update)
    assert update.outcome is UpdateState.SUCCEEDED
    assert last.says() == "2"
    last.stop()


@pytest.mark.parametrize("error", [DiskFullError, DiskError])
@pytest.mark.parametrize("length", [1, 4, 10_000])
def test_it_survives_a_disk_that_takes_nothing_more(
    scene: Scene, error: type[DiskError], length: int
) -> None:
    total = operations(scene, "whole")
    for first in range(3, total, 40):
        scene.copy("full")
        disk = FullDisk(10**9, 0, error)
        device = scene.device("full", disk)
        try:
            update = scene.offer("whole")
            disk.first, disk.last = disk.count + first, disk.count + first + length
            turn_until_done(device, update, disk)
            disk.first = 10**9
            assert device.says() in ("1", "2")
            check_whole(device)
            device.take(update)
            if update.outcome is UpdateState.FAILED:
                assert device.code in ("agent.disk_full", "agent.disk")
                assert device.says() == "1"
            else:
                assert update.outcome is UpdateState.SUCCEEDED
            device.take(scene.offer("whole"))
            assert device.says() == "2"
        finally:
            device.stop()


def turn_until_done(device: Device, update: Update, disk: FullDisk) -> None:
    """Turn as the service does, which lives through a journal that cannot be written."""
    assert device.agent.loop is not None
    for _ in range(40):
        assert device.says() in ("1", "2"), "it answers all the time"
        try:
            device.agent.loop.turn()
        except DiskError:
            continue
        if update.outcome is not None or (disk.hit and disk.count > disk.last):
            return
