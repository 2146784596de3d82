"""The HTTP client: small requests with a deadline, streams with a least rate, our errors only.

Answers are asked for without content coding and refused with one, so that a length on the wire is
a length on the disk. Sizes are capped while reading and not after it.
"""

import logging
import random
import ssl
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, TypeVar

import httpx

from compiler.contract.canonical import parse_object
from compiler.contract.errors import ContractError
from device_agent.clock import Clock
from device_agent.config import AgentConfig
from device_agent.errors import (
    AgentError,
    ConfigurationError,
    DeadlineError,
    NetworkError,
    OversizedError,
    ProtocolError,
    RefusedError,
    ServerError,
    SlowTransferError,
    TruncatedError,
    UnauthorizedError,
)
from device_agent.storage.floors import EARLIEST

USER_AGENT: Final = "sparsefleet-agent/1"
MAX_PROBLEM_BYTES: Final = 16 * 1024
MAX_TRIES: Final = 1_000
_BUSY: Final = HTTPStatus.TOO_MANY_REQUESTS
_BAD_RANGE: Final = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
NO_CHECK_TIME: Final = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which `ssl` does not name
CERTIFICATE_TIMES: Final = ("certificate is not yet valid", "certificate has expired")
CLOCK_HINT: Final = "the clock of this device is wrong, or the server's certificate is old"
T = TypeVar("T")
log = logging.getLogger("device_agent.http")


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class StreamResponse:
    """An answer whose body is still on its way."""

    status: int
    headers: Mapping[str, str]
    chunks: Iterator[bytes]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter, until a deadline.

    Attributes:
        first_s: Upper end of the first wait, seconds; doubled each time.
        most_s: Upper end of any wait, seconds.
        deadline_s: Time for all tries and waits, seconds.
    """

    first_s: float
    most_s: float
    deadline_s: float

    def delay_s(self, attempt: int, random_unit: float) -> float:
        """Return the wait after try number `attempt` (from 0)."""
        return min(self.most_s, self.first_s * 2.0 ** min(attempt, 30)) * random_unit


class HttpClient:
    """Connections to one server."""

    def __init__(
        self, config: AgentConfig, clock: Clock, transport: httpx.BaseTransport | None = None
    ) -> None:
        """Connect lazily.

        Raises:
            ConfigurationError: `ca_file` cannot be used.
        """
        self._config = config
        self._clock = clock
        self._http = httpx.Client(
            base_url=config.server_url,
            transport=transport,
            verify=_trusted_certificates(config, clock),
            timeout=httpx.Timeout(config.read_timeout_s, connect=config.connect_timeout_s),
            headers={"User-Agent": USER_AGENT, "Accept-Encoding": "identity"},
            follow_redirects=False,
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def build(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None = None
    ) -> httpx.Request:
        """Return a request that can be signed before it is sent."""
        return self._http.build_request(method, path, headers=dict(headers), content=body)

    def send(self, request: httpx.Request, *, limit_bytes: int) -> Response:
        """Send a small request and return its whole answer, whatever its status below 500.

        Raises:
            NetworkError: The server cannot be reached or went away.
            DeadlineError: The whole took longer than `request_deadline_s`.
            OversizedError: The answer is longer than `limit_bytes`.
            ServerError: HTTP 5xx or 429.
        """
        deadline = self._clock.monotonic() + self._config.request_deadline_s
        with self._opened(request) as response:
            limit = limit_bytes if response.is_success else MAX_PROBLEM_BYTES
            body = bytearray()
            for chunk in _raw(response):
                body += chunk
                if len(body) > limit:
                    raise OversizedError(f"{request.url.path}: answer longer than {limit} bytes")
                if self._clock.monotonic() > deadline:
                    raise DeadlineError(f"{request.url.path}: answer took too long")
            _require_length(response, len(body))
        answer = Response(response.status_code, response.headers, bytes(body))
        _require_healthy(answer, request.url.path)
        return answer

    @contextmanager
    def stream(
        self,
        path: str,
        *,
        headers: Mapping[str, str],
        limit_bytes: int,
        deadline_s: float,
        gone: type[AgentError] | None = None,
    ) -> Generator[StreamResponse, None, None]:
        """Open a large answer.

        Args:
            path: Path and query.
            headers: Sent along.
            limit_bytes: Most bytes of the body.
            deadline_s: Time for the whole body, seconds.
            gone: Error for 410.

        Raises:
            NetworkError: As `send`; also while reading `chunks`.
            SlowTransferError: Below `min_rate_bytes_s` for `min_rate_window_s`, while reading.
            TruncatedError: The body ended before its announced length, while reading.
            RefusedError: HTTP 4xx other than 416.
        """
        request = self.build("GET", path, headers=headers)
        with self._opened(request) as response:
            if response.status_code >= HTTPStatus.BAD_REQUEST:
                problem = _read_problem(response)
                _require_healthy(problem, request.url.path)
                require_success(problem, request.url.path, also=(_BAD_RANGE,), gone=gone)
            yield StreamResponse(
                response.status_code,
                response.headers,
                self._paced(response, request.url.path, limit_bytes, deadline_s),
            )

    def _paced(
        self, response: httpx.Response, path: str, limit_bytes: int, deadline_s: float
    ) -> Iterator[bytes]:
        config = self._config
        start = window_start = self._clock.monotonic()
        total = window = 0
        for chunk in _raw(response):
            total += len(chunk)
            window += len(chunk)
            now = self._clock.monotonic()
            if total > limit_bytes:
                raise OversizedError(f"{path}: more than {limit_bytes} bytes")
            if now - start > deadline_s:
                raise DeadlineError(f"{path}: not finished after {deadline_s:.0f} s")
            if now - window_start >= config.min_rate_window_s:
                if window < config.min_rate_bytes_s * config.min_rate_window_s:
                    raise SlowTransferError(f"{path}: {window} bytes in {now - window_start:.0f} s")
                window_start, window = now, 0
            yield chunk
        _require_length(response, total)

    @contextmanager
    def _opened(self, request: httpx.Request) -> Generator[httpx.Response, None, None]:
        try:
            response = self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            reason = _reason(error)
            hint = CLOCK_HINT if any(text in reason for text in CERTIFICATE_TIMES) else ""
            raise NetworkError(f"{request.url.path}: {reason}", hint=hint) from error
        try:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise ProtocolError(f"{request.url.path}: content coding was not asked for")
            yield response
        except httpx.HTTPError as error:
            raise TruncatedError(f"{request.url.path}: {_reason(error)}") from error
        finally:
            response.close()


def require_success(
    response: Response, path: str, also: tuple[int, ...] = (), gone: type[AgentError] | None = None
) -> Response:
    """Return `response` if its status is 2xx, 304 or one of `also`.

    Args:
        response: The answer.
        path: Named in the error.
        also: Further statuses to let through.
        gone: Error for 410.

    Raises:
        UnauthorizedError: 401.
        RefusedError: Any other status; message, code and hint are those of the problem document.
    """
    status = response.status
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES or status in also:
        return response
    detail, code, hint = _problem(response)
    if status == HTTPStatus.GONE and gone is not None:
        raise gone(f"{path}: {detail or 'gone'}")
    kind = UnauthorizedError if status == HTTPStatus.UNAUTHORIZED else RefusedError
    raise kind(f"{path}: {status} {detail}".rstrip(), status=status, server_code=code, hint=hint)


def problem_code(response: Response) -> str:
    """Return the code of a problem document, empty where it is none."""
    return _problem(response)[1]


def with_retries(
    call: Callable[[], T],
    policy: RetryPolicy,
    clock: Clock,
    *,
    before_wait: Callable[[AgentError], None] | None = None,
) -> T:
    """Return what `call` returns, trying again while its error class says that this may help.

    Args:
        call: The operation; must be safe to run again.
        policy: Waits and deadline.
        clock: Waits.
        before_wait: Called with each error; may raise to stop.

    Raises:
        AgentError: The last error, when it is not retryable or the deadline would pass.
    """
    end = clock.monotonic() + policy.deadline_s
    for attempt in range(MAX_TRIES):
        try:
            return call()
        except AgentError as error:
            wait = policy.delay_s(attempt, random.random())  # noqa: S311 -- jitter
            if not error.retryable or clock.monotonic() + wait > end:
                raise
            if before_wait is not None:
                before_wait(error)
        clock.sleep(wait)
    raise DeadlineError(f"given up after {MAX_TRIES} tries")


def _raw(response: httpx.Response) -> Iterator[bytes]:
    return response.iter_raw()


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _trusted_certificates(config: AgentConfig, clock: Clock) -> ssl.SSLContext:
    if not config.server_url.startswith("https:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody, and costs nothing
    try:
        context = ssl.create_default_context(cafile=config.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"ca_file cannot be used: {error}") from error
    if clock.now() < EARLIEST:
        # This clock was never set: it says nothing about when a certificate is good.
        log.warning("the clock was never set: times of certificates are not checked")
        context.verify_flags |= ssl.VerifyFlags(NO_CHECK_TIME)
    return context


def _require_length(response: httpx.Response, length: int) -> None:
    announced = response.headers.get("Content-Length", "")
    if announced.isdigit() and int(announced) != length:
        raise TruncatedError(f"{length} of {announced} bytes came")


def _require_healthy(response: Response, path: str) -> None:
    if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR or response.status == _BUSY:
        raise ServerError(f"{path}: HTTP {response.status}")


def _read_problem(response: httpx.Response) -> Response:
    body = bytearray()
    for chunk in _raw(response):
        body += chunk
        if len(body) > MAX_PROBLEM_BYTES:
            break
    return Response(response.status_code, response.headers, bytes(body[:MAX_PROBLEM_BYTES]))


def problem_text(response: Response) -> str:
    """Return what a problem document says, empty where it is none."""
    return _problem(response)[0]


def _problem(response: Response) -> tuple[str, str, str]:
    """Return (detail, code, hint) of a problem document, empty where it is none."""
    try:
        document = parse_object(response.body)
    except ContractError:
        return "", "", ""
    detail = document.get("detail") or document.get("title") or ""
    return str(detail)[:500], str(document.get("code", "")), str(document.get("hint", ""))[:500]
