"""What removing columns of a matrix does to its product, measured on calibration rows.

For a matrix W (N, K), rows x it was multiplied with, and a set S of columns:

    E(S) = mean over x of |sum over j in S of W_j (x_j - m_j)|^2  /  mean over x of |W x|^2

with m the mean of x if a bias can make up for it, else 0: the relative squared error of the output.
For one column it is |W_j|^2 Var(x_j), the fluctuation metric of FLAP (An et al. 2024,
arXiv:2312.11983), without the bias |W_j|^2 E[x_j^2], Wanda's weight times activation norm squared
(Sun et al. 2024, arXiv:2306.11695), summed over outputs. For sets it counts how columns cancel; the
order is greedy, the column that adds least goes next, as in ThiNet (Luo et al. 2017,
arXiv:1707.06342). With G = C * (W^T W), elementwise, C the second moments of x (about m), E(S) is
the sum of G over S x S.

Called by `compiler.driver.choose_removal`. Pure. The same rows give the same order; ties go to the
lower column.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Index = NDArray[np.int64]
MAX_JOINT_COLUMNS: Final = 2048
"""Above it cancelling is not counted: the matrix of all pairs would not fit."""


@dataclass(frozen=True, slots=True, eq=False)
class RemovalOrder:
    """In which order the units of one matrix go.

    Attributes:
        units: (U,) numbers of units, the least important first.
        error: (U + 1,) E of the first n units, n = 0 .. U; relative to the energy of the output.
        energy: Mean squared norm of the output over the rows, 0 if nothing was seen.
        mean: (K,) m, all zero if no bias makes up for it.
    """

    units: Index
    error: NDArray[np.float64]
    energy: float
    mean: NDArray[np.float64]


def removal_order(weight: Floats, rows: Floats, width: int, *, has_bias: bool) -> RemovalOrder:
    """Return the greedy order of the units of a matrix.

    Args:
        weight: (N, K).
        rows: (R, K) what it was multiplied with; with R = 0 columns go by their norm alone.
        width: Columns of a unit; K is a multiple of it.
        has_bias: Whether a bias makes up for the mean of what goes.
    """
    w, x = weight.astype(np.float64), rows.astype(np.float64)
    if not len(x):
        norms = np.square(w).sum(axis=0).reshape(-1, width).sum(axis=1)
        order = np.argsort(norms, kind="stable")
        return RemovalOrder(order, np.zeros(len(order) + 1), 0.0, np.zeros(w.shape[1]))
    mean = x.mean(axis=0) if has_bias else np.zeros(w.shape[1])
    energy = float(np.square(x @ w.T).sum(axis=1).mean())
    order, error = _greedy(_gram(w, x - mean, width))
    scale = energy if energy > 0 else 1.0
    return RemovalOrder(order, error / scale, energy, mean)


def _gram(w: Floats, x: Floats, width: int) -> Floats:
    """Return G summed over the columns of units (U, U); only its diagonal if K is large."""
    units = w.shape[1] // width
    if w.shape[1] > MAX_JOINT_COLUMNS:
        parts = zip(np.split(w, units, axis=1), np.split(x, units, axis=1), strict=True)
        return np.diag([float(np.square(b @ a.T).sum(axis=1).mean()) for a, b in parts])
    full = (x.T @ x / len(x)) * (w.T @ w)
    return np.asarray(full.reshape(units, width, units, width).sum(axis=(1, 3)))


def _greedy(gram: Floats) -> tuple[Index, NDArray[np.float64]]:
    """Return units in the order in which each adds least to the sum of G over the chosen ones."""
    added = gram.diagonal().astype(np.float64).copy()
    left = np.ones(len(added), np.bool_)
    order, error = [], [0.0]
    for _ in range(len(added)):
        unit = int(np.argmin(np.where(left, added, np.inf)))
        order.append(unit)
        error.append(max(error[-1] + float(added[unit]), 0.0))
        left[unit] = False
        added = added + 2 * gram[:, unit]
    return np.array(order, np.int64), np.array(error)
