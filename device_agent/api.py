"""The device protocol, spoken by the device: one method per address of `/d/v1/`.

Enrolment and token requests are signed with the device key; the token is fetched when needed,
shared by all threads, and fetched anew when it is about to end or was refused. A server that does
not believe the clock of this device is asked for a nonce, which is signed instead. While the key is
being replaced, whichever of the two the server knows is used.
"""

import logging
import re
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.errors import ContractError
from compiler.contract.fingerprint import Fingerprint
from compiler.contract.protocol import (
    CODE_CLOCK,
    MAX_DOCUMENT_BYTES,
    NEW_KEY_TAG,
    PATH_ENROL,
    PATH_POLL,
    PATH_ROTATE,
    PATH_TELEMETRY,
    PATH_TIME,
    PATH_TOKEN,
    PollAnswer,
    UpdateReport,
    integer,
    parse_poll_answer,
    text,
)
from compiler.contract.rules_order import PATH_RULES
from device_agent.clock import Clock
from device_agent.errors import (
    CancelledError,
    PostponedError,
    ProtocolError,
    RefusedError,
    UnauthorizedError,
)
from device_agent.http import (
    HttpClient,
    Response,
    StreamResponse,
    problem_code,
    problem_text,
    require_success,
)
from device_agent.identity import DEVICE_ID_DIGITS, DeviceKey, DeviceKeys

RUNNING_HEADER: Final = "Sparsefleet-Running"
BOOT_HEADER: Final = "Sparsefleet-Boot"
MAX_ROOT_BYTES: Final = 512_000
TOKEN_EARLY_RATIO: Final = 0.8
_JSON: Final = {"Content-Type": "application/json"}
_DEVICE_ID: Final = re.compile(rf"[0-9a-f]{{{DEVICE_ID_DIGITS}}}", re.ASCII)
# The key that a request is signed with, and the one that shall replace it.
_Signers = tuple[DeviceKey, DeviceKey | None]
log = logging.getLogger("device_agent.api")


@dataclass(frozen=True, slots=True)
class EnrolmentRequest:
    """What a device says about itself."""

    claim: str
    serial: str
    name: str
    model: str
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class EnrolmentAnswer:
    """What it is told.

    Attributes:
        device_id: Derived from the first key of this device; stays when the key is replaced.
        state: `pending`, `accepted` ...
        image_root, director_root: Signed TUF root documents: the roots of trust from now on.
        tuf_path: Path of the update metadata on the same server.
        poll_after_s: Seconds.
    """

    device_id: str
    state: str
    image_root: bytes
    director_root: bytes
    tuf_path: str
    poll_after_s: float


