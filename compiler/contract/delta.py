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
import io
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from compiler.contract.delta_errors import (
    DeltaBaseError,
    DeltaDirectionError,
    DeltaError,
    DeltaFormatError,
    DeltaLimitError,
    DeltaResultError,
    DeltaTruncatedError,
    DeltaVersionError,
)
from compiler.contract.delta_table import (
    PLAIN_VERSION,
    parse_table,
    require_counts,
    require_limit,
    table_bytes,
    unpack_table,
)
from compiler.contract.delta_types import (
    AFTER_MODES,
    HASH_BYTES,
    MAX_CHUNK_BYTES,
    MAX_DELTA_BYTES,
    MAX_EXTENTS,
    MAX_PAYLOAD_SLACK_BYTES,
    MAX_PIECE_BYTES,
    MAX_PIECE_SOURCE_BYTES,
    MAX_PLANES,
    MAX_RECORDS,
    MAX_REPLAY_BYTES,
    MAX_REPLAY_PAYLOAD_BYTES,
    MAX_SECTIONS,
    MAX_TABLE_BYTES,
    MODES,
    NEWER_MODES,
    NO_SHA256,
    PIECES,
    RECORD_BYTES,
    RECORD_LAYOUT,
    STREAM_KINDS,
    STREAMS,
    WORD_MODES,
    DeltaHeader,
    DeltaRecord,
    DeltaSection,
    Mode,
    RecordKind,
)

__all__ = [
    "AFTER_MODES",
    "HASH_BYTES",
    "MAX_CHUNK_BYTES",
    "MAX_DELTA_BYTES",
    "MAX_EXTENTS",
    "MAX_PAYLOAD_SLACK_BYTES",
    "MAX_PIECE_BYTES",
    "MAX_PIECE_SOURCE_BYTES",
    "MAX_PLANES",
    "MAX_RECORDS",
    "MAX_REPLAY_BYTES",
    "MAX_REPLAY_PAYLOAD_BYTES",
    "MAX_SECTIONS",
    "MAX_TABLE_BYTES",
    "MODES",
    "NEWER_MODES",
    "NO_SHA256",
    "PIECES",
    "RECORD_BYTES",
    "STREAMS",
    "STREAM_KINDS",
    "WORD_MODES",
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
VERSION: Final = 3
FLAG_REVERSIBLE: Final = 1

Read = Callable[[int], bytes]

_FIXED: Final = struct.Struct("<4sHHQIIIII")
_LAYOUTS_A_SECTION: Final = {PLAIN_VERSION: 1, VERSION: 2}
_LENGTHS: Final = {
    RecordKind.PIECE: MAX_PIECE_BYTES,
    RecordKind.PIECE_BACK: MAX_PIECE_BYTES,
    RecordKind.REPLAY: MAX_REPLAY_BYTES,
}


def chunk_hash(data: bytes | bytearray | memoryview) -> bytes:
    """Return the BLAKE2b-128 of a chunk."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


def header_bytes(
    sections: Sequence[DeltaSection],
    *,
    reversible: bool,
    record_count: int,
    records_length: int,
    newer_modes: bool = False,
) -> bytes:
    """Return the header of a file whose records take `records_length` bytes.

    Args:
        sections: Changed sections in ascending component order.
        reversible: Whether every section coded whole has pieces for both directions.
        record_count: Number of records.
        records_length: Bytes of all records with their payloads.
        newer_modes: Whether a record has one of `NEWER_MODES`. The file says the lowest version
            that has all it uses, so that older readers read what they can.

    Raises:
        DeltaError: What was written would be refused by `parse_header`.
    """
    is_plain = not newer_modes and all(section.is_plain for section in sections)
    version = PLAIN_VERSION if is_plain else VERSION
    table, layouts = table_bytes(sections, version)
    packed = zlib.compress(table, 9)
    stored = packed if len(packed) < len(table) else table
    fixed = _FIXED.pack(
        MAGIC,
        version,
        FLAG_REVERSIBLE if reversible else 0,
        _FIXED.size + len(stored) + records_length,
        record_count,
        len(sections),
        layouts,
        len(table),
        len(stored),
    )
    parse_header(io.BytesIO(fixed + stored).read)
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
    if version not in (PLAIN_VERSION, VERSION):
        raise DeltaVersionError(f"delta version {version}, known: {PLAIN_VERSION} and {VERSION}")
    if flags & ~FLAG_REVERSIBLE:
        raise DeltaFormatError(f"unknown flags {flags:#x}")
    require_limit("file length", file_length, MAX_DELTA_BYTES)
    require_limit("records", records, MAX_RECORDS)
    require_limit("sections", sections, MAX_SECTIONS)
    require_limit("table", length, MAX_TABLE_BYTES)
    if layouts > _LAYOUTS_A_SECTION[version] * sections or stored > length:
        raise DeltaFormatError("layouts without sections, or a table larger than itself")
    require_counts(sections, layouts, length)
    header_length = _FIXED.size + stored
    if header_length + records * RECORD_BYTES > file_length:
        raise DeltaFormatError("the file is too short for its counts")
    table = unpack_table(_read_exact(read, stored), length)
    parsed = parse_table(table, sections, layouts, version)
    return DeltaHeader(
        sections=parsed,
        reversible=bool(flags & FLAG_REVERSIBLE),
        record_count=records,
        header_length=header_length,
        file_length=file_length,
        version=version,
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
            if record.mode in NEWER_MODES and header.version == PLAIN_VERSION:
                raise DeltaFormatError(f"mode {record.mode.name} is newer than the file")
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
    if kind is RecordKind.REPLAY and record.length != total:
        raise DeltaFormatError("a replay makes its plane whole")
    if (kind is RecordKind.F32 or record.mode in WORD_MODES) and record.length % 4:
        raise DeltaFormatError("record splits a word")


def _parse_record(data: bytes) -> DeltaRecord:
    number, code, section, offset, length, payload, old_hash, new_hash = RECORD_LAYOUT.unpack(data)
    try:
        kind, mode = RecordKind(number), Mode(code)
    except ValueError as error:
        raise DeltaFormatError(f"record kind {number}, mode {code}") from error
    if mode not in MODES[kind]:
        raise DeltaFormatError(f"mode {mode.name} is not for {kind.name}")
    require_limit("chunk", length, _LENGTHS.get(kind, MAX_CHUNK_BYTES))
    require_limit("payload", payload, _payload_limit(kind, length))
    if length == 0:
        raise DeltaFormatError("empty record")
    if mode is Mode.SAME and (payload or old_hash != new_hash):
        raise DeltaFormatError("an unchanged chunk has no payload and one hash")
    return DeltaRecord(kind, mode, section, offset, length, payload, old_hash, new_hash)


def _payload_limit(kind: RecordKind, length: int) -> int:
    if kind is RecordKind.REPLAY:
        return MAX_REPLAY_PAYLOAD_BYTES
    return length + MAX_PAYLOAD_SLACK_BYTES


def _read_exact(read: Read, length: int) -> bytes:
    data = read(length)
    while len(data) < length:
        more = read(length - len(data))
        if not more:
            raise DeltaTruncatedError(f"{length - len(data)} bytes are missing")
        data += more
    return data
