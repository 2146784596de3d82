"""Matrix products on the calling thread.

Waking BLAS's other threads costs more than the compiler's small products take, many times more on
a busy machine.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]

MOST_PRODUCTS: Final = 1 << 18
"""Multiplications that BLAS does without its other threads."""


def small_products(x: Floats, weight: Floats) -> Floats:
    """Return x (R, K) @ weight (K, N), in pieces that BLAS does on the calling thread."""
    rows = len(x)
    at_once = max(2, MOST_PRODUCTS // max(1, weight.size))
    if rows == 1:
        x = np.repeat(x, 2, axis=0)
    return np.concatenate([x[at : at + at_once] @ weight for at in range(0, len(x), at_once)])[
        :rows
    ]
