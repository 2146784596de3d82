"""First users and tokens of a new installation."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from builds.common.audit import audit
from builds.common.auth import SYSTEM, token_create
from builds.common.roles import Role
from builds.models import ApiToken, Membership

PASSWORD_BYTES: Final = 12
CI_TOKEN_NAME: Final = "ci"  # noqa: S105 -- a name, not a secret
FIRST_USERS: Final[tuple[tuple[str, Role], ...]] = (
    ("admin", Role.ADMIN),
    ("release-manager", Role.RELEASE_MANAGER),
    ("viewer", Role.VIEWER),
)


@dataclass(frozen=True, slots=True)
class Credential:
    """What to show once: the secret is None when the user or token existed and was left alone."""

    name: str
    role: Role
    secret: str | None


@transaction.atomic
def access_bootstrap(
    *, passwords: Mapping[str, str], reset: bool = False
) -> tuple[tuple[Credential, ...], Credential]:
    """Make the first users and the CI token.

    Args:
        passwords: User name -> password wanted; others get a random one.
        reset: Give existing users new passwords and replace the CI token.

    Returns:
        The users and the CI token.
    """
    users = tuple(
        Credential(name, role, _user(name, role, passwords.get(name), reset=reset))
        for name, role in FIRST_USERS
    )
    return users, Credential(CI_TOKEN_NAME, Role.DEVELOPER, _ci_token(reset=reset))


def user_create(*, name: str, role: Role, password: str) -> User:
    """Make a user with a role, or give an existing one this role and password."""
    user, _ = User.objects.get_or_create(username=name)
    user.set_password(password)
    user.is_staff = user.is_superuser = role is Role.ADMIN
    user.save()
    Membership.objects.update_or_create(user=user, defaults={"role": role.value})
    audit(actor=SYSTEM.name, action="access.user_create", obj=user, role=role.value)
    return user


def _user(name: str, role: Role, wanted: str | None, *, reset: bool) -> str | None:
    if User.objects.filter(username=name).exists() and not reset and wanted is None:
        return None
    password = wanted or secrets.token_urlsafe(PASSWORD_BYTES)
    user_create(name=name, role=role, password=password)
    return password


def _ci_token(*, reset: bool) -> str | None:
    live = ApiToken.objects.filter(name=CI_TOKEN_NAME, revoked_at=None)
    if live.exists() and not reset:
        return None
    live.update(revoked_at=timezone.now())
    token, text = token_create(name=CI_TOKEN_NAME, role=Role.DEVELOPER)
    audit(
        actor=SYSTEM.name, action="access.token_create", obj=token, role=token.role, name=token.name
    )
    return text
