"""Caches of experts of equal size, as rules without memory behind them.

    use(key, layer, step) -> whether it had to be loaded; `present` says what is inside

`Lru` is the baseline. `LeastStale` is the order of a device's expert pool but for its heat: first
goes what nobody used for `GRACE_STEPS` passes, then what the passes before this one used and whose
layer this one is through with, then what this one still comes to, last what it used itself; within
these what is needed again last. Called by the search of steering coefficients and by benchmarks;
pure.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final

GRACE_STEPS: Final = 2
"""Passes that an expert stays after its last use before it counts as stale."""


@dataclass(slots=True)
class _Entry:
    layer: int
    step: int
    clock: int


class ExpertCache(ABC):
    """At most `capacity` experts, by key."""

    name: ClassVar[str]

    def __init__(self, capacity: int, layers: int = 1) -> None:
        """Begin empty.

        Args:
            capacity: Experts that fit.
            layers: Layers of a pass.

        Raises:
            ValueError: There is no room for one expert.
        """
        if capacity < 1:
            raise ValueError(f"a cache of {capacity} experts")
        self._capacity, self._layers = capacity, layers
        self._entries: dict[int, _Entry] = {}
        self._clock = 0
        self.uses = self.misses = 0
        self.evicted: int | None = None

    def __contains__(self, key: int) -> bool:
        """Return whether an expert is inside."""
        return key in self._entries

    def use(self, key: int, layer: int, step: int) -> bool:
        """Use an expert; return whether it had to be loaded, `evicted` says what went for it."""
        self._clock += 1
        self.uses += 1
        self.evicted = None
        is_missing = key not in self._entries
        if is_missing:
            self.misses += 1
            if len(self._entries) >= self._capacity:
                self.evicted = min(
                    self._entries, key=lambda k: self._worth(self._entries[k], layer, step)
                )
                del self._entries[self.evicted]
        self._entries[key] = _Entry(layer, step, self._clock)
        return is_missing

    @abstractmethod
    def _worth(self, entry: _Entry, layer: int, step: int) -> tuple[int, ...]:
        """Return what an entry is worth while `layer` of pass `step` runs; the least goes."""


class Lru(ExpertCache):
    """What was used longest ago goes."""

    name = "LRU"

    def _worth(self, entry: _Entry, layer: int, step: int) -> tuple[int, ...]:  # noqa: ARG002
        return (entry.clock,)


class LeastStale(ExpertCache):
    """What a pass left behind goes before what the present one needs next."""

    name = "Least-Stale"

    def _worth(self, entry: _Entry, layer: int, step: int) -> tuple[int, ...]:
        age, is_over = step - entry.step, entry.layer < layer
        ahead = (entry.layer - layer) % self._layers
        rank = 0 if age > GRACE_STEPS else 3 if not age else 1 if is_over else 2
        return (rank, -ahead, entry.clock)


CACHES: Final = (Lru, LeastStale)
