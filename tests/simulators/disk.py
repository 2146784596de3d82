"""Disks that lose power, run full, or break, at the operation that a test names."""

import random
from pathlib import Path

from device_agent.errors import DiskError, DiskFullError
from device_agent.storage.disk import Disk, OpenFile

SECTOR = 512


class PowerCut(BaseException):
    """The power is gone; nothing after this happened."""


class FastDisk(Disk):
    """Without the waiting: a test that never cuts the power needs no sync."""

    def sync(self, file: OpenFile) -> None:
        return

    def sync_dir(self, path: Path) -> None:
        return


class CountingDisk(FastDisk):
    """Counts the operations that change something, and lets a subclass act on each."""

    def __init__(self) -> None:
        self.count = 0
        self.log: list[str] = []
        self.room: int | None = None

    def free_bytes(self, path: Path) -> int:
        return super().free_bytes(path) if self.room is None else self.room

    def before(self, what: str, path: Path) -> None:
        self.log.append(f"{what} {path.parent.name}/{path.name[:12]}")
        self.count += 1

    def create(self, path: Path) -> OpenFile:
        self.before("create", path)
        return super().create(path)

    def write(self, file: OpenFile, offset: int, data: bytes | memoryview) -> None:
        self.before("write", file.path)
        super().write(file, offset, data)

    def truncate(self, file: OpenFile, length: int) -> None:
        self.before("truncate", file.path)
        super().truncate(file, length)

    def sync(self, file: OpenFile) -> None:
        self.before("sync", file.path)

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename", target)
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self.before("link", target)
        super().link(source, target)

    def remove(self, path: Path) -> None:
        if path.exists():
            self.before("remove", path)
        super().remove(path)

    def sync_dir(self, path: Path) -> None:
        self.before("sync_dir", path / ".")


class FullDisk(CountingDisk):
    """Has no room for the operations numbered `first` to `last`."""

    def __init__(self, first: int, last: int, error: type[DiskError] = DiskFullError) -> None:
        super().__init__()
        self.first, self.last, self.error = first, last, error
        self.hit = False

    def before(self, what: str, path: Path) -> None:
        super().before(what, path)
        if what in ("create", "write") and self.first <= self.count <= self.last:
            self.hit = True
            raise self.error(f"simulated at {what} {path.name[:16]}")


class PowerCutDisk(CountingDisk):
    """Loses power before operation `cut_at`, and with it what was not made durable.

    Model: the content of a file is durable as of its last sync, the names of a folder as of its
    last sync. At the cut every name and every 512-byte sector that is not durable survives or not,
    by chance and independently: loss, reordering and tearing.
    """

    def __init__(self, root: Path, cut_at: int) -> None:
        super().__init__()
        self.root = root
        self.cut_at = cut_at
        self.is_cut = False
        self._next = 0
        self._names: dict[Path, int] = {}
        self._durable_names: dict[Path, int] = {}
        self._durable: dict[int, bytes] = {}
        self._gone: dict[int, bytes] = {}
        for path in _files(root):
            self._durable[self._adopt(path)] = path.read_bytes()
        self._durable_names = dict(self._names)

    def before(self, what: str, path: Path) -> None:
        super().before(what, path)
        if self.is_cut or self.count >= self.cut_at:
            self.is_cut = True
            raise PowerCut(f"at operation {self.count}: {what} {path.name[:16]}")

    def create(self, path: Path) -> OpenFile:
        file = super().create(path)
        self._durable[self._adopt(path)] = b""
        return file

    def sync(self, file: OpenFile) -> None:
        super().sync(file)
        self._durable[self._names[file.path]] = file.path.read_bytes()

    def rename(self, source: Path, target: Path) -> None:
        self._forget(target)
        super().rename(source, target)
        self._names[target] = self._names.pop(source)

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self._names[target] = self._names[source]

    def remove(self, path: Path) -> None:
        if path.exists() and not self.is_cut and self.count + 1 < self.cut_at:
            self._forget(path)
        super().remove(path)

    def sync_dir(self, path: Path) -> None:
        super().sync_dir(path)
        kept = {name: id_ for name, id_ in self._durable_names.items() if name.parent != path}
        now = {name: id_ for name, id_ in self._names.items() if name.parent == path}
        self._durable_names = {**kept, **now}

    def lose(self, seed: int) -> None:
        """Leave in the folder what a power cut would leave."""
        chance = random.Random(seed)
        after: dict[Path, bytes] = {}
        for name in sorted({*self._names, *self._durable_names}):
            now, durable = self._names.get(name), self._durable_names.get(name)
            id_ = now if now == durable or chance.random() < 0.5 else durable
            if id_ is not None:
                after[name] = self._content(id_, chance)
        for path in _files(self.root):
            if path in self._names or path in after:
                path.unlink()
            elif path.suffix == ".json" and not path.is_symlink():
                self._damage(path, chance)  # ngclient's cache, which is never synced
        for path, data in after.items():
            path.write_bytes(data)

    def _adopt(self, path: Path) -> int:
        self._next += 1
        self._names[path] = self._next
        return self._next

    def _forget(self, path: Path) -> None:
        id_ = self._names.pop(path, None)
        if id_ is not None and path.exists():
            self._gone[id_] = path.read_bytes()

    def _content(self, id_: int, chance: random.Random) -> bytes:
        durable = self._durable[id_]
        current = next(
            (path.read_bytes() for path, known in self._names.items() if known == id_),
            self._gone.get(id_, durable),
        )
        if current == durable:
            return durable
        length = chance.choice((len(current), len(durable)))
        mixed = bytearray()
        for start in range(0, length, SECTOR):
            source = current if chance.random() < 0.5 else durable
            mixed += source[start : start + SECTOR].ljust(min(SECTOR, length - start), b"\0")
        return bytes(mixed)

    @staticmethod
    def _damage(path: Path, chance: random.Random) -> None:
        kind = chance.randrange(4)
        if kind == 0:
            path.write_bytes(b"")
        elif kind == 1:
            path.write_bytes(path.read_bytes()[: chance.randrange(200)])
        elif kind == 2:
            path.unlink()


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() or path.is_symlink()]
