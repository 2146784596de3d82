"""A content-addressed cache of stage results: killed anywhere, a rerun is clean.

An entry is one file, `<directory>/<stage>/<key[:2]>/<key>`; the key is a SHA-256 over everything
that the stage depends on. A file appears under its name only by `rename`, and carries the digest of
its content: a torn or altered entry counts as absent and is written again, so entries need no sync.
Losing any entry, or all, costs time and nothing else.

    SFCACHE2 | header length u32 | header (canonical JSON: parts [[name, bytes]], sha256) | parts

The digest is over the table of parts and their bytes.

Size: `trim` removes the entries that were used longest ago until the rest fits the limit. A read
stamps the entry's modification time, because access times are not kept on every disk. Any number of
processes may read, write and trim at once: an entry that is gone is an absent one, and a file that
is removed under a reader stays readable for it. Files that no stage and no tool of ours wrote, by
their place and name, are neither counted nor removed: the directory may be somebody's home.
"""

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object, sha256_hex
from compiler.contract.errors import ContractError
from compiler.contract.fields import require_integer, require_list, require_text

MAGIC: Final = b"SFCACHE2"
DEFAULT_LIMIT_BYTES: Final = 2 * 1024**3
FILL_AFTER_TRIM: Final = 0.9
"""Trimming goes below the limit, so that the next entry does not trim again."""
NOT_OURS: Final = "zig"
"""The C compiler's own cache lies below `toolchain/`: counted, never trimmed."""
MAX_PARTS: Final = 65_536
MAX_PART_NAME: Final = 4_096
_LENGTH_BYTES: Final = 4
_SUFFIX_PARTIAL: Final = ".partial"
_OUR_FOLDER: Final = re.compile(r"[0-9a-f]{2}")
_OUR_FILE: Final = re.compile(r"[0-9a-f]{64}(\.[a-z]{1,8})?|.+\.partial")
_OUR_BUILD: Final = ".build-"
"""Folders in which `compiler.emitters.toolchain` builds; a killed build leaves one."""


def cache_key(stage: str, facts: Mapping[str, Json]) -> str:
    """Return the key of a stage: the SHA-256 over its name and everything it depends on."""
    return sha256_hex(canonical_bytes({"stage": stage, "facts": facts}))


@dataclass(frozen=True, slots=True)
class StageUse:
    """What one stage keeps: number of entries and their bytes."""

    entries: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    used_ns: int
    size_bytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class StageCache:
    """Stage results in a directory; without a directory, an empty cache that keeps nothing.

    Attributes:
        limit_bytes: What `trim` leaves at most.
    """

    directory: Path | None
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    def get(self, stage: str, key: str) -> dict[str, bytes] | None:
        """Return the parts stored under `key`, or None if there is no whole entry."""
        if self.directory is None:
            return None
        path = self._path(self.directory, stage, key)
        try:
            parts = _unpack(path.read_bytes())
        except (OSError, ContractError):
            return None
        with contextlib.suppress(OSError):  # trimmed meanwhile, or a read-only disk
            os.utime(path)
        return parts

    def put(self, stage: str, key: str, parts: Mapping[str, bytes]) -> None:
        """Store `parts` under `key`, whole or not at all.

        A full or read-only disk only loses the entry: the caller has the result already.
        """
        if self.directory is None:
            return
        with contextlib.suppress(OSError):
            write_atomic(self._path(self.directory, stage, key), _pack(parts), is_durable=False)

    def trim(self) -> int:
        """Remove what was used longest ago until the rest fits; return the bytes removed."""
        entries = sorted(self._entries(), key=lambda entry: entry.used_ns)
        total = sum(entry.size_bytes for entry in entries)
        if total <= self.limit_bytes:
            return 0
        removed = 0
        for entry in entries:
            if total - removed <= self.limit_bytes * FILL_AFTER_TRIM:
                break
            with contextlib.suppress(OSError):
                entry.path.unlink()
                removed += entry.size_bytes
        return removed

    def use_by_stage(self) -> dict[str, StageUse]:
        """Return what each stage keeps, by name; partial files of running writers included."""
        found: dict[str, StageUse] = {}
        if self.directory is None:
            return found
        for entry in self._entries(with_foreign=True):
            stage = entry.path.relative_to(self.directory).parts[0]
            before = found.get(stage, StageUse(0, 0))
            found[stage] = StageUse(before.entries + 1, before.size_bytes + entry.size_bytes)
        return dict(sorted(found.items()))

    def _entries(self, *, with_foreign: bool = False) -> Iterator[_Entry]:
        if self.directory is None:
            return
        for folder, _, files in os.walk(self.directory):
            for name in files:
                path = Path(folder) / name
                parts = path.relative_to(self.directory).parts
                if not (_is_ours(parts) or (with_foreign and NOT_OURS in parts[1:2])):
                    continue
                with contextlib.suppress(OSError):
                    status = path.stat(follow_symlinks=False)
                    yield _Entry(status.st_mtime_ns, status.st_size, path)

    @staticmethod
    def _path(directory: Path, stage: str, key: str) -> Path:
        return directory / stage / key[:2] / key


def _is_ours(parts: Sequence[str]) -> bool:
    """Return whether a path below the cache is one of `<stage>/<two digits>/<entry>`."""
    _stage, folder, entry, *below = (*parts, "", "", "")[: max(3, len(parts))]
    if _OUR_FOLDER.fullmatch(folder) is None:
        return False
    return entry.startswith(_OUR_BUILD) if below else _OUR_FILE.fullmatch(entry) is not None


def write_atomic(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    """Write a file that is there whole or not at all, parents included.

    Args:
        path: Where to.
        data: Its content.
        is_durable: Wait for the disk; without it a power cut may leave an empty or torn file.

    Raises:
        OSError: The disk is full or not writable; nothing stays behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=_SUFFIX_PARTIAL)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk does not say which
            error.filename = str(path)
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
    table: list[Json] = [[name, len(data)] for name, data in parts.items()]
    header = canonical_bytes({"parts": table, "sha256": _digest(table, body)})
    return b"".join((MAGIC, len(header).to_bytes(_LENGTH_BYTES, "little"), header, body))


def _digest(table: Json, body: bytes | memoryview) -> str:
    digest = hashlib.sha256(canonical_bytes({"parts": table}))
    digest.update(body)
    return digest.hexdigest()


def _unpack(data: bytes) -> dict[str, bytes]:
    start = len(MAGIC) + _LENGTH_BYTES
    if data[: len(MAGIC)] != MAGIC:
        raise ContractError("not a cache entry")
    end = start + int.from_bytes(data[len(MAGIC) : start], "little")
    header = parse_object(data[start:end])
    table = header.get("parts")
    if header.get("sha256") != _digest(table, memoryview(data)[end:]):
        raise ContractError("the cache entry is torn")
    parts: dict[str, bytes] = {}
    for item in require_list(table, "parts", MAX_PARTS):
        name, size = (*require_list(item, "part", 2), None, None)[:2]
        name = require_text(name, "name", MAX_PART_NAME)
        size = require_integer(size, "size", 0, len(data) - end)
        parts[name] = data[end : end + size]
        end += size
    return parts
