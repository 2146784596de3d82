"""One answer while it is made: an iterator of tokens that can be stopped, and says why it ended.

    dialogue -(program, inputs)-> one native call -(outputs)-> dialogue -> token -> caller

Between two native calls, and nowhere else, it looks whether it was cancelled or is late: a call is
never torn, so the cache is whole whatever happens. Nothing waits in a loop. `Session.generate`
makes these; the clock starts with the first token that is asked for.
"""

import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Final, Protocol, Self, TypeGuard

from compiler.contract.errors import ContractError
from compiler.contract.pipeline import TokenSpec
from compiler.contract.session import Answer, Buffer, Dialogue, Request, Runs
from device_agent.errors import AnswerError, RequestError

_SECOND_MS: Final = 1_000.0
_SHOWN_BITS: Final = 64


class Stop(Protocol):
    """Says that an answer is not wanted any more; `threading.Event` is one."""

    def is_set(self) -> bool:
        """Return whether it is not."""


class Reason(StrEnum):
    """Why an answer ended."""

    ENDED = "ended"  # the model ended it
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer."""

    id: int
    text: str


@dataclass(slots=True)
class Stats:
    """What an answer took. Times count native calls and what is between them, not the caller.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        tokens: Tokens of the answer so far.
        native_calls: Calls so far, those that look at a picture included.
        first_token_ms: From the first request for a token to the first token; None before it.
        total_ms: From there to now or to the end.
        tokens_per_s: Of the tokens after the first; None before the second.
        degraded: Whether the device did less for it than the bundle asks for.
    """

    prompt_tokens: int
    degraded: bool = False
    tokens: int = 0
    native_calls: int = 0
    first_token_ms: float | None = None
    total_ms: float = 0.0
    tokens_per_s: float | None = None

    def to_json(self) -> dict[str, object]:
        """Return it for machines."""
        return asdict(self)

    def told(self, seconds: float) -> None:
        """Count a token that was known after so many seconds of work."""
        self.tokens += 1
        milliseconds = seconds * _SECOND_MS
        if self.first_token_ms is None:
            self.first_token_ms = milliseconds
        elif milliseconds > self.first_token_ms:
            after = (milliseconds - self.first_token_ms) / _SECOND_MS
            self.tokens_per_s = (self.tokens - 1) / after


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


class Generation(Iterator[Token]):
    """An answer in progress; iterate over it, or call `words` to wait for all of it.

    One thread iterates; any thread may `cancel`. When it has ended, `reason` says why and `ids`
    holds what was said, be it whole or a part.
    """

    def __init__(
        self,
        runner: Runs,
        dialogue: Callable[[Callable[[int], None]], Dialogue[Answer]],
        tokens: TokenSpec,
        limits: Limits,
        stats: Stats,
        ended: Callable[[Reason, Stats], None],
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin nothing yet.

        Args:
            runner: Makes the native calls.
            dialogue: Returns what to run, given who is to be told each token.
            tokens: Words of the model.
            limits: When to give up.
            stats: Where to count.
            ended: Told once, when it has ended.
            monotonic: Clock in seconds.
        """
        self._runner, self._tokens, self._limits = runner, tokens, limits
        self._dialogue = dialogue(self._tell)
        self._request: Request | None = None
        self._fresh: deque[Token] = deque()
        self._ended, self._monotonic = ended, monotonic
        self._cancelled = threading.Event()
        self._started_at: float | None = None
        self._worked_s = self._work_began = 0.0
        self.stats: Final = stats
        self.ids: Final[list[int]] = []
        self.reason: Reason | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        """Return the next token.

        Raises:
            StopIteration: The answer has ended; see `reason`.
            AnswerError: The plan ended with an error status; `ids` holds the part before it.
        """
        while not self._fresh:
            if self.reason is not None:
                raise StopIteration
            self._advance()
        return self._fresh.popleft()

    def words(self) -> tuple[str, ...]:
        """Wait for the end and return all words, those that were iterated over included.

        Raises:
            AnswerError: As iterating.
        """
        for _ in self:
            pass
        return tuple(self._tokens.words(self.ids))

    def text(self) -> str:
        """Wait for the end and return the words with a space between them.

        Raises:
            AnswerError: As iterating.
        """
        return " ".join(self.words())

    def cancel(self) -> None:
        """End it before the next native call; safe from any thread and from signal handlers."""
        self._cancelled.set()

    def close(self) -> None:
        """End it now; tokens that were not fetched stay in `ids`."""
        self._fresh.clear()
        if self.reason is None:
            self._end(Reason.CANCELLED)
            self._ended(Reason.CANCELLED, self.stats)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _advance(self) -> None:
        """Make one native call, or end."""
        self._work_began = now = self._monotonic()
        if self._started_at is None:
            self._started_at = now
        try:
            self._request = next(self._dialogue) if self._request is None else self._request
            late = self._late(now)
            if late is not None:
                self._end(late)
                return
            outputs = self._run(*self._request)
            self._request = self._dialogue.send(outputs)
        except StopIteration as end:
            self._end(self._reason_of(end.value))
        except (ContractError, OSError) as error:
            self._end(Reason.ERROR)
            hint = error.hint if isinstance(error, ContractError) else ""
            raise AnswerError(f"the answer broke off: {error}", hint=hint) from error
        except BaseException:
            self._end(Reason.CANCELLED)
            raise
        finally:
            self._worked_s += self._monotonic() - self._work_began
            self.stats.total_ms = self._worked_s * _SECOND_MS
            if self.reason is not None:
                self._ended(self.reason, self.stats)

    def _run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, Buffer]:
        self.stats.native_calls += 1
        return self._runner.run(program, inputs)

    def _late(self, now: float) -> Reason | None:
        if self._cancelled.is_set() or self._limits.cancel.is_set():
            return Reason.CANCELLED
        limit, start = self._limits.deadline_s, self._started_at
        is_late = limit is not None and start is not None and now - start >= limit
        return Reason.DEADLINE if is_late else None

    def _tell(self, token: int) -> None:
        self.ids.append(token)
        self._fresh.append(Token(token, self._tokens.vocabulary[token]))
        self.stats.told(self._worked_s + self._monotonic() - self._work_began)

    def _reason_of(self, answer: Answer) -> Reason:
        if answer.stopped:
            return Reason.ENDED
        is_full = len(answer.tokens) < self._limits.most
        return Reason.CONTEXT_FULL if is_full else Reason.MAX_TOKENS

    def _end(self, reason: Reason) -> None:
        self.reason = reason
        self._dialogue.close()


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


def require_ids(prompt: Sequence[int], tokens: TokenSpec) -> list[int]:
    """Return a prompt of token ids as it is.

    Raises:
        ContractError: One is no whole number, or not in the vocabulary.
    """
    hint = f"ids are 0 to {len(tokens.vocabulary) - 1}"
    try:
        ids = [operator.index(token) for token in prompt]
    except TypeError as error:
        raise ContractError(f"a prompt that holds no token ids: {error}", hint=hint) from error
    for at, token in enumerate(ids):
        if not 0 <= token < len(tokens.vocabulary):
            name = token if token.bit_length() <= _SHOWN_BITS else f"number {at}"
            raise ContractError(f"token {name} is outside the vocabulary", hint=hint)
    return ids
