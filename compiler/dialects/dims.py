"""Sizes of tensor axes: integers, or integer-linear expressions in named run-time lengths.

Two lengths occur: `T`, the token rows of one call, and `P`, the rows in the key-value cache.
An axis of `past + new` rows is `P + T`; routed rows of a top-2 layer are `2*T`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

Binding = Mapping[str, int]

_TERM = re.compile(r"(?:(\d+)\*)?([A-Z][A-Za-z0-9_]*)|(\d+)")


@dataclass(frozen=True, slots=True)
class Dim:
    """One axis: `constant + sum(coefficient * symbol)`; terms sorted, no zero coefficient."""

    constant: int
    terms: tuple[tuple[str, int], ...] = ()

    @property
    def is_static(self) -> bool:
        """Whether the size is known at compile time."""
        return not self.terms

    def at(self, binding: Binding) -> int:
        """Return the size under `binding`; a `KeyError` names the first unbound symbol."""
        return self.constant + sum(factor * binding[symbol] for symbol, factor in self.terms)

    def substitute(self, binding: Mapping[str, "Dim"]) -> "Dim":
        """Return this size with some symbols replaced by other sizes."""
        result = Dim(self.constant)
        for symbol, factor in self.terms:
            result = result + binding.get(symbol, symbol_dim(symbol)).times(factor)
        return result

    def times(self, factor: int) -> "Dim":
        """Return `factor` times this size."""
        return linear(self.constant * factor, ((s, f * factor) for s, f in self.terms))

    def __add__(self, other: "Dim") -> "Dim":
        """Return the sum of two sizes."""
        return linear(self.constant + other.constant, (*self.terms, *other.terms))

    def __str__(self) -> str:
        parts = [symbol if factor == 1 else f"{factor}*{symbol}" for symbol, factor in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts).replace("+ -", "- ")


def static(size: int) -> Dim:
    """Return the compile-time size `size`."""
    return Dim(size)


def symbol_dim(symbol: str) -> Dim:
    """Return the size that is one run-time length."""
    return Dim(0, ((symbol, 1),))


def linear(constant: int, terms: Iterable[tuple[str, int]]) -> Dim:
    """Return the normal form of `constant + sum(terms)`; equal symbols are added up."""
    total: dict[str, int] = {}
    for symbol, factor in terms:
        total[symbol] = total.get(symbol, 0) + factor
    return Dim(constant, tuple(sorted((s, f) for s, f in total.items() if f)))


@lru_cache(maxsize=4096)
def parse_dim(text: str) -> Dim:
    """Parse what `str(Dim)` writes.

    Raises:
        ValueError: The text is not a linear expression with integer coefficients.
    """
    result = Dim(0)
    for raw in text.replace("- ", "+ -").split("+"):
        part = raw.strip()
        sign = -1 if part.startswith("-") else 1
        match = _TERM.fullmatch(part.lstrip("-"))
        if match is None:
            raise ValueError(f"not a size expression: {text!r}")
        factor, symbol, number = match.groups()
        term = Dim(int(number)) if number else Dim(0, ((symbol, int(factor or 1)),))
        result = result + term.times(sign)
    return result


def witnesses(symbols: Iterable[str]) -> tuple[Binding, ...]:
    """Return bindings that pin down every linear expression in `symbols`, and two more to check it.

    The first is the origin of the fit, then one per symbol, then the checks; the last one turns the
    order of the symbols' sizes around, so that a maximum is not taken for one of them. Sizes are
    small and mutually distinct: arrays of indices stay cheap and axes cannot be confused.
    """
    names = sorted(set(symbols))
    origin = dict(zip(names, (5, 3, 7, 11, 13), strict=False))
    steps = [{**origin, name: origin[name] + 1} for name in names]
    doubled = {name: 2 * value + 3 for name, value in origin.items()}
    turned = dict(zip(reversed(names), (17, 4, 2, 6, 9), strict=False))
    return (origin, *steps, doubled, turned)


def fit(values: Iterable[int], bindings: tuple[Binding, ...]) -> Dim | None:
    """Return the linear expression with `values` under `witnesses(...)`, or None."""
    sizes = tuple(values)
    origin = bindings[0]
    names = sorted(origin)
    slopes = [(name, sizes[1 + i] - sizes[0]) for i, name in enumerate(names)]
    constant = sizes[0] - sum(factor * origin[name] for name, factor in slopes)
    result = linear(constant, slopes)
    return result if all(result.at(b) == s for b, s in zip(bindings, sizes, strict=True)) else None
