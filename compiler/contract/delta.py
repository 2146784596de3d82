"""The delta file: how to make the changed sections of one bundle from those of another.

Parties: the *builder* encodes, the *server* stores, the *device* applies.

    release manifest -(sha256)-> delta -(blake2b-128)-> chunks -> sections <-(sha256)- manifest

Layout (little endian; prose in `docs/formats/delta.md`): fixed header, table (layouts, sections),
records, nothing behind them. Weight sections of unchanged layout are joined into one virtual stream
per plane kind, so that many small experts share chunks; the streams come in the order of
`STREAM_KINDS`, and each record covers the next range of its stream. Every other section is coded
whole, in pieces. A position is never trusted: the reader knows which range must come next and
refuses anything else.

Here is what needs the standard library only: strict parsing and writing. Payloads are opened by
`compiler.delta`.
"""

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from compiler.contract.delta_types import (
    HASH_BYTES,
    MAX_CHUNK_BYTES,
    MAX_DELTA_BYTES,
    MAX_EXTENTS,
    MAX_PAYLOAD_SLACK_BYTES,
    MAX_PIECE_BYTES,
    MAX_PIECE_SOURCE_BYTES,
    MAX_PLANES,
    MAX_RECORDS,
    MAX_SECTIONS,
    MAX_TABLE_BYTES,
    MODES,
    NO_SHA256,
    RECORD_BYTES,
    RECORD_LAYOUT,
    STREAM_KINDS,
    DeltaBaseError,
    DeltaDirectionError,
    DeltaError,
    DeltaFormatError,
    DeltaHeader,
    DeltaLimitError,
    DeltaRecord,
    DeltaResultError,
    DeltaSection,
    DeltaTruncatedError,
    DeltaVersionError,
    Mode,
    RecordKind,
)
from compiler.contract.errors import ContractError
from compiler.contract.planes import (
    MAX_SECTION_BYTES,
    PLANE_KINDS,
    Plane,
    require_component,
)

__all__ = [
    "HASH_BYTES",
    "MAX_CHUNK_BYTES",
    "MAX_DELTA_BYTES",
    "MAX_EXTENTS",
    "MAX_PAYLOAD_SLACK_BYTES",
    "MAX_PIECE_BYTES",
    "MAX_PIECE_SOURCE_BYTES",
    "MAX_PLANES",
    "MAX_RECORDS",
    "MAX_SECTIONS",
    "MAX_TABLE_BYTES",
    "MODES",
    "NO_SHA256",
    "RECORD_BYTES",
    "STREAM_KINDS",
    "DeltaBaseError",
    "DeltaDirectionError",
    "DeltaError",
    "DeltaFormatError",
    "DeltaHeader",
    "DeltaLimitError",
    "DeltaRecord",
    "DeltaResultError",
    "DeltaSection",
    "DeltaTruncatedError",
    "DeltaVersionError",
    "Mode",
    "Read",
    "RecordKind",
    "chunk_hash",
    "header_bytes",
    "parse_header",
    "read_records",
]

MAGIC: Final = b"SFD1"
VERSION: Final = 1
FLAG_REVERSIBLE: Final = 1

Read = Callable[[int], bytes]

_FIXED: Final = struct.Struct("<4sHHQIIIII")
_PLANE: Final = struct.Struct("<BQ")
_COUNT: Final = struct.Struct("<I")
_SECTION: Final = struct.Struct("<QQI")
_SHA256_BYTES: Final = 32
_SHORTEST_SECTION: Final = 1 + len("plan") + 2 * _SHA256_BYTES + _SECTION.size
_SHORTEST_LAYOUT: Final = _COUNT.size + _PLANE.size


