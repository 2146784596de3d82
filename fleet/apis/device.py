"""The device API, except its hot paths: enrolment, tokens, assignments, reports, telemetry.

Device keys sign enrolment and token requests; all else needs a session token. `poll` is here too,
slow and from the rows: it answers when the hot path is not in front (a development server), and the
tests hold the two together.
"""

import base64
import binascii
import logging
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from http import HTTPStatus
from typing import Any, Final

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from builds.common.clock import SystemClock
from builds.common.errors import ApplicationError, InvalidInputError
from builds.common.problem import problem_of
from builds.services.signing import trust_anchors
from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.errors import ContractError
from compiler.contract.fingerprint import fingerprint_from_json
from compiler.contract.protocol import (
    MAX_DOCUMENT_BYTES,
    NEW_KEY_TAG,
    PATH_TUF,
    Network,
    parse_report,
    text,
)
from compiler.contract.telemetry import MAX_BATCH_BYTES, parse_batch
from fleet.common.rates import Rates
from fleet.common.time_nonces import LIFE_S
from fleet.common.tokens import bearer, check, token_key
from fleet.errors import (
    DeviceStateError,
    DeviceUnauthorizedError,
    MethodNotAllowedError,
    TooOftenError,
)
from fleet.models import Device
from fleet.selectors.poll import device_poll_answer
from fleet.services.assignments import update_assignment
from fleet.services.device_keys import device_key_rotate
from fleet.services.enrolment import (
    EnrolmentRequest,
    device_enrol,
    device_token,
    enrolment_require,
    require_seal_key,
)
from fleet.services.reports import update_report
from fleet.services.rules import device_rules_order
from fleet.services.signatures import SignedRequest, signature_require, time_nonce
from fleet.services.telemetry import telemetry_ingest
from fleet.states import DeviceState

logger = logging.getLogger(__name__)

JSON: Final = "application/json"
View = Callable[..., HttpResponse]


def _device_view(*methods: str) -> Callable[[View], View]:
    """Return a decorator: answers these methods only, errors raised on purpose as problems."""

    def decorate(view: View) -> View:
        @csrf_exempt  # devices have no cookies: a signature or a session token says who asks
        @wraps(view)
        def answer(request: HttpRequest, **kwargs: Any) -> HttpResponse:  # noqa: ANN401
            try:
                if request.method not in methods:
                    raise MethodNotAllowedError(methods)
                return view(request, **kwargs)
            except (ApplicationError, ContractError) as error:
                return _problem(error)

        return answer

    return decorate


