"""The blob store: whole or absent, whatever happens while writing."""

import errno
import hashlib
import io
import threading
from pathlib import Path

import pytest

from builds.common.errors import NotFoundError
from builds.errors import BlobDigestError, BlobTooLargeError, StorageFullError
from builds.storage import LocalBlobStore
from compiler.contract.errors import ContractError


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Broken(io.BytesIO):
    """A stream that fails after its first piece."""

    def __init__(self, error: Exception) -> None:
        super().__init__(b"x" * (3 << 20))
        self.error = error

    def read(self, size: int | None = -1) -> bytes:
        if self.tell():
            raise self.error
        return super().read(size)


@pytest.fixture
def store(tmp_path: Path) -> LocalBlobStore:
    return LocalBlobStore(tmp_path)


def files(store: LocalBlobStore) -> list[str]:
    folder = store.path("00" * 32).parents[1]
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_it_keeps_bytes_under_their_digest(store: LocalBlobStore) -> None:
    data = bytes(range(256)) * 10_000
    assert store.put(io.BytesIO(data), sha(data), limit_bytes=len(data)) == len(data)
    with store.open(sha(data)) as file:
        assert file.read() == data
    assert store.size(sha(data)) == len(data)
    assert files(store) == [sha(data)]


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (io.BytesIO(b"other"), BlobDigestError),
        (io.BytesIO(b"y" * 4_000_000), BlobTooLargeError),
        (Broken(OSError(errno.ENOSPC, "No space left on device")), StorageFullError),
        (Broken(ConnectionResetError("client went away")), ConnectionResetError),
        (Broken(KeyboardInterrupt()), KeyboardInterrupt),
    ],
    ids=["digest", "size", "disk", "client", "stop"],
)
def test_it_leaves_nothing_behind(
    store: LocalBlobStore, stream: io.BytesIO, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        store.put(stream, sha(b"right"), limit_bytes=3_500_000)
    assert files(store) == []
    assert not store.has(sha(b"right"))


def test_it_accepts_the_same_blob_from_many_at_once(store: LocalBlobStore) -> None:
    data = b"z" * 2_000_000
    threads = [
        threading.Thread(
            target=store.put, args=(io.BytesIO(data), sha(data)), kwargs={"limit_bytes": len(data)}
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files(store) == [sha(data)]


@pytest.mark.parametrize("name", ["", "../x", "A" * 64, "a" * 63, "a" * 65, "g" * 64])
def test_it_takes_only_digests_as_names(store: LocalBlobStore, name: str) -> None:
    for action in (store.path, store.has, store.open, store.size):
        with pytest.raises(ContractError):
            action(name)  # type: ignore[operator]


def test_it_says_that_a_blob_is_absent(store: LocalBlobStore) -> None:
    for action in (store.open, store.size):
        with pytest.raises(NotFoundError):
            action("0" * 64)


@pytest.mark.parametrize("damage", [b"", b"righ", b"wrong", b"right, and more"])
def test_it_replaces_a_file_that_is_damaged(store: LocalBlobStore, damage: bytes) -> None:
    digest = sha(b"right")
    store.put(io.BytesIO(b"right"), digest, limit_bytes=10)
    store.path(digest).write_bytes(damage)
    with pytest.raises(BlobDigestError):
        store.put(io.BytesIO(b"lies"), digest, limit_bytes=10)
    assert store.path(digest).read_bytes() == damage
    assert store.put(io.BytesIO(b"right"), digest, limit_bytes=10) == 5
    assert store.path(digest).read_bytes() == b"right"
    assert files(store) == [digest]
