"""Pieces: sections without planes, or whose layout changed, coded whole.

A piece makes at most `MAX_PIECE_BYTES` of a section, from at most `MAX_PIECE_SOURCE_BYTES` of what
the section was, so memory stays bounded whatever the size of the section. Payloads:

    ZSTD         frame
    ZSTD_SOURCE  u64 source offset | u32 source length | frame with the source as raw dictionary
    BSDIFF4      u64 source offset | u32 source length | BSDIFF40 patch
"""

import struct
from typing import Final

from compiler.contract.delta import (
    HASH_BYTES,
    MAX_PIECE_SOURCE_BYTES,
    DeltaBaseError,
    DeltaFormatError,
    DeltaLimitError,
    DeltaRecord,
    DeltaSection,
    Mode,
    chunk_hash,
)
from compiler.delta.blobs import BlobReader, open_frame
from compiler.delta.bsdiff import apply_bsdiff4
from compiler.delta.sections import Base
from compiler.delta.streams import read_range

SOURCE_RANGE: Final = struct.Struct("<QI")
NO_SOURCE_HASH: Final = bytes(HASH_BYTES)


def decode_piece(
    record: DeltaRecord, payload: bytes, section: DeltaSection, base: Base, *, reverse: bool
) -> bytes:
    """Return the bytes of a piece, as many as the record says.

    Args:
        record: A piece in the direction of travel.
        payload: As it came.
        section: The section of the record.
        base: Where the section is read.
        reverse: Whether the base holds the new section.

    Raises:
        DeltaBaseError: The base holds other bytes.
        DeltaLimitError: The source range is too long.
        DeltaFormatError: The payload is malformed.
    """
    if record.mode is Mode.ZSTD:
        if record.old_hash != NO_SOURCE_HASH:
            raise DeltaFormatError("a piece without source has a source hash")
        return open_frame(payload, record.length, checksum=True)
    reader = BlobReader(payload)
    offset, length = SOURCE_RANGE.unpack(reader.take(SOURCE_RANGE.size))
    available = section.new_length if reverse else section.old_length
    if length > MAX_PIECE_SOURCE_BYTES:
        raise DeltaLimitError(f"source of {length} bytes, limit {MAX_PIECE_SOURCE_BYTES}")
    if length == 0 or offset + length > available:
        raise DeltaFormatError("the source range is empty or outside the section")
    source = read_range(base, section.component, offset, length)
    if chunk_hash(source) != record.old_hash:
        raise DeltaBaseError(f"{section.component}: other bytes at {offset}")
    if record.mode is Mode.BSDIFF4:
        return apply_bsdiff4(reader.rest(), source, record.length)
    return open_frame(reader.rest(), record.length, source=source, checksum=True)
