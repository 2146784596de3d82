"""How many groups of 32 columns hold anything but zeros, in all rows of one run together.

A check of a LINEAR call looks at all its rows at once (`compiler.quant.checks`), so rows one by one
say too little: each may leave out another group. The recorder feeds this; nothing else does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.operations import Op
from compiler.contract.tiles import GROUP
from compiler.kernels.program import Call, Module

_A8: Final = 127.0
Key = tuple[int, int]
"""A weight, and the rows of the calls that read it; 0 rows if a run decides how many."""


@dataclass(frozen=True, slots=True, eq=False)
class LiveGroups:
    """What runs of the calls of one kind left alive.

    Attributes:
        weight: Id of the W4 weight (N, K).
        rows: Rows of the calls that read it, 0 if each run decides.
        runs: (G + 1,) i64, runs with so many of the G groups live.
    """

    weight: int
    rows: int
    runs: NDArray[np.int64]

    def held_ratio(self, most: int) -> float:
        """Return the share of runs with at most so many live groups."""
        return float(self.runs[: most + 1].sum() / max(1, self.runs.sum()))


class LiveCounter:
    """Counts live groups call by call."""

    def __init__(self, module: Module) -> None:
        """Count for the LINEAR calls over four-bit weights of a module."""
        self._module = module
        self._counts: dict[Key, NDArray[np.int64]] = {}

    def add(self, call: Call, x: NDArray[Any], runs: NDArray[Any] | None) -> None:
        """Count a call that multiplied the real rows (R, K); `runs` says whose each row is."""
        key = key_of(self._module, call)
        if key is None or not len(x):
            return
        live = live_groups(quantised(x)[0])
        if runs is None:
            counts = [live.any(axis=0).sum()]
        else:
            counts = [live[runs == run].any(axis=0).sum() for run in np.unique(runs)]
        found = self._counts.setdefault(key, np.zeros(live.shape[1] + 1, np.int64))
        np.add.at(found, counts, 1)

    def finish(self) -> tuple[LiveGroups, ...]:
        """Return what was counted, in order of weights."""
        return tuple(LiveGroups(*key, self._counts[key]) for key in sorted(self._counts))


def key_of(module: Module, call: Call) -> Key | None:
    """Return under which key a call is counted, None if it is not."""
    if call.op is not Op.LINEAR or module.weights[call.weights[0]].kind != "w4":
        return None
    buffer = module.buffers[call.inputs[0]]
    return call.weights[0], 0 if buffer.dynamic else buffer.rows


def quantised(x: NDArray[Any]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return rows (R, K) in eight bits as a device quantises them, and a scale for each."""
    widest = np.abs(x).max(axis=1, initial=0.0)
    inverse = np.where(widest > 0, _A8 / np.where(widest > 0, widest, 1), 0.0)
    return np.rint(x * inverse[:, None]).astype(np.int8), (widest / _A8).astype(np.float32)


def live_groups(rows: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Return (R, G): whether a group of 32 columns of a row (R, K) holds anything but zeros."""
    padded = np.zeros((len(rows), -(-rows.shape[1] // GROUP) * GROUP), np.int8)
    padded[:, : rows.shape[1]] = rows
    return np.asarray(padded.reshape(len(rows), -1, GROUP).any(axis=2))


def by_key(found: tuple[LiveGroups, ...]) -> Mapping[Key, LiveGroups]:
    """Return counts by weight and rows."""
    return {(item.weight, item.rows): item for item in found}
