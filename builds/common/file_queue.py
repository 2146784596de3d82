"""The embedded queue: kombu's file transport with whole messages only.

The stock transport creates a message's file, then locks and writes it, and truncates an exchange's
table before it writes the new one; a reader in between finds an empty file and its worker ends
with a JSON error. Here every file appears by rename, complete, and one that cannot be read is
dropped: the queue is a doorbell (ADR 0006), a lost message costs one tick.

Messages that a killed worker had taken are lost. Nothing here is durable, and nothing needs to be.
"""

import fcntl
import logging
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from queue import Empty
from typing import Any, Final

from kombu.transport import filesystem
from kombu.utils.json import dumps, loads

logger = logging.getLogger(__name__)

PARTIAL: Final = ".partial"
GUARD: Final = "tables.lock"


class Channel(filesystem.Channel):
    """File channel whose files are never seen half written."""

    def _put(  # type: ignore[override]
        self, queue: str, payload: Mapping[str, Any], **_kwargs: object
    ) -> None:
        """Put a message; its name orders it."""
        name = f"{time.monotonic_ns():020d}_{uuid.uuid4()}.{queue}.msg"
        _write(Path(self.data_folder_out) / name, _encoded(payload))

    def _get(self, queue: str, timeout: float | None = None) -> object:  # noqa: ARG002 -- kombu's
        """Take the oldest message of `queue` that no other worker takes first.

        Raises:
            Empty: There is none.
        """
        folder = Path(self.data_folder_in)
        for name in sorted(entry.name for entry in folder.iterdir()):
            if name.partition(".")[2] != f"{queue}.msg":
                continue
            taken = folder / f"{name}.{uuid.uuid4()}{PARTIAL}"
            try:
                (folder / name).rename(taken)
            except FileNotFoundError:
                continue  # another worker was faster
            data = taken.read_bytes()
            taken.unlink()
            try:
                return loads(data.decode("utf-8"))  # type: ignore[no-untyped-call]
            except ValueError as error:
                logger.warning("message %s cannot be read and is dropped: %s", name, error)
        raise Empty

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        """Add a queue to the table of an exchange, one process at a time."""
        file: Path = self._exchange_file(exchange)  # type: ignore[no-untyped-call]
        file.parent.mkdir(parents=True, exist_ok=True)
        row = filesystem.exchange_queue_t(routing_key or "", pattern or "", queue or "")
        with (file.parent / GUARD).open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            rows = self.get_table(exchange)  # type: ignore[no-untyped-call]
            if row not in rows:
                _write(file, _encoded([row, *rows]))


class Transport(filesystem.Transport):
    """File transport for one machine; chosen by `CELERY_BROKER_TRANSPORT`."""

    Channel = Channel
    # Kombu keeps one state for all connections of a process, and so do we.
    global_state = filesystem.Transport.global_state


def _encoded(value: object) -> str:
    text: str = dumps(value)  # type: ignore[no-untyped-call]
    return text


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{uuid.uuid4()}{PARTIAL}")
    draft.write_bytes(text.encode("utf-8"))
    draft.replace(path)
