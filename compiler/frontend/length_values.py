"""Values that follow from the run-time lengths alone and mean something to the passes.

Real decoders compute their causal mask and their positions from an attention mask and the sizes of
the cache: with the mask known to be all ones, both are shape arithmetic, known under every binding
of the lengths and different for each. `FunctionBuilder` asks here before it refuses such a value:
one that is exactly the causal mask, or exactly `P, P + 1, ...`, becomes an argument of that role,
as if the exporter had made it an input.
"""

from typing import Final

import numpy as np

from compiler.analysis.causal import is_causal_plane
from compiler.dialects.dims import Binding
from compiler.frontend.values import Array, Known, Value

TOKENS: Final = "T"
PAST: Final = "P"
CAUSAL_MASK: Final = "causal_mask"
POSITIONS: Final = "positions"


def length_role(family: tuple[Value, ...], bindings: tuple[Binding, ...]) -> str | None:
    """Return the role of the argument that a value is, or None if it means nothing to us.

    Args:
        family: The value under every binding.
        bindings: Tokens of a call `T` and rows of the cache `P`.
    """
    if not all(TOKENS in b and PAST in b for b in bindings):
        return None
    pairs = list(zip(family, bindings, strict=True))
    for role, is_it in ((POSITIONS, _is_positions), (CAUSAL_MASK, is_causal_plane)):
        if all(isinstance(v, Known) and is_it(v.array, b[TOKENS], b[PAST]) for v, b in pairs):
            return role
    return None


def attention_mask(binding: Binding, dtype: str) -> Array:
    """Return the mask that hides nothing: (1, P + T) ones."""
    return np.ones((1, binding[PAST] + binding[TOKENS]), dtype)


def _is_positions(array: Array, tokens: int, past: int) -> bool:
    if array.dtype.kind != "i" or array.shape not in ((tokens,), (1, tokens)):
        return False
    return bool((array.reshape(-1) == past + np.arange(tokens)).all())
