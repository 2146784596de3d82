"""What native threads have a part in belongs to the process that opened it: forks are refused.

A fork copies the memory and not the threads: a lock that one of them held stays held, an expert
that one of them was reading never comes. So expert pools, and plans that have one or lent threads,
remember who opened them; a call from a forked process raises, and what would end them does nothing
there. A plan that runs on its caller's thread alone may be forked, and each process has its own.

For `native_hold`, `native_library`, `expert_pool` and `pooled_weights`. Standard library only.
"""

import os
import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from compiler.contract.native_errors import NativeError

Given = ParamSpec("Given")
Result = TypeVar("Result")


def require_opened_here(pid: int) -> None:
    """Refuse a process other than `pid`, which opened what is called.

    Raises:
        NativeError: This process is a fork of that one.
    """
    if os.getpid() != pid:
        raise NativeError(
            f"this was opened by process {pid}, of which process {os.getpid()} is a fork",
            hint="open the plan and its pool anew after a fork, or start processes by spawning",
        )


def finalize_here(
    owner: object,
    call: Callable[Given, Result],
    *arguments: Given.args,
    **named: Given.kwargs,
) -> "weakref.finalize[..., object]":
    """Return a finalizer of `owner` that does nothing, and returns None, in a forked process."""
    pid = os.getpid()

    def ended() -> Result | None:
        return call(*arguments, **named) if os.getpid() == pid else None

    return weakref.finalize(owner, ended)
