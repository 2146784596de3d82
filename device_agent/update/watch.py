"""Whether an update is still wanted, asked while it is being fetched."""

import random
from collections.abc import Callable
from typing import Final

from compiler.contract.protocol import PollAnswer
from device_agent.clock import Clock
from device_agent.errors import AgentError, CancelledError
from device_agent.update.context import UpdateContext

FIRST_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 60.0
Poll = Callable[[], PollAnswer]


class OfferWatch:
    """Polls when it is time to, and stops the update when the answer no longer shows it.

    A server that cannot be reached changes nothing: the transfer itself will tell.
    """

    def __init__(self, poll: Poll, interval_s: Callable[[PollAnswer], float], clock: Clock) -> None:
        self._poll = poll
        self._interval_s = interval_s
        self._clock = clock
        self._next = 0.0

    def answered(self, answer: PollAnswer) -> None:
        """Note that somebody has just polled."""
        self._next = self._clock.monotonic() + self._interval_s(answer)

    def failed(self, times: int) -> None:
        """Note that the server could not be asked for the `times`-th time in a row."""
        wait = min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(times - 1, 16))
        self._next = self._clock.monotonic() + wait * random.uniform(0.5, 1.0)  # noqa: S311

    def wait_s(self) -> float:
        """Return how long it is until the next poll, seconds."""
        return max(0.0, self._next - self._clock.monotonic())

    def due(self) -> bool:
        """Return whether it is time to poll."""
        return self._clock.monotonic() >= self._next

    def require_wanted(self, context: UpdateContext) -> None:
        """Poll if it is time.

        Raises:
            CancelledError: The server shows no offer, or another one.
        """
        self._clock.sleep(0.0)  # where an agent that shall stop leaves a transfer
        if self.due():
            self.require_wanted_now(context)

    def require_wanted_now(self, context: UpdateContext) -> None:
        """Poll at once: the last chance before the new bundle runs.

        Raises:
            CancelledError: The server shows no offer, or another one.
        """
        try:
            answer = self._poll()
        except AgentError as error:
            if not error.retryable:
                raise
            self.failed(1)
            return
        self.answered(answer)
        if answer.offer is None or not context.is_for(answer.offer):
            raise CancelledError("the server does not offer the update any more")
