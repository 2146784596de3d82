"""Small pieces of WSGI: types, headers, problem documents, byte ranges. Pure."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from builds.common.errors import ApplicationError
from fleet.errors import MethodNotAllowedError

Environ = Mapping[str, Any]
StartResponse = Callable[..., Any]
WsgiApp = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]

RETRY_AFTER_S: Final = 2
MAX_RANGE_HEADER: Final = 100
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` up to and excluding `end` of a file; `is_part` when not asked for all."""

    start: int
    end: int
    is_part: bool


def status_line(status: HTTPStatus) -> str:
    """Return `200 OK` and the like."""
    return f"{status.value} {status.phrase}"


def problem(start_response: StartResponse, error: ApplicationError) -> list[bytes]:
    """Answer with an RFC 9457 problem document."""
    document = {
        "type": f"urn:sparsefleet:error:{error.code}",
        "title": error.status.phrase,
        "status": error.status.value,
        "detail": str(error),
        "code": error.code,
        "hint": error.hint,
    }
    body = json.dumps(document).encode()
    headers = [
        ("Content-Type", "application/problem+json"),
        ("Content-Length", str(len(body))),
        ("Cache-Control", "no-store"),
    ]
    if error.retryable:
        headers.append(("Retry-After", str(RETRY_AFTER_S)))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers.append(("WWW-Authenticate", "Bearer"))
    if isinstance(error, MethodNotAllowedError):
        headers.append(("Allow", error.allow))
    start_response(status_line(error.status), headers)
    return [body]


def byte_range(header: str, size: int) -> ByteRange | None:
    """Return which bytes a `Range` header asks for, or None when there are none such (416).

    A header that is not one single range of bytes is ignored, as RFC 9110 allows.
    """
    everything = ByteRange(0, size, is_part=False)
    match = _RANGE.fullmatch(header) if len(header) <= MAX_RANGE_HEADER else None
    if match is None or not (match[1] or match[2]):
        return everything
    if not match[1]:
        length = min(int(match[2]), size)
        return ByteRange(size - length, size, is_part=True) if length else None
    start = int(match[1])
    last = int(match[2]) if match[2] else size - 1
    if match[2] and last < start:
        return everything
    return ByteRange(start, min(last + 1, size), is_part=True) if start < size else None
