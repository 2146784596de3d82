"""Intervals of i32 values, and what each elementwise integer function does to them.

Arithmetic of a plan wraps at 32 bits, so a result that could leave i32 is `FULL`, never clipped.
Called by `compiler.kernels.index_bounds`; a function without a row gives `FULL`.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from types import MappingProxyType
from typing import Final, NamedTuple

from compiler.contract.reference import MapKind

I32_LOW: Final = -(1 << 31)
I32_HIGH: Final = (1 << 31) - 1


class Interval(NamedTuple):
    """The integers from `low` to `high`, both included."""

    low: int
    high: int

    @property
    def is_full(self) -> bool:
        """Whether nothing is known."""
        return self.low <= I32_LOW and self.high >= I32_HIGH

    def inside(self, other: "Interval") -> bool:
        """Return whether every element of this interval is one of `other`."""
        return other.low <= self.low and self.high <= other.high


FULL: Final = Interval(I32_LOW, I32_HIGH)
TRUTH: Final = Interval(0, 1)


def hull(parts: Iterable[Interval]) -> Interval:
    """Return the least interval around all parts, at least one."""
    known = list(parts)
    return Interval(min(part.low for part in known), max(part.high for part in known))


def wrapped(values: Iterable[int]) -> Interval:
    """Return the interval around exact values, `FULL` if one of them would wrap."""
    known = list(values)
    around = Interval(min(known), max(known))
    return around if around.inside(FULL) else FULL


Rule = Callable[..., Interval]


def _corners(function: Callable[[int, int], int]) -> Rule:
    """A function of two values that is monotone in each: its extremes lie at the corners."""
    return lambda a, b: wrapped(function(x, y) for x, y in product(a, b))


def _quotient(x: int, y: int) -> int:
    """Return x / y towards zero, exactly."""
    return x // y if (x < 0) == (y < 0) else -(-x // y)


def _divide(a: Interval, b: Interval) -> Interval:
    return _corners(_quotient)(a, b) if b.low > 0 else FULL


def _modulo(a: Interval, b: Interval) -> Interval:
    """The result has the sign of the divisor."""
    if b.low <= 0:
        return FULL
    high = b.high - 1
    return Interval(0, min(high, a.high) if a.low >= 0 else high)


def _remainder(a: Interval, b: Interval) -> Interval:
    """The result has the sign of the dividend."""
    if b.low <= 0:
        return FULL
    most = b.high - 1
    return Interval(max(-most, min(a.low, 0)), min(most, max(a.high, 0)))


def _and(a: Interval, b: Interval) -> Interval:
    ends = [part.high for part in (a, b) if part.low >= 0]
    return Interval(0, min(ends)) if ends else FULL


def _bits(a: Interval, b: Interval) -> Interval:
    """OR and XOR of values that are not negative set no bit above the highest of both."""
    if min(a.low, b.low) < 0:
        return FULL
    return Interval(0, (1 << max(a.high, b.high).bit_length()) - 1)


def _abs(a: Interval) -> Interval:
    low = 0 if a.low <= 0 <= a.high else min(abs(a.low), abs(a.high))
    return wrapped((low, abs(a.low), abs(a.high)))


def _clip(a: Interval, b: Interval, c: Interval) -> Interval:
    return Interval(min(max(a.low, b.low), c.low), min(max(a.high, b.high), c.high))


def _within(low: int, high: int) -> Rule:
    return lambda *_: Interval(low, high)


_K: Final = MapKind
_TRUTHS: Final = (
    *(_K.EQUAL, _K.LESS, _K.LESS_EQUAL, _K.IS_NAN, _K.IS_INF, _K.NOT_I, _K.EQUAL_I, _K.LESS_I),
    *(_K.LESS_EQUAL_I, _K.TO_BOOL, _K.TO_BOOL_I),
)
MAP_INTERVALS: Final[Mapping[MapKind, Rule]] = MappingProxyType(
    {
        **dict.fromkeys(_TRUTHS, _within(*TRUTH)),
        _K.NEG_I: lambda a: wrapped((-a.low, -a.high)),
        _K.ABS_I: _abs,
        _K.SIGN_I: lambda a: Interval(*(((end > 0) - (end < 0)) for end in a)),
        _K.ADD_I: _corners(lambda x, y: x + y),
        _K.SUB_I: _corners(lambda x, y: x - y),
        _K.MUL_I: _corners(lambda x, y: x * y),
        _K.DIV_I: _divide,
        _K.MOD_I: _modulo,
        _K.FMOD_I: _remainder,
        _K.MAX_I: _corners(max),
        _K.MIN_I: _corners(min),
        _K.AND_I: _and,
        _K.OR_I: _bits,
        _K.XOR_I: _bits,
        _K.CLIP_I: _clip,
        _K.WHERE_I: lambda _, b, c: hull((b, c)),
        _K.WRAP_U8_I: _within(0, 255),
        _K.WRAP_I8_I: _within(-128, 127),
    }
)
"""By function: the interval of its result from those of its operands (`FULL` for f32 operands)."""
