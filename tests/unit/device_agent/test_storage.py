import hashlib
from pathlib import Path

import pytest

from device_agent.errors import (
    BundleError,
    ContentError,
    DiskError,
    DiskFullError,
    OversizedError,
    ReplayError,
    StateBusyError,
    StateLostError,
)
from device_agent.storage.disk import Disk
from device_agent.storage.floors import Floors, FloorStore
from device_agent.storage.guard import FolderLock
from device_agent.storage.journal import Journal, record_line
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer, Slots
from device_agent.storage.twin import TwinDocument


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(Disk(), tmp_path, max_bytes=1 << 20)


class TestTwinDocument:
    def test_it_keeps_the_copy_before_when_the_newest_is_torn(self, tmp_path: Path) -> None:
        twin = TwinDocument(Disk(), tmp_path, "x")
        for number in range(3):
            twin.save({"n": number})
        newest = max(tmp_path.iterdir(), key=lambda path: int(path.read_bytes().split()[1]))
        newest.write_bytes(newest.read_bytes()[:-2])
        assert TwinDocument(Disk(), tmp_path, "x").load() == {"n": 1}

    @pytest.mark.parametrize("damage", [b"", b"\0" * 40, b"SFT1 9 2 00000000\n{}", b"SFT1 x\n"])
    def test_it_says_so_when_both_copies_are_damaged(self, tmp_path: Path, damage: bytes) -> None:
        twin = TwinDocument(Disk(), tmp_path, "x")
        twin.save({"n": 1})
        twin.save({"n": 2})
        for path in tmp_path.iterdir():
            path.write_bytes(damage)
        again = TwinDocument(Disk(), tmp_path, "x")
        assert again.load() is None
        assert again.exists

    def test_it_goes_on_after_a_restart(self, tmp_path: Path) -> None:
        TwinDocument(Disk(), tmp_path, "x").save({"n": 1})
        again = TwinDocument(Disk(), tmp_path, "x")
        assert again.load() == {"n": 1}
        again.save({"n": 2})
        assert TwinDocument(Disk(), tmp_path, "x").load() == {"n": 2}


class TestJournal:
    def test_it_returns_what_was_appended(self, tmp_path: Path) -> None:
        journal = Journal(Disk(), tmp_path / "journal")
        assert journal.open() == []
        journal.append({"a": 1})
        journal.append({"b": 2})
        journal.close()
        assert Journal(Disk(), tmp_path / "journal").open() == [{"a": 1}, {"b": 2}]

    @pytest.mark.parametrize("cut", range(1, 12))
    def test_it_cuts_off_a_torn_end_and_goes_on(self, tmp_path: Path, cut: int) -> None:
        path = tmp_path / "journal"
        path.write_bytes(record_line({"a": 1}) + record_line({"b": 2})[:-cut])
        journal = Journal(Disk(), path)
        assert journal.open() == [{"a": 1}]
        journal.append({"c": 3})
        assert Journal(Disk(), path).open() == [{"a": 1}, {"c": 3}]

    def test_it_believes_nothing_behind_a_damaged_line(self, tmp_path: Path) -> None:
        path = tmp_path / "journal"
        damaged = bytearray(record_line({"b": 2}))
        damaged[12] ^= 1
        path.write_bytes(record_line({"a": 1}) + bytes(damaged) + record_line({"c": 3}))
        assert Journal(Disk(), path).open() == [{"a": 1}]

    def test_it_starts_anew_in_one_step(self, tmp_path: Path) -> None:
        journal = Journal(Disk(), tmp_path / "journal")
        journal.open()
        journal.append({"a": 1})
        journal.replace([{"z": 9}])
        journal.append({"y": 8})
        assert Journal(Disk(), tmp_path / "journal").open() == [{"z": 9}, {"y": 8}]


