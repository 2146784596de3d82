"""A small document kept twice, so that a torn write always leaves one whole copy.

Each copy is `SFT1 <seq> <length> <crc32>` on a line, then canonical JSON. Writing goes to the copy
that is not the newest; reading takes the whole copy of the highest seq.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.errors import ContractError
from device_agent.errors import DiskError
from device_agent.storage.disk import Disk

MAGIC: Final = b"SFT1"
MAX_BYTES: Final = 1 << 20


class TwinDocument:
    """One document in two files `<name>.0` and `<name>.1`."""

    def __init__(self, disk: Disk, folder: Path, name: str) -> None:
        self._disk = disk
        self._paths = (folder / f"{name}.0", folder / f"{name}.1")
        self._seq = 0
        self._newest = 1

    @property
    def exists(self) -> bool:
        """Return whether a copy, readable or not, is there."""
        return any(path.exists() for path in self._paths)

    def load(self) -> dict[str, Json] | None:
        """Return the newest whole copy, or None when there is none (absent or both damaged)."""
        best: dict[str, Json] | None = None
        for number, path in enumerate(self._paths):
            found = self._read(path)
            if found is not None and (best is None or found[0] > self._seq):
                self._seq, best = found
                self._newest = number
        return best

    def save(self, document: Mapping[str, Json]) -> None:
        """Make `document` the newest copy; durable when this returns."""
        target = 1 - self._newest
        body = canonical_bytes(document)
        head = b"%s %d %d %08x\n" % (MAGIC, self._seq + 1, len(body), zlib.crc32(body))
        self._disk.write_atomic(self._paths[target], head + body)
        self._seq += 1
        self._newest = target

    def _read(self, path: Path) -> tuple[int, dict[str, Json]] | None:
        try:
            head, _, body = self._disk.read_bytes(path, MAX_BYTES).partition(b"\n")
            magic, seq, length, crc = head.split(b" ")
            if magic != MAGIC or int(length) != len(body) or int(crc, 16) != zlib.crc32(body):
                return None
            return int(seq), parse_object(body)
        except (DiskError, ContractError, ValueError):
            return None
