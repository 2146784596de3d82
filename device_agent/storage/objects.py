"""The object store: files named by the SHA-256 of their content.

    partial/<sha256>   being written, may hold anything
    objects/<sha256>   whole, hashed, synced, then renamed into place; never written again

A name under `objects` is a promise about the bytes at the time of the rename; whoever runs them
hashes them once more (`read_verified`). Folder names are made durable by `sync`, once for many
objects: an object whose name was lost with the power is simply fetched again.
"""

import hashlib
import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from compiler.contract.canonical import SHA256_PATTERN
from device_agent.errors import (
    BundleError,
    ContentError,
    DamagedError,
    DiskError,
    DiskFullError,
    OversizedError,
)
from device_agent.storage.disk import Disk, OpenFile, disk_errors

HASH_BLOCK_BYTES: Final = 1 << 20


class ObjectStore:
    """Content-addressed files below one folder, with a quota."""

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        *,
        max_bytes: int,
        reserve_bytes: int = 0,
        is_guest: bool = False,
    ) -> None:
        """Use `folder`, made if needed.

        Args:
            disk: Where to.
            folder: Holds `objects` and `partial`.
            max_bytes: Most bytes of whole and partial objects together.
            reserve_bytes: Free space of the file system that is never used.
            is_guest: The store is an agent's, and only read here: what is damaged stays.
        """
        self._disk = disk
        self._objects = folder / "objects"
        self._partial = folder / "partial"
        self.max_bytes: Final = max_bytes
        self.reserve_bytes: Final = reserve_bytes
        self._is_guest = is_guest
        disk.make_dir(self._objects)
        disk.make_dir(self._partial)

    def path(self, sha256: str) -> Path:
        """Return where the object is or would be.

        Raises:
            BundleError: `sha256` is not a digest; it never becomes a path.
        """
        return self._objects / _name(sha256)

    def has(self, sha256: str, size_bytes: int) -> bool:
        """Return whether an object of this name and size is there, in a file of its own."""
        try:
            found = self.path(sha256).lstat()
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == size_bytes

    def partial_bytes(self, sha256: str) -> int:
        """Return how much of an object that is being written is there."""
        try:
            return (self._partial / _name(sha256)).stat().st_size
        except OSError:
            return 0

    def drop_partials(self) -> None:
        """Remove everything that is not whole, to make room."""
        for path in sorted(self._partial.iterdir()):
            self._disk.remove(path)

    def used_bytes(self) -> int:
        """Return the size of everything kept."""
        total = 0
        for folder in (self._objects, self._partial):
            for entry in os.scandir(folder):
                total += entry.stat(follow_symlinks=False).st_size
        return total

    def require_space(self, size_bytes: int) -> None:
        """Check that `size_bytes` more may be written.

        Raises:
            DiskFullError: The quota or the reserve would be touched.
        """
        used = self.used_bytes()
        if used + size_bytes > self.max_bytes:
            raise DiskFullError(
                f"{size_bytes} bytes are needed, {max(0, self.max_bytes - used)} are left of the "
                f"quota of {self.max_bytes}",
                hint="raise max_store_bytes",
            )
        free = self._disk.free_bytes(self._objects) - self.reserve_bytes
        if size_bytes > free:
            raise DiskFullError(
                f"{size_bytes} bytes are needed, {max(0, free)} are free",
                hint="free some space; the update is offered again",
            )

    def begin(self, sha256: str, size_bytes: int, *, resume: bool) -> "PartialObject":
        """Start or go on writing an object.

        Args:
            sha256: Digest of the whole.
            size_bytes: Length of the whole.
            resume: Keep what an interrupted writer left.

        Raises:
            DiskFullError: There is no room for the missing bytes.
        """
        path = self._partial / _name(sha256)
        if resume and path.is_file() and path.stat().st_size <= size_bytes:
            self.require_space(size_bytes - path.stat().st_size)
            return PartialObject(self._disk, self._disk.open(path), self.path(sha256), size_bytes)
        self._disk.remove(path)
        self.require_space(size_bytes)
        return PartialObject(self._disk, self._disk.create(path), self.path(sha256), size_bytes)

    def put(self, data: bytes, sha256: str) -> None:
        """Store bytes that are already in memory.

        Raises:
            ContentError: They do not hash to `sha256`.
        """
        if self.has(sha256, len(data)):
            return
        partial = self.begin(sha256, len(data), resume=False)
        partial.append(data)
        partial.finish()

    def read_verified(self, sha256: str, size_bytes: int) -> memoryview:
        """Map an object and return its bytes if they still hash to its name.

        The bytes hashed are the bytes returned: the file is opened once.

        Raises:
            DamagedError: It is missing, of another length, or damaged; a damaged one is removed.
        """
        view = self._map(sha256, size_bytes)
        if hashlib.sha256(view).hexdigest() != sha256:
            view.release()
            raise self._damaged(sha256)
        return view

    def verify(self, sha256: str, size_bytes: int) -> "ReadObject":
        """Open an object that still hashes to its name, without mapping it.

        Takes one block of memory whatever the size of the object; the file hashed is the one that
        is read.

        Raises:
            DamagedError: It is missing, of another length, or damaged; a damaged one is removed.
        """
        found = ReadObject(self.open(sha256, size_bytes), sha256)
        digest = hashlib.sha256()
        for offset in range(0, size_bytes, HASH_BLOCK_BYTES):
            digest.update(found.read(HASH_BLOCK_BYTES, offset))
        if digest.hexdigest() != sha256:
            found.close()
            raise self._damaged(sha256)
        return found

    def open(self, sha256: str, size_bytes: int) -> int:
        """Open an object and return the descriptor; its bytes are not verified.

        Raises:
            DamagedError: It is missing or of another length.
        """
        path = self.path(sha256)
        with disk_errors(f"open {path.name[:16]}"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                raise DamagedError(f"object {sha256[:16]} is missing") from None
            if os.fstat(fd).st_size != size_bytes:
                os.close(fd)
                raise DamagedError(f"object {sha256[:16]} has another length than signed for")
            return fd

    def known_bytes(self, sha256: str, size_bytes: int) -> bytes | None:
        """Return a small object if it is here and whole, else None."""
        if not self.has(sha256, size_bytes):
            return None
        try:
            return bytes(self.read_verified(sha256, size_bytes))
        except BundleError:
            return None

    def forget(self, sha256: str) -> None:
        """Remove an object and what is left of writing it; a guest leaves it."""
        if self._is_guest:
            return
        self._disk.remove(self.path(sha256))
        self._disk.remove(self._partial / _name(sha256))

    def sync(self) -> None:
        """Make the names of finished objects durable."""
        self._disk.sync_dir(self._objects)

    def collect(self, keep: Iterable[str]) -> int:
        """Remove every object and partial object that is not in `keep`; return the bytes freed."""
        kept = set(keep)
        freed = 0
        for folder in (self._objects, self._partial):
            for path in sorted(folder.iterdir()):
                if path.name in kept and not (folder == self._partial and self._is_whole(path)):
                    continue
                freed += path.lstat().st_size
                self._disk.remove(path)
        return freed

    def _is_whole(self, partial: Path) -> bool:
        return (self._objects / partial.name).exists()

    def _damaged(self, sha256: str) -> DamagedError:
        self.forget(sha256)
        end = "" if self._is_guest else " and was dropped"
        return DamagedError(f"object {sha256[:16]} is damaged{end}")

    def _map(self, sha256: str, size_bytes: int) -> memoryview:
        fd = self.open(sha256, size_bytes)
        with disk_errors(f"map {sha256[:16]}"):
            try:
                if not size_bytes:
                    return memoryview(b"")
                return memoryview(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ))
            finally:
                os.close(fd)


