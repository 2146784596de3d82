"""Replay a recorded routing trace under steering coefficients and a cache of experts.

    logits of every routed row -> what would be chosen while these experts are inside -> misses

The choice is that of `compiler.contract.steering` in f64; what a steered layer changes in those
behind it is not replayed, so answers are judged by running the plan. Called by the search of
coefficients and by benchmarks. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.analysis.expert_cache import ExpertCache
from compiler.contract.steering import SPREAD_RATE, Steering

Array = NDArray[Any]
PROTECTED: Final = 1e12
"""Above every logit: what the best of a row count with, less one from each to the next."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerTrace:
    """What one router computed, row by row, in order.

    Attributes:
        logits: (R, E) f64, what experts are chosen by.
        run: (R,) number of the program run that a row belongs to, ascending.
        k: Experts per row.
    """

    logits: Array
    run: Array
    k: int

    @property
    def experts(self) -> int:
        """How many experts the layer has."""
        return int(self.logits.shape[1])


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay came to.

    Attributes:
        uses, misses: Distinct experts that the layers of the runs used, and those to be loaded.
        rows, chosen: Rows routed, and experts they took.
        moved: Share of the gates' mass that the router itself would have given to experts that
            were not taken.
    """

    uses: int
    misses: int
    rows: int
    chosen: int
    moved: float

    @property
    def mean_k(self) -> float:
        """Experts per routed row."""
        return self.chosen / max(1, self.rows)


def replay(layers: Sequence[LayerTrace], steering: Steering, cache: ExpertCache) -> Replayed:
    """Return what a trace would have used and loaded.

    Args:
        layers: The routers, in the order in which a run comes to them.
        steering: Its coefficients; bias and `may_load` are not replayed.
        cache: Empty; experts are known to it by number, counted over the layers.
    """
    spreads = [_mean_spreads(layer.logits) for layer in layers]
    firsts = np.cumsum([0, *(layer.experts for layer in layers)])
    rows = chosen = 0
    moved = 0.0
    for run in np.unique(np.concatenate([layer.run for layer in layers])):
        for number, layer in enumerate(layers):
            from_row, to = np.searchsorted(layer.run, [run, run + 1])
            if from_row == to:
                continue
            first = int(firsts[number])
            absent = np.array([first + at not in cache for at in range(layer.experts)])
            taken = choose(
                layer.logits[from_row:to], layer.k, steering, spreads[number][from_row:to], absent
            )
            rows, chosen = rows + len(taken), chosen + int(taken.sum())
            moved += float(_moved(layer.logits[from_row:to], layer.k, taken).sum())
            for expert in np.flatnonzero(taken.any(axis=0)):
                cache.use(first + int(expert), number, int(run))
    return Replayed(cache.uses, cache.misses, rows, chosen, moved / max(1, rows))


def choose(
    logits: Array, k: int, steering: Steering, spreads: Array, absent: Array
) -> NDArray[np.bool_]:
    """Return (R, E) which experts rows take.

    Args:
        logits: (R, E).
        k: What the router takes.
        steering: Pull, protection, margin and most experts.
        spreads: (R,) mean spread of the router as of each row.
        absent: (E,) what is not in memory.
    """
    order = np.argsort(-logits, axis=1, kind="stable")
    key = logits.copy()
    if absent.any() and not absent.all():
        key -= steering.pull * spreads[:, None] * absent
    best = order[:, : steering.protect]
    np.put_along_axis(key, best, PROTECTED - np.arange(best.shape[1]), axis=1)
    picked = np.argsort(-key, axis=1, kind="stable")[:, :k]
    most = min(k, steering.max_k or k)
    wide = np.full(len(logits), most)
    if most > 1:
        gates = _gates(logits, order[:, :k])
        wide[gates[:, 0] - gates[:, 1] > steering.margin] = 1
    taken = np.zeros(logits.shape, bool)
    np.put_along_axis(taken, picked, np.arange(k) < wide[:, None], axis=1)
    return taken


def _gates(logits: Array, index: Array) -> Array:
    """Return (R, k) softmax over what was chosen."""
    terms = np.take_along_axis(logits, index, axis=1)
    terms = np.exp(terms - terms.max(axis=1, keepdims=True))
    return np.asarray(terms / terms.sum(axis=1, keepdims=True))


def _moved(logits: Array, k: int, taken: Array) -> Array:
    """Return (R,) share of the unsteered gates whose experts are not taken."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    kept = np.take_along_axis(taken, order, axis=1)
    return np.asarray((_gates(logits, order) * ~kept).sum(axis=1))


def _mean_spreads(logits: Array) -> Array:
    """Return (R,) exponential means of the rows' spreads."""
    spreads = logits.max(axis=1) - logits.min(axis=1)
    means = np.empty_like(spreads)
    mean = spreads[0] if len(spreads) else 0.0
    for at, spread in enumerate(spreads):
        mean = mean + (spread - mean) * SPREAD_RATE
        means[at] = mean
    return np.asarray(means)
