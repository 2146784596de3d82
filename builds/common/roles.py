"""Roles of people and tokens, and what each may do. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Role(StrEnum):
    """Role of a user or an API token."""

    VIEWER = "viewer"
    DEVELOPER = "developer"
    RELEASE_MANAGER = "release_manager"
    APPROVER = "approver"
    ADMIN = "admin"


class Permission(StrEnum):
    """One thing that a role may or may not do."""

    VIEW = "view"
    SUBMIT = "submit"
    BUILD_RETRY = "build_retry"
    MODEL_EDIT = "model_edit"
    TARGET_ACTIVATE = "target_activate"
    DEVICE_ADMIT = "device_admit"
    GROUP_EDIT = "group_edit"
    CLAIM_EDIT = "claim_edit"
    RULES_EDIT = "rules_edit"
    RELEASE_APPROVE = "release_approve"
    ROLLOUT_EDIT = "rollout_edit"
    ROLLOUT_APPROVE = "rollout_approve"
    ROLLOUT_HALT = "rollout_halt"
    AUDIT_VIEW = "audit_view"
    ACCESS_EDIT = "access_edit"


_P = Permission
_VIEWER: Final = frozenset({_P.VIEW})
_DEVELOPER: Final = _VIEWER | {_P.SUBMIT, _P.BUILD_RETRY}
_RELEASE_MANAGER: Final = _DEVELOPER | {
    _P.MODEL_EDIT,
    _P.TARGET_ACTIVATE,
    _P.DEVICE_ADMIT,
    _P.GROUP_EDIT,
    _P.CLAIM_EDIT,
    _P.RULES_EDIT,
    _P.RELEASE_APPROVE,
    _P.ROLLOUT_EDIT,
    _P.ROLLOUT_HALT,
    _P.AUDIT_VIEW,
}
_APPROVER: Final = _VIEWER | {
    _P.RELEASE_APPROVE,
    _P.ROLLOUT_APPROVE,
    _P.ROLLOUT_HALT,
    _P.AUDIT_VIEW,
}

ROLE_PERMISSIONS: Final[Mapping[Role, frozenset[Permission]]] = MappingProxyType(
    {
        Role.VIEWER: _VIEWER,
        Role.DEVELOPER: _DEVELOPER,
        Role.RELEASE_MANAGER: _RELEASE_MANAGER,
        Role.APPROVER: _APPROVER,
        Role.ADMIN: frozenset(Permission),
    }
)


def roles_with(permission: Permission) -> tuple[Role, ...]:
    """Return the roles that have `permission`, in the order of `Role`."""
    return tuple(role for role in Role if permission in ROLE_PERMISSIONS[role])
