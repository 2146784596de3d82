"""`Idempotency-Key`: the same POST sent twice is done once.

The key's row is inserted before the work (status 0), so that a twin in flight is refused; it holds
the answer afterwards, and is removed when the work failed, so that the caller can try again. A row
left at status 0 by a killed process is taken over after `STALE_AFTER`.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Final

from django.db import IntegrityError, transaction
from django.http import HttpRequest, HttpResponse
from django.utils import timezone

from builds.common.access_models import IdempotencyKey
from builds.common.auth import Actor
from builds.common.errors import ConflictError, InvalidInputError
from compiler.contract.canonical import sha256_hex

HEADER: Final = "Idempotency-Key"
MAX_KEY: Final = 200
STALE_AFTER: Final = timedelta(minutes=2)
KEEP_FOR: Final = timedelta(hours=24)
IN_FLIGHT: Final = 0


class IdempotencyMismatchError(InvalidInputError):
    """The Idempotency-Key was used before for another request."""

    code = "app.idempotency_mismatch"


class IdempotencyInFlightError(ConflictError):
    """A request with the same Idempotency-Key is still being answered."""

    code = "app.idempotency_in_flight"
    retryable = True


def answer_once(
    request: HttpRequest, actor: Actor, answer: Callable[[], HttpResponse]
) -> HttpResponse:
    """Return what `answer` returns, or the stored answer if this key was answered before.

    Raises:
        InvalidInputError: The key is too long.
        IdempotencyMismatchError: The key belongs to another request.
        IdempotencyInFlightError: A twin is still at work.
    """
    key = request.headers.get(HEADER, "")
    if not key:
        return answer()
    if len(key) > MAX_KEY or not key.isprintable():
        raise InvalidInputError(f"{HEADER} must be printable, at most {MAX_KEY} characters")
    body_sha256 = sha256_hex(f"{request.method} {request.path}\n".encode() + request.body)
    stored = _claim(key, actor.name, body_sha256)
    if stored is not None:
        return stored
    row = IdempotencyKey.objects.filter(key=key, actor=actor.name)
    try:
        response = answer()
    except BaseException:
        row.delete()
        raise
    row.update(status=response.status_code, response=response.content)
    return response


def keys_forget() -> int:
    """Remove keys older than a day; return how many."""
    return IdempotencyKey.objects.filter(created_at__lt=timezone.now() - KEEP_FOR).delete()[0]


def _claim(key: str, actor: str, body_sha256: str) -> HttpResponse | None:
    try:
        with transaction.atomic():
            IdempotencyKey.objects.create(
                key=key, actor=actor, body_sha256=body_sha256, status=IN_FLIGHT, response=b""
            )
    except IntegrityError:
        return _stored(key, actor, body_sha256)
    return None


def _stored(key: str, actor: str, body_sha256: str) -> HttpResponse | None:
    row = IdempotencyKey.objects.get(key=key, actor=actor)
    if row.body_sha256 != body_sha256:
        raise IdempotencyMismatchError(
            "this Idempotency-Key was used for another request", hint="make a new key per request"
        )
    if row.status != IN_FLIGHT:
        response = HttpResponse(
            bytes(row.response), status=row.status, content_type="application/json"
        )
        response["Idempotent-Replayed"] = "true"
        return response
    stale = IdempotencyKey.objects.filter(
        pk=row.pk, status=IN_FLIGHT, created_at__lt=timezone.now() - STALE_AFTER
    )
    if stale.update(created_at=timezone.now()) != 1:
        raise IdempotencyInFlightError("the first request with this key is still being answered")
    return None
