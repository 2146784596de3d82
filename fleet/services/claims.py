"""Claim tokens: permission to join the fleet, `sfc_<id>_<secret>`, good for a number of devices."""

import hashlib
import hmac
import re
import secrets
from datetime import datetime
from typing import Final

from django.db import transaction
from django.db.models import F, Q

from builds.common.audit import audit
from builds.common.auth import Actor, require
from builds.common.errors import InvalidInputError
from builds.common.roles import Permission
from fleet.errors import ClaimError
from fleet.models import ClaimToken
from fleet.services.labels import require_class

PREFIX: Final = "sfc"
SECRET_BYTES: Final = 24
MAX_USES: Final = 10_000_000
MAX_NAME: Final = 100
MIN_YEAR: Final = 2000
MAX_YEAR: Final = 9000
_PATTERN: Final = re.compile(r"sfc_(\d{1,18})_([A-Za-z0-9_-]{20,64})", re.ASCII)


@transaction.atomic
def claim_create(
    *,
    actor: Actor,
    name: str,
    uses: int,
    expires_at: datetime | None = None,
    device_class: str = "",
    accepts: bool = True,
) -> tuple[ClaimToken, str]:
    """Make a claim token.

    Args:
        actor: Who makes it.
        name: For people.
        uses: How many devices may enrol with it.
        expires_at: After this it is refused; None: never.
        device_class: Class that devices get whatever they say; empty: what they say.
        accepts: Whether its devices are members at once, or wait for somebody to accept them.

    Returns:
        The row, and the text that is shown once and cannot be had again.

    Raises:
        InvalidInputError: A value is out of range.
    """
    require(actor, Permission.CLAIM_EDIT)
    if not 1 <= uses <= MAX_USES:
        raise InvalidInputError(f"uses must be in 1..{MAX_USES}")
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise InvalidInputError(f"name must be 1..{MAX_NAME} printable characters")
    if device_class:
        require_class(device_class)
    _require_end(expires_at)
    secret = secrets.token_urlsafe(SECRET_BYTES)
    claim = ClaimToken.objects.create(
        name=name,
        secret_sha256=_digest(secret),
        uses_left=uses,
        expires_at=expires_at,
        device_class=device_class,
        accepts=accepts,
        created_by=actor.name,
    )
    audit(actor=actor.name, action="claim.create", obj=claim, name=name, uses=uses)
    return claim, f"{PREFIX}_{claim.pk}_{secret}"


def _require_end(expires_at: datetime | None) -> None:
    if expires_at is None:
        return
    if expires_at.tzinfo is None:
        raise InvalidInputError(
            "expires_at has no time zone", hint="add one, as in 2030-01-31T12:00:00Z"
        )
    if not MIN_YEAR <= expires_at.year <= MAX_YEAR:
        raise InvalidInputError(f"expires_at must be in the years {MIN_YEAR}..{MAX_YEAR}")


def claim_check(*, text: str, now: datetime) -> ClaimToken:
    """Return the claim token of a text.

    Raises:
        ClaimError: Unknown, wrong, used up or expired; the message does not say which.
    """
    match = _PATTERN.fullmatch(text)
    claim = ClaimToken.objects.filter(pk=int(match[1])).first() if match else None
    wanted = claim.secret_sha256 if claim else _digest("")
    given = _digest(match[2]) if match else _digest("-")
    good = hmac.compare_digest(wanted, given)
    if claim is None or not good or (claim.expires_at is not None and claim.expires_at <= now):
        raise ClaimError(
            "this claim token is not valid", hint="ask the fleet's owner for a new one"
        )
    return claim


def claim_use(*, claim: ClaimToken, now: datetime) -> None:
    """Count one use, inside the caller's transaction.

    Raises:
        ClaimError: It was used up in the meantime.
    """
    alive = Q(expires_at=None) | Q(expires_at__gt=now)
    rows = ClaimToken.objects.filter(alive, pk=claim.pk, uses_left__gt=0)
    if rows.update(uses_left=F("uses_left") - 1) != 1:
        raise ClaimError("this claim token is used up", hint="ask the fleet's owner for a new one")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8")).hexdigest()
