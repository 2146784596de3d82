"""What degrade rules look at beside the sensors: how long answers take, what the expert pool says.

`DegradeKeeper` asks. A pool hands in an `Observation` of its own (`PoolSignals`); where there is
none its signals are unknown, so rules about them neither take effect nor let go.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from device_agent.runtime.degrade import Observation

WINDOW_S: Final = 60.0
LEAST_ANSWERS: Final = 20
"""A p99 of fewer answers says nothing."""
MAX_ANSWERS: Final = 4_096
_RANK: Final = 0.99

PoolSignals = Callable[[], Observation]
"""Gauges `fragmentation` and `expert_misses` in percent, counter `stalls` with those of its total
that degrading caused."""


def no_pool() -> Observation:
    """Return what is known of a pool that is not there."""
    return Observation()


class LatencyWindow:
    """Latencies of the answers of the last minute; of those that timed out, the time they took."""

    def __init__(self) -> None:
        """Know none."""
        self._seen: deque[tuple[float, float]] = deque(maxlen=MAX_ANSWERS)

    def add(self, at: float, latency_ms: float) -> None:
        """Take in an answer that ended at `at`, monotonic seconds."""
        self._seen.append((at, latency_ms))

    def p99(self, now: float) -> float | None:
        """Return the nearest-rank p99, milliseconds; None for fewer than `LEAST_ANSWERS`."""
        while self._seen and now - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        if len(self._seen) < LEAST_ANSWERS:
            return None
        latencies = sorted(latency_ms for _, latency_ms in self._seen)
        return latencies[min(len(latencies) - 1, int(_RANK * len(latencies)))]
