"""ROUTE under a steering record, row by row; see `compiler.contract.steering` for the equations.

Reductions, rounding and ties follow templates/steer.c.in. A `Steers` is what a context holds: the
record, the residency table, what routers remember and what was counted.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.contract.steering import NO_EXPERT, SPREAD_RATE, Counts, Residency, Steering
from compiler.simulator.numerics import Numerics

Array = NDArray[Any]
Rule = Callable[[Array], Array]
"""Returns gates (k,) of experts chosen (k,), best first, by the router's own rule."""


class Steers:
    """The steering of one simulator."""

    def __init__(self) -> None:
        self.record: Steering | None = None
        self.residency: Residency | None = None
        self.spreads: dict[int, Any] = {}
        self._counted: Counter[str] = Counter()

    @property
    def counts(self) -> Counts:
        """What was done so far."""
        return Counts(**self._counted)

    def apart(self) -> "Steers":
        """Return what steers alike and remembers apart: what it does leaves no trace here."""
        other = Steers()
        other.record, other.residency, other.spreads = self.record, self.residency, {**self.spreads}
        return other

    def count(self, **more: int) -> None:
        """Add to what was done."""
        self._counted.update(more)


class RouterSteering:
    """The steering of one call: its router's memory and its experts."""

    def __init__(
        self, steers: Steers, record: Steering, router: int, firsts: Sequence[int], n: Numerics
    ) -> None:
        self._steers, self._record, self._router, self._numerics = steers, record, router, n
        dtype = n.dtype
        self._pull, self._margin = dtype(np.float32(record.pull)), dtype(np.float32(record.margin))
        bias = [record.bias[first] for first in firsts] if record.bias else []
        self._bias = np.asarray(bias, np.float32).astype(dtype)
        self._modality = dtype(np.float32(record.modality))
        self._firsts = firsts

    def row(self, u: Array, score: Array, gone: Array | None, index: Array, rule: Rule) -> Array:
        """Return what one row chooses, -1 behind what is missing.

        Args:
            u: (E,) what the router chooses by, before a softmax.
            score: (E,) the same after it.
            gone: (E,) what lies outside its groups; None = nothing.
            index: (k,) the unsteered choice.
            rule: Gates of a choice.
        """
        table = self._steers.residency
        absent = np.array([table is not None and not table[first] for first in self._firsts])
        self._learn(u)
        key = self._key(u, absent)
        wanted = self._width(rule(index))
        picked, substituted = index, 0
        passes_over = absent.any() and not self._record.may_load
        if key is not None or wanted < len(index) or passes_over:
            chosen, substituted = self._pick(
                score, score if key is None else key, gone, absent, wanted
            )
            picked = np.array([e for e in _order(score) if e in chosen], np.int64)
        self._steers.count(
            rows=1,
            chosen=len(picked),
            narrowed=int(wanted < len(index)),
            substituted=substituted,
            missing=max(0, wanted - len(picked)),
        )
        return np.append(picked, np.full(len(index) - len(picked), NO_EXPERT))

    def _learn(self, u: Array) -> None:
        low = top = u[0]
        for value in u:
            low, top = min(low, value), max(top, value)
        spread, before = top - low, self._steers.spreads.get(self._router)
        if spread < np.inf:
            rate = self._numerics.dtype(SPREAD_RATE)
            mean = spread if before is None else before + (spread - before) * rate
            self._steers.spreads[self._router] = mean

    def _key(self, u: Array, absent: Array) -> Array | None:
        spread = self._steers.spreads.get(self._router, self._numerics.dtype(0))
        pull = self._pull * spread if absent.any() and not absent.all() else 0
        leans = len(self._bias) and self._modality
        if not pull > 0 and not leans:
            return None
        key = np.where(absent, u - pull, u) if pull > 0 else u
        return key + self._modality * self._bias if leans else key

    def _width(self, gates: Array) -> int:
        k = len(gates)
        most = min(k, self._record.max_k or k)
        total = self._numerics.dtype(0)
        for gate in gates:
            total = total + gate
        return 1 if most > 1 and gates[0] - gates[1] > self._margin * total else most

    def _pick(
        self, score: Array, key: Array, gone: Array | None, absent: Array, wanted: int
    ) -> tuple[set[int], int]:
        is_open = np.ones(len(score), bool) if gone is None else ~gone
        by_score, by_key = _order(score), _order(key)
        picked: set[int] = set()
        substituted = tried = 0
        while len(picked) < wanted and is_open.any():
            order = by_score if tried < self._record.protect else by_key
            expert = next(e for e in order if is_open[e])
            is_open[expert] = False
            if absent[expert] and not self._record.may_load:
                substituted += tried < wanted
            else:
                picked.add(expert)
            tried += 1
        return picked, substituted


def _order(values: Array) -> list[int]:
    """Return positions, best first; ties to the lower, NaN last."""
    return [int(at) for at in np.argsort(-values, kind="stable")]
