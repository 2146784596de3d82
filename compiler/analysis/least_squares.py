"""Least squares whose solution is not negative; the cost model fits its coefficients with it."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_MOST_PASSES: Final = 50


def nonnegative_least_squares(a: Array, b: Array) -> Array:
    """Return x >= 0 that minimises |a x - b|, by active sets; columns are scaled first."""
    scale = np.maximum(np.abs(a).max(axis=0), 1e-30)
    scaled = a / scale
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], bool)
    for _ in range(_MOST_PASSES):
        gradient = scaled.T @ (b - scaled @ x)
        if free.all() or gradient[~free].max() <= 1e-10:
            break
        free[np.argmax(np.where(free, -np.inf, gradient))] = True
        while True:
            step = np.zeros_like(x)
            step[free] = np.linalg.lstsq(scaled[:, free], b, rcond=None)[0]
            falling = free & (step <= 0)
            if not falling.any():
                x = step
                break
            share = (x[falling] / np.maximum(x[falling] - step[falling], 1e-300)).min()
            x = x + share * (step - x)
            free &= x > 1e-15
            x[~free] = 0.0
    return np.asarray(x / scale)