def chunk_hash(data: bytes | bytearray | memoryview) -> bytes:
    """Return the BLAKE2b-128 of a chunk."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


def header_bytes(
    sections: Sequence[DeltaSection], *, reversible: bool, record_count: int, records_length: int
) -> bytes:
    """Return the header of a file whose records take `records_length` bytes.

    Args:
        sections: Changed sections in ascending component order.
        reversible: Whether every section coded whole has pieces for both directions.
        record_count: Number of records.
        records_length: Bytes of all records with their payloads.

    Raises:
        DeltaError: What was written would be refused by `parse_header`.
    """
    layouts = tuple(dict.fromkeys(section.planes for section in sections if section.planes))
    numbers = {planes: number for number, planes in enumerate(layouts, start=1)}
    table = b"".join(_layout_bytes(planes) for planes in layouts)
    table += b"".join(
        _section_bytes(section, numbers.get(section.planes, 0)) for section in sections
    )
    packed = zlib.compress(table, 9)
    stored = packed if len(packed) < len(table) else table
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        FLAG_REVERSIBLE if reversible else 0,
        _FIXED.size + len(stored) + records_length,
        record_count,
        len(sections),
        len(layouts),
        len(table),
        len(stored),
    )
    parse_header(_reader(fixed + stored))
    return fixed + stored


def parse_header(read: Read) -> DeltaHeader:
    """Read and check the header.

    Args:
        read: As `BinaryIO.read`: at most n bytes, none only at the end of the file.

    Raises:
        DeltaTruncatedError: The file ends inside the header.
        DeltaVersionError: Another version.
        DeltaLimitError: A size or count is above its limit.
        DeltaFormatError: Anything else is not as it must be.
    """
    fixed = _read_exact(read, _FIXED.size)
    magic, version, flags, file_length, records, sections, layouts, length, stored = _FIXED.unpack(
        fixed
    )
    if magic != MAGIC:
        raise DeltaFormatError("not a delta file")
    if version != VERSION:
        raise DeltaVersionError(f"delta version {version}, known: {VERSION}")
    if flags & ~FLAG_REVERSIBLE:
        raise DeltaFormatError(f"unknown flags {flags:#x}")
    _require_limit("file length", file_length, MAX_DELTA_BYTES)
    _require_limit("records", records, MAX_RECORDS)
    _require_limit("sections", sections, MAX_SECTIONS)
    _require_limit("table", length, MAX_TABLE_BYTES)
    if layouts > sections or stored > length:
        raise DeltaFormatError("layouts without sections, or a table larger than itself")
    if sections * _SHORTEST_SECTION + layouts * _SHORTEST_LAYOUT > length:
        raise DeltaFormatError("the table is too short for its counts")
    header_length = _FIXED.size + stored
    if header_length + records * RECORD_BYTES > file_length:
        raise DeltaFormatError("the file is too short for its counts")
    cursor = _Cursor(_unpack_table(_read_exact(read, stored), length))
    parsed = _parse_sections(cursor, sections, _parse_layouts(cursor, layouts))
    if cursor.left:
        raise DeltaFormatError(f"{cursor.left} bytes behind the table")
    return DeltaHeader(
        sections=parsed,
        reversible=bool(flags & FLAG_REVERSIBLE),
        record_count=records,
        header_length=header_length,
        file_length=file_length,
    )


def read_records(read: Read, header: DeltaHeader) -> Iterator[tuple[DeltaRecord, bytes]]:
    """Yield each record with its payload; the ranges are exactly those of `header.spans()`.

    Holds one payload at a time. Whether something is missing or left over is known only behind the
    last record, so exhaust the iterator before you believe the result.

    Raises:
        DeltaTruncatedError: The file ends early.
        DeltaLimitError: A chunk or payload is above its limit.
        DeltaFormatError: A record is out of place, its mode does not fit its kind, or bytes
            follow the last one.
    """
    position = header.header_length
    count = 0
    for kind, section, total in header.spans():
        offset = 0
        while offset < total:
            if count == header.record_count:
                raise DeltaFormatError(f"{kind.name} is covered up to {offset} of {total} bytes")
            record = _parse_record(_read_exact(read, RECORD_BYTES))
            _require_place(record, kind, section, offset, total)
            position += RECORD_BYTES + record.payload_length
            if position > header.file_length:
                raise DeltaFormatError("records reach behind the end of the file")
            yield record, _read_exact(read, record.payload_length)
            offset += record.length
            count += 1
    if count != header.record_count or position != header.file_length or read(1):
        raise DeltaFormatError("records or bytes are left over")


def _require_place(
    record: DeltaRecord, kind: RecordKind, section: int, offset: int, total: int
) -> None:
    if (record.kind, record.section, record.offset) != (kind, section, offset):
        raise DeltaFormatError(
            f"record of {record.kind.name} {record.section} at {record.offset}, "
            f"expected {kind.name} {section} at {offset}"
        )
    if record.length > total - offset:
        raise DeltaFormatError("record reaches behind its range")
    if kind is RecordKind.F32 and record.length % 4:
        raise DeltaFormatError("record splits a word")


def _parse_record(data: bytes) -> DeltaRecord:
    number, code, section, offset, length, payload, old_hash, new_hash = RECORD_LAYOUT.unpack(data)
    try:
        kind, mode = RecordKind(number), Mode(code)
    except ValueError as error:
        raise DeltaFormatError(f"record kind {number}, mode {code}") from error
    if mode not in MODES[kind]:
        raise DeltaFormatError(f"mode {mode.name} is not for {kind.name}")
    limit = MAX_PIECE_BYTES if kind >= RecordKind.PIECE else MAX_CHUNK_BYTES
    _require_limit("chunk", length, limit)
    _require_limit("payload", payload, length + MAX_PAYLOAD_SLACK_BYTES)
    if length == 0:
        raise DeltaFormatError("empty record")
    if mode is Mode.SAME and (payload or old_hash != new_hash):
        raise DeltaFormatError("an unchanged chunk has no payload and one hash")
    return DeltaRecord(kind, mode, section, offset, length, payload, old_hash, new_hash)


def _parse_layouts(cursor: "_Cursor", count: int) -> list[tuple[Plane, ...]]:
    layouts: list[tuple[Plane, ...]] = []
    total = 0
    for _ in range(count):
        (planes,) = cursor.unpack(_COUNT)
        total += planes
        if planes == 0 or planes * _PLANE.size > cursor.left:
            raise DeltaFormatError("a layout has no planes, or more than the table holds")
        _require_limit("planes", total, MAX_PLANES)
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
    cursor: "_Cursor", count: int, layouts: Sequence[tuple[Plane, ...]]
) -> tuple[DeltaSection, ...]:
    sections = []
    seen = extents = 0
    previous = ""
    for _ in range(count):
        component = _parse_component(cursor)
        old_sha256, new_sha256 = cursor.take(_SHA256_BYTES).hex(), cursor.take(_SHA256_BYTES).hex()
        old_length, new_length, number = cursor.unpack(_SECTION)
        if component <= previous:
            raise DeltaFormatError("sections are not in ascending order")
        if number > min(seen + 1, len(layouts)):
            raise DeltaFormatError("layouts are numbered by first use")
        seen, previous = max(seen, number), component
        planes = layouts[number - 1] if number else ()
        extents += len(planes)
        _require_limit("extents", extents, MAX_EXTENTS)
        section = DeltaSection(component, old_sha256, new_sha256, old_length, new_length, planes)
        _require_section(section)
        sections.append(section)
    if seen != len(layouts):
        raise DeltaFormatError("a layout is not used")
    return tuple(sections)


def _require_section(section: DeltaSection) -> None:
    _require_limit("section", max(section.old_length, section.new_length), MAX_SECTION_BYTES)
    if section.new_sha256 in (NO_SHA256, section.old_sha256):
        raise DeltaFormatError(f"{section.component}: no new digest, or nothing changed")
    if section.old_sha256 == NO_SHA256 and (section.old_length or section.planes):
        raise DeltaFormatError(f"{section.component}: bytes without a digest")
    if section.planes and not (section.old_length == section.new_length == section.planes[-1].end):
        raise DeltaFormatError(f"{section.component}: the planes do not cover the section")


def _parse_component(cursor: "_Cursor") -> str:
    (length,) = cursor.take(1)
    try:
        return require_component(cursor.take(length).decode("ascii"))
    except (UnicodeDecodeError, ContractError) as error:
        raise DeltaFormatError("not a component name") from error


def _layout_bytes(planes: Sequence[Plane]) -> bytes:
    rows = (_PLANE.pack(PLANE_KINDS.index(plane.kind), plane.length) for plane in planes)
    return _COUNT.pack(len(planes)) + b"".join(rows)


def _section_bytes(section: DeltaSection, layout: int) -> bytes:
    name = section.component.encode("ascii")
    return (
        bytes((len(name),))
        + name
        + bytes.fromhex(section.old_sha256)
        + bytes.fromhex(section.new_sha256)
        + _SECTION.pack(section.old_length, section.new_length, layout)
    )


def _unpack_table(stored: bytes, length: int) -> bytes:
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


def _require_limit(what: str, value: int, limit: int) -> None:
    if value > limit:
        raise DeltaLimitError(f"{what} {value}, limit {limit}")


def _read_exact(read: Read, length: int) -> bytes:
    data = read(length)
    while len(data) < length:
        more = read(length - len(data))
        if not more:
            raise DeltaTruncatedError(f"{length - len(data)} bytes are missing")
        data += more
    return data


def _reader(data: bytes) -> Read:
    cursor = _Cursor(data)
    return cursor.take


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
