"""Patching in place, forward and backward, with the power cut before every kind of operation.

The model of `PowerCutDisk`: what was not synced is lost, torn and reordered by sectors of 512
bytes, names by themselves. Up to five cuts in a row, then a run that is left alone.
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import DeltaOffer
from compiler.delta import EncodeOptions, encode_delta
from device_agent.errors import DeltaUnusableError
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.update.in_place import PatchFolder, pairs_of, patch_objects
from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle
from tests.simulators.disk import CountingDisk, FastDisk, PowerCut, PowerCutDisk

CHUNK_BYTES = 1_024
CUTS_IN_A_ROW = 5
SAMPLE, MOST = 60, 3_000
"""Cuts of a campaign, in the everyday tier and in full."""


@dataclass
class Ground:
    """Objects of an old bundle and a delta, to be copied for every run."""

    folder: Path
    old: ToyBundle
    new: ToyBundle
    offer: DeltaOffer
    cuts: int = 0
    reversed_halfway: int = 0
    healed: int = field(default=0)

    def fresh(self) -> Path:
        target = self.folder / "run"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.folder / "start", target)
        return target

    def patch(self, folder: Path, disk: Disk, *, reverse: bool) -> None:
        store = ObjectStore(disk, folder, max_bytes=1 << 30)
        patch_objects(
            store,
            PatchFolder(disk, folder),
            self.offer,
            self.old.manifest,
            self.new.manifest,
            reverse=reverse,
        )

    def check(self, folder: Path, bundle: ToyBundle) -> None:
        """Check that a bundle is whole, and that nothing of the way is left."""
        for sha256, data in bundle.blobs.items():
            assert (folder / "objects" / sha256).read_bytes() == data
        for path in (folder / "objects").iterdir():
            assert sha256_hex(path.read_bytes()) == path.name, "the name of an object is a promise"
        assert [path.name for path in (folder / "patching").iterdir()] == ["journal"]
        pairs = pairs_of(self.old.manifest, self.new.manifest)
        other = {pair.old_sha256 if bundle is self.new else pair.new_sha256 for pair in pairs}
        assert not other & {path.name for path in (folder / "objects").iterdir()}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    old = toy_bundle(ToySpec())
    new = toy_bundle(ToySpec(version="2", release_seq=2, changed=40))
    options = EncodeOptions(chunk_bytes=CHUNK_BYTES, try_bsdiff4=False)
    delta = encode_delta(old.sections, new.sections, options).data
    folder = tmp_path_factory.mktemp("ground")
    store = ObjectStore(FastDisk(), folder / "start", max_bytes=1 << 30)
    for sha256, data in {**old.blobs, sha256_hex(delta): delta}.items():
        store.put(data, sha256)
    offer = DeltaOffer(old.sha256, sha256_hex(delta), len(delta))
    return Ground(folder, old, new, offer)


def operations(ground: Ground, *, reverse: bool) -> int:
    folder = ground.fresh()
    if reverse:
        ground.patch(folder, FastDisk(), reverse=False)
    disk = CountingDisk()
    ground.patch(folder, disk, reverse=reverse)
    return disk.count


def cut(ground: Ground, folder: Path, chance: random.Random, most: int, *, reverse: bool) -> bool:
    """Run until the power is cut at a random operation; return whether it was."""
    disk = PowerCutDisk(folder, chance.randrange(1, most))
    try:
        ground.patch(folder, disk, reverse=reverse)
    except PowerCut:
        disk.lose(chance.randrange(1 << 30))
        ground.cuts += 1
        return True
    return False


def campaign(ground: Ground, wanted: int, run: Callable[[random.Random], None]) -> int:
    """Repeat runs of different seeds until so many cuts were made; return how many."""
    ground.cuts, seed = 0, 0
    while ground.cuts < wanted:
        run(random.Random(seed))
        seed += 1
    return ground.cuts


def forward(ground: Ground, most: int) -> Callable[[random.Random], None]:
    def run(chance: random.Random) -> None:
        folder = ground.fresh()
        for _ in range(chance.randint(1, CUTS_IN_A_ROW)):
            if not cut(ground, folder, chance, most, reverse=False):
                break
        ground.patch(folder, FastDisk(), reverse=False)
        ground.check(folder, ground.new)

    return run


def backward(ground: Ground, most: int) -> Callable[[random.Random], None]:
    """From half patched, or whole, back to the old bundle."""

    def run(chance: random.Random) -> None:
        folder = ground.fresh()
        if cut(ground, folder, chance, most, reverse=False):
            ground.reversed_halfway += 1
        for _ in range(chance.randint(1, CUTS_IN_A_ROW)):
            if not cut(ground, folder, chance, most, reverse=True):
                break
        ground.patch(folder, FastDisk(), reverse=True)
        ground.check(folder, ground.old)

    return run


CAMPAIGNS = {"forward": forward, "backward": backward}


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_it_survives_sampled_cuts(ground: Ground, name: str) -> None:
    most = operations(ground, reverse=False)
    assert most > 60
    assert campaign(ground, SAMPLE, CAMPAIGNS[name](ground, most)) >= SAMPLE


@pytest.mark.full
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_it_survives_thousands_of_cuts(ground: Ground, name: str, record_property) -> None:
    most = operations(ground, reverse=False)
    cuts = campaign(ground, MOST, CAMPAIGNS[name](ground, most))
    record_property("cuts", cuts)
    assert cuts >= MOST


@pytest.mark.parametrize("reverse", [False, True])
def test_it_survives_a_cut_before_every_operation(ground: Ground, reverse: bool) -> None:
    """Every operation once, each with the loss of another seed."""
    cuts = 0
    for cut_at in range(1, operations(ground, reverse=reverse) + 1):
        folder = ground.fresh()
        if reverse:
            ground.patch(folder, FastDisk(), reverse=False)
        disk = PowerCutDisk(folder, cut_at)
        with pytest.raises(PowerCut):
            ground.patch(folder, disk, reverse=reverse)
        disk.lose(cut_at)
        cuts += 1
        ground.patch(folder, FastDisk(), reverse=reverse)
        ground.check(folder, ground.old if reverse else ground.new)
    assert cuts > 60


@pytest.mark.parametrize("left_out", ["sync", "sync_dir"])
def test_the_campaign_notices_when_a_sync_is_left_out(
    ground: Ground, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = operations(ground, reverse=False)

    def forget(self: PowerCutDisk, what: object) -> None:
        self.before(left_out, getattr(what, "path", what))

    monkeypatch.setattr(PowerCutDisk, left_out, forget)
    with pytest.raises((AssertionError, DeltaUnusableError)):
        campaign(ground, 10 * SAMPLE, backward(ground, most))


def test_it_gives_up_a_chunk_that_is_neither(ground: Ground) -> None:
    """Rot is told; nothing half right gets the name of an object."""
    folder = ground.fresh()
    pairs = pairs_of(ground.old.manifest, ground.new.manifest)
    path = folder / "objects" / pairs[0].old_sha256
    data = bytearray(path.read_bytes())
    data[100] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DeltaUnusableError):
        ground.patch(folder, FastDisk(), reverse=False)
    assert not (folder / "objects" / pairs[0].new_sha256).exists()


def test_it_refuses_what_is_needed_in_two_forms() -> None:
    old = toy_bundle(ToySpec())
    new = toy_bundle(ToySpec(version="2", release_seq=2, changed=40))
    sections = {**new.sections, "expert.L0.E0": old.sections["expert.L0.E1"]}
    mixed = ToyBundle(_with(new, sections), sections)
    assert pairs_of(old.manifest, new.manifest)
    assert pairs_of(old.manifest, mixed.manifest) is None


def _with(bundle: ToyBundle, sections: dict):
    from dataclasses import replace

    entries = tuple(
        replace(entry, sha256=sections[entry.component].sha256)
        for entry in bundle.manifest.sections
    )
    return replace(bundle.manifest, sections=entries)
