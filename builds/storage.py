"""Where blobs live: content-addressed, immutable files.

A name is the SHA-256 of the content. A file is written under a draft name, hashed on the way,
fsynced, renamed, and its folder is fsynced. A disk may still damage it later: an upload of the same
content looks at the file that is there and replaces it when it is wrong.
"""

import errno
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from django.conf import settings

from builds.common.errors import NotFoundError
from builds.errors import BlobDigestError, BlobTooLargeError, StorageFullError
from compiler.contract.canonical import require_sha256

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 1 << 20
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Readable(Protocol):
    """Anything that hands out bytes in pieces: a file, a request."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; empty at the end."""


class BlobStore(Protocol):
    """The port; an S3 store would hand out presigned addresses instead of paths."""

    def put(self, stream: Readable, sha256: str, *, limit_bytes: int) -> int:
        """Store the bytes of `stream` if they hash to `sha256`; return their count."""

    def open(self, sha256: str) -> BinaryIO:
        """Open a blob for reading."""

    def size(self, sha256: str) -> int:
        """Return the size of a blob in bytes."""

    def has(self, sha256: str) -> bool:
        """Return whether the blob is there."""

    def path(self, sha256: str) -> Path:
        """Return the local file of a blob, whether it exists or not."""


class LocalBlobStore:
    """Blobs in a folder of this machine: `<folder>/ab/abcdef...`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, stream: Readable, sha256: str, *, limit_bytes: int) -> int:
        """Store the bytes of `stream` if they hash to `sha256`; return their count.

        A stored file whose content is wrong is replaced, atomically.

        Raises:
            BlobDigestError: They hash to something else; nothing was kept.
            BlobTooLargeError: More than `limit_bytes` came; nothing was kept.
            StorageFullError: No room; nothing was kept.
        """
        final = self.path(sha256)
        if final.exists():
            if _is_intact(final, sha256):
                return _copy(stream, lambda _chunk: None, sha256, limit_bytes)
            logger.error("blob %s is damaged on the disk; this upload replaces it", sha256)
        final.parent.mkdir(parents=True, exist_ok=True)
        with _full_disk_reported():
            return self._write(stream, final, sha256, limit_bytes)

    def _write(self, stream: Readable, final: Path, sha256: str, limit_bytes: int) -> int:
        draft = final.with_name(f".draft-{secrets.token_hex(8)}")
        try:
            with draft.open("xb") as file:
                size = _copy(stream, file.write, sha256, limit_bytes)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(final)
            _sync_folder(final.parent)
        finally:
            draft.unlink(missing_ok=True)
        return size

    def open(self, sha256: str) -> BinaryIO:
        """Open a blob for reading.

        Raises:
            NotFoundError: It is not there.
        """
        try:
            return self.path(sha256).open("rb")
        except FileNotFoundError:
            raise NotFoundError(f"no blob {sha256}") from None

    def size(self, sha256: str) -> int:
        """Return the size of a blob in bytes.

        Raises:
            NotFoundError: It is not there.
        """
        try:
            return self.path(sha256).stat().st_size
        except FileNotFoundError:
            raise NotFoundError(f"no blob {sha256}") from None

    def has(self, sha256: str) -> bool:
        """Return whether the blob is there."""
        return self.path(sha256).exists()

    def path(self, sha256: str) -> Path:
        """Return the local file of a blob, whether it exists or not.

        Raises:
            ContractError: `sha256` is not a digest (it becomes a file name).
        """
        require_sha256(sha256, "blob name")
        return self._folder / sha256[:2] / sha256


def blob_store() -> BlobStore:
    """Return the blob store of this process, as the settings say."""
    return _local(settings.SPARSEFLEET.blob_path)


@lru_cache(maxsize=4)
def _local(folder: Path) -> LocalBlobStore:
    return LocalBlobStore(folder)


def _copy(stream: Readable, write: Callable[[bytes], object], sha256: str, limit_bytes: int) -> int:
    digest = hashlib.sha256()
    size = 0
    while chunk := stream.read(CHUNK_BYTES):
        size += len(chunk)
        if size > limit_bytes:
            raise BlobTooLargeError(f"more than {limit_bytes} bytes")
        digest.update(chunk)
        write(chunk)
    if digest.hexdigest() != sha256:
        raise BlobDigestError(
            f"{size} bytes arrived, their SHA-256 is {digest.hexdigest()}, not {sha256}",
            hint="upload the file again; the address must be the digest of its content",
        )
    return size


def _is_intact(path: Path, sha256: str) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:  # gone meanwhile, or the disk cannot read it
        return False


@contextmanager
def _full_disk_reported() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFullError(f"the blob store is full: {error.strerror}") from error
        raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
