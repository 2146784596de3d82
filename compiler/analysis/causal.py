"""What a causal mask looks like as numbers that are added to scores."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BLOCKED: Final = -1e4
"""A score lowered by at least this much has no weight after a softmax."""


def is_causal_plane(array: NDArray[Any], rows: int, past: int) -> bool:
    """Return whether a mask hides from row i exactly the keys behind `past + i`.

    Args:
        array: (..., rows, past + rows) floats, all leading axes of size 1.
        rows: Queries of a call.
        past: Keys in front of them.
    """
    shape = (rows, past + rows)
    if array.dtype.kind != "f" or array.shape[-2:] != shape or array.size != rows * shape[1]:
        return False
    allowed = np.arange(shape[1]) <= past + np.arange(rows)[:, None]
    plane = array.reshape(shape)
    return bool((plane[allowed] == 0.0).all() and (plane[~allowed] <= BLOCKED).all())
