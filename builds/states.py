"""State tables of this app: versions, build jobs, deltas.

Pure; printed to `docs/states/` by `manage.py states_print`.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class VersionState(StrEnum):
    """State of a model version."""

    SUBMITTED = "submitted"
    VALIDATED = "validated"
    INVALID = "invalid"


class VersionEvent(StrEnum):
    """What can happen to a model version."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    RECONSIDER = "reconsider"


class BuildState(StrEnum):
    """State of one build job (version x target)."""

    QUEUED = "queued"
    LEASED = "leased"
    COMPILING = "compiling"
    VERIFYING = "verifying"
    SIGNING = "signing"
    READY = "ready"
    FAILED_USER = "failed_user"
    FAILED_APP = "failed_app"


class BuildEvent(StrEnum):
    """What can happen to a build job."""

    LEASE = "lease"
    COMPILE = "compile"
    VERIFY = "verify"
    SIGN = "sign"
    PUBLISH = "publish"
    FAIL_USER = "fail_user"
    FAIL_APP = "fail_app"
    TRY_AGAIN = "try_again"
    LEASE_EXPIRED = "lease_expired"
    RETRY = "retry"


class DeltaState(StrEnum):
    """State of the delta between two bundles."""

    QUEUED = "queued"
    DEFERRED = "deferred"  # the queue is full: it waits outside
    BUILDING = "building"
    READY = "ready"
    TOO_LARGE = "too_large"
    FAILED = "failed"


class DeltaEvent(StrEnum):
    """What can happen to a delta."""

    DEFER = "defer"
    ADMIT = "admit"
    START = "start"
    FINISH = "finish"
    EXCEED = "exceed"
    FAIL = "fail"
    TRY_AGAIN = "try_again"
    LEASE_EXPIRED = "lease_expired"
    RETRY = "retry"


_V, _VE = VersionState, VersionEvent
_B, _BE = BuildState, BuildEvent
_D, _DE = DeltaState, DeltaEvent
_VersionTable = Mapping[tuple[VersionState, VersionEvent], VersionState]
_BuildTable = Mapping[tuple[BuildState, BuildEvent], BuildState]
_DeltaTable = Mapping[tuple[DeltaState, DeltaEvent], DeltaState]

# fmt: off
VERSION_TRANSITIONS: Final[_VersionTable] = MappingProxyType({
    (_V.SUBMITTED, _VE.ACCEPT):     _V.VALIDATED,
    (_V.SUBMITTED, _VE.REFUSE):     _V.INVALID,
    (_V.VALIDATED, _VE.REFUSE):     _V.INVALID,  # a target can see more
    (_V.INVALID,   _VE.RECONSIDER): _V.SUBMITTED,
})

BUILD_TRANSITIONS: Final[_BuildTable] = MappingProxyType({
    (_B.QUEUED,      _BE.LEASE):         _B.LEASED,
    (_B.QUEUED,      _BE.FAIL_USER):     _B.FAILED_USER,  # its version was refused by another job
    (_B.LEASED,      _BE.COMPILE):       _B.COMPILING,
    (_B.LEASED,      _BE.FAIL_USER):     _B.FAILED_USER,
    (_B.LEASED,      _BE.FAIL_APP):      _B.FAILED_APP,
    (_B.LEASED,      _BE.TRY_AGAIN):     _B.QUEUED,
    (_B.LEASED,      _BE.LEASE_EXPIRED): _B.QUEUED,
    (_B.COMPILING,   _BE.VERIFY):        _B.VERIFYING,
    (_B.COMPILING,   _BE.FAIL_USER):     _B.FAILED_USER,
    (_B.COMPILING,   _BE.FAIL_APP):      _B.FAILED_APP,
    (_B.COMPILING,   _BE.TRY_AGAIN):     _B.QUEUED,
    (_B.COMPILING,   _BE.LEASE_EXPIRED): _B.QUEUED,
    (_B.VERIFYING,   _BE.SIGN):          _B.SIGNING,
    (_B.VERIFYING,   _BE.FAIL_USER):     _B.FAILED_USER,
    (_B.VERIFYING,   _BE.FAIL_APP):      _B.FAILED_APP,
    (_B.VERIFYING,   _BE.TRY_AGAIN):     _B.QUEUED,
    (_B.VERIFYING,   _BE.LEASE_EXPIRED): _B.QUEUED,
    (_B.SIGNING,     _BE.PUBLISH):       _B.READY,
    (_B.SIGNING,     _BE.FAIL_APP):      _B.FAILED_APP,
    (_B.SIGNING,     _BE.TRY_AGAIN):     _B.QUEUED,
    (_B.SIGNING,     _BE.LEASE_EXPIRED): _B.QUEUED,
    (_B.FAILED_USER, _BE.RETRY):         _B.QUEUED,
    (_B.FAILED_APP,  _BE.RETRY):         _B.QUEUED,
})

DELTA_TRANSITIONS: Final[_DeltaTable] = MappingProxyType({
    (_D.QUEUED,    _DE.START):         _D.BUILDING,
    (_D.QUEUED,    _DE.DEFER):         _D.DEFERRED,
    (_D.DEFERRED,  _DE.ADMIT):         _D.QUEUED,
    (_D.BUILDING,  _DE.FINISH):        _D.READY,
    (_D.BUILDING,  _DE.EXCEED):        _D.TOO_LARGE,
    (_D.BUILDING,  _DE.FAIL):          _D.FAILED,
    (_D.BUILDING,  _DE.TRY_AGAIN):     _D.QUEUED,
    (_D.BUILDING,  _DE.LEASE_EXPIRED): _D.QUEUED,
    (_D.FAILED,    _DE.RETRY):         _D.QUEUED,
})
# fmt: on

BUILD_FINAL: Final = frozenset({BuildState.READY, BuildState.FAILED_USER, BuildState.FAILED_APP})
BUILD_WORKING: Final = frozenset(
    {BuildState.LEASED, BuildState.COMPILING, BuildState.VERIFYING, BuildState.SIGNING}
)
DELTA_FINAL: Final = frozenset({DeltaState.READY, DeltaState.TOO_LARGE, DeltaState.FAILED})
