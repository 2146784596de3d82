"""Keeps the snapshot fresh and writes heartbeats: two threads per process, started on first use.

The snapshot's age counts from the start of the last look at the fleet version. Usually the thread
looks twice as often as it must; if it is late, the request that finds the snapshot too old looks
itself, and if that fails the answer is "ask again" (503) and never an old offer.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from django.db import DatabaseError, close_old_connections

from fleet.edge.snapshot import Snapshot, snapshot_build, version_read
from fleet.errors import StaleSnapshotError
from fleet.services.running import Beat, heartbeats_store

logger = logging.getLogger(__name__)

FLUSH_S: Final = 1.0
MAX_BEATS: Final = 200_000


class SnapshotHolder:
    """Hands out a snapshot that is never older than `max_age_s`, seconds."""

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._checked_at = -float("inf")

    def current(self) -> Snapshot:
        """Return the snapshot.

        Raises:
            StaleSnapshotError: It is too old and the database cannot be asked.
        """
        snapshot = self._snapshot
        if snapshot is not None and time.monotonic() - self._checked_at <= self._max_age_s:
            return snapshot
        return self.refresh(unless_younger_s=self._max_age_s)

    def refresh(self, *, unless_younger_s: float = 0.0) -> Snapshot:
        """Look at the fleet version and build a new snapshot if it changed.

        Args:
            unless_younger_s: Do nothing if somebody else looked this lately, seconds.

        Raises:
            StaleSnapshotError: The database cannot be asked.
        """
        with self._lock:
            started = time.monotonic()
            if self._snapshot is not None and started - self._checked_at < unless_younger_s:
                return self._snapshot
            try:
                number = version_read()
                if self._snapshot is None or self._snapshot.number != number:
                    self._snapshot = snapshot_build()
            except DatabaseError as error:
                raise StaleSnapshotError(f"the database cannot be asked: {error}") from error
            self._checked_at = started
            return self._snapshot


class BeatBuffer:
    """Polls since the last flush; the newest per device is what counts."""

    def __init__(self) -> None:
        self._beats: list[Beat] = []

    def add(self, beat: Beat) -> None:
        """Note one poll; beyond `MAX_BEATS` (a database that is down) new ones are dropped."""
        if len(self._beats) < MAX_BEATS:
            self._beats.append(beat)

    def flush(self) -> int:
        """Write what was noted; return how many devices that were."""
        beats, self._beats = self._beats, []
        return heartbeats_store(beats=beats) if beats else 0


class Keeper:
    """The two threads of one process; a forked child starts its own."""

    def __init__(self, holder: SnapshotHolder, beats: BeatBuffer, interval_s: float) -> None:
        self._holder = holder
        self._beats = beats
        self._interval_s = interval_s
        self._pid = 0
        self._lock = threading.Lock()

    def ensure(self) -> None:
        """Start the threads unless this process has them."""
        if self._pid == os.getpid():
            return
        with self._lock:
            if self._pid == os.getpid():
                return
            self._pid = os.getpid()
            self._start("fleet-snapshot", self._holder.refresh, self._interval_s)
            self._start("fleet-heartbeats", self._beats.flush, FLUSH_S)

    def _start(self, name: str, work: Callable[[], object], interval_s: float) -> None:
        threading.Thread(
            target=_forever, args=(name, work, interval_s), name=name, daemon=True
        ).start()


def _forever(name: str, work: Callable[[], object], interval_s: float) -> None:
    while True:
        try:
            close_old_connections()
            work()
        except (DatabaseError, StaleSnapshotError) as error:
            logger.warning("%s: %s", name, error)
        time.sleep(interval_s)
