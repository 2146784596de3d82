"""The server's clock as a port, so that decisions can be tested at any time of day."""

from datetime import datetime
from typing import Protocol

from django.utils import timezone


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> datetime:
        """Return the current time, aware, in UTC."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        """Return the current time, aware, in UTC."""
        return timezone.now()
