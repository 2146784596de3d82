"""A release server that speaks the real device protocol over real sockets, and can misbehave.

It checks RFC 9421 signatures, hands out session tokens, offers updates, signs assignments with a
real director, serves real TUF metadata, and serves blobs with Range and If-Range. `fail` makes the
next answers of one kind slow, short, wrong, late or absent.
"""

import base64
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from http_message_signatures import HTTPMessageVerifier, MappingKeyResolver, algorithms
from http_message_signatures.exceptions import HTTPMessageSignaturesException

from compiler.contract.canonical import canonical_bytes, sha256_hex
from compiler.contract.protocol import (
    SIGNATURE_COMPONENTS,
    SIGNATURE_MAX_AGE_S,
    SIGNATURE_TAG,
    TERMINAL_STATES,
    Assignment,
    DeltaOffer,
    Offer,
    OfferKind,
    PollAnswer,
    UpdateReport,
    UpdateState,
    parse_report,
)
from compiler.contract.rules_order import RulesOrder
from compiler.contract.telemetry import TelemetryBatch, parse_batch
from tests.simulators.bundles import ToyBundle, toy_delta
from tests.simulators.tuf_repository import Director, ImageRepository


@dataclass
class Fault:
    """What goes wrong with one answer.

    Attributes:
        status: Answer with this status instead.
        drop: Close the connection without an answer.
        cut: Close the connection after so many bytes of the body.
        change: Replaces the body.
        rate: Bytes per second.
        announce: Value of Content-Length instead of the true one.
        ignore_range: Answer 200 with everything.
        headers: Added or replaced.
        delay_s: Wait before the answer.
    """

    status: int | None = None
    drop: bool = False
    cut: int | None = None
    change: Callable[[bytes], bytes] | None = None
    rate: float | None = None
    announce: int | None = None
    ignore_range: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


@dataclass
class Update:
    """One update of one device, as the server sees it."""

    update_id: int
    device_id: str
    bundle: ToyBundle
    kind: OfferKind
    attempt: int = 1
    delta: DeltaOffer | None = None
    security_floor: int = 0
    retry_failed: bool = False
    confirm_deadline: int = 0
    live: bool = True
    reports: list[UpdateReport] = field(default_factory=list)

    @property
    def states(self) -> list[UpdateState]:
        return [report.state for report in self.reports]

    @property
    def outcome(self) -> UpdateState | None:
        last = self.reports[-1].state if self.reports else None
        return last if last in TERMINAL_STATES else None


