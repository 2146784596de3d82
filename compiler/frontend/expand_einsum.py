"""Einsum as transposes, reshapes, products and sums.

    "bhqd,bhkd->bhqk"    MatMul(q, Transpose(k))
    "ij,kj->k"           MatMul of ReduceSum(a, i) with Transpose(b)
    "bii->bi"            a diagonal: two axes flattened, every (n + 1)-th element

Operands are joined from left to right. Labels that only one operand has and nothing reads later are
summed first; labels of both that nothing reads later are the inner axis of a MatMul. An ellipsis
stands for labels of its own, which broadcast.
"""

import math
import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from compiler.frontend.writer import Writer

_ELLIPSIS: Final = "..."
_TERM: Final = re.compile(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*")


@dataclass(frozen=True, slots=True)
class Term:
    """A value and the label of each of its axes."""

    value: str
    labels: tuple[str, ...]


def expand_einsum(w: Writer) -> None:
    """Write `Einsum` out.

    Raises:
        ValueError: The equation does not fit its operands.
    """
    operands = list(w.proto.input)
    terms, wanted = _parsed(w, str(w.attrs()["equation"]), operands)
    terms = [_without_repeats(w, term) for term in terms]
    terms = _without_ones(w, terms)
    joined = terms[0]
    for at, term in enumerate(terms[1:], start=2):
        later = {label for other in terms[at:] for label in other.labels} | set(wanted)
        joined = _join(w, joined, term, later)
    joined = _summed(w, joined, set(wanted))
    missing = [label for label in wanted if label not in joined.labels]
    if missing:
        joined = _with_ones(w, joined, missing)
    w.give(_turned(w, joined, wanted).value)


def _parsed(w: Writer, text: str, operands: list[str]) -> tuple[list[Term], tuple[str, ...]]:
    left, arrow, right = text.replace(" ", "").partition("->")
    sources = left.split(",")
    for item in (*sources, right):
        if _TERM.fullmatch(item) is None:
            raise ValueError(f"equation {text!r} cannot be read")
    if len(sources) != len(operands):
        raise ValueError(f"equation {text!r} of {len(operands)} operands")
    terms = []
    for source, name in zip(sources, operands, strict=True):
        spare = w.rank(name) - len(source.replace(_ELLIPSIS, ""))
        if spare < 0 or (spare and _ELLIPSIS not in source):
            raise ValueError(f"term {source!r} of an operand with {w.rank(name)} axes")
        terms.append(Term(name, _labels(source, spare)))
    spread = max((label for t in terms for label in t.labels if len(label) > 1), default="")
    most = int(spread[3:]) if spread else 0
    if arrow:
        wanted = _labels(right, most)
    else:
        letters = [label for term in terms for label in term.labels if len(label) == 1]
        once = sorted(label for label in set(letters) if letters.count(label) == 1)
        wanted = (*_labels(_ELLIPSIS, most), *once)
    known = {label for term in terms for label in term.labels}
    if not set(wanted) <= known or len(set(wanted)) != len(wanted):
        raise ValueError(f"result {right!r} of equation {text!r}")
    return terms, wanted


def _labels(term: str, spread: int) -> tuple[str, ...]:
    """Return one label per axis; `...3` is the third axis from the end of an ellipsis."""
    head, dots, tail = term.partition(_ELLIPSIS)
    middle = [f"{_ELLIPSIS}{at:03d}" for at in range(spread, 0, -1)] if dots else []
    return (*head, *middle, *tail)


def _without_repeats(w: Writer, term: Term) -> Term:
    """Return a term whose repeated labels are read along their diagonal."""
    for label in dict.fromkeys(term.labels):
        while term.labels.count(label) > 1:
            first = term.labels.index(label)
            second = term.labels.index(label, first + 1)
            rest = [at for at in range(len(term.labels)) if at not in (first, second)]
            turned = w.op("Transpose", term.value, perm=[*rest, first, second])
            shape = w.shape(turned)
            if shape[-1] != shape[-2]:
                raise ValueError(f"label {label!r} has sizes {shape[-2]} and {shape[-1]}")
            flat = w.reshape(turned, *shape[:-2], shape[-1] * shape[-1])
            places = w.store(np.arange(shape[-1], dtype=np.int64) * (shape[-1] + 1))
            value = w.op("Gather", flat, places, axis=len(rest))
            term = Term(value, (*(term.labels[at] for at in rest), label))
    return term


def _without_ones(w: Writer, terms: list[Term]) -> list[Term]:
    """Return terms without axes of one where another term has more: those broadcast."""
    size: dict[str, int] = {}
    for term in terms:
        for label, count in zip(term.labels, w.sizes(term.value)[0], strict=True):
            size[label] = max(size.get(label, 1), count)
    result = []
    for term in terms:
        counts = w.sizes(term.value)[0]
        ones = [i for i, n in enumerate(term.labels) if counts[i] == 1 and size[n] > 1]
        value = w.op("Squeeze", term.value, w.ints(*ones)) if ones else term.value
        kept = tuple(label for i, label in enumerate(term.labels) if i not in ones)
        result.append(Term(value, kept))
    return result


def _summed(w: Writer, term: Term, kept: set[str]) -> Term:
    axes = [at for at, label in enumerate(term.labels) if label not in kept]
    if not axes:
        return term
    value = w.op("ReduceSum", term.value, w.ints(*axes), keepdims=0)
    return Term(value, tuple(label for label in term.labels if label in kept))


def _turned(w: Writer, term: Term, order: tuple[str, ...]) -> Term:
    perm = [term.labels.index(label) for label in order]
    if perm == sorted(perm):
        return term
    return Term(w.op("Transpose", term.value, perm=perm), order)


def _with_ones(w: Writer, term: Term, labels: list[str]) -> Term:
    axes = w.ints(*range(len(term.labels), len(term.labels) + len(labels)))
    return Term(w.op("Unsqueeze", term.value, axes), (*term.labels, *labels))


def _join(w: Writer, a: Term, b: Term, later: set[str]) -> Term:
    a = _summed(w, a, later | set(b.labels))
    b = _summed(w, b, later | set(a.labels))
    inner = tuple(label for label in a.labels if label in b.labels and label not in later)
    batch = tuple(label for label in a.labels if label in b.labels and label in later)
    left = tuple(label for label in a.labels if label not in b.labels)
    right = tuple(label for label in b.labels if label not in a.labels)
    if not inner:
        return _times(w, a, b, (*batch, *left, *right))
    if not batch and len(left) >= 1 and len(inner) == len(right) == 1:  # rows as they stand
        turned = [_turned(w, a, (*left, *inner)).value, _turned(w, b, (*inner, *right)).value]
        return Term(w.op("MatMul", *turned), (*left, *right))
    counts = _counts(w, a, b)
    rows = _regrouped(w, _turned(w, a, (*batch, *left, *inner)).value, counts, batch, left, inner)
    cols = _regrouped(w, _turned(w, b, (*batch, *inner, *right)).value, counts, batch, inner, right)
    whole = (*batch, *left, *right)
    made = _shaped(w, w.op("MatMul", rows, cols), [[c[n] for n in whole] for c in counts])
    return Term(made, whole)


def _counts(w: Writer, *terms: Term) -> list[dict[str, int]]:
    """Return the size of each label under every binding of the lengths."""
    counts: list[dict[str, int]] = [{} for _ in range(w.bindings)]
    for term in terms:
        for found, sizes in zip(counts, w.sizes(term.value), strict=True):
            found.update(zip(term.labels, sizes, strict=True))
    return counts


def _regrouped(
    w: Writer, x: str, counts: list[dict[str, int]], batch: tuple[str, ...], *sides: tuple[str, ...]
) -> str:
    """Write x with the axes of each side as one."""
    if all(len(side) == 1 for side in sides):
        return x
    sizes = [
        [*(c[n] for n in batch), *(math.prod(c[n] for n in side) for side in sides)] for c in counts
    ]
    return _shaped(w, x, sizes)


def _shaped(w: Writer, x: str, sizes: list[list[int]]) -> str:
    if [list(shape) for shape in w.sizes(x)] == sizes:
        return x
    return w.op("Reshape", x, w.by_length([np.array(row, np.int64) for row in sizes]))


def _times(w: Writer, a: Term, b: Term, order: tuple[str, ...]) -> Term:
    """Write the product of all pairs: nothing is summed."""
    sides = []
    for term in (a, b):
        turned = _turned(w, term, tuple(label for label in order if label in term.labels))
        axes = [at for at, label in enumerate(order) if label not in term.labels]
        sides.append(w.op("Unsqueeze", turned.value, w.ints(*axes)) if axes else turned.value)
    return Term(w.op("Mul", *sides), order)