def _problem(error: ApplicationError | ContractError) -> HttpResponse:
    response = problem_of(error)
    if response.status_code == HTTPStatus.UNAUTHORIZED:
        response["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowedError):
        response["Allow"] = error.allow
    return response


@_device_view("POST")
def enrol(request: HttpRequest) -> HttpResponse:
    body = _body(request, MAX_DOCUMENT_BYTES)
    document = parse_object(body, limit_bytes=MAX_DOCUMENT_BYTES)
    wanted = _enrolment(document)
    enrolment_require(request=wanted)
    signature_require(request=_signed(request, body), public_key=wanted.public_key)
    device, created = device_enrol(request=wanted)
    answer: dict[str, Json] = {
        "device_id": device.device_id,
        "state": device.state,
        "tuf_url": request.build_absolute_uri(PATH_TUF),
        "poll_after_s": settings.SPARSEFLEET.poll_after_s,
        **trust_anchors(),
    }
    return _json(answer, HTTPStatus.CREATED if created else HTTPStatus.OK)


@_device_view("POST")
def token(request: HttpRequest) -> HttpResponse:
    body = _body(request, MAX_DOCUMENT_BYTES)
    document = parse_object(body, limit_bytes=MAX_DOCUMENT_BYTES)
    device_id, seal_key = text(document, "device_id"), _seal_key(document)
    device = _device_of(device_id)
    signer = signature_require(request=_signed(request, body), public_key=bytes(device.public_key))
    life_s = settings.SPARSEFLEET.session_token_s
    answer = device_token(
        device_id=device_id,
        thumbprint=signer.thumbprint,
        clock_skew_s=signer.clock_skew_s,
        seal_key=seal_key,
    )
    return _json({"token": answer, "expires_in_s": life_s})


@_device_view("GET", "HEAD")
def time_and_nonce(request: HttpRequest) -> HttpResponse:
    """Return the time and a nonce to anybody, not too often; nothing is stored."""
    if not _time_rates().allows(request.META.get("REMOTE_ADDR", ""), time.monotonic()):
        raise TooOftenError("this address asked too often", hint="ask again in a minute")
    now, nonce = time_nonce()
    response = _json({"now": now, "nonce": nonce, "good_for_s": LIFE_S})
    response["Cache-Control"] = "no-store"
    return response


@_device_view("POST")
def rotate_key(request: HttpRequest) -> HttpResponse:
    body = _body(request, MAX_DOCUMENT_BYTES)
    document = parse_object(body, limit_bytes=MAX_DOCUMENT_BYTES)
    device, new_key = _device_of(text(document, "device_id")), _public_key(document)
    signed = _signed(request, body)
    old = signature_require(request=signed, public_key=bytes(device.public_key))
    signature_require(request=signed, public_key=new_key, tag=NEW_KEY_TAG)
    device = device_key_rotate(
        device_pk=device.pk, old_thumbprint=old.thumbprint, public_key=new_key
    )
    return _json({"device_id": device.device_id, "key_thumbprint": device.key_thumbprint})


@_device_view("GET", "HEAD")
def assignment(request: HttpRequest, update_id: int) -> HttpResponse:
    device = _device(request)
    data = update_assignment(
        device_pk=device.pk,
        update_id=update_id,
        nonce=request.GET.get("nonce", ""),
        network=request.GET.get("network", Network.UNKNOWN.value),
    )
    return HttpResponse(data, content_type=JSON, headers={"Cache-Control": "no-store"})


@_device_view("POST")
def report(request: HttpRequest, update_id: int) -> HttpResponse:
    device = _device(request)
    fact = parse_report(_body(request, MAX_DOCUMENT_BYTES))
    if fact.update_id != update_id:
        raise InvalidInputError("the report is about another update than its address")
    outcome = update_report(device_pk=device.pk, report=fact)
    return _json(
        {"state": outcome.state.value, "new": outcome.was_new, "applied": outcome.was_applied}
    )


@_device_view("GET", "HEAD")
def rules(request: HttpRequest) -> HttpResponse:
    device = _device(request)
    data = device_rules_order(device_pk=device.pk, nonce=request.GET.get("nonce", ""))
    return HttpResponse(data, content_type=JSON, headers={"Cache-Control": "no-store"})


@_device_view("POST")
def telemetry(request: HttpRequest) -> HttpResponse:
    device = _device(request)
    batch = parse_batch(_body(request, MAX_BATCH_BYTES))
    return _json({"new": telemetry_ingest(device_pk=device.pk, batch=batch)})


@_device_view("GET", "HEAD")
def poll(request: HttpRequest) -> HttpResponse:
    device = _device(request)
    answer = device_poll_answer(device_pk=device.pk)
    if answer is None:
        raise DeviceStateError(f"the device is {device.state}")
    return HttpResponse(answer.to_bytes(), content_type=JSON)


def _device(request: HttpRequest) -> Device:
    """Return the member device that the session token names.

    Raises:
        DeviceUnauthorizedError: No valid token.
        DeviceStateError: The device is no member.
    """
    given = bearer(request.headers.get("Authorization", ""))
    now = SystemClock().now().timestamp()
    session = check(token_key(settings.SECRET_KEY), given, now)
    device = Device.objects.filter(pk=session.device_pk).first() if session else None
    if session is None or device is None or device.token_generation != session.generation:
        raise DeviceUnauthorizedError(
            "the session token is missing, wrong or expired", hint="POST /d/v1/token"
        )
    if device.state != DeviceState.ACCEPTED:
        raise DeviceStateError(f"the device is {device.state}")
    return device


def _enrolment(document: Mapping[str, Json]) -> EnrolmentRequest:
    fingerprint = document.get("fingerprint")
    if not isinstance(fingerprint, Mapping):
        raise ContractError("fingerprint must be an object")
    return EnrolmentRequest(
        claim=text(document, "claim"),
        serial=text(document, "serial"),
        name=text(document, "name"),
        public_key=_public_key(document),
        model=text(document, "model"),
        fingerprint=fingerprint_from_json(fingerprint),
        seal_key=_seal_key(document),
    )


def _public_key(document: Mapping[str, Json]) -> bytes:
    return _base64(document, "public_key")


def _seal_key(document: Mapping[str, Json]) -> bytes:
    """Return the X25519 key that a device tells; empty from an agent that makes none."""
    key = _base64(document, "seal_key") if "seal_key" in document else b""
    require_seal_key(key)
    return key


def _base64(document: Mapping[str, Json], name: str) -> bytes:
    try:
        return base64.b64decode(text(document, name), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ContractError(f"{name} must be base64") from error


def _device_of(device_id: str) -> Device:
    device = Device.objects.only("public_key").filter(device_id=device_id).first()
    if device is None:
        raise DeviceUnauthorizedError("no device has this id", hint="POST /d/v1/enrol")
    return device


@lru_cache(maxsize=1)
def _time_rates() -> Rates:
    return Rates(settings.SPARSEFLEET.time_nonces_per_minute)


def _signed(request: HttpRequest, body: bytes) -> SignedRequest:
    return SignedRequest(
        method=request.method or "",
        url=request.build_absolute_uri(),
        headers=dict(request.headers),
        body=body,
    )


def _body(request: HttpRequest, limit_bytes: int) -> bytes:
    length = request.headers.get("Content-Length", "")
    if not length.isdecimal() or int(length) > limit_bytes:
        raise InvalidInputError(f"a body of known length, at most {limit_bytes} bytes, is needed")
    return request.body


def _json(document: Mapping[str, Json], status: HTTPStatus = HTTPStatus.OK) -> HttpResponse:
    return HttpResponse(canonical_bytes(dict(document)), content_type=JSON, status=status)
