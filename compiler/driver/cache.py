"""A content-addressed cache of stage results: killed anywhere, a rerun is clean.

An entry is one file, `<directory>/<stage>/<key[:2]>/<key>`; the key is a SHA-256 over everything
that the stage depends on. A file appears under its name only by `rename`, complete and synced, and
carries the digest of its content: a torn or altered entry counts as absent and is written again.
Losing any entry, or all, costs time and nothing else.

    SFCACHE1 | header length u32 | header (canonical JSON: parts [[name, bytes]], sha256) | parts
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object, sha256_hex
from compiler.contract.errors import ContractError

MAGIC: Final = b"SFCACHE1"
_LENGTH_BYTES: Final = 4
_SUFFIX_PARTIAL: Final = ".partial"


def cache_key(stage: str, facts: Mapping[str, Json]) -> str:
    """Return the key of a stage: the SHA-256 over its name and everything it depends on."""
    return sha256_hex(canonical_bytes({"stage": stage, "facts": facts}))


@dataclass(frozen=True, slots=True)
class StageCache:
    """Stage results in a directory; without a directory, an empty cache that keeps nothing."""

    directory: Path | None

    def get(self, stage: str, key: str) -> dict[str, bytes] | None:
        """Return the parts stored under `key`, or None if there is no whole entry."""
        if self.directory is None:
            return None
        try:
            data = self._path(self.directory, stage, key).read_bytes()
        except OSError:
            return None
        try:
            return _unpack(data)
        except ContractError:
            return None

    def put(self, stage: str, key: str, parts: Mapping[str, bytes]) -> None:
        """Store `parts` under `key`, whole or not at all.

        A full or read-only disk only loses the entry: the caller has the result already.
        """
        if self.directory is None:
            return
        with contextlib.suppress(OSError):
            write_atomic(self._path(self.directory, stage, key), _pack(parts))

    @staticmethod
    def _path(directory: Path, stage: str, key: str) -> Path:
        return directory / stage / key[:2] / key


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, parents included.

    Raises:
        OSError: The disk is full or not writable; nothing stays behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=_SUFFIX_PARTIAL)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yield a private directory that is gone afterwards.

    It lies in the system's temporary folder: what a killed process leaves there is not ours to
    clean, and a supervisor can point `TMPDIR` at a folder that it removes itself.
    """
    with tempfile.TemporaryDirectory(prefix="sparsefleet-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _pack(parts: Mapping[str, bytes]) -> bytes:
    body = b"".join(parts.values())
    header = canonical_bytes(
        {
            "parts": [[name, len(data)] for name, data in parts.items()],
            "sha256": sha256_hex(body),
        }
    )
    return b"".join((MAGIC, len(header).to_bytes(_LENGTH_BYTES, "little"), header, body))


def _unpack(data: bytes) -> dict[str, bytes]:
    start = len(MAGIC) + _LENGTH_BYTES
    if data[: len(MAGIC)] != MAGIC:
        raise ContractError("not a cache entry")
    end = start + int.from_bytes(data[len(MAGIC) : start], "little")
    header = parse_object(data[start:end])
    if header.get("sha256") != sha256_hex(memoryview(data)[end:]):
        raise ContractError("the cache entry is torn")
    parts: dict[str, bytes] = {}
    table = header.get("parts")
    for item in table if isinstance(table, list) else ():
        name, size = item
        parts[name] = data[end : end + size]
        end += size
    return parts
