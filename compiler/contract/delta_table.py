"""The table of a delta file: layouts, then sections; strict parsing and writing.

Called by `compiler.contract.delta`, which has read and limited the lengths; layout in
`docs/formats/delta.md`.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from compiler.contract.delta_alignment import MAX_STEPS, parse_alignment
from compiler.contract.delta_errors import DeltaFormatError, DeltaLimitError
from compiler.contract.delta_types import MAX_EXTENTS, MAX_PLANES, NO_SHA256, DeltaSection
from compiler.contract.errors import ContractError
from compiler.contract.planes import MAX_SECTION_BYTES, PLANE_KINDS, Plane, require_component

PLAIN_VERSION: Final = 1

_PLANE: Final = struct.Struct("<BQ")
_COUNT: Final = struct.Struct("<I")
_SECTION: Final = struct.Struct("<QQI")
_MOVED: Final = struct.Struct("<III")
_SHA256_BYTES: Final = 32
_SHORTEST_SECTION: Final = 1 + len("plan") + 2 * _SHA256_BYTES + _SECTION.size
_SHORTEST_LAYOUT: Final = _COUNT.size + _PLANE.size


def table_bytes(sections: Sequence[DeltaSection], version: int) -> tuple[bytes, int]:
    """Return the table, and how many layouts it starts with."""
    used = [planes for item in sections for planes in (item.planes, item.old_planes) if planes]
    layouts = tuple(dict.fromkeys(used))
    numbers = {planes: number for number, planes in enumerate(layouts, start=1)}
    rows = [_layout_bytes(planes) for planes in layouts]
    rows += [_section_bytes(section, numbers, version) for section in sections]
    return b"".join(rows), len(layouts)


def require_counts(sections: int, layouts: int, length: int) -> None:
    """Check that a table of `length` bytes may hold so many sections and layouts.

    Raises:
        DeltaFormatError: It may not.
    """
    if sections * _SHORTEST_SECTION + layouts * _SHORTEST_LAYOUT > length:
        raise DeltaFormatError("the table is too short for its counts")


def parse_table(
    table: bytes, sections: int, layouts: int, version: int
) -> tuple[DeltaSection, ...]:
    """Return the sections of a table.

    Raises:
        DeltaLimitError: A size or count is above its limit.
        DeltaFormatError: Anything else is not as it must be.
    """
    cursor = _Cursor(table)
    parsed = _parse_sections(cursor, sections, _parse_layouts(cursor, layouts), version)
    if cursor.left:
        raise DeltaFormatError(f"{cursor.left} bytes behind the table")
    return parsed


def require_limit(what: str, value: int, limit: int) -> None:
    """Raise `DeltaLimitError` if a value is above its limit."""
    if value > limit:
        raise DeltaLimitError(f"{what} {value}, limit {limit}")


def unpack_table(stored: bytes, length: int) -> bytes:
    """Return the table of `length` bytes that `stored` holds.

    Raises:
        DeltaFormatError: It holds anything else.
    """
    if len(stored) == length:
        return stored
    inflater = zlib.decompressobj()
    try:
        table = inflater.decompress(stored, length + 1)
    except zlib.error as error:
        raise DeltaFormatError("the table cannot be inflated") from error
    if len(table) != length or not inflater.eof or inflater.unused_data:
        raise DeltaFormatError("the table inflates to another length")
    return table


def _parse_layouts(cursor: "_Cursor", count: int) -> list[tuple[Plane, ...]]:
    layouts: list[tuple[Plane, ...]] = []
    total = 0
    for _ in range(count):
        (planes,) = cursor.unpack(_COUNT)
        total += planes
        if planes == 0 or planes * _PLANE.size > cursor.left:
            raise DeltaFormatError("a layout has no planes, or more than the table holds")
        require_limit("planes", total, MAX_PLANES)
        layouts.append(_parse_planes(cursor, planes))
    if len(set(layouts)) != count:
        raise DeltaFormatError("the same layout twice")
    return layouts


def _parse_planes(cursor: "_Cursor", count: int) -> tuple[Plane, ...]:
    planes = []
    offset = 0
    for _ in range(count):
        number, length = cursor.unpack(_PLANE)
        if number >= len(PLANE_KINDS):
            raise DeltaFormatError(f"plane kind {number}")
        try:
            planes.append(Plane(PLANE_KINDS[number], offset, length))
        except ContractError as error:
            raise DeltaFormatError(str(error)) from error
        offset += length
    return tuple(planes)


def _parse_sections(
    cursor: "_Cursor", count: int, layouts: Sequence[tuple[Plane, ...]], version: int
) -> tuple[DeltaSection, ...]:
    sections = []
    seen = extents = steps = 0
    previous = ""
    for _ in range(count):
        component = _parse_component(cursor)
        old_sha256, new_sha256 = cursor.take(_SHA256_BYTES).hex(), cursor.take(_SHA256_BYTES).hex()
        old_length, new_length, number = cursor.unpack(_SECTION)
        if component <= previous:
            raise DeltaFormatError("sections are not in ascending order")
        seen, previous = _require_next(number, seen, len(layouts)), component
        planes = layouts[number - 1] if number else ()
        section = DeltaSection(component, old_sha256, new_sha256, old_length, new_length, planes)
        if version > PLAIN_VERSION:
            section, seen = _parse_moved(cursor, section, layouts, seen)
        extents += len(planes) + len(section.old_planes)
        steps += section.alignment.steps if section.alignment is not None else 0
        require_limit("extents", extents, MAX_EXTENTS)
        require_limit("steps", steps, MAX_STEPS)
        _require_section(section)
        sections.append(section)
    if seen != len(layouts):
        raise DeltaFormatError("a layout is not used")
    return tuple(sections)


def _require_next(number: int, seen: int, layouts: int) -> int:
    """Return how many layouts were used after the use of one."""
    if number > min(seen + 1, layouts):
        raise DeltaFormatError("layouts are numbered by first use")
    return max(seen, number)


def _parse_moved(
    cursor: "_Cursor", section: DeltaSection, layouts: Sequence[tuple[Plane, ...]], seen: int
) -> tuple[DeltaSection, int]:
    """Return the section with what version 3 says of it, and how many layouts were used."""
    number, replays, length = cursor.unpack(_MOVED)
    seen = _require_next(number, seen, len(layouts))
    if replays * _COUNT.size > cursor.left or length > cursor.left:
        raise DeltaFormatError("more replays or moves than the table holds")
    if replays:
        found = tuple(cursor.unpack(_COUNT)[0] for _ in range(replays))
        section = replace(section, replays=found)
    moves = cursor.take(length)
    if number == 0 and moves:
        raise DeltaFormatError("moves without an old layout")
    if number:
        old = layouts[number - 1]
        moved = parse_alignment(moves, old, section.planes)
        section = replace(section, old_planes=old, alignment=moved)
    return section, seen


def _require_section(section: DeltaSection) -> None:
    require_limit("section", max(section.old_length, section.new_length), MAX_SECTION_BYTES)
    if section.new_sha256 in (NO_SHA256, section.old_sha256):
        raise DeltaFormatError(f"{section.component}: no new digest, or nothing changed")
    if section.old_sha256 == NO_SHA256 and (section.old_length or section.planes):
        raise DeltaFormatError(f"{section.component}: bytes without a digest")
    if section.planes and section.planes[-1].end != section.new_length:
        raise DeltaFormatError(f"{section.component}: the planes do not cover the section")
    old_planes = section.old_planes or section.planes
    if old_planes and old_planes[-1].end != section.old_length:
        raise DeltaFormatError(f"{section.component}: the planes do not cover the old section")
    _require_replays(section)


def _require_replays(section: DeltaSection) -> None:
    if section.replays and section.alignment is not None:
        raise DeltaFormatError(f"{section.component}: replays beside an alignment")
    if list(section.replays) != sorted(set(section.replays)):
        raise DeltaFormatError(f"{section.component}: replays are not in ascending order")
    for number in section.replays:
        if number >= len(section.planes) or section.planes[number].kind != "codes4":
            raise DeltaFormatError(f"{section.component}: a replay of a plane without codes")


def _parse_component(cursor: "_Cursor") -> str:
    (length,) = cursor.take(1)
    try:
        return require_component(cursor.take(length).decode("ascii"))
    except (UnicodeDecodeError, ContractError) as error:
        raise DeltaFormatError("not a component name") from error


def _layout_bytes(planes: Sequence[Plane]) -> bytes:
    rows = (_PLANE.pack(PLANE_KINDS.index(plane.kind), plane.length) for plane in planes)
    return _COUNT.pack(len(planes)) + b"".join(rows)


def _section_bytes(
    section: DeltaSection, numbers: Mapping[tuple[Plane, ...], int], version: int
) -> bytes:
    name = section.component.encode("ascii")
    row = (
        bytes((len(name),))
        + name
        + bytes.fromhex(section.old_sha256)
        + bytes.fromhex(section.new_sha256)
        + _SECTION.pack(section.old_length, section.new_length, numbers.get(section.planes, 0))
    )
    if version == PLAIN_VERSION:
        return row
    moves = section.alignment.to_bytes() if section.alignment is not None else b""
    row += _MOVED.pack(numbers.get(section.old_planes, 0), len(section.replays), len(moves))
    return row + b"".join(_COUNT.pack(number) for number in section.replays) + moves


class _Cursor:
    """Strict reading of a byte string."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._position

    def take(self, length: int) -> bytes:
        if length > self.left:
            raise DeltaFormatError("the table ends early")
        start = self._position
        self._position += length
        return self._data[start : self._position]

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))
