"""Whether what stopped an update speaks against its bundle, so that it is not tried again. Pure.

A network, a disk or a server that fails says nothing about a bundle; bits that differ, a crash, a
hang or a probation that was not passed do. Bytes that are not what was signed for do after one
fall-back from a delta to whole sections.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from device_agent.errors import (
    AgentError,
    BundleError,
    CrashLoopError,
    DamagedError,
    SelfTestFailedError,
    UnfitError,
    WrongContentError,
)
from device_agent.states import State
from device_agent.update.context import UpdateContext

_TRIED: Final = frozenset((State.ACTIVATING, State.PROBATION))
_MADE: Final = frozenset((State.DOWNLOADING, State.APPLYING, State.STAGING)) | _TRIED
_AGAINST: Final[Mapping[type[AgentError], frozenset[State]]] = MappingProxyType(
    {
        BundleError: _TRIED,
        SelfTestFailedError: _TRIED,
        UnfitError: _TRIED,
        CrashLoopError: _MADE,
        WrongContentError: _MADE,
    }
)


def speaks_against(error: AgentError, state: State, context: UpdateContext) -> bool:
    """Return whether `error` in `state` is a reason not to try the bundle again."""
    if isinstance(error, DamagedError):
        return False
    if isinstance(error, WrongContentError) and not context.fallbacks:
        return False
    return any(isinstance(error, kind) and state in states for kind, states in _AGAINST.items())
