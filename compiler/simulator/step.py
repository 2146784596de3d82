"""One call with its operands resolved, and what several operations compute alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.contract.native_errors import ContextFullError, ContextLostError
from compiler.simulator.numerics import Numerics
from compiler.simulator.pages import Pages
from compiler.simulator.steering import Steers

Array = NDArray[Any]
Results = tuple[Array, ...]


@dataclass(slots=True)
class Cache:
    """Keys and values per layer (capacity, heads * head_dim), and how many rows are valid.

    Attributes:
        key_scales, value_scales: Per layer (capacity, heads): `keys` and `values` are codes, to be
            multiplied by these; None where they are the numbers themselves.
        window, sink: What all cached attentions see, see `Op.ATTENTION`; window 0 = everything.
        high: End of the highest row written that may have taken an older one's slot.
    """

    keys: Array
    values: Array
    length: int = 0
    window: int = 0
    sink: int = 0
    high: int = 0
    key_scales: Array | None = None
    value_scales: Array | None = None

    def reserve(self, rows: int) -> None:
        """Note that `rows` rows will be appended.

        Raises:
            ContextFullError: They do not fit; a windowed cache never fills.
        """
        if not self.window and self.length + rows > self.keys.shape[1]:
            raise ContextFullError(f"{self.length} rows and {rows} more do not fit")
        self.high = max(self.high, self.length + rows)

    def copy(self) -> "Cache":
        """Return a cache with the same rows."""
        used = max(self.length, self.high)
        parts = (self.keys, self.values, self.key_scales, self.value_scales)
        keys, values, *scales = (_first_rows(part, used) for part in parts)
        assert keys is not None
        assert values is not None
        return replace(self, keys=keys, values=values, key_scales=scales[0], value_scales=scales[1])

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on.

        Raises:
            ContextLostError: The window would show rows again that were overwritten.
        """
        capacity = self.keys.shape[1]
        shown = max(self.sink, length - self.window) if length > self.sink else self.high
        oldest = self.high - (capacity - self.sink)
        if self.window and self.high > capacity and shown < oldest:
            raise ContextLostError(f"rows before row {length} were overwritten")
        if length <= self.sink or self.high <= capacity:
            self.high = length
        self.length = length


def _first_rows(part: Array | None, used: int) -> Array | None:
    """Return a copy of the first `used` rows per layer, zeros behind them."""
    if part is None:
        return None
    copy = np.zeros(part.shape, part.dtype)
    copy[:, :used] = part[:, :used]
    return copy


def _forget(held: bool) -> None:
    """Note nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call, its operands resolved.

    Attributes:
        inputs: Operand arrays (R, C), None where absent.
        weights: Constant arrays as (rows, cols) in the arithmetic's dtype; None where absent.
        weight_ids: Their numbers, for `Numerics.linear`.
        cache: The key/value cache, if the module has one.
        sizes: Elements of each result.
        pages: Which experts are in memory.
        ran: Receives the numbers of the w_in weights of experts that ran.
        checked: Is told whether the call's run-time check held.
        steers: What routers are steered by; without a record nothing.
        mixes: First weights of the experts that this call's router chooses; None = not steered.
    """

    numerics: Numerics
    inputs: tuple[Array | None, ...]
    weights: tuple[Array | None, ...]
    weight_ids: tuple[int, ...]
    params: Mapping[str, int | float]
    cache: Cache | None = None
    sizes: tuple[int, ...] = ()
    ran: set[int] = field(default_factory=set)
    pages: Pages = field(default_factory=Pages)
    checked: Callable[[bool], None] = _forget
    steers: Steers = field(default_factory=Steers)
    mixes: tuple[int, ...] | None = None

    def source(self, at: int) -> Array:
        """Return a present operand."""
        found = self.inputs[at]
        if found is None:
            raise ValueError(f"operand {at} is absent")
        return found

    def constant(self, at: int) -> Array:
        """Return a present constant."""
        found = self.weights[at]
        if found is None:
            raise ValueError(f"constant {at} is absent")
        return found

    def maybe_source(self, at: int) -> Array | None:
        """Return an operand or None."""
        return self.inputs[at] if at < len(self.inputs) else None

    def maybe_constant(self, at: int) -> Array | None:
        """Return a constant or None."""
        return self.weights[at] if at < len(self.weights) else None

    def number(self, name: str) -> int:
        """Return an integer parameter."""
        return int(self.params[name])

    def real(self, name: str) -> Any:  # noqa: ANN401 - a numpy scalar of the arithmetic
        """Return a float parameter as it is stored (f32), in the arithmetic's dtype."""
        return self.numerics.dtype(np.float32(self.params[name]))


def softmax_terms(s: Step, scores: Array) -> tuple[Array, Array]:
    """Return e^(x - max) and its sums (..., 1) over the last axis."""
    terms = s.numerics.exp(scores - scores.max(axis=-1, keepdims=True))
    return terms, s.numerics.total(terms)[..., None]


def best(scores: Array, k: int, gone: Array | None = None) -> Array:
    """Return the positions of the k best along the last axis; ties to the lower, NaN last.

    What is `gone` (flags of the shape of the scores) comes even after NaN.
    """
    if gone is None:
        order: Array = np.argsort(-scores, axis=-1, kind="stable")
    else:
        order = np.lexsort((-scores, gone), axis=-1)
    return order[..., :k]


def taken(index: Array, limit: int, error: type[Exception], what: str) -> Array:
    """Return the only column of `index` after checking that it lies in [0, limit)."""
    rows = index[:, 0]
    if ((rows < 0) | (rows >= limit)).any():
        raise error(f"a {what} is outside [0, {limit})")
    return rows
