"""The language of degrade rules: parsed, never evaluated as code.

The server writes rules and checks them with this module; the device parses them again and asks
`device_agent.runtime.degrade` whether they hold. Grammar, lowest precedence first:

    condition  = both { "or" both }
    both       = part { "and" part }
    part       = "(" condition ")" | comparison
    comparison = quantity ("<" | "<=" | ">" | ">=") number [unit] [ "for" number time ]
    quantity   = name | "rate" "(" name ")"

`temperature > 55 C for 30 s and rate(faults) > 0.1` is a condition. A name is one of the signals
that the caller lists; `rate` is for counters only: events per second over `RATE_WINDOW_S`.
Units must be the signal's own. There is no equality: measured values do not hit a number.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from compiler.contract.errors import ContractError

MAX_TEXT: Final = 1_000
MAX_DEPTH: Final = 16
MAX_DIGITS: Final = 15
MAX_FOR_S: Final = 86_400.0
RATE_WINDOW_S: Final = 60.0
_TOKEN: Final = re.compile(
    r"(?:(\d+(?:\.\d+)?)|([a-z_][a-z0-9_]*|°?C|%|[A-Z][A-Za-z]*)|([<>]=?|[()]))",
    re.ASCII,
)
_TIMES: Final[Mapping[str, float]] = MappingProxyType({"ms": 1e-3, "s": 1.0, "min": 60.0})


class SignalKind(StrEnum):
    """What a name stands for."""

    GAUGE = "gauge"
    """A present value."""
    COUNTER = "counter"
    """A total that only grows; only its `rate` can be compared."""


@dataclass(frozen=True, slots=True)
class Signal:
    """A name that a rule may use.

    Attributes:
        unit: How its numbers are read: `C`, `ms`, `%`, `MB`, or empty.
    """

    kind: SignalKind
    unit: str = ""


class Comparator(StrEnum):
    """How a quantity is compared."""

    BELOW = "<"
    AT_MOST = "<="
    ABOVE = ">"
    AT_LEAST = ">="


COMPARE: Final[Mapping[Comparator, Callable[[float, float], bool]]] = MappingProxyType(
    {
        Comparator.BELOW: lambda value, limit: value < limit,
        Comparator.AT_MOST: lambda value, limit: value <= limit,
        Comparator.ABOVE: lambda value, limit: value > limit,
        Comparator.AT_LEAST: lambda value, limit: value >= limit,
    }
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison.

    Attributes:
        name: A signal.
        is_rate: Its events per second are compared, not its value.
        limit: In the signal's unit.
        for_s: How long it must have held without a break, seconds.
    """

    name: str
    is_rate: bool
    comparator: Comparator
    limit: float
    for_s: float


@dataclass(frozen=True, slots=True)
class All:
    """Holds when every part does."""

    parts: tuple["Condition", ...]


@dataclass(frozen=True, slots=True)
class Any:
    """Holds when one part does."""

    parts: tuple["Condition", ...]


Condition = Comparison | All | Any


def parse_condition(text: str, signals: Mapping[str, Signal]) -> Condition:
    """Parse a condition.

    Raises:
        ContractError: It is too long or too deep, breaks the grammar, or names no known signal; the
            message says at which character.
    """
    if len(text) > MAX_TEXT:
        raise ContractError(f"a condition has at most {MAX_TEXT} characters")
    parser = _Parser(_tokens(text), signals)
    condition = parser.condition(0)
    parser.require_end()
    return condition


def comparisons(condition: Condition) -> tuple[Comparison, ...]:
    """Return every comparison of a condition, from left to right."""
    if isinstance(condition, Comparison):
        return (condition,)
    return tuple(one for part in condition.parts for one in comparisons(part))


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    at: int
    is_number: bool = False


