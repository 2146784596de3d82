"""Durable file operations as a port: everything that must survive a power cut goes through here.

Rules of use: data is durable after `sync`; a name is durable after `sync_dir` of its folder; rename
is atomic for the name only. Tests put a disk in this place that loses whatever was not made
durable, or that is full.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from device_agent.errors import AgentError, DiskError, DiskFullError

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class OpenFile:
    """A file open for writing."""

    __slots__ = ("fd", "path")

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd


class Disk:
    """The file system of this machine, with our errors."""

    def create(self, path: Path) -> OpenFile:
        """Create an empty file for reading and writing, replacing one that is there."""
        self.remove(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with disk_errors(f"create {path.name}"):
            return OpenFile(path, os.open(path, flags, FILE_MODE))

    def open(self, path: Path) -> OpenFile:
        """Open an existing file for reading and writing."""
        with disk_errors(f"open {path.name}"):
            return OpenFile(path, os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))

    def write(self, file: OpenFile, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data)
        with disk_errors(f"write {file.path.name}"):
            while view:
                written = os.pwrite(file.fd, view, offset)
                offset += written
                view = view[written:]

    def read(self, file: OpenFile, offset: int, length: int) -> bytes:
        """Read up to `length` bytes at `offset`; fewer only at the end of the file."""
        with disk_errors(f"read {file.path.name}"):
            return os.pread(file.fd, length, offset)

    def size(self, file: OpenFile) -> int:
        """Return the length of the file in bytes."""
        with disk_errors(f"stat {file.path.name}"):
            return os.fstat(file.fd).st_size

    def truncate(self, file: OpenFile, length: int) -> None:
        """Cut the file to `length` bytes."""
        with disk_errors(f"truncate {file.path.name}"):
            os.ftruncate(file.fd, length)

    def sync(self, file: OpenFile) -> None:
        """Make the content of the file durable."""
        with disk_errors(f"fsync {file.path.name}"):
            os.fsync(file.fd)

    def close(self, file: OpenFile) -> None:
        """Close the file; what was not synced may be lost with the power."""
        with disk_errors(f"close {file.path.name}"):
            os.close(file.fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name in one step, replacing what had it."""
        with disk_errors(f"rename {source.name}"):
            source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        with disk_errors(f"link {source.name}"):
            target.hardlink_to(source)

    def remove(self, path: Path) -> None:
        """Remove a file if it is there."""
        with disk_errors(f"remove {path.name}"):
            path.unlink(missing_ok=True)

    def sync_dir(self, path: Path) -> None:
        """Make the names in a folder durable."""
        with disk_errors(f"fsync {path.name}"):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def make_dir(self, path: Path) -> None:
        """Make a folder, with its parents, for the owner only."""
        with disk_errors(f"mkdir {path.name}"):
            path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)

    def read_bytes(self, path: Path, limit_bytes: int) -> bytes:
        """Return a small file.

        Raises:
            DiskError: It is not there, or longer than `limit_bytes`.
        """
        with disk_errors(f"read {path.name}"), path.open("rb") as file:
            data = file.read(limit_bytes + 1)
        if len(data) > limit_bytes:
            raise DiskError(f"{path.name} is longer than {limit_bytes} bytes")
        return data

    def free_bytes(self, path: Path) -> int:
        """Return the space that an ordinary user may still fill, in bytes."""
        with disk_errors("statvfs"):
            facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize

    def write_atomic(self, path: Path, data: bytes) -> None:
        """Replace `path` by `data`: after a power cut the old or the new bytes are there."""
        temporary = path.with_name(f".{path.name}.tmp")
        file = self.create(temporary)
        try:
            self.write(file, 0, data)
            self.sync(file)
        finally:
            self.close(file)
        self.rename(temporary, path)
        self.sync_dir(path.parent)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn operating system errors into ours.

    Raises:
        DiskFullError: No space or quota is left.
        DiskError: Anything else.
    """
    try:
        yield
    except AgentError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _NO_SPACE:
            raise DiskFullError(
                f"{what}: {reason}", hint="free some space; the update is offered again"
            ) from error
        raise DiskError(f"{what}: {reason}") from error