@dataclass
class Answer:
    """An answer on its way out."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class ReleaseServer:
    """State and behaviour; `start` opens the socket."""

    def __init__(self) -> None:
        self.image = ImageRepository()
        self.director = Director()
        self.blobs: dict[str, bytes] = {}
        self.keys: dict[str, bytes] = {}
        self.serials: dict[str, str] = {}
        self.updates: dict[int, Update] = {}
        self.polls: list[tuple[str, str]] = []
        self.networks: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self.batches: dict[tuple[str, str, int], TelemetryBatch] = {}
        self.posts: list[tuple[int, int, bytes]] = []
        self.sent_bytes: dict[str, int] = {}
        self.assignment_seq = 0
        self.poll_after_s = 0.05
        self.arm: tuple[int | None, int | None, str] = (None, None, "")
        self.tokens: set[str] = set()
        self.nonces: set[str] = set()
        self.rules: tuple[int, str | None] | None = None
        self.order: Callable[[str, str], bytes] = self._order
        self.assign: Callable[[Update, str], bytes] = self._assign
        self.on_blob: Callable[[str], None] = lambda _sha256: None
        self._faults: dict[str, list[Fault]] = {}
        self._lock = threading.RLock()
        self._http: ThreadingHTTPServer | None = None

    # --- what tests do ------------------------------------------------------------------------

    def start(self) -> "ReleaseServer":
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def stop(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def transport(self) -> httpx.MockTransport:
        """Return a transport that reaches this server without a socket."""
        return httpx.MockTransport(self._handle)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        headers = {name.title(): value for name, value in request.headers.items()}
        seen = _Request(request.method, str(request.url), headers, request.content)
        kind = kind_of(seen.path)
        fault = self.take_fault(kind)
        if fault.drop:
            raise httpx.ConnectError("simulated")
        if fault.status is not None:
            answer = _problem(fault.status, "simulated")
        else:
            answer = self.answer(kind, seen)
        body = fault.change(answer.body) if fault.change else answer.body
        part = body if fault.cut is None else body[: fault.cut]
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + len(part)
        sent = {**answer.headers, **fault.headers, "Content-Length": str(len(body))}
        return httpx.Response(answer.status, headers=sent, stream=httpx.ByteStream(part))

    @property
    def url(self) -> str:
        if self._http is None:
            return "http://release.test"
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def fail(self, kind: str, *faults: Fault) -> None:
        """Let the next answers of a kind (`poll`, `blob`, `tuf`, ...) fail, one fault each."""
        with self._lock:
            self._faults.setdefault(kind, []).extend(faults)

    def faults_left(self, kind: str) -> int:
        """Return how many answers of a kind are still to fail."""
        with self._lock:
            return len(self._faults.get(kind, []))

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def publish(self, bundle: ToyBundle) -> ToyBundle:
        self.image.add(bundle.path, bundle.manifest_bytes)
        self.blobs.update(bundle.travels)
        return bundle

    def publish_delta(self, old: ToyBundle, new: ToyBundle) -> DeltaOffer:
        data = toy_delta(old, new)
        sha256 = sha256_hex(data)
        self.blobs[sha256] = data
        return DeltaOffer(old.sha256, sha256, len(data))

    def offer(
        self,
        bundle: ToyBundle,
        device_id: str = "",
        kind: OfferKind = OfferKind.INSTALL,
        delta: DeltaOffer | None = None,
    ) -> Update:
        """Offer a bundle; open updates of the device are withdrawn."""
        with self._lock:
            device_id = device_id or next(iter(self.keys))
            for other in self.updates.values():
                if other.device_id == device_id:
                    other.live = False
            update = Update(len(self.updates) + 1, device_id, bundle, kind, delta=delta)
            self.updates[update.update_id] = update
            return update

    def running(self) -> str:
        """Return what the last poll said is running."""
        return self.polls[-1][1] if self.polls else ""

    # --- answers ------------------------------------------------------------------------------

    def take_fault(self, kind: str) -> Fault:
        with self._lock:
            waiting = self._faults.get(kind)
            return waiting.pop(0) if waiting else Fault()

    def answer(self, kind: str, request: "_Request") -> Answer:
        with self._lock:
            self.requests.append((kind, request.path))
        if kind in _SIGNED and not self._is_signed(request):
            return _problem(401, "fleet.signature")
        if kind in _TOKEN and request.token not in self.tokens:
            return _problem(401, "fleet.token")
        handler: Callable[[_Request], Answer] = getattr(self, f"_{kind}")
        return handler(request)

    def _enrol(self, request: "_Request") -> Answer:
        document = json.loads(request.body)
        key = base64.b64decode(document["public_key"])
        thumbprint = sha256_hex(key)
        if not document["claim"].startswith("sfc_"):
            return _problem(403, "fleet.claim")
        with self._lock:
            if self.serials.setdefault(document["serial"], thumbprint) != thumbprint:
                return _problem(409, "fleet.serial")
            device_id = thumbprint[:32]
            self.keys[device_id] = key
        return _json(
            {
                "device_id": device_id,
                "state": "accepted",
                "image_root": json.loads(self.image.trust_anchor),
                "director_root": json.loads(self.director.trust_anchor),
                "tuf_url": f"{self.url}/tuf/",
                "poll_after_s": self.poll_after_s,
            }
        )

    def _token(self, request: "_Request") -> Answer:
        device_id = json.loads(request.body)["device_id"]
        token = f"{device_id}.{len(self.tokens)}"
        self.tokens.add(token)
        return _json({"token": token, "expires_in_s": 3600})

    def _poll(self, request: "_Request") -> Answer:
        device_id = request.token.partition(".")[0]
        self.polls.append((device_id, request.headers.get("Sparsefleet-Running", "")))
        offer = None
        for update in self.updates.values():
            if update.device_id == device_id and update.live and update.outcome is None:
                offer = Offer(
                    update.update_id,
                    update.attempt,
                    update.kind,
                    update.bundle.manifest.version,
                    update.bundle.sha256,
                )
        body = PollAnswer(self.poll_after_s, offer, *self.arm).to_bytes()
        etag = f'"{sha256_hex(body)[:16]}"'
        if request.headers.get("If-None-Match") == etag:
            return Answer(304, headers={"ETag": etag})
        return Answer(200, body, {"ETag": etag})

    def _assignment(self, request: "_Request") -> Answer:
        update = self.updates[int(request.path.split("/")[4])]
        if not update.live:
            return _problem(410, "fleet.update_cancelled")
        self.networks.append(request.query["network"])
        return Answer(200, self.assign(update, request.query["nonce"]))

    def _assign(self, update: Update, nonce: str, /, **changes: Any) -> bytes:
        with self._lock:
            self.assignment_seq += 1
        values: dict[str, Any] = {
            "device_id": update.device_id,
            "key_thumbprint": sha256_hex(self.keys[update.device_id]),
            "assignment_seq": self.assignment_seq,
            "nonce": nonce,
            "kind": update.kind,
            "security_floor": update.security_floor,
            "delta": update.delta,
            "retry_failed": update.retry_failed,
            "confirm_deadline": update.confirm_deadline,
        }
        assignment = Assignment(**{**values, **changes})
        return self.director.assign(assignment, update.bundle.path, update.bundle.manifest_bytes)

    def _rules(self, request: "_Request") -> Answer:
        if self.rules is None:
            return _problem(404, "app.not_found")
        return Answer(200, self.order(request.token.partition(".")[0], request.query["nonce"]))

    def _order(self, device_id: str, nonce: str, /, **changes: Any) -> bytes:
        assert self.rules is not None
        values: dict[str, Any] = {
            "device_id": device_id,
            "key_thumbprint": sha256_hex(self.keys[device_id]),
            "nonce": nonce,
            "revision": self.rules[0],
            "text": self.rules[1],
        }
        return self.director.order(RulesOrder(**{**values, **changes}))

    def _report(self, request: "_Request") -> Answer:
        report = parse_report(request.body)
        update = self.updates[report.update_id]
        with self._lock:
            self.posts.append((report.update_id, report.seq, request.body))
            if not any(known.seq == report.seq for known in update.reports):
                update.reports.append(report)
        return Answer(204)

    def _telemetry(self, request: "_Request") -> Answer:
        batch = parse_batch(request.body)
        self.batches[request.token.partition(".")[0], batch.boot_id, batch.seq] = batch
        return Answer(204)

    def _tuf(self, request: "_Request") -> Answer:
        repository, _, name = request.path.removeprefix("/tuf/").partition("/")
        files = {"image": self.image.files, "director": self.director.files}.get(repository, {})
        return Answer(200, files[name]) if name in files else _problem(404, "app.not_found")

    def _blob(self, request: "_Request") -> Answer:
        sha256 = request.path.rpartition("/")[2]
        update = self.updates.get(int(request.query.get("update", "0")))
        self.on_blob(sha256)
        if update is None or not update.live:
            return _problem(410, "fleet.update_cancelled")
        data = self.blobs.get(sha256)
        if data is None:
            return _problem(404, "app.not_found")
        headers = {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        if match is None or request.headers.get("If-Range", f'"{sha256}"') != f'"{sha256}"':
            return Answer(200, data, headers)
        start = int(match[1])
        if start >= len(data):
            return Answer(416, b"", headers)
        headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return Answer(206, data[start:], headers)

    def _unknown(self, _request: "_Request") -> Answer:
        return _problem(404, "app.not_found")

    def _is_signed(self, request: "_Request") -> bool:
        document = json.loads(request.body)
        encoded = document.get("public_key")
        key = base64.b64decode(encoded) if encoded else self.keys.get(document["device_id"], b"")
        if len(key) != 32:
            return False
        resolver = MappingKeyResolver(
            public_keys={sha256_hex(key): Ed25519PublicKey.from_public_bytes(key)}, private_keys={}
        )
        verifier = HTTPMessageVerifier(
            signature_algorithm=algorithms.ED25519, key_resolver=resolver
        )
        try:
            (result,) = verifier.verify(
                request,
                max_age=timedelta(seconds=SIGNATURE_MAX_AGE_S),
                expect_tag=SIGNATURE_TAG,
                require_components=SIGNATURE_COMPONENTS,
                body=request.body,
            )
        except HTTPMessageSignaturesException:
            return False
        fresh = result.nonce not in self.nonces
        self.nonces.add(result.nonce)
        return fresh


_SIGNED = ("enrol", "token")
_TOKEN = ("poll", "assignment", "report", "telemetry", "blob", "rules")
_KINDS = (
    (r"/d/v1/(enrol|token|poll|telemetry|rules)", None),
    (r"/d/v1/updates/\d+/(assignment|report)", None),
    (r"/d/v1/blobs/[0-9a-f]{64}", "blob"),
    (r"/tuf/.+", "tuf"),
)


@dataclass
class _Request:
    """One request, as the signature verifier wants it."""

    method: str
    url: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.url).path

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.url).query).items()}

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")


def kind_of(path: str) -> str:
    for pattern, kind in _KINDS:
        match = re.fullmatch(pattern, path)
        if match:
            return kind or match[1]
    return "unknown"


def _json(document: Any) -> Answer:
    return Answer(200, canonical_bytes(document))


def _problem(status: int, code: str) -> Answer:
    body = {"title": HTTPStatus(status).phrase, "code": code, "detail": code, "hint": ""}
    return Answer(status, json.dumps(body).encode())


def _handler(server: ReleaseServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def log_message(self, *_args: object) -> None:
            return

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length", "0"))
            body = self.rfile.read(length)
            request = _Request(
                self.command, f"{server.url}{self.path}", dict(self.headers.items()), body
            )
            request.headers = {name.title(): value for name, value in request.headers.items()}
            kind = kind_of(request.path)
            fault = server.take_fault(kind)
            time.sleep(fault.delay_s)
            if fault.drop:
                self.close_connection = True
                return
            if fault.ignore_range:
                request.headers.pop("Range", None)
            if fault.status is not None:
                answer = _problem(fault.status, "simulated")
            else:
                answer = server.answer(kind, request)
            self._send(kind, answer, fault)

        def _send(self, kind: str, answer: Answer, fault: Fault) -> None:
            body = fault.change(answer.body) if fault.change else answer.body
            self.send_response(answer.status)
            for name, value in {**answer.headers, **fault.headers}.items():
                self.send_header(name, value)
            if answer.status not in (204, 304):
                announced = len(body) if fault.announce is None else fault.announce
                self.send_header("Content-Length", str(announced))
            self.end_headers()
            try:
                self._send_body(kind, body, fault)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def _send_body(self, kind: str, body: bytes, fault: Fault) -> None:
            part = body if fault.cut is None else body[: fault.cut]
            step = max(1, int(fault.rate * 0.02)) if fault.rate else max(1, len(part))
            for start in range(0, len(part), step):
                piece = part[start : start + step]
                self.wfile.write(piece)
                self.wfile.flush()
                if fault.status is None:
                    server.sent_bytes[kind] = server.sent_bytes.get(kind, 0) + len(piece)
                if fault.rate:
                    time.sleep(0.02)
            if fault.cut is not None or fault.announce is not None:
                self.close_connection = True

    return Handler
