"""The WSGI application: hot paths here, everything else Django's."""

from collections.abc import Iterable
from datetime import datetime
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs

from django.conf import settings
from django.db import DatabaseError, close_old_connections

from builds.common.clock import Clock, SystemClock
from builds.common.errors import ApplicationError, InvalidInputError, NotFoundError
from builds.storage import blob_store
from compiler.contract.canonical import SHA256_PATTERN
from compiler.contract.protocol import PATH_POLL
from fleet.clones import parse_boot
from fleet.common.tokens import bearer, check, token_key
from fleet.edge.blobs import blob_answer
from fleet.edge.holder import BeatBuffer, Keeper, SnapshotHolder
from fleet.edge.snapshot import Snapshot
from fleet.edge.wire import Environ, StartResponse, WsgiApp, problem, status_line
from fleet.errors import (
    DeviceStateError,
    DeviceUnauthorizedError,
    MethodNotAllowedError,
    StaleSnapshotError,
    UpdateCancelledError,
)
from fleet.selectors.poll import late_delta_offered
from fleet.services.running import Beat

PATH_BLOBS: Final = "/d/v1/blobs/"
READING: Final = ("GET", "HEAD")
_OK: Final = status_line(HTTPStatus.OK)
_UNCHANGED: Final = status_line(HTTPStatus.NOT_MODIFIED)


class Edge:
    """The hot paths in front of another WSGI application."""

    def __init__(
        self,
        behind: WsgiApp,
        *,
        holder: SnapshotHolder,
        beats: BeatBuffer,
        keeper: Keeper | None,
        clock: Clock,
    ) -> None:
        self._behind = behind
        self._holder = holder
        self._beats = beats
        self._keeper = keeper
        self._clock = clock
        self._key = token_key(settings.SECRET_KEY)

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        path = environ.get("PATH_INFO", "")
        is_poll = path == PATH_POLL
        if not is_poll and not path.startswith(PATH_BLOBS):
            return self._behind(environ, start_response)
        if self._keeper is not None:
            self._keeper.ensure()
        try:
            if environ["REQUEST_METHOD"] not in READING:
                raise MethodNotAllowedError(READING)
            if is_poll:
                return self._poll(environ, start_response)
            return self._blob(environ, start_response, path[len(PATH_BLOBS) :])
        except ApplicationError as error:
            return problem(start_response, error)

    def _poll(self, environ: Environ, start_response: StartResponse) -> list[bytes]:
        snapshot = self._holder.current()
        now = self._clock.now()
        device_pk = self._device(environ, snapshot, now)
        self._beats.add(Beat(device_pk, now, _running(environ), _boot(environ)))
        answer = snapshot.answers.get(device_pk, snapshot.idle)
        headers = [("ETag", answer.etag), ("Cache-Control", "private, no-cache")]
        if environ.get("HTTP_IF_NONE_MATCH") == answer.etag:
            start_response(_UNCHANGED, headers)
            return [b""]
        headers.append(("Content-Type", "application/json"))
        headers.append(("Content-Length", str(len(answer.body))))
        start_response(_OK, headers)
        return [answer.body]

    def _blob(
        self, environ: Environ, start_response: StartResponse, sha256: str
    ) -> Iterable[bytes]:
        device_pk = self._device(environ, self._holder.current(), self._clock.now())
        if SHA256_PATTERN.fullmatch(sha256) is None:
            raise NotFoundError("a blob is named by its SHA-256")
        update_id = _update_id(environ)

        def is_live() -> bool:
            return self._holder.current().live.get(update_id) == device_pk

        if not is_live():
            raise UpdateCancelledError(
                f"update {update_id} may not proceed", hint="poll for what to do instead"
            )
        self._require_blob_of(update_id, sha256)
        return blob_answer(environ, start_response, blob_store(), sha256, is_live)

    def _require_blob_of(self, update_id: int, sha256: str) -> None:
        """Check that a blob belongs to an update; asks the database only if it seems not to.

        Raises:
            NotFoundError: It is neither a section of the update's bundle nor its delta.
            StaleSnapshotError: The database cannot be asked.
        """
        download = self._holder.current().downloads.get(update_id)
        if download is not None and download.allows(sha256):
            return
        try:
            close_old_connections()
            is_late = late_delta_offered(update_id=update_id, sha256=sha256)
        except DatabaseError as error:
            raise StaleSnapshotError(f"the database cannot be asked: {error}") from error
        if not is_late:
            raise NotFoundError(f"update {update_id} has no such blob")

    def _device(self, environ: Environ, snapshot: Snapshot, now: datetime) -> int:
        text = bearer(environ.get("HTTP_AUTHORIZATION", ""))
        token = check(self._key, text, now.timestamp())
        if token is None or not snapshot.admits(token.device_pk, token.generation):
            raise DeviceUnauthorizedError(
                "the session token is missing, wrong or expired", hint="POST /d/v1/token"
            )
        if token.device_pk in snapshot.denied:
            raise DeviceStateError("this device is not a member of the fleet")
        return token.device_pk


def wrap(behind: WsgiApp) -> Edge:
    """Return the platform's WSGI application; threads start with the first device request."""
    max_age_s = settings.SPARSEFLEET.snapshot_max_age_s
    clock = SystemClock()
    holder, beats = SnapshotHolder(max_age_s), BeatBuffer()
    keeper = Keeper(holder, beats, max_age_s / 2)
    return Edge(behind, holder=holder, beats=beats, keeper=keeper, clock=clock)


def _running(environ: Environ) -> str | None:
    """Return the manifest that the device says it runs; empty: nothing; None: it did not say."""
    value = environ.get("HTTP_SPARSEFLEET_RUNNING")
    if value is None or value == "" or SHA256_PATTERN.fullmatch(value):
        return value
    raise InvalidInputError("Sparsefleet-Running must be the SHA-256 of a manifest, or empty")


def _boot(environ: Environ) -> tuple[str, int] | None:
    """Return the boot of the agent and the number of this poll in it; None: it did not say."""
    value = environ.get("HTTP_SPARSEFLEET_BOOT")
    if value is None:
        return None
    boot = parse_boot(value)
    if boot is None:
        raise InvalidInputError("Sparsefleet-Boot must be <boot id, hexadecimal>.<number>")
    return boot


def _update_id(environ: Environ) -> int:
    text = parse_qs(environ.get("QUERY_STRING", "")).get("update", [""])[0]
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise InvalidInputError("a blob is fetched for an update: add ?update=<id>")
    return int(text)
