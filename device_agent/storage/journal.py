"""The journal: one line per fact, appended and synced before the agent goes on.

A line is `<crc32 of the rest, 8 hex digits> <canonical JSON>`. A line that is torn or damaged ends
the journal: it and everything behind it are cut off at the next start, because a step whose record
was not durable is done again, and every step may be done again.
"""

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.errors import ContractError
from device_agent.storage.disk import Disk, OpenFile

MAX_JOURNAL_BYTES: Final = 16 << 20
_CRC_DIGITS: Final = 8

Record = Mapping[str, Json]


class Journal:
    """An append-only file of records."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._file: OpenFile | None = None
        self._end = 0

    @property
    def size_bytes(self) -> int:
        """Return the length of the journal."""
        return self._end

    def open(self) -> list[Record]:
        """Open the journal, cut off a damaged end, and return its records in order."""
        if not self._path.exists():
            self._disk.write_atomic(self._path, b"")
        data = self._disk.read_bytes(self._path, MAX_JOURNAL_BYTES)
        records, self._end = read_records(data)
        self._file = self._disk.open(self._path)
        if self._end != len(data):
            self._disk.truncate(self._file, self._end)
            self._disk.sync(self._file)
        return records

    def append(self, record: Record) -> None:
        """Add a record; durable when this returns."""
        line = record_line(record)
        file = self._opened()
        self._disk.write(file, self._end, line)
        self._disk.sync(file)
        self._end += len(line)

    def replace(self, records: Iterable[Record]) -> None:
        """Start the journal anew with `records`, in one step."""
        data = b"".join(map(record_line, records))
        self.close()
        self._disk.write_atomic(self._path, data)
        self._file = self._disk.open(self._path)
        self._end = len(data)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._disk.close(self._file)
            self._file = None

    def _opened(self) -> OpenFile:
        if self._file is None:
            self._file = self._disk.open(self._path)
        return self._file


def record_line(record: Record) -> bytes:
    """Return the line of a record."""
    body = canonical_bytes(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def read_records(data: bytes) -> tuple[list[Record], int]:
    """Return the whole records of `data` and how many bytes they take."""
    records: list[Record] = []
    end = 0
    while (newline := data.find(b"\n", end)) >= 0:
        line = data[end:newline]
        crc, body = line[:_CRC_DIGITS], line[_CRC_DIGITS + 1 :]
        try:
            if int(crc, 16) != zlib.crc32(body):
                break
            records.append(parse_object(body))
        except (ValueError, ContractError):
            break
        end = newline + 1
    return records, end
