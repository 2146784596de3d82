"""Who is calling: a person with a session or a program with a token, as one `Actor`.

    browser -(session cookie, CSRF)-> User -> Membership.role -> Actor
    CI      -(Authorization: Bearer sf_<id>_<secret>)-> ApiToken.role -> Actor

Of a token's secret only the SHA-256 is kept; 256 random bits need no slow hash.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.http import HttpRequest
from django.utils import timezone
from ninja.errors import AuthenticationError
from ninja.security import HttpBearer, SessionAuth
from ninja.utils import check_csrf

from builds.common.access_models import ApiToken, Membership
from builds.common.errors import ForbiddenError
from builds.common.roles import ROLE_PERMISSIONS, Permission, Role, roles_with

TOKEN_PREFIX: Final = "sf"  # noqa: S105 -- a marker, not a secret
SECRET_BYTES: Final = 32
LAST_USED_RESOLUTION: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Actor:
    """Somebody who acts: a name for the audit chain and a role (None: may do nothing)."""

    name: str
    role: Role | None

    def may(self, permission: Permission) -> bool:
        """Return whether the role has `permission`."""
        return self.role is not None and permission in ROLE_PERMISSIONS[self.role]


SYSTEM: Final = Actor(name="system", role=Role.ADMIN)
STRANGER: Final = Actor(name="anonymous", role=None)


def require(actor: Actor, permission: Permission) -> None:
    """Let the actor pass or raise.

    Raises:
        ForbiddenError: The role has no such permission; the hint names the roles that do.
    """
    if not actor.may(permission):
        role = actor.role.value if actor.role else "no role"
        raise ForbiddenError(
            f"{actor.name} ({role}) lacks the permission {permission.value!r}",
            hint="roles that have it: " + ", ".join(r.value for r in roles_with(permission)),
        )


def user_actor(user: AbstractBaseUser | AnonymousUser) -> Actor:
    """Return the actor of a signed-in user, or the stranger."""
    if not user.is_authenticated or not user.is_active:
        return STRANGER
    membership = Membership.objects.filter(user_id=user.pk).first()
    if membership is None:
        superuser = getattr(user, "is_superuser", False)
        return Actor(name=user.get_username(), role=Role.ADMIN if superuser else None)
    return Actor(name=user.get_username(), role=Role(membership.role))


def request_actor(request: HttpRequest) -> Actor:
    """Return who makes this request: what ninja's authentication found, else the session's user."""
    found = getattr(request, "auth", None)
    return found if isinstance(found, Actor) else user_actor(request.user)


def token_create(
    *, name: str, role: Role, owner: AbstractBaseUser | None = None
) -> tuple[ApiToken, str]:
    """Make a token; the returned text is shown once and cannot be had again."""
    secret = secrets.token_urlsafe(SECRET_BYTES)
    token = ApiToken.objects.create(
        name=name,
        secret_sha256=_digest(secret),
        role=role.value,
        owner_id=owner.pk if owner is not None else None,
    )
    return token, f"{TOKEN_PREFIX}_{token.pk}_{secret}"


def token_actor(text: str) -> Actor | None:
    """Return the actor of a token text, or None when it is malformed, unknown, wrong or revoked."""
    prefix, _, rest = text.partition("_")
    number, _, secret = rest.partition("_")
    if prefix != TOKEN_PREFIX or not number.isascii() or not number.isdecimal() or not secret:
        return None
    if len(number) > 18:
        return None
    token = ApiToken.objects.filter(pk=int(number), revoked_at=None).first()
    if token is None or not hmac.compare_digest(token.secret_sha256, _digest(secret)):
        return None
    now = timezone.now()
    if token.last_used_at is None or now - token.last_used_at > LAST_USED_RESOLUTION:
        ApiToken.objects.filter(pk=token.pk).update(last_used_at=now)
    return Actor(name=token_label(token), role=Role(token.role))


def token_label(token: ApiToken) -> str:
    """Return how the audit chain calls a token: by name, and by number since names repeat."""
    return f"token {token.name} (#{token.pk})"


class CsrfError(ForbiddenError):
    """A write with a session cookie came without the CSRF token of that session."""

    code: ClassVar[str] = "app.csrf"


class TokenAuth(HttpBearer):
    """Ninja authentication by API token.

    Whoever sends an `Authorization` header is judged by it alone: a wrong token is never helped out
    by a session cookie, and never turned into a complaint about one.
    """

    def __call__(self, request: HttpRequest) -> Actor | None:
        """Return the actor of the header, or None when there is no header.

        Raises:
            AuthenticationError: The header is there and is no valid token.
        """
        actor: Actor | None = super().__call__(request)
        if actor is None and request.headers.get(self.header) is not None:
            raise AuthenticationError
        return actor

    def authenticate(self, request: HttpRequest, token: str) -> Actor | None:  # noqa: ARG002
        """Return the actor of the bearer token, or None (401)."""
        return token_actor(token)


class BrowserAuth(SessionAuth):
    """Ninja authentication by Django session; unsafe methods need the CSRF token."""

    def __call__(self, request: HttpRequest) -> Any | None:  # noqa: ANN401 -- ninja's signature
        """Return the actor of the session, or None (401).

        Raises:
            CsrfError: There is a session, and a write came without its CSRF token.
        """
        actor = self.authenticate(request, None)
        if actor is not None and check_csrf(request) is not None:
            raise CsrfError(
                "CSRF check failed: this write came with a session cookie but not its CSRF token",
                hint="send the csrftoken cookie's value as X-CSRFToken, or use an API token",
            )
        return actor

    def authenticate(self, request: HttpRequest, key: str | None) -> Any | None:  # noqa: ANN401, ARG002
        """Return the actor of the signed-in user, or None (401)."""
        actor = user_actor(request.user)
        return None if actor is STRANGER else actor


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8")).hexdigest()
