"""When an answer is given up: its limits, and what a caller may give as one. Pure."""

import threading
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard

from device_agent.errors import RequestError


class Stop(Protocol):
    """Says that an answer is not wanted any more; `threading.Event` is one."""

    def is_set(self) -> bool:
        """Return whether it is not."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When an answer is given up.

    Attributes:
        most: Tokens at most.
        deadline_s: Seconds from the first request for a token; None = any time.
        cancel: Ends it when set, from any thread.
    """

    most: int
    deadline_s: float | None = None
    cancel: Stop = field(default_factory=threading.Event)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a setting is a number, which True is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_limits(max_tokens: object, deadline: object) -> None:
    """Require limits of an answer that are some: a whole number of tokens, seconds or None.

    Raises:
        RequestError: They are of another type or out of range.
    """
    if not is_number(max_tokens) or isinstance(max_tokens, float) or max_tokens < 1:
        raise RequestError(f"max_tokens {max_tokens!r}", hint="a whole number, at least 1")
    if deadline is None:
        return
    if not is_number(deadline) or not 0 < deadline < float("inf"):
        raise RequestError(f"a deadline of {deadline!r} s", hint="seconds above 0; None for none")
