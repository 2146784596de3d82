"""Patch the objects of the base into those of the new bundle, where there is no room for both.

    objects/<old>  -(move)->  patching/<old>  -(chunk by chunk)->  -(hash, move)->  objects/<new>

A file leaves `objects` before its first byte changes and comes back when it hashes to its new name,
so nothing half patched has the name of an object, and nothing in `patching` can be loaded. It gets
its new name before it loses the old one, so that no cut leaves it without any. Where each file lies
says how far it is; chunks say it within a file; so every run, forward or back, goes on where the
last one was cut, with no further record. Called by `patching`.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from compiler.contract.delta import DeltaHeader
from compiler.contract.manifest import ReleaseManifest
from compiler.contract.protocol import DeltaOffer
from compiler.delta import chunk_extent, patch_in_place
from device_agent.errors import ContentError, DamagedError, DeltaUnusableError
from device_agent.storage.disk import Disk, OpenFile
from device_agent.storage.objects import HASH_BLOCK_BYTES, ObjectStore
from device_agent.update.apply import UNUSABLE, checked_header, make_sections, open_delta

FOLDER: Final = "patching"
JOURNAL: Final = "journal"


@dataclass(frozen=True, slots=True)
class Pair:
    """One object and what becomes of it."""

    old_sha256: str
    new_sha256: str
    size_bytes: int


def pairs_of(base: ReleaseManifest, new: ReleaseManifest) -> tuple[Pair, ...] | None:
    """Return the objects that a delta would patch chunk by chunk, or None if they cannot be.

    They cannot when an object of the base is needed by the new bundle as it is, or should become
    two different ones. Pure.
    """
    before = {section.component: section for section in base.sections}
    needed = {section.sha256 for section in new.sections}
    pairs: dict[str, Pair] = {}
    for section in new.sections:
        old = before.get(section.component)
        if old is None or old.sha256 == section.sha256 or not section.planes:
            continue
        if old.planes != section.planes or old.size_bytes != section.size_bytes:
            continue
        pair = Pair(old.sha256, section.sha256, section.size_bytes)
        if old.sha256 in needed or pairs.setdefault(old.sha256, pair) != pair:
            return None
    made = [pair.new_sha256 for pair in pairs.values()]
    return tuple(pairs.values()) if len(set(made)) == len(made) else None


class PatchFolder:
    """Files on their way from one object to another, and the journal of one chunk."""

    def __init__(self, disk: Disk, state_dir: Path) -> None:
        self.disk: Final = disk
        self.path: Final = state_dir / FOLDER

    def file(self, old_sha256: str) -> Path:
        """Return where the object that had this name lies while it is patched."""
        return self.path / old_sha256

    def prepare(self, slot_bytes: int) -> None:
        """Take the space of the journal now, so that patching needs none later."""
        if not self.path.exists():
            self.disk.make_dir(self.path)
            self.disk.sync_dir(self.path.parent)
        path = self.path / JOURNAL
        if path.exists() and path.stat().st_size >= slot_bytes:
            return
        file = self.disk.create(path)
        try:
            self.disk.write(file, 0, bytes(slot_bytes))
            self.disk.sync(file)
        finally:
            self.disk.close(file)
        self.disk.sync_dir(self.path)

    def drop(self) -> None:
        """Remove everything."""
        if self.path.exists():
            for path in sorted(self.path.iterdir()):
                self.disk.remove(path)


class _Slot:
    """`compiler.delta.ChunkJournal` in a file of fixed length."""

    def __init__(self, disk: Disk, file: OpenFile) -> None:
        self._disk, self._file = disk, file

    def read(self) -> bytes:
        return self._disk.read(self._file, 0, self._disk.size(self._file))

    def write(self, header: bytes, payload: bytes) -> None:
        self._disk.write(self._file, len(header), payload)
        self._disk.write(self._file, 0, header)
        self._disk.sync(self._file)


class _Files:
    """`compiler.delta.Place` over the files of the components that are patched."""

    def __init__(self, disk: Disk, paths: Mapping[str, Path]) -> None:
        self._disk, self._paths = disk, paths
        self._open: dict[Path, OpenFile] = {}
        self._touched: set[Path] = set()

    def pread(self, component: str, length: int, offset: int) -> bytes:
        return self._disk.read(self._file(component), offset, length)

    def pwrite(self, component: str, data: bytes, offset: int) -> None:
        self._disk.write(self._file(component), offset, data)
        self._touched.add(self._paths[component])

    def sync(self) -> None:
        for path in sorted(self._touched):
            self._disk.sync(self._open[path])
        self._touched.clear()

    def close(self) -> None:
        for file in self._open.values():
            self._disk.close(file)
        self._open.clear()

    def digest(self, component: str) -> str:
        """Return the SHA-256 of the whole file."""
        file, digest, offset = self._file(component), hashlib.sha256(), 0
        while block := self._disk.read(file, offset, HASH_BLOCK_BYTES):
            digest.update(block)
            offset += len(block)
        return digest.hexdigest()

    def _file(self, component: str) -> OpenFile:
        path = self._paths[component]
        if path not in self._open:
            self._open[path] = self._disk.open(path)
        return self._open[path]


def patch_objects(
    store: ObjectStore,
    folder: PatchFolder,
    offer: DeltaOffer,
    base: ReleaseManifest,
    new: ReleaseManifest,
    *,
    reverse: bool = False,
) -> None:
    """Make the objects of `new` out of those of `base`, or with `reverse` the other way round.

    May be cut anywhere and called again, in either direction.

    Raises:
        DeltaUnusableError: The delta cannot do it, or a file is neither the one nor the other.
        DiskError: The disk is full or broken; call again.
    """
    pairs = pairs_of(base, new)
    if pairs is None:
        raise DeltaUnusableError("an object of the base is needed in two forms")
    try:
        with open_delta(store, offer) as patch:
            header = checked_header(patch, base, new)
            _require_pairs(header, pairs)
            first_piece, slot_bytes = chunk_extent(patch)
            if not reverse:
                _make_pieces(store, patch, base, new, header, first_piece)
        folder.prepare(slot_bytes)
        _take(store, folder, pairs, reverse=reverse)
        _patch(store, folder, offer, header, reverse=reverse)
        _give_back(store, folder, pairs, reverse=reverse)
    except UNUSABLE as error:
        raise DeltaUnusableError(f"{error} [{error.code}]") from error


def _require_pairs(header: DeltaHeader, pairs: tuple[Pair, ...]) -> None:
    chunked = {(one.old_sha256, one.new_sha256) for one in header.sections if one.planes}
    if chunked != {(pair.old_sha256, pair.new_sha256) for pair in pairs}:
        raise DeltaUnusableError("the delta codes other sections in chunks than the manifests say")


def _make_pieces(
    store: ObjectStore,
    patch: BinaryIO,
    base: ReleaseManifest,
    new: ReleaseManifest,
    header: DeltaHeader,
    first: int,
) -> None:
    """Make what is coded whole beside what it was: plan, kernels and the like are small."""
    pieces = {section.component for section in header.sections if not section.planes}
    if all(
        store.has(section.sha256, section.size_bytes)
        for section in new.sections
        if section.component in pieces
    ):
        return
    patch.seek(0)
    make_sections(store, patch, base, new, pieces, start_record=first)


def _take(
    store: ObjectStore, folder: PatchFolder, pairs: tuple[Pair, ...], *, reverse: bool
) -> None:
    """Move every object to patch out of `objects`, unless it is done already."""
    for pair in pairs:
        source, target = (pair.old_sha256, pair.new_sha256)
        if reverse:
            source, target = target, source
        path = folder.file(pair.old_sha256)
        if not path.exists() and not store.has(target, pair.size_bytes):
            if not store.has(source, pair.size_bytes):
                raise DamagedError(f"object {source[:16]} is missing")
            folder.disk.link(store.path(source), path)
    folder.disk.sync_dir(folder.path)
    for pair in pairs:
        if folder.file(pair.old_sha256).exists():
            folder.disk.remove(store.path(pair.new_sha256 if reverse else pair.old_sha256))
    store.sync()


def _patch(
    store: ObjectStore,
    folder: PatchFolder,
    offer: DeltaOffer,
    header: DeltaHeader,
    *,
    reverse: bool,
) -> None:
    paths = dict(_places(store, folder, header))
    files = _Files(folder.disk, paths)
    slot = folder.disk.open(folder.path / JOURNAL)
    try:
        patch_in_place(
            files,
            lambda: open_delta(store, offer),
            _Slot(folder.disk, slot),
            delta_sha256=offer.sha256,
            reverse=reverse,
        )
        for section in header.sections:
            wanted = section.old_sha256 if reverse else section.new_sha256
            if section.planes and files.digest(section.component) != wanted:
                raise ContentError(f"{section.component} is not what was signed for")
    finally:
        folder.disk.close(slot)
        files.close()


def _places(
    store: ObjectStore, folder: PatchFolder, header: DeltaHeader
) -> Iterator[tuple[str, Path]]:
    """Yield where each component lies that is coded in chunks; some may be done already."""
    for section in header.sections:
        if not section.planes:
            continue
        path = folder.file(section.old_sha256)
        if not path.exists():
            whole = [store.path(name) for name in (section.new_sha256, section.old_sha256)]
            path = next((one for one in whole if one.exists()), path)
        yield section.component, path


def _give_back(
    store: ObjectStore, folder: PatchFolder, pairs: tuple[Pair, ...], *, reverse: bool
) -> None:
    """Give every file that is done its name as an object."""
    for pair in pairs:
        path = folder.file(pair.old_sha256)
        target = store.path(pair.old_sha256 if reverse else pair.new_sha256)
        if path.exists() and not target.exists():
            folder.disk.link(path, target)
    store.sync()
    for pair in pairs:
        folder.disk.remove(folder.file(pair.old_sha256))
    folder.disk.sync_dir(folder.path)
