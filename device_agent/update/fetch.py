"""Fetch one object: resume where the last try stopped, hash what was written, believe nothing.

The address is the content, so bytes of two versions cannot be joined: a resumed download asks for
the rest of exactly these bytes (`If-Range`), and the digest decides in the end.
"""

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from device_agent.api import DeviceApi
from device_agent.clock import Clock
from device_agent.config import AgentConfig
from device_agent.errors import AgentError, ContentError, ProtocolError, WrongContentError
from device_agent.http import RetryPolicy, StreamResponse, with_retries
from device_agent.storage.objects import ObjectStore, PartialObject

MAX_CONTENT_FAILURES: Final = 3
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Fetcher:
    """Fetches objects into the store."""

    def __init__(
        self, api: DeviceApi, store: ObjectStore, config: AgentConfig, clock: Clock
    ) -> None:
        self._api = api
        self._store = store
        self._config = config
        self._clock = clock

    def fetch(
        self, sha256: str, size_bytes: int, update_id: int, require_wanted: Callable[[], None]
    ) -> None:
        """Fetch an object unless it is here.

        Args:
            sha256: Its name.
            size_bytes: Signed length.
            update_id: For whose sake; the server stops sending when that update is withdrawn.
            require_wanted: Called before each try and with every chunk; raises to stop.

        Raises:
            CancelledError: The update was withdrawn.
            WrongContentError: The server keeps sending other bytes.
            DiskFullError: No space; what was written stays for the caller to drop.
            AgentError: The last error when time is up.
        """
        if self._store.has(sha256, size_bytes):
            return
        wrong: list[AgentError] = []

        def note(error: AgentError) -> None:
            if isinstance(error, ContentError):
                wrong.append(error)
            if len(wrong) >= MAX_CONTENT_FAILURES:
                raise WrongContentError(f"{error}; asked {len(wrong)} times") from error

        def one_try() -> None:
            require_wanted()
            self._one_try(sha256, size_bytes, update_id, require_wanted)

        with_retries(one_try, self._policy(), self._clock, before_wait=note)

    def _policy(self) -> RetryPolicy:
        config = self._config
        return RetryPolicy(config.retry_first_s, config.retry_most_s, config.update_deadline_s)

    def _one_try(
        self, sha256: str, size_bytes: int, update_id: int, require_wanted: Callable[[], None]
    ) -> None:
        partial = self._store.begin(sha256, size_bytes, resume=True)
        try:
            if partial.missing:
                with self._api.blob(
                    sha256,
                    update_id,
                    offset=partial.length,
                    limit_bytes=size_bytes,
                    deadline_s=self._config.download_deadline_s,
                ) as answer:
                    self._receive(answer, partial, size_bytes, require_wanted)
            partial.finish()
        finally:
            partial.close()

    @staticmethod
    def _receive(
        answer: StreamResponse,
        partial: PartialObject,
        size_bytes: int,
        require_wanted: Callable[[], None],
    ) -> None:
        _require_start(answer, partial, size_bytes)
        for chunk in answer.chunks:
            partial.append(chunk)
            require_wanted()


def _require_start(answer: StreamResponse, partial: PartialObject, size_bytes: int) -> None:
    """Check that the body begins where the partial object ends."""
    if answer.status == HTTPStatus.OK:
        if partial.length:
            partial.restart()
        _require_announced(answer, size_bytes)
        return
    if answer.status == HTTPStatus.PARTIAL_CONTENT:
        match = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        wanted = (partial.length, size_bytes - 1, size_bytes)
        if match is None or tuple(map(int, match.groups())) != wanted:
            partial.discard()
            raise ContentError("the server sent another range than was asked for")
        _require_announced(answer, partial.missing)
        return
    if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        partial.discard()
        raise ContentError("the server has fewer bytes than were written here")
    raise ProtocolError(f"unexpected status {answer.status}")


def _require_announced(answer: StreamResponse, expected: int) -> None:
    announced = answer.headers.get("Content-Length", "")
    if announced and (not announced.isdigit() or int(announced) != expected):
        raise ContentError(f"{announced} bytes are announced, {expected} were signed for")
