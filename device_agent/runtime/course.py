"""The course of one answer over a plan in custody: its runs, and how it goes on after a fault.

    run -> fault? -> remedy of its kind -> the same run again, where the cache is as before it
                                        -> else from the start: tokens already told are fed again
                                        -> no remedy left: the answer ends, with the kind

A run that failed leaves the cache as it was; where something behind it failed (an output that is no
number), the row that it wrote is cut off. A plan that was built anew has no cache: the prompt and
what was told are run again. Where weights had changed in memory, what was told may be wrong: it has
to come out the same again, or the answer ends (`corrupt_weights`) instead of going on from it.

`generation.Generation` asks; `moe_runtime.Session` makes one per answer.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from compiler.contract.errors import ContractError
from compiler.contract.pipeline import Pipeline
from compiler.contract.session import Answer, Buffer, Dialogue, Manner
from compiler.contract.session import Session as PlanSession
from device_agent.runtime.assembly import Assembly
from device_agent.runtime.custody import Custody, degraded_by
from device_agent.runtime.faults import (
    AS_ASKED,
    REMEDIES,
    FaultError,
    FaultKind,
    Remedy,
    Way,
    kind_of,
)
from device_agent.runtime.sampling import Chooser

log = logging.getLogger("device_agent.runtime")

MAX_REMEDIES: Final = 8
"""Of one answer, however often it breaks off."""
_MS: Final = 1e3


class Next(Enum):
    """How an answer goes on after a fault."""

    SAME_RUN = auto()
    FROM_START = auto()
    END = auto()


class View:
    """What a session looks at, on whichever plan answers now."""

    def __init__(self, pipeline: Pipeline) -> None:
        """Have nothing in view."""
        self.pipeline: Final = pipeline
        self._pixels: bytes | None = None
        self._plan: PlanSession | None = None
        self._on: Assembly | None = None

    @property
    def seen(self) -> int:
        """Rows that what is in view takes in the cache, as far as that is known."""
        return 0 if self._plan is None else self._plan.seen

    def show(self, pixels: bytes) -> None:
        """Have a picture in view, looked at with the next answer."""
        self._pixels = pixels
        self.doubt()

    def forget(self) -> None:
        """Have nothing in view."""
        self._pixels = None
        self.doubt()

    def doubt(self) -> None:
        """Take rows that are in the cache for wrong: what is in view is looked at again."""
        if self._plan is not None and self._pixels is None:
            self._plan.forget()
        elif self._plan is not None and self._pixels is not None:
            self._plan.keep(self._pixels)

    def on(self, assembly: Assembly) -> PlanSession:
        """Return the session of a plan, with the same in view.

        Raises:
            ContractError: The plan refuses.
        """
        if self._plan is None or self._on is not assembly:
            self._plan, self._on = PlanSession(assembly.runner, self.pipeline), assembly
            self.doubt()
        return self._plan


@dataclass(slots=True)
class Told:
    """Tokens of an answer so far, over all attempts at it.

    Attributes:
        ids: What the caller knows.
        tell: Tells the caller one more.
        at: How many the present attempt has come to.
        is_doubted: Whether they have to come out the same again.
    """

    ids: list[int]
    tell: Callable[[int], None]
    at: int = 0
    is_doubted: bool = False

    def chosen(self, token: int) -> int:
        """Return the token to go on with: what was told, where the attempt is not beyond it.

        Raises:
            FaultError: What was told while weights were wrong does not come out again.
        """
        if self.at >= len(self.ids):
            return token
        if self.is_doubted and token != self.ids[self.at]:
            raise FaultError(
                FaultKind.CORRUPT_WEIGHTS,
                "weights had changed in memory, and what was said does not come out again",
            )
        return self.ids[self.at]

    def came(self, token: int) -> None:
        """Count a token of the attempt; tell one that is new."""
        self.at += 1
        if self.at > len(self.ids):
            self.is_doubted = False
            self.tell(token)


@dataclass(slots=True)
class Course:
    """One answer's way; used by the thread that iterates over it.

    Attributes:
        custody: The plan.
        view: What the session has in view.
        ids: The prompt.
        most: Tokens at most.
        choosing: Returns what chooses tokens, from its first draw on.
        told: What the caller knows.
        faults: What went wrong, in order.
        reasons: Why the answer is degraded, as far as the plan said.
    """

    custody: Custody[Assembly]
    view: View
    ids: Sequence[int]
    most: int
    choosing: Callable[[], Chooser]
    told: Told
    faults: list[FaultKind] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    _way: Way = AS_ASKED
    _on: Assembly | None = None
    _kept: int = -1
    """Rows in the cache before the run that may have failed; -1 if none is under way."""
    _remedies: Iterator[Remedy] | None = None
    _left: int = MAX_REMEDIES
    _alone: ExitStack = field(default_factory=ExitStack)

    def begin(self) -> Dialogue[Answer]:
        """Look after the plan and begin.

        Raises:
            Exception: A fault; `meet` says how to go on.
        """
        found = self.custody.between()
        if FaultKind.CORRUPT_WEIGHTS in found:
            self.view.doubt()  # it may have been looked at with them
        self._way, hot = self.custody.first_way()
        self.faults += [*found, *hot]
        return self.from_start()

    def from_start(self) -> Dialogue[Answer]:
        """Return the dialogue of an attempt from the first token of the prompt on.

        Raises:
            Exception: As `begin`.
        """
        self._kept, self.told.at = -1, 0
        assembly = self._take()
        if assembly.is_stale:
            self.view.doubt()
        choose = self.choosing()
        manner = Manner(
            self.most, lambda outputs: self.told.chosen(choose(outputs)), self.told.came
        )
        return self.custody.call(assembly, lambda: self.view.on(assembly).answers(self.ids, manner))

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, Buffer]:
        """Run a program of the plan, within the limit of a call.

        Raises:
            Exception: As `begin`.
        """
        assembly = self._on
        assert assembly is not None

        def do() -> Mapping[str, Buffer]:
            self._kept = assembly.runner.kv_length
            return assembly.runner.run(program, inputs)

        outputs = self.custody.call(assembly, do)
        self._kept = -1
        return outputs

    def progressed(self) -> None:
        """Note that a token came: the next fault is met from the first remedy on."""
        self._remedies = None

    def meet(self, error: Exception, deadline: float) -> Next:
        """Meet a fault; return how to go on. Raises nothing.

        Args:
            error: What ended the attempt.
            deadline: Of the answer, by the clock.
        """
        try:
            return self._met(error, min(deadline, self.custody.until()))
        except Exception as unmet:
            log.exception("a remedy ended in an error of our own")
            self.faults.append(kind_of(unmet))
            return Next.END

    def _met(self, error: Exception, until: float) -> Next:
        kind = kind_of(error)
        if kind is FaultKind.CRASH and not isinstance(error, (ContractError, FaultError)):
            log.error("an answer ended in an error of our own", exc_info=error)
        self.faults.append(kind)
        if not REMEDIES[kind]:
            return Next.END
        if self._remedies is None:
            self._remedies = iter(REMEDIES[kind])
        for remedy in self._remedies:
            if self._left == 0:
                break
            self._left -= 1
            found: list[FaultKind] = []
            is_worth = self.custody.prepare(remedy, until, found)
            self.faults += found
            if FaultKind.CORRUPT_WEIGHTS in found:
                self.told.is_doubted = True
                self.view.doubt()
            if is_worth:
                self._way = remedy.way
                return self._resumed(is_doubtful=bool(found))
        return Next.END

    def _resumed(self, *, is_doubtful: bool) -> Next:
        """Set the plan up for the remedy; return from where to go on."""
        before, kept = self._on, self._kept
        if is_doubtful or before is None or kept < 0 or not self.custody.has(before):
            return Next.FROM_START
        try:
            self._take()
            self.custody.call(before, lambda: setattr(before.runner, "kv_length", kept))
        except Exception:  # noqa: BLE001 -- the next attempt meets it again, from the start
            return Next.FROM_START
        return Next.SAME_RUN

    def _take(self) -> Assembly:
        """Set the plan up to run in the present way."""
        assembly = self.custody.ready()
        if self._on is not assembly:
            self._alone.pop_all()  # of a plan that is no more
            self._on = assembly
        self.reasons |= set(self.custody.call(assembly, lambda: self._set_up(assembly)))
        return assembly

    def _set_up(self, assembly: Assembly) -> tuple[str, ...]:
        self._alone.close()
        if self._way.alone:
            self._alone.enter_context(assembly.alone())
        return assembly.begin(self._way)

    def end(self, seconds: float, *, failed: bool, is_whole: bool) -> tuple[str, ...]:
        """Count the answer; return why it is degraded.

        Args:
            seconds: That it took.
            failed: Whether a fault ended it.
            is_whole: Whether it came to its end.
        """
        if self._on is not None:
            try:
                self._leave(self._on, seconds, failed=failed, is_whole=is_whole)
            except Exception as error:
                log.exception("what an answer took could not be counted")
                self.faults.append(kind_of(error))
        reasons = degraded_by(self.reasons, self.faults, self._way, failed=failed)
        self.custody.counts.answered(self.faults, reasons, failed=failed or not is_whole)
        return reasons

    def _leave(self, on: Assembly, seconds: float, *, failed: bool, is_whole: bool) -> None:
        if not self.custody.has(on):
            self._alone.pop_all()
            return
        with self._alone:
            self.reasons |= set(on.ended(seconds).reasons)
        if FaultKind.BAD_INPUT not in self.faults:
            on.judged(failed=failed, latency_ms=seconds * _MS if is_whole else None)
