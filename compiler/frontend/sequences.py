"""Sequences of tensors and optional values, resolved while a graph is evaluated.

A sequence never reaches the device: what it holds is known once loops are unrolled, so it is a
list of value names here, and what reads it becomes plain nodes.

Before:
    s = SplitToSequence(x, split);  y = SequenceAt(s, 1);  z = ConcatFromSequence(s)
After:
    s/0, s/1 = Split(x, split);  y = Identity(s/1);  z = Concat(s/0, s/1)
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from compiler.frontend.control_flow import MAX_TRIPS
from compiler.frontend.writer import Writer

Sequences = dict[str, list[str]]
Row = Callable[[Writer, Sequences], None]


def _position(w: Writer, name: str, count: int) -> int:
    (at,) = w.integers(name, "the position")
    if not -count <= at < count:
        raise ValueError(f"position {at} of a sequence of {count}")
    return at % count


def _empty(w: Writer, held: Sequences) -> None:
    held[w.outputs[0]] = []


def _construct(w: Writer, held: Sequences) -> None:
    held[w.outputs[0]] = list(w.proto.input)


def _insert(w: Writer, held: Sequences) -> None:
    items, value, place = list(held[w.inputs[0]]), w.inputs[1], w.inputs[2]
    at = len(items)
    if place:
        (at,) = w.integers(place, "the position")
        if not -len(items) <= at <= len(items):
            raise ValueError(f"position {at} of a sequence of {len(items)}")
    items.insert(at, value)
    held[w.outputs[0]] = items


def _erase(w: Writer, held: Sequences) -> None:
    items, place = list(held[w.inputs[0]]), w.inputs[1]
    del items[_position(w, place, len(items)) if place else -1]
    held[w.outputs[0]] = items


def _at(w: Writer, held: Sequences) -> None:
    items = held[w.inputs[0]]
    w.give(items[_position(w, w.inputs[1], len(items))])


def _length(w: Writer, held: Sequences) -> None:
    w.give(w.scalar(len(held[w.inputs[0]])))


def _concat(w: Writer, held: Sequences) -> None:
    given = w.attrs(new_axis=0)
    parts, axis = held[w.inputs[0]], int(given["axis"])
    if given["new_axis"]:
        parts = [w.op("Unsqueeze", part, w.ints(axis)) for part in parts]
    w.op("Concat", *parts, out=w.outputs[0], axis=axis)


def _split(w: Writer, held: Sequences) -> None:
    x, sizes = w.inputs[:2]
    given = w.attrs(axis=0, keepdims=1)
    axis = given["axis"] % w.rank(x)
    whole = w.size(x, axis)
    counts = [1] * whole
    if sizes:
        wanted = w.stored(sizes, "the sizes of the parts")
        counts = [int(n) for n in wanted.reshape(-1)]
        if wanted.ndim == 0:
            step = counts[0]
            counts = [min(step, whole - at) for at in range(0, whole, step)]
    w.need(len(counts) <= MAX_TRIPS, f"{len(counts)} parts, opened are at most {MAX_TRIPS}")
    parts = w.split(x, counts, axis)
    if not sizes and not given["keepdims"]:
        parts = [w.op("Squeeze", part, w.ints(axis)) for part in parts]
    held[w.outputs[0]] = parts


def _optional(w: Writer, held: Sequences) -> None:
    w.need(bool(w.inputs[0]), "an optional value that holds nothing")
    _same(w, held)


def _same(w: Writer, held: Sequences) -> None:
    if w.inputs[0] in held:
        held[w.outputs[0]] = held[w.inputs[0]]
    else:
        w.give(w.inputs[0])


def _has(w: Writer, _held: Sequences) -> None:
    w.give(w.store(np.array(bool(w.inputs[0]))))


SEQUENCES: Final[Mapping[str, Row]] = MappingProxyType(
    {
        "ConcatFromSequence": _concat,
        "Optional": _optional,
        "OptionalGetElement": _same,
        "OptionalHasElement": _has,
        "SequenceAt": _at,
        "SequenceConstruct": _construct,
        "SequenceEmpty": _empty,
        "SequenceErase": _erase,
        "SequenceInsert": _insert,
        "SequenceLength": _length,
        "SplitToSequence": _split,
    }
)


def is_held(kind: str, inputs: list[str], held: Sequences) -> bool:
    """Return whether a node is resolved here: it names a sequence, or hands one on."""
    return kind in SEQUENCES or (kind == "Identity" and inputs[0] in held)


def resolve(w: Writer, held: Sequences) -> None:
    """Resolve one node, `is_held`; sequences it makes are added to `held`."""
    SEQUENCES.get(w.proto.op_type, _same)(w, held)
