"""Answering: load a verified bundle, keep one session, count what happens.

`MoERuntime` is the door for developers; see `device_agent.runtime.moe_runtime`. It is imported when
it is first named, so that processes which need less of this package start fast.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from device_agent.runtime.moe_runtime import MoERuntime

__all__ = ["MoERuntime"]


def __getattr__(name: str) -> object:
    if name != "MoERuntime":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from device_agent.runtime.moe_runtime import MoERuntime

    return MoERuntime