class ReadObject:
    """An object open for reading, a range at a time."""

    def __init__(self, fd: int, sha256: str) -> None:
        self._fd = fd
        self._name = sha256[:16]

    def read(self, length: int, offset: int) -> bytes:
        """Return `length` bytes from `offset`, fewer only at the end."""
        with disk_errors(f"read {self._name}"):
            return os.pread(self._fd, length, offset)

    def close(self) -> None:
        """Close it; once."""
        os.close(self._fd)


class PartialObject:
    """An object being written: appended to in order, or written anywhere and hashed at the end."""

    def __init__(self, disk: Disk, file: OpenFile, target: Path, size_bytes: int) -> None:
        self._disk = disk
        self._file = file
        self._target = target
        self._size = size_bytes
        self._length = disk.size(file)
        self._hash = hashlib.sha256()
        self._ordered = True
        self._open = True
        self._hash_file(self._length)

    @property
    def length(self) -> int:
        """Return how many bytes were appended so far."""
        return self._length

    @property
    def missing(self) -> int:
        """Return how many bytes are missing."""
        return self._size - self._length

    def append(self, data: bytes | memoryview) -> None:
        """Write at the end.

        Raises:
            OversizedError: More than the whole; nothing of `data` was written.
            DiskFullError: No space is left.
        """
        if len(data) > self.missing:
            raise OversizedError(
                f"more than the {self._size} bytes that were signed for {self._target.name[:16]}"
            )
        self._disk.write(self._file, self._length, data)
        self._hash.update(data)
        self._length += len(data)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write anywhere inside the whole; `finish` then hashes the file.

        Raises:
            OversizedError: The range leaves the object.
        """
        if offset < 0 or offset + len(data) > self._size:
            raise OversizedError(f"write outside of object {self._target.name[:16]}")
        self._ordered = False
        self._disk.write(self._file, offset, data)
        self._length = max(self._length, offset + len(data))

    def restart(self) -> None:
        """Throw away what was written."""
        self._disk.truncate(self._file, 0)
        self._length = 0
        self._hash = hashlib.sha256()
        self._ordered = True

    def finish(self) -> None:
        """Check the digest of what was written, make it durable and give it its name.

        Raises:
            ContentError: Another digest or length; the file was removed.
        """
        if not self._ordered:
            self._hash = hashlib.sha256()
            self._hash_file(self._disk.size(self._file))
        if self._length != self._size or self._hash.hexdigest() != self._target.name:
            self.discard()
            raise ContentError(f"object {self._target.name[:16]} is not what was signed for")
        self._disk.sync(self._file)
        self.close()
        self._disk.rename(self._file.path, self._target)

    def close(self) -> None:
        """Stop writing; what is there can be resumed."""
        if self._open:
            self._open = False
            self._disk.close(self._file)

    def discard(self) -> None:
        """Stop writing and remove the file."""
        self.close()
        self._disk.remove(self._file.path)

    def _hash_file(self, length: int) -> None:
        offset = 0
        while offset < length:
            block = self._disk.read(self._file, offset, min(HASH_BLOCK_BYTES, length - offset))
            if not block:
                raise DiskError(f"{self._file.path.name[:16]} became shorter while it was read")
            self._hash.update(block)
            offset += len(block)


def _name(sha256: str) -> str:
    if SHA256_PATTERN.fullmatch(sha256) is None:
        raise BundleError("an object is named by 64 hexadecimal digits")
    return sha256
