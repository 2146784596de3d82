"""Weights that adapters were merged into: what they were before, and what was added.

    W' = W + left @ right        left (N, rank), right (rank, K), f32, scales included

`compiler.passes.merge_adapters` makes them, groups of linear layers stack them, and
`compiler.quant` replays them on the codes of a base. Nothing of this reaches a plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """One merged weight.

    Attributes:
        base: (N, K) f32, before any adapter.
        left: (N, rank) f32.
        right: (rank, K) f32.
    """

    base: np.ndarray
    left: np.ndarray
    right: np.ndarray

    @classmethod
    def nothing(cls, weight: np.ndarray) -> "Merged":
        """Return a weight with nothing added: rank 0."""
        rows, cols = weight.shape
        return cls(weight, np.zeros((rows, 0), np.float32), np.zeros((0, cols), np.float32))

    def plus(self, left: np.ndarray, right: np.ndarray) -> "Merged":
        """Return the weight with one more adapter."""
        return Merged(self.base, np.hstack((self.left, left)), np.vstack((self.right, right)))

    def values(self) -> Floats:
        """Return W', (N, K) f32, rounded once."""
        total = self.base.astype(np.float64)
        for column, row in zip(self.left.T, self.right, strict=True):  # the same on every machine
            total += np.outer(column.astype(np.float64), row)
        return total.astype(np.float32)


def stacked(parts: Sequence[Merged]) -> Merged:
    """Return layers of one input as one: rows after rows, ranks beside ranks."""
    ranks = [part.left.shape[1] for part in parts]
    left = np.zeros((sum(len(part.left) for part in parts), sum(ranks)), np.float32)
    row = rank = 0
    for part, own in zip(parts, ranks, strict=True):
        left[row : row + len(part.left), rank : rank + own] = part.left
        row, rank = row + len(part.left), rank + own
    base = np.concatenate([part.base for part in parts])
    return Merged(base, left, np.concatenate([part.right for part in parts]))