class TestObjects:
    def test_it_names_only_what_hashes_to_the_name(self, store: ObjectStore) -> None:
        data = b"section" * 100
        partial = store.begin(digest(data), len(data), resume=True)
        partial.append(data[:10])
        assert not store.has(digest(data), len(data))
        partial.append(data[10:])
        partial.finish()
        assert store.has(digest(data), len(data))
        assert bytes(store.read_verified(digest(data), len(data))) == data

    def test_it_drops_other_bytes(self, store: ObjectStore) -> None:
        data = b"right"
        partial = store.begin(digest(data), 5, resume=True)
        partial.append(b"wrong")
        with pytest.raises(ContentError):
            partial.finish()
        assert not store.has(digest(data), 5)
        assert store.partial_bytes(digest(data)) == 0

    def test_it_resumes_and_hashes_what_was_there(self, store: ObjectStore) -> None:
        data = bytes(range(256))
        first = store.begin(digest(data), 256, resume=True)
        first.append(data[:100])
        first.close()
        second = store.begin(digest(data), 256, resume=True)
        assert second.length == 100
        second.append(data[100:])
        second.finish()
        assert store.has(digest(data), 256)

    def test_it_takes_writes_in_any_order(self, store: ObjectStore) -> None:
        data = b"abcdef"
        partial = store.begin(digest(data), 6, resume=False)
        partial.write(3, b"def")
        partial.write(0, b"abc")
        partial.finish()
        assert bytes(store.read_verified(digest(data), 6)) == data

    def test_it_never_writes_more_than_was_signed_for(self, store: ObjectStore) -> None:
        partial = store.begin(digest(b"abc"), 3, resume=False)
        with pytest.raises(OversizedError):
            partial.append(b"abcd")
        with pytest.raises(OversizedError):
            partial.write(2, b"cd")
        with pytest.raises(OversizedError):
            partial.write(-1, b"a")

    @pytest.mark.parametrize("name", ["../../etc/passwd", "A" * 64, "0" * 63, "0" * 65, ""])
    def test_it_makes_no_path_of_anything_but_a_digest(self, store: ObjectStore, name: str) -> None:
        with pytest.raises(BundleError):
            store.path(name)
        with pytest.raises(BundleError):
            store.begin(name, 1, resume=True)

    def test_it_drops_an_object_that_was_damaged_later(self, store: ObjectStore) -> None:
        store.put(b"good", digest(b"good"))
        store.path(digest(b"good")).write_bytes(b"goof")
        with pytest.raises(BundleError, match="damaged"):
            store.read_verified(digest(b"good"), 4)
        assert not store.has(digest(b"good"), 4)
        with pytest.raises(BundleError, match="missing"):
            store.read_verified(digest(b"good"), 4)

    def test_it_follows_no_link(self, store: ObjectStore, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.write_bytes(b"good")
        store.path(digest(b"good")).symlink_to(outside)
        with pytest.raises(DiskError):
            store.read_verified(digest(b"good"), 4)

    def test_it_keeps_the_quota(self, tmp_path: Path) -> None:
        store = ObjectStore(Disk(), tmp_path, max_bytes=10)
        store.put(b"12345678", digest(b"12345678"))
        with pytest.raises(DiskFullError, match="quota"):
            store.begin(digest(b"abc"), 3, resume=True)

    def test_it_keeps_the_reserve(self, tmp_path: Path) -> None:
        store = ObjectStore(Disk(), tmp_path, max_bytes=1 << 60, reserve_bytes=1 << 59)
        with pytest.raises(DiskFullError, match="free"):
            store.begin(digest(b"abc"), 3, resume=True)

    def test_it_collects_what_nobody_points_to(self, store: ObjectStore) -> None:
        for data in (b"keep", b"drop"):
            store.put(data, digest(data))
        store.begin(digest(b"half"), 4, resume=True).close()
        store.collect({digest(b"keep")})
        assert store.has(digest(b"keep"), 4)
        assert not store.has(digest(b"drop"), 4)
        assert store.used_bytes() == 4

    def test_it_is_private(self, store: ObjectStore) -> None:
        store.put(b"secret", digest(b"secret"))
        assert store.path(digest(b"secret")).stat().st_mode & 0o777 == 0o600


V1 = Pointer("1" * 64, 10, "1", 0)
V2 = Pointer("2" * 64, 10, "2", 0)
V3 = Pointer("3" * 64, 10, "3", 0)


class TestSlots:
    def test_it_goes_round_in_two_slots(self, tmp_path: Path) -> None:
        slots = Slots(Disk(), tmp_path)
        for pointer in (V1, V2, V3):
            slots.stage(pointer)
            slots.activate()
            assert slots.table.current == pointer
            assert slots.table.on_trial
            slots.commit()
            assert not slots.table.on_trial
        again = Slots(Disk(), tmp_path).load()
        assert again.current is not None
        assert again.other is not None
        assert (again.current.version, again.other.version) == ("3", "2")
        assert again.other.committed

    def test_it_returns_to_the_bundle_before(self, tmp_path: Path) -> None:
        slots = Slots(Disk(), tmp_path)
        slots.stage(V1)
        slots.activate()
        slots.commit()
        slots.stage(V2)
        slots.activate()
        assert slots.count_start() == 1
        assert slots.count_start() == 2
        slots.revert()
        table = Slots(Disk(), tmp_path).load()
        assert table.current is not None
        assert table.current.version == "1"
        assert table.other is None
        assert not table.on_trial

    def test_it_returns_to_nothing_when_there_was_nothing(self, tmp_path: Path) -> None:
        slots = Slots(Disk(), tmp_path)
        slots.stage(V1)
        slots.activate()
        slots.revert()
        assert slots.table.current is None
        assert slots.table.active == ""

    def test_it_does_not_forget_what_ran_here_before(self, tmp_path: Path) -> None:
        slots = Slots(Disk(), tmp_path)
        for pointer in (V1, V2):
            slots.stage(pointer)
            slots.activate()
            slots.commit()
        slots.unstage(V1.manifest_sha256)
        assert slots.table.other is not None
        slots.stage(V3)
        slots.unstage(V3.manifest_sha256)
        assert slots.table.other is None

    def test_it_activates_nothing_that_was_not_staged(self, tmp_path: Path) -> None:
        with pytest.raises(BundleError, match="nothing is staged"):
            Slots(Disk(), tmp_path).activate()

    def test_it_says_when_the_table_is_damaged(self, tmp_path: Path) -> None:
        slots = Slots(Disk(), tmp_path)
        slots.stage(V1)
        for path in tmp_path.iterdir():
            path.write_bytes(b"?")
        again = Slots(Disk(), tmp_path)
        assert again.load().current is None
        assert again.was_damaged


class TestFloors:
    def test_it_never_begins_at_zero_by_itself(self, tmp_path: Path) -> None:
        store = FloorStore(Disk(), tmp_path)
        with pytest.raises(StateLostError):
            store.load()
        store.save(Floors(assignment_seq=7))
        assert FloorStore(Disk(), tmp_path).load().assignment_seq == 7
        for path in tmp_path.iterdir():
            path.write_bytes(b"junk")
        with pytest.raises(StateLostError):
            FloorStore(Disk(), tmp_path).load()

    def test_it_refuses_older_metadata(self) -> None:
        floors = Floors().raised_metadata({"root": 1, "timestamp": 5, "bin-0": 2}, "keys")
        with pytest.raises(ReplayError, match="timestamp version 4"):
            floors.raised_metadata({"root": 1, "timestamp": 4}, "keys")
        with pytest.raises(ReplayError, match="bin-0"):
            floors.raised_metadata({"root": 1, "timestamp": 6, "bin-0": 1}, "keys")

    def test_it_lets_a_new_root_with_new_keys_begin_anew(self) -> None:
        floors = Floors().raised_metadata({"root": 1, "timestamp": 1 << 31}, "old")
        with pytest.raises(ReplayError, match="without a new root"):
            floors.raised_metadata({"root": 1, "timestamp": 1}, "new")
        recovered = floors.raised_metadata({"root": 2, "timestamp": 1, "snapshot": 1}, "new")
        assert recovered.versions["timestamp"] == 1

    def test_it_only_rises(self) -> None:
        floors = Floors(assignment_seq=5, security_floor=2, release_seq_high=9, clock_floor_s=100)
        same = floors.raised(assignment_seq=1, security_floor=1, release_seq=1, clock_floor_s=1)
        assert same == floors

    def test_it_takes_the_same_assignment_only_for_the_same_bundle(self) -> None:
        floors = Floors(assignment_seq=5).with_assignment("a" * 64)
        assert floors.accepts(6, "b" * 64)
        assert floors.accepts(5, "a" * 64)
        assert not floors.accepts(5, "b" * 64)
        assert not floors.accepts(4, "a" * 64)


def test_it_lets_one_agent_work_in_a_folder(tmp_path: Path) -> None:
    lock = FolderLock(Disk(), tmp_path / "run" / "lock").acquire()
    with pytest.raises(StateBusyError):
        FolderLock(Disk(), tmp_path / "run" / "lock").acquire()
    lock.release()
    FolderLock(Disk(), tmp_path / "run" / "lock").acquire().release()


class RecordingDisk(Disk):
    """Notes the order of what matters for durability."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def write(self, file, offset, data):
        self.calls.append("write")
        super().write(file, offset, data)

    def sync(self, file):
        self.calls.append("sync")
        super().sync(file)

    def rename(self, source, target):
        self.calls.append("rename")
        super().rename(source, target)

    def sync_dir(self, path):
        self.calls.append("sync_dir")
        super().sync_dir(path)


def test_it_syncs_the_file_before_and_the_folder_after_the_rename(tmp_path: Path) -> None:
    disk = RecordingDisk()
    disk.write_atomic(tmp_path / "x", b"data")
    assert disk.calls == ["write", "sync", "rename", "sync_dir"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_it_syncs_an_object_before_it_gets_its_name(tmp_path: Path) -> None:
    disk = RecordingDisk()
    store = ObjectStore(disk, tmp_path, max_bytes=100)
    store.put(b"data", digest(b"data"))
    store.sync()
    assert disk.calls == ["write", "sync", "rename", "sync_dir"]
