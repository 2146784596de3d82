"""One agent per state folder: an exclusive lock for as long as it runs."""

import fcntl
import os
from pathlib import Path
from typing import Self

from device_agent.errors import StateBusyError
from device_agent.storage.disk import FILE_MODE, Disk, disk_errors


class FolderLock:
    """An exclusive `flock` on a file; the system drops it when the process ends."""

    def __init__(self, disk: Disk, path: Path) -> None:
        disk.make_dir(path.parent)
        with disk_errors(f"open {path.name}"):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(path, flags, FILE_MODE)
        self._folder = path.parent

    def acquire(self) -> Self:
        """Take the lock.

        Raises:
            StateBusyError: Another process has it.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateBusyError(
                f"another agent works in {self._folder.name!r}",
                hint="stop it, or give this one its own state_dir",
            ) from None
        return self

    def release(self) -> None:
        """Give the lock back; once is enough."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
