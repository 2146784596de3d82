"""Which parts of a section's old planes became which parts of its new planes.

A packed weight stores what its mask leaves: tiles, elements, blocks. When the mask changes, units
go and come, and everything behind them moves. An *alignment* pairs the planes of the old layout
with those of the new one and walks each pair in units: drop some, add some, keep some.

    group      planes that share one walk, such as codes, scales and index of the same tiles
    pair       number of the old plane, number of the new plane, bytes of a unit in both
    step       drop, add, keep: units of the old plane, of the new plane, of both

Kept ranges are coded as differences like planes that never moved; what was added stands apart, and
so does what was dropped if the file leads back. Planes without a partner come or go whole.

Bytes: per group a varint each for the number of pairs, (old, new, unit) of each pair, the number of
steps; then two columns, (drop, add) of all steps and keep of all steps; groups until the end. A
column is its length, its stored length, and the varints of its numbers, deflated if stored is less.
A varint is LEB128 of at most 5 bytes.

What was added next to something kept often resembles it: the column of an element, the index of a
tile. So each added range names the kept unit before it, which a record may start from.
"""

import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from compiler.contract.delta_errors import DeltaFormatError, DeltaLimitError
from compiler.contract.planes import ELEMENT_BYTES, Plane

MAX_STEPS: Final = 1 << 16  # in all alignments of a file
_MAX_VARINT_BYTES: Final = 5
_STEP: Final = 3
_RAW_DEFLATE: Final = -15
_STRATEGIES: Final = (zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY)
NOTHING: Final = -1


class PlanePair(NamedTuple):
    """An old plane, the new plane it became, and the bytes of one unit in both."""

    old: int
    new: int
    unit: int


class Kept(NamedTuple):
    """A range that is in both sections."""

    old: int
    new: int
    length: int


class Alone(NamedTuple):
    """A range that only one section holds.

    Attributes:
        offset: In that section.
        length: Bytes.
        before: Where the other section has the unit kept in front of it, or `NOTHING`.
        unit: Bytes of a unit.
    """

    offset: int
    length: int
    before: int
    unit: int


@dataclass(frozen=True, slots=True)
class AlignedPlanes:
    """Pairs of planes that share one walk.

    Attributes:
        pairs: At least one.
        steps: Drop, add, keep of every step, one after another, in units.
    """

    pairs: tuple[PlanePair, ...]
    steps: "array[int]"

    def walk(self) -> Iterator[tuple[int, int, int]]:
        """Yield (drop, add, keep) of every step."""
        return zip(self.steps[0::_STEP], self.steps[1::_STEP], self.steps[2::_STEP], strict=True)

    def units(self) -> tuple[int, int]:
        """Return the units of an old plane and those of a new one."""
        drop, add, keep = (sum(self.steps[at::_STEP]) for at in range(_STEP))
        return drop + keep, add + keep


