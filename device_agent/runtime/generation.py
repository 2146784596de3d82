"""One answer while it is made: an iterator of tokens that can be stopped, and says why it ended.

    dialogue -(program, inputs)-> one native call -(outputs)-> dialogue -> token -> caller
                                        | fault -(course)-> the same call, from the start, or ended

Between two native calls, and nowhere else, it looks whether it was cancelled or is late: a call is
never torn, so the cache is whole whatever happens. Nothing waits in a loop, and no fault of the
device is raised: what no remedy mends ends it, with a reason. `Session.generate` makes these; the
clock starts with the first token that is asked for.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final, Self

from compiler.contract.pipeline import TokenSpec
from compiler.contract.session import Answer, Dialogue, Request
from device_agent.errors import AnswerError, RequestError
from device_agent.runtime.course import Course, Next, Told
from device_agent.runtime.faults import FaultKind, kind_of
from device_agent.runtime.limits import Limits

_SECOND_MS: Final = 1_000.0


class Reason(StrEnum):
    """Why an answer ended."""

    ENDED = "ended"  # the model ended it
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    ERROR = "error"  # a fault that nothing mended; `Generation.fault` says which

    @property
    def is_whole(self) -> bool:
        """Return whether the answer came to its end."""
        return self in (Reason.ENDED, Reason.MAX_TOKENS, Reason.CONTEXT_FULL)


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
        degraded: Whether the device did less for it than the bundle asks for, or failed.
        reasons: Why: kinds of faults, signals of rules.
        faults: What went wrong on the way, in order; the answer may still have come of it.
    """

    prompt_tokens: int
    degraded: bool = False
    reasons: tuple[str, ...] = ()
    faults: tuple[FaultKind, ...] = ()
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


class Generation(Iterator[Token]):
    """An answer in progress; iterate over it, or call `words` to wait for all of it.

    One thread iterates; any thread may `cancel`. When it has ended, `reason` says why and `ids`
    holds what was said, be it whole or a part. Ended by `Reason.ERROR`, `fault` is the kind of what
    went wrong and `detail` its text: what was said until then is no answer.
    """

    def __init__(
        self,
        course: Callable[[Told], Course],
        tokens: TokenSpec,
        limits: Limits,
        stats: Stats,
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin nothing yet.

        Args:
            course: Returns what makes the runs, given what is told.
            tokens: Words of the model.
            limits: When to give up.
            stats: Where to count.
            monotonic: Clock in seconds.
        """
        self._tokens, self._limits, self._monotonic = tokens, limits, monotonic
        self._dialogue: Dialogue[Answer] | None = None
        self._request: Request | None = None
        self._fresh: deque[Token] = deque()
        self._cancelled = threading.Event()
        self._started_at: float | None = None
        self._worked_s = self._work_began = 0.0
        self.stats: Final = stats
        self.ids: Final[list[int]] = []
        self.reason: Reason | None = None
        self.fault: FaultKind | None = None
        self.detail = self.hint = ""
        self._course = course(Told(self.ids, self._tell))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        """Return the next token.

        Raises:
            StopIteration: The answer has ended; see `reason`.
        """
        while not self._fresh:
            if self.reason is not None:
                raise StopIteration
            self._advance()
        return self._fresh.popleft()

    def words(self) -> tuple[str, ...]:
        """Wait for the end and return all words, those that were iterated over included."""
        for _ in self:
            pass
        return tuple(self._tokens.words(self.ids))

    def text(self) -> str:
        """Wait for the end and return the words with a space between them."""
        return " ".join(self.words())

    def require_answered(self) -> None:
        """Raise for an answer that a fault ended, for callers who want that.

        Raises:
            RequestError: The bundle cannot be asked this.
            AnswerError: Anything else; `ids` holds the part before it.
        """
        if self.fault is FaultKind.BAD_INPUT:
            raise RequestError(self.detail, hint=self.hint)
        if self.reason is Reason.ERROR:
            raise AnswerError(f"the answer broke off: {self.detail}", hint=self.hint)

    def cancel(self) -> None:
        """End it before the next native call; safe from any thread and from signal handlers."""
        self._cancelled.set()

    def close(self) -> None:
        """End it now; tokens that were not fetched stay in `ids`."""
        self._fresh.clear()
        if self.reason is None:
            self._end(Reason.CANCELLED)
            self._count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _advance(self) -> None:
        """Make one native call, meet a fault, or end."""
        self._work_began = now = self._monotonic()
        is_first = self._started_at is None
        if self._started_at is None:
            self._started_at = now
        try:
            late = self._late(now)
            if late is None:
                self._call(is_first=is_first)
            else:
                self._end(late)
        except StopIteration as end:
            self._end(self._reason_of(end.value))
        except Exception as error:  # noqa: BLE001 -- met by kind; what nothing mends ends it
            self._meet(error)
        except BaseException:
            self._end(Reason.CANCELLED)
            raise
        finally:
            self._worked_s += self._monotonic() - self._work_began
            self.stats.total_ms = self._worked_s * _SECOND_MS
            self.stats.degraded = bool(self._course.reasons)
            if self.reason is not None:
                self._count()

    def _call(self, *, is_first: bool) -> None:
        if self._dialogue is None:
            course = self._course
            self._dialogue = course.begin() if is_first else course.from_start()
        if self._request is None:
            self._request = next(self._dialogue)
        self.stats.native_calls += 1
        outputs = self._course.run(*self._request)
        self._request = self._dialogue.send(outputs)

    def _meet(self, error: Exception) -> None:
        limit, start = self._limits.deadline_s, self._started_at
        deadline = float("inf") if limit is None or start is None else start + limit
        following = self._course.meet(error, deadline)
        if following is Next.END:
            self.fault = kind_of(error)
            self.detail = str(error) or type(error).__name__
            self.hint = getattr(error, "hint", "")
            self._end(Reason.ERROR)
        elif following is Next.FROM_START:
            self._drop()

    def _drop(self) -> None:
        dialogue, self._dialogue, self._request = self._dialogue, None, None
        if dialogue is not None:
            dialogue.close()

    def _late(self, now: float) -> Reason | None:
        if self._cancelled.is_set() or self._limits.cancel.is_set():
            return Reason.CANCELLED
        limit, start = self._limits.deadline_s, self._started_at
        is_late = limit is not None and start is not None and now - start >= limit
        return Reason.DEADLINE if is_late else None

    def _tell(self, token: int) -> None:
        self.ids.append(token)
        self._course.progressed()
        self._fresh.append(Token(token, self._tokens.vocabulary[token]))
        self.stats.told(self._worked_s + self._monotonic() - self._work_began)

    def _reason_of(self, answer: Answer) -> Reason:
        if answer.stopped:
            return Reason.ENDED
        is_full = len(answer.tokens) < self._limits.most
        return Reason.CONTEXT_FULL if is_full else Reason.MAX_TOKENS

    def _end(self, reason: Reason) -> None:
        self.reason = reason
        self._drop()

    def _count(self) -> None:
        reason = self.reason
        assert reason is not None
        self.stats.reasons = self._course.end(
            self._worked_s, failed=reason is Reason.ERROR, is_whole=reason.is_whole
        )
        self.stats.faults = tuple(self._course.faults)
        self.stats.degraded = bool(self.stats.reasons)