def _tokens(text: str) -> list[_Token]:
    tokens, at = [], 0
    while left := text[at:].lstrip():
        at = len(text) - len(left)
        match = _TOKEN.match(text, at)
        if match is None:
            raise ContractError(
                f"character {at + 1}: cannot read {left[:12]!r}",
                hint="comparisons are <, <=, > and >=",
            )
        number, word, sign = match.groups()
        found = number or word or sign
        tokens.append(_Token(found, match.end() - len(found), number is not None))
        at = match.end()
    return [*tokens, _Token("", len(text))]


class _Parser:
    """Recursive descent over tokens; the last token is the empty one."""

    def __init__(self, tokens: list[_Token], signals: Mapping[str, Signal]) -> None:
        self._tokens = tokens
        self._signals = signals
        self._next = 0

    def condition(self, depth: int) -> Condition:
        """Parse parts joined by `or`."""
        parts = [self._both(depth)]
        while self._take("or"):
            parts.append(self._both(depth))
        return parts[0] if len(parts) == 1 else Any(tuple(parts))

    def require_end(self) -> None:
        """Refuse what is left over."""
        if self._token.text:
            raise self._error("expected 'and', 'or' or the end")

    def _both(self, depth: int) -> Condition:
        parts = [self._part(depth)]
        while self._take("and"):
            parts.append(self._part(depth))
        return parts[0] if len(parts) == 1 else All(tuple(parts))

    def _part(self, depth: int) -> Condition:
        if depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} parentheses inside each other")
        if not self._take("("):
            return self._comparison()
        inner = self.condition(depth + 1)
        self._need(")")
        return inner

    def _comparison(self) -> Comparison:
        is_rate = self._take("rate")
        if is_rate:
            self._need("(")
        name, signal = self._signal()
        if is_rate:
            self._need(")")
        if is_rate != (signal.kind is SignalKind.COUNTER):
            wanted = f"rate({name})" if signal.kind is SignalKind.COUNTER else name
            raise self._error(f"{name!r} is a {signal.kind.value}: write {wanted}")
        comparator = self._comparator()
        limit = self._number()
        self._unit("" if is_rate else signal.unit)
        return Comparison(name, is_rate, comparator, limit, self._duration())

    def _signal(self) -> tuple[str, Signal]:
        name = self._token.text
        if name not in self._signals:
            raise self._error("expected a signal", f"signals: {', '.join(sorted(self._signals))}")
        self._next += 1
        return name, self._signals[name]

    def _comparator(self) -> Comparator:
        try:
            comparator = Comparator(self._token.text)
        except ValueError:
            raise self._error("expected <, <=, > or >=") from None
        self._next += 1
        return comparator

    def _number(self) -> float:
        if not self._token.is_number:
            raise self._error("expected a number")
        if len(self._token.text) > MAX_DIGITS:
            raise self._error(f"a number has at most {MAX_DIGITS} characters")
        self._next += 1
        return float(self._tokens[self._next - 1].text)

    def _unit(self, unit: str) -> None:
        """Take the unit of a number, which may be left out."""
        found = self._token.text
        if found in {"", "for", "and", "or", ")"}:
            return
        if not unit or found.removeprefix("°") != unit:
            raise self._error(f"expected {unit or 'no unit'}, 'for', 'and', 'or' or the end")
        self._next += 1

    def _duration(self) -> float:
        if not self._take("for"):
            return 0.0
        number = self._number()
        scale = _TIMES.get(self._token.text)
        if scale is None:
            raise self._error(f"expected {', '.join(_TIMES)}")
        self._next += 1
        if number * scale > MAX_FOR_S:
            raise self._error(f"at most {MAX_FOR_S:g} s")
        return number * scale

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, text: str) -> bool:
        if self._token.text != text:
            return False
        self._next += 1
        return True

    def _need(self, text: str) -> None:
        if not self._take(text):
            raise self._error(f"expected {text!r}")

    def _error(self, message: str, hint: str = "") -> ContractError:
        found = self._token.text or "the end"
        return ContractError(
            f"character {self._token.at + 1}: {message}, found {found!r}", hint=hint
        )