@dataclass(frozen=True, slots=True)
class Alignment:
    """How the planes of a section moved."""

    groups: tuple[AlignedPlanes, ...]

    @property
    def steps(self) -> int:
        """Steps of all groups."""
        return sum(len(group.steps) // _STEP for group in self.groups)

    def to_bytes(self) -> bytes:
        """Return the bytes that `parse_alignment` reads."""
        out = bytearray()
        for group in self.groups:
            _put(out, len(group.pairs))
            for pair in group.pairs:
                for value in pair:
                    _put(out, value)
            _put(out, len(group.steps) // _STEP)
            for column in _columns(group.steps):
                _put_column(out, column)
        return bytes(out)

    def kept(self, old: Sequence[Plane], new: Sequence[Plane], kind: str) -> Iterator[Kept]:
        """Yield the kept ranges of planes of `kind`, in the order of their streams."""
        for group in self.groups:
            for pair in group.pairs:
                if new[pair.new].kind == kind:
                    yield from _kept(group, pair, old[pair.old].offset, new[pair.new].offset)

    def kept_lengths(self, new: Sequence[Plane], kind: str) -> Iterator[int]:
        """Yield how many bytes each pair of planes of `kind` keeps, in the order of `kept`."""
        for group in self.groups:
            units = sum(group.steps[2::_STEP])
            for pair in group.pairs:
                if new[pair.new].kind == kind:
                    yield units * pair.unit

    def alone(
        self, old: Sequence[Plane], new: Sequence[Plane], kind: str, *, dropped: bool
    ) -> Iterator[Iterator[Alone]]:
        """Yield, plane by plane, the ranges of `kind` that only one section holds.

        Args:
            old: Planes of the old section.
            new: Planes of the new section.
            kind: A kind of plane.
            dropped: Whether that section is the old one.
        """
        side = 0 if dropped else 1
        planes = (old, new)
        paired = {pair[side] for group in self.groups for pair in group.pairs}
        for number, plane in enumerate(planes[side]):
            if plane.kind == kind and number not in paired:
                yield iter((Alone(plane.offset, plane.length, NOTHING, 1),))
        for group in self.groups:
            for pair in group.pairs:
                starts = old[pair.old].offset, new[pair.new].offset
                if new[pair.new].kind == kind:
                    yield _alone(group, pair.unit, starts, side)


def parse_alignment(data: bytes, old: Sequence[Plane], new: Sequence[Plane]) -> Alignment:
    """Return the alignment that `data` holds, checked against both layouts.

    Raises:
        DeltaLimitError: More steps than `MAX_STEPS`.
        DeltaFormatError: The bytes are no alignment, or it does not fit the planes.
    """
    groups, at = [], 0
    seen: tuple[set[int], set[int]] = (set(), set())
    while at < len(data):
        group, at = _parse_group(data, at)
        _require_group(group, old, new, seen)
        groups.append(group)
    if not groups:
        raise DeltaFormatError("an alignment without planes")
    return Alignment(tuple(groups))


def _parse_group(data: bytes, at: int) -> tuple[AlignedPlanes, int]:
    count, at = _take(data, at)
    if not 0 < count <= len(data) - at:
        raise DeltaFormatError("a group of no planes, or of more than there are bytes")
    values = array("Q")
    for _ in range(3 * count):
        value, at = _take(data, at)
        values.append(value)
    pairs = tuple(PlanePair(*values[3 * n : 3 * n + 3]) for n in range(count))
    number, at = _take(data, at)
    if number > MAX_STEPS:
        raise DeltaLimitError(f"{number} steps, limit {MAX_STEPS}")
    if not number:
        raise DeltaFormatError("a walk of no steps")
    moves, at = _take_column(data, at, 2 * number)
    keeps, at = _take_column(data, at, number)
    steps = array("Q", bytes(8 * _STEP * number))
    steps[0::_STEP], steps[1::_STEP], steps[2::_STEP] = moves[0::2], moves[1::2], keeps
    return AlignedPlanes(pairs, steps), at


def _require_group(
    group: AlignedPlanes,
    old: Sequence[Plane],
    new: Sequence[Plane],
    seen: tuple[set[int], set[int]],
) -> None:
    before, after = group.units()
    for pair in group.pairs:
        if pair.old >= len(old) or pair.new >= len(new):
            raise DeltaFormatError("an alignment names a plane that is not there")
        if pair.old in seen[0] or pair.new in seen[1]:
            raise DeltaFormatError("an alignment names a plane twice")
        seen[0].add(pair.old)
        seen[1].add(pair.new)
        was, now = old[pair.old], new[pair.new]
        if was.kind != now.kind or pair.unit == 0 or pair.unit % ELEMENT_BYTES[was.kind]:
            raise DeltaFormatError("an alignment pairs planes of other kinds or splits elements")
        if (was.length, now.length) != (before * pair.unit, after * pair.unit):
            raise DeltaFormatError("a walk does not end where its planes end")
    if any(not drop + add + keep for drop, add, keep in group.walk()):
        raise DeltaFormatError("a step that goes nowhere")


def _kept(group: AlignedPlanes, pair: PlanePair, old: int, new: int) -> Iterator[Kept]:
    for drop, add, keep in group.walk():
        old += drop * pair.unit
        new += add * pair.unit
        if keep:
            yield Kept(old, new, keep * pair.unit)
        old += keep * pair.unit
        new += keep * pair.unit


def _alone(group: AlignedPlanes, unit: int, starts: tuple[int, int], side: int) -> Iterator[Alone]:
    here, there, before = starts[side], starts[1 - side], NOTHING
    for step in group.walk():
        alone = step[side] * unit
        if alone:
            yield Alone(here, alone, before, unit)
        kept = step[2] * unit
        here += alone + kept
        there += step[1 - side] * unit + kept
        if kept:
            before = there - unit


def _columns(steps: "array[int]") -> "tuple[array[int], array[int]]":
    moves = array("Q", bytes(16 * (len(steps) // _STEP)))
    moves[0::2], moves[1::2] = steps[0::_STEP], steps[1::_STEP]
    return moves, steps[2::_STEP]


def _put_column(out: bytearray, column: "array[int]") -> None:
    raw = bytearray()
    for value in column:
        _put(raw, value)
    stored = min((bytes(raw), *(_deflated(raw, strategy) for strategy in _STRATEGIES)), key=len)
    _put(out, len(raw))
    _put(out, len(stored))
    out += stored


def _deflated(raw: bytearray, strategy: int) -> bytes:
    deflater = zlib.compressobj(9, zlib.DEFLATED, _RAW_DEFLATE, 9, strategy)
    return deflater.compress(raw) + deflater.flush()


def _take_column(data: bytes, at: int, count: int) -> "tuple[array[int], int]":
    length, at = _take(data, at)
    stored, at = _take(data, at)
    if not count <= length <= _MAX_VARINT_BYTES * count or stored > min(length, len(data) - at):
        raise DeltaFormatError("a column of another length")
    raw = data[at : at + stored]
    if stored < length:
        inflater = zlib.decompressobj(_RAW_DEFLATE)
        try:
            raw = inflater.decompress(raw, length + 1)
        except zlib.error as error:
            raise DeltaFormatError("a column cannot be inflated") from error
        if len(raw) != length or not inflater.eof or inflater.unused_data:
            raise DeltaFormatError("a column inflates to another length")
    values, place = array("Q"), 0
    for _ in range(count):
        value, place = _take(raw, place)
        values.append(value)
    if place != length:
        raise DeltaFormatError("numbers are left over in a column")
    return values, at + stored


def _put(out: bytearray, value: int) -> None:
    while value > 127:
        out.append(128 | value & 127)
        value >>= 7
    out.append(value)


def _take(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_MAX_VARINT_BYTES):
        if at + place >= len(data):
            raise DeltaFormatError("an alignment ends early")
        byte = data[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            if place and not byte:
                raise DeltaFormatError("a number with leading zeros")
            return value, at + place + 1
    raise DeltaFormatError("a number of more than 5 bytes")
