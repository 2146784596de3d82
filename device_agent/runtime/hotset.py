"""`expert_hotset.bin`: how often each expert was used lately, kept across restarts.

    pool -(heats, now and then and at the end)-> file -(next start)-> what is read in last and stays

A guess that saves time, nothing more: a file that is damaged, or of other weights, is ignored with
a line in the log. All integers are little endian:

    magic "SFHOTS01" | SHA-256 of the experts' digests, in order | count u32 | heats u32, of 65536
    CRC-32 of everything before, u32
"""

import hashlib
import logging
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compiler.contract.expert_pool import ExpertFile
from compiler.contract.pool_abi import HEAT_ONE
from device_agent.errors import AgentError
from device_agent.storage.disk import Disk

log = logging.getLogger("device_agent.runtime")

HOTSET_FILE: Final = "expert_hotset.bin"
MAGIC: Final = b"SFHOTS01"
MAX_EXPERTS: Final = 1 << 15
_HEADER: Final = struct.Struct("<8s32sI")
_CHECKSUM: Final = struct.Struct("<I")
_HEAT_BYTES: Final = 4
MAX_BYTES: Final = _HEADER.size + _HEAT_BYTES * MAX_EXPERTS + _CHECKSUM.size


def identity_of(digests: Sequence[str]) -> bytes:
    """Return what names a set of experts: the SHA-256 of their SHA-256 in order."""
    return hashlib.sha256("".join(digests).encode()).digest()


def hotset_bytes(identity: bytes, heats: Sequence[int]) -> bytes:
    """Return the file."""
    body = _HEADER.pack(MAGIC, identity, len(heats)) + struct.pack(f"<{len(heats)}I", *heats)
    return body + _CHECKSUM.pack(zlib.crc32(body))


def parse_hotset(data: bytes, identity: bytes, count: int) -> tuple[int, ...]:
    """Return the heats of a file for these experts.

    Raises:
        ValueError: It is damaged or of other experts; the message says which.
    """
    body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    if len(data) < _HEADER.size + _CHECKSUM.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError("it is no hot set")
    if _CHECKSUM.unpack(checksum)[0] != zlib.crc32(body):
        raise ValueError("its checksum is wrong")
    _, found, number = _HEADER.unpack_from(body)
    if found != identity or number != count:
        raise ValueError("it is of other experts")
    if len(body) != _HEADER.size + _HEAT_BYTES * count:
        raise ValueError("it has another length than it says")
    heats = struct.unpack_from(f"<{count}I", body, _HEADER.size)
    if max(heats, default=0) > HEAT_ONE:
        raise ValueError("a heat is out of range")
    return heats


@dataclass(frozen=True, slots=True)
class HotSetFile:
    """Where a device keeps its hot set.

    Attributes:
        disk: Writes it, whole or not at all.
        path: Its name.
    """

    disk: Disk
    path: Path

    def read(self, files: Sequence[ExpertFile]) -> tuple[int, ...] | None:
        """Return the heats of these experts as they were; None if nothing usable is there."""
        if not self.path.exists():
            return None
        try:
            data = self.disk.read_bytes(self.path, MAX_BYTES)
            identity = identity_of([file.sha256 for file in files])
            return parse_hotset(data, identity, len(files))
        except (AgentError, OSError, ValueError) as error:
            log.warning("%s is ignored: %s", self.path.name, error)
            return None

    def write(self, files: Sequence[ExpertFile], heats: Sequence[int]) -> None:
        """Keep the heats; where that fails, the next start does without."""
        identity = identity_of([file.sha256 for file in files])
        try:
            self.disk.write_atomic(self.path, hotset_bytes(identity, heats))
        except (AgentError, OSError) as error:
            log.warning("%s cannot be kept: %s", self.path.name, error)
