"""The seat of the running bundle: who answers now, swapped in one step.

Answering and updating are independent threads. A swap replaces the seat; the answer in progress
ends on the old bundle, which is closed after it. A native call that never returns keeps its old
seat for ever and nothing else: the new bundle answers on a new thread. The picture in view stays in
view: the first question without one after a swap is asked about the last one that was understood.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from device_agent.errors import NoBundleError
from device_agent.runtime.answers import Answerer, AnswerRecord, Question

log = logging.getLogger("device_agent.runtime")

CLOSE_WAIT_S: Final = 15.0


@dataclass(slots=True)
class _Seat:
    answerer: Answerer | None
    busy: threading.Lock = field(default_factory=threading.Lock)
    is_new: bool = True
    """Whether it was asked nothing yet, so that it has no picture in view."""


class SessionHost:
    """Holds the running bundle; safe for any number of threads."""

    def __init__(self, close_wait_s: float = CLOSE_WAIT_S) -> None:
        self._seat = _Seat(None)
        self._close_wait_s = close_wait_s
        self._view = b""

    @property
    def seat(self) -> object:
        """Return what stays the same until the next swap."""
        return self._seat

    @property
    def manifest_sha256(self) -> str:
        """Return the running bundle, or an empty string."""
        answerer = self._seat.answerer
        return "" if answerer is None else answerer.manifest_sha256

    @property
    def facts(self) -> Mapping[str, object]:
        """Return what `status` shows of the running code; nothing if none runs."""
        return self.running()[1]

    def running(self) -> tuple[str, Mapping[str, object]]:
        """Return the running bundle, or an empty string, and what is known of its code."""
        answerer = self._seat.answerer
        return ("", {}) if answerer is None else (answerer.manifest_sha256, answerer.facts)

    def understands(self, question: Question) -> bool:
        """Return whether the running bundle can be asked this."""
        answerer = self._seat.answerer
        return answerer is not None and answerer.understands(question)

    def answer(self, question: Question) -> AnswerRecord:
        """Answer with the bundle that runs now.

        Raises:
            NoBundleError: None runs.
        """
        while True:
            seat = self._seat
            with seat.busy:
                if seat is not self._seat:
                    continue  # swapped while waiting
                if seat.answerer is None:
                    raise NoBundleError("no bundle is installed yet")
                return seat.answerer.answer(self._in_view(seat, seat.answerer, question))

    def _in_view(self, seat: _Seat, answerer: Answerer, question: Question) -> Question:
        """Return the question with the picture that it is about, where the bundle may not know."""
        if not answerer.understands(question):
            return question
        shown = replace(question, image=question.image or self._view)
        if not seat.is_new or not answerer.understands(shown):
            shown = question
        seat.is_new = False
        self._view = shown.image or self._view
        return shown

    def swap(self, answerer: Answerer | None) -> None:
        """Make `answerer` the running bundle and close the one before after its last answer."""
        old, self._seat = self._seat, _Seat(answerer)
        if old.answerer is None:
            return
        if not old.busy.acquire(timeout=self._close_wait_s):
            log.warning("an answer of the old bundle does not end; its memory is given up")
            return
        try:
            old.answerer.close()
        finally:
            old.busy.release()
