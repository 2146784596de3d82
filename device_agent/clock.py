"""The agent's clock as a port: calendar time for expiry, monotonic time for everything else."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Tells the time and waits."""

    def now(self) -> datetime:
        """Return calendar time, aware, in UTC. It may be wrong on a device without a battery."""

    def monotonic(self) -> float:
        """Return seconds since an unknown start; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        """Return calendar time, aware, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return seconds since an unknown start."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait `seconds`."""
        time.sleep(seconds)
