"""Blobs for devices: resumable, and cut off in the middle when the update is withdrawn."""

import os
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import BinaryIO, Final

from builds.storage import BlobStore
from fleet.edge.wire import Environ, StartResponse, byte_range, status_line
from fleet.errors import UpdateCancelledError

CHUNK_BYTES: Final = 64 * 1024
_OK: Final = status_line(HTTPStatus.OK)
_PART: Final = status_line(HTTPStatus.PARTIAL_CONTENT)
_OUTSIDE: Final = status_line(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)


class BlobBody:
    """Iterates over a piece of a file; raises as soon as the update may not proceed.

    The server has announced a `Content-Length`, so an iterator that raises breaks the connection
    and the device knows that the body is not whole.
    """

    def __init__(self, file: BinaryIO, start: int, end: int, is_live: Callable[[], bool]) -> None:
        self._file = file
        self._left = end - start
        self._is_live = is_live
        file.seek(start)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._left <= 0:
            self.close()
            raise StopIteration
        if not self._is_live():
            self.close()
            raise UpdateCancelledError("the update was withdrawn during the download")
        chunk = self._file.read(min(CHUNK_BYTES, self._left))
        if not chunk:
            self.close()
            raise OSError("the blob ended early")
        self._left -= len(chunk)
        return chunk

    def close(self) -> None:
        """Close the file; the server calls it when it is done, however that came."""
        self._file.close()


def blob_answer(
    environ: Environ,
    start_response: StartResponse,
    store: BlobStore,
    sha256: str,
    is_live: Callable[[], bool],
) -> BlobBody | list[bytes]:
    """Answer with a blob, or the part of it that was asked for.

    Raises:
        NotFoundError: There is no such blob.
    """
    file = store.open(sha256)
    size = os.fstat(file.fileno()).st_size
    etag = f'"{sha256}"'
    asked = environ.get("HTTP_RANGE", "")
    if environ.get("HTTP_IF_RANGE", etag) != etag:
        asked = ""
    part = byte_range(asked, size)
    headers = [
        ("Content-Type", "application/octet-stream"),
        ("ETag", etag),
        ("Accept-Ranges", "bytes"),
        ("Cache-Control", "private, max-age=31536000, immutable"),
    ]
    if part is None:
        file.close()
        outside = [("Content-Range", f"bytes */{size}"), ("Content-Length", "0")]
        start_response(_OUTSIDE, [*headers, *outside])
        return [b""]
    if part.is_part:
        headers.append(("Content-Range", f"bytes {part.start}-{part.end - 1}/{size}"))
    headers.append(("Content-Length", str(part.end - part.start)))
    start_response(_PART if part.is_part else _OK, headers)
    if environ["REQUEST_METHOD"] == "HEAD":
        file.close()
        return [b""]
    return BlobBody(file, part.start, part.end, is_live)
