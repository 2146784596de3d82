"""How often one address may ask: a bucket that refills, one per address, kept in the process.

Several processes allow several times as much; the limit keeps strangers from costing anything, and
is no promise to anybody.
"""

import threading
from collections import OrderedDict
from typing import Final

MAX_ADDRESSES: Final = 10_000


class Rates:
    """Buckets of `per_minute` requests; the addresses that asked longest ago are forgotten."""

    def __init__(self, per_minute: float) -> None:
        self._size = per_minute
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def allows(self, address: str, now: float) -> bool:
        """Take one request out of the bucket of an address; whether there was one.

        Args:
            address: Who asks.
            now: Seconds of a clock that never goes back.
        """
        with self._lock:
            left, at = self._buckets.pop(address, (self._size, now))
            left = min(self._size, left + (now - at) * self._size / 60.0)
            allowed = left >= 1.0
            self._buckets[address] = (left - allowed, now)
            if len(self._buckets) > MAX_ADDRESSES:
                self._buckets.popitem(last=False)
            return allowed