class DeviceApi:
    """The server as one device sees it."""

    def __init__(self, http: HttpClient, keys: DeviceKeys, clock: Clock) -> None:
        self._http = http
        self._keys = keys
        self._clock = clock
        self.device_id = keys.current.device_id
        self.clock_skew_s = 0.0
        self._lock = threading.Lock()
        self._token = ""
        self._token_until = 0.0
        self._etag = ""
        self._answer: PollAnswer | None = None

    @property
    def key(self) -> DeviceKey:
        """Return the key of this device."""
        return self._keys.current

    def enrol(self, wanted: EnrolmentRequest) -> EnrolmentAnswer:
        """Register this device; the same key again gives the same device.

        Raises:
            RefusedError: The claim is wrong, or the serial belongs to another key.
            ProtocolError: The answer is malformed.
        """
        document: dict[str, Json] = {
            "claim": wanted.claim,
            "serial": wanted.serial,
            "name": wanted.name,
            "public_key": self.key.public_base64,
            "seal_key": self._keys.seal.public_base64,
            "model": wanted.model,
            "fingerprint": wanted.fingerprint.to_json(),
        }
        response = require_success(
            self._signed(PATH_ENROL, document, limit_bytes=4 * MAX_ROOT_BYTES), PATH_ENROL
        )
        try:
            answer = _enrolment(parse_object(response.body))
        except ContractError as error:
            raise ProtocolError(f"{PATH_ENROL}: {error}") from error
        self.device_id = answer.device_id
        return answer

    def rotate_key(self) -> str:
        """Replace the key of this device by a new one; return the thumbprint that holds now.

        Raises:
            RefusedError: The server does not want the new key; the old one stays.
            AgentError: Nobody knows whether it has it; the next token exchange finds out.
        """
        following = self._keys.begin()
        body = canonical_bytes({"device_id": self.device_id, "public_key": following.public_base64})
        with self._lock:
            response = self._fresh(PATH_ROTATE, body, MAX_DOCUMENT_BYTES, (self.key, following))
            self._token = ""  # tokens of the old key end
            try:
                require_success(response, PATH_ROTATE)
            except RefusedError as refusal:
                self._after_refusal(refusal)
            else:
                self._keys.promote()
        return self.key.thumbprint

    def _after_refusal(self, refusal: RefusedError) -> None:
        """Find out which key the server knows: an earlier try may have come through.

        Raises:
            RefusedError: It does not know the new one; that is dropped if it knows the old one.
        """
        try:
            self._exchange()
        except UnauthorizedError:
            raise refusal from None  # it knows neither: both are kept
        except RefusedError:
            pass  # it knows the old one and does not want it to get on
        if self._keys.next is not None:
            self._keys.drop_next()
            raise refusal

    def poll(self, running_sha256: str, boot: str = "") -> PollAnswer:
        """Ask what to do.

        Args:
            running_sha256: Manifest of the running bundle, empty for none.
            boot: `<boot id>.<number of the poll>`, by which clones are told apart.

        Raises:
            ProtocolError: The answer is malformed.
        """
        headers = {RUNNING_HEADER: running_sha256, **({BOOT_HEADER: boot} if boot else {})}
        if self._answer is not None and self._etag:
            headers["If-None-Match"] = self._etag
        response = self._authorized("GET", PATH_POLL, headers)
        if response.status == HTTPStatus.NOT_MODIFIED and self._answer is not None:
            return self._answer
        require_success(response, PATH_POLL)
        try:
            self._answer = parse_poll_answer(response.body)
        except ContractError as error:
            raise ProtocolError(f"{PATH_POLL}: {error}") from error
        self._etag = response.headers.get("ETag", "")
        return self._answer

    def assignment(self, update_id: int, nonce: str, network: str) -> bytes:
        """Return the director's assignment for an update, unverified.

        Args:
            update_id: The update.
            nonce: Made for this question.
            network: What this device knows of its network, a `Network`.

        Raises:
            CancelledError: The update may no longer proceed.
            PostponedError: It has to wait, on this network or for now.
        """
        path = f"/d/v1/updates/{update_id}/assignment?nonce={nonce}&network={network}"
        response = self._authorized("GET", path, {})
        if response.status == HTTPStatus.TOO_EARLY:
            raise PostponedError(problem_text(response) or "the server wants the update later")
        return require_success(response, path.partition("?")[0], gone=CancelledError).body

    def rules(self, nonce: str) -> bytes | None:
        """Return the director's order about degrade rules, unverified; None if there is none."""
        response = self._authorized("GET", f"{PATH_RULES}?nonce={nonce}", {})
        if response.status == HTTPStatus.NOT_FOUND:
            return None
        return require_success(response, PATH_RULES).body

    def report(self, report: UpdateReport) -> None:
        """Tell the server where an update stands.

        Raises:
            RefusedError: The server does not want this report; sending it again is pointless.
        """
        path = f"/d/v1/updates/{report.update_id}/report"
        require_success(self._authorized("POST", path, _JSON, report.to_bytes()), path)

    def telemetry(self, batch: bytes) -> None:
        """Upload one batch; sending it twice is harmless.

        Raises:
            RefusedError: The server does not want this batch.
        """
        require_success(self._authorized("POST", PATH_TELEMETRY, _JSON, batch), PATH_TELEMETRY)

    @contextmanager
    def blob(
        self, sha256: str, update_id: int, *, offset: int, limit_bytes: int, deadline_s: float
    ) -> Generator[StreamResponse, None, None]:
        """Open the bytes of a section or delta from `offset` on.

        Raises:
            CancelledError: The update may no longer proceed.
            RefusedError: There is no such blob for this update.
        """
        path = f"/d/v1/blobs/{sha256}?update={update_id}"
        headers = {"Authorization": f"Bearer {self._session_token()}"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            headers["If-Range"] = f'"{sha256}"'
        try:
            with self._http.stream(
                path,
                headers=headers,
                limit_bytes=limit_bytes,
                deadline_s=deadline_s,
                gone=CancelledError,
            ) as answer:
                yield answer
        except UnauthorizedError:
            self._forget_token()
            raise

    def _authorized(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> Response:
        response = self._with_token(method, path, headers, body)
        if response.status == HTTPStatus.UNAUTHORIZED:
            self._forget_token()
            response = self._with_token(method, path, headers, body)
        return response

    def _with_token(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Response:
        token = {"Authorization": f"Bearer {self._session_token()}"}
        request = self._http.build(method, path, headers={**headers, **token}, body=body)
        return self._http.send(request, limit_bytes=MAX_DOCUMENT_BYTES)

    def _session_token(self) -> str:
        with self._lock:
            if not self._token or self._clock.monotonic() >= self._token_until:
                self._token, life_s = self._exchange()
                self._token_until = self._clock.monotonic() + life_s * TOKEN_EARLY_RATIO
            return self._token

    def _forget_token(self) -> None:
        with self._lock:
            self._token = ""

    def _exchange(self) -> tuple[str, float]:
        """Return a session token and its life, seconds; ends an interrupted change of the key."""
        try:
            return self._exchange_with(self.key)
        except UnauthorizedError:
            following = self._keys.next
            if following is None:
                raise
        answer = self._exchange_with(following)
        self._keys.promote()
        return answer

    def _exchange_with(self, key: DeviceKey) -> tuple[str, float]:
        body = canonical_bytes(
            {"device_id": self.device_id, "seal_key": self._keys.seal.public_base64}
        )
        response = self._fresh(PATH_TOKEN, body, MAX_DOCUMENT_BYTES, (key, None))
        require_success(response, PATH_TOKEN)
        try:
            document = parse_object(response.body)
            return text(document, "token"), _seconds(document, "expires_in_s")
        except ContractError as error:
            raise ProtocolError(f"{PATH_TOKEN}: {error}") from error

    def _signed(self, path: str, document: Json, *, limit_bytes: int) -> Response:
        return self._fresh(path, canonical_bytes(document), limit_bytes, (self.key, None))

    def _fresh(self, path: str, body: bytes, limit_bytes: int, keys: _Signers) -> Response:
        """Send a signed request, once more with a nonce of the server if it rejects the time."""
        response = self._sign_and_send(path, body, limit_bytes, keys)
        if response.status != HTTPStatus.UNAUTHORIZED or problem_code(response) != CODE_CLOCK:
            return response
        nonces = [self._time_nonce() for key in keys if key is not None]
        return self._sign_and_send(path, body, limit_bytes, keys, nonces)

    def _sign_and_send(
        self, path: str, body: bytes, limit_bytes: int, keys: _Signers, nonces: Sequence[str] = ()
    ) -> Response:
        request = self._http.build("POST", path, headers=_JSON, body=body)
        first, second = [*nonces, "", ""][:2]
        keys[0].sign(request, body, self._clock, nonce=first)
        if keys[1] is not None:
            keys[1].sign(request, body, self._clock, nonce=second, tag=NEW_KEY_TAG)
        return self._http.send(request, limit_bytes=limit_bytes)

    def _time_nonce(self) -> str:
        """Return a nonce of the server; note how wrong this clock is."""
        request = self._http.build("GET", PATH_TIME, headers={})
        response = require_success(
            self._http.send(request, limit_bytes=MAX_DOCUMENT_BYTES), PATH_TIME
        )
        try:
            document = parse_object(response.body)
            nonce, now = text(document, "nonce"), integer(document, "now")
        except ContractError as error:
            raise ProtocolError(f"{PATH_TIME}: {error}") from error
        self.clock_skew_s = self._clock.now().timestamp() - now
        log.warning("the clock of this device is %+.0f s from the server's", self.clock_skew_s)
        return nonce


def _enrolment(document: Mapping[str, Json]) -> EnrolmentAnswer:
    device_id = text(document, "device_id")
    if _DEVICE_ID.fullmatch(device_id) is None:
        raise ContractError(f"device_id must be {DEVICE_ID_DIGITS} hexadecimal digits")
    path = urlsplit(text(document, "tuf_url")).path
    return EnrolmentAnswer(
        device_id=device_id,
        state=text(document, "state"),
        image_root=_root(document, "image_root"),
        director_root=_root(document, "director_root"),
        tuf_path=path if path.endswith("/") else f"{path}/",
        poll_after_s=_seconds(document, "poll_after_s"),
    )


def _root(document: Mapping[str, Json], name: str) -> bytes:
    """Return a TUF root as bytes; TUF signs a canonical form, so text and object are equal."""
    value = document.get(name)
    if isinstance(value, str):
        return value.encode("utf-8")
    if isinstance(value, Mapping):
        return canonical_bytes(value)
    raise ContractError(f"{name} must be a TUF root document")


def _seconds(document: Mapping[str, Json], name: str) -> float:
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise ContractError(f"{name} must be a number of seconds")
    return float(value)
