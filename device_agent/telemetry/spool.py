"""Batches on disk until the server has them; bounded, oldest first.

A batch keeps the name that makes it idempotent on the server, `<boot>-<seq>`, so sending it again
after a lost answer is harmless.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

from compiler.contract.telemetry import MAX_BATCH_BYTES, TelemetryBatch
from device_agent.errors import DiskError
from device_agent.storage.disk import Disk

log = logging.getLogger("device_agent.telemetry")


class Spool:
    """A folder of batches."""

    def __init__(self, disk: Disk, folder: Path, max_batches: int) -> None:
        self._disk = disk
        self._folder = folder
        self._max_batches = max_batches
        self.dropped = 0
        disk.make_dir(folder)

    def put(self, batch: TelemetryBatch) -> None:
        """Keep a batch; when the spool is full the oldest one goes."""
        waiting = self._paths()
        for path in waiting[: max(0, len(waiting) - self._max_batches + 1)]:
            self._drop(path, "the spool is full")
        name = f"{batch.boot_id}-{batch.seq:08d}.json"
        self._disk.write_atomic(self._folder / name, batch.to_bytes())

    def waiting(self) -> Iterator[tuple[Path, bytes]]:
        """Yield the batches, oldest first; one that cannot be read is dropped."""
        for path in self._paths():
            try:
                yield path, self._disk.read_bytes(path, MAX_BATCH_BYTES)
            except DiskError as error:
                self._drop(path, str(error))

    def done(self, path: Path) -> None:
        """Forget a batch that the server has."""
        self._disk.remove(path)

    def refuse(self, path: Path, reason: str) -> None:
        """Forget a batch that the server does not want."""
        self._drop(path, reason)

    def _drop(self, path: Path, reason: str) -> None:
        self.dropped += 1
        log.warning("telemetry batch %s dropped: %s", path.stem, reason)
        self._disk.remove(path)

    def _paths(self) -> list[Path]:
        found = [path for path in self._folder.glob("*.json") if not path.name.startswith(".")]
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
