"""Patch sections where they lie, forward or backward, with a journal of one chunk.

    read the chunk, hash it -> the target already: go on
                            -> the source: compute, journal the target (durable), write it, sync
                            -> neither: it was torn; write it again from the journal, sync

Only chunks of streams: they depend on nothing but their own bytes. A cut may lose, tear or reorder
whatever was not synced; running again, in either direction, goes on where it was without being told
where. The journal has one slot, so a torn chunk is healed before anything else: the slot must not
be used again while a chunk depends on it.

The slot is `SFJ1 | u8 direction | u32 record | u32 length | sha256 of the delta | blake2b-128 of
the payload | blake2b-128 of this header`, then the payload, which is the chunk as it shall be.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, Protocol

from compiler.contract.delta import (
    HASH_BYTES,
    MAX_CHUNK_BYTES,
    STREAMS,
    DeltaBaseError,
    DeltaDirectionError,
    DeltaHeader,
    DeltaRecord,
    DeltaResultError,
    chunk_hash,
    parse_header,
    read_records,
)
from compiler.delta.chunks import decode_chunk
from compiler.delta.sections import Base, Sink
from compiler.delta.streams import Extent, cursors, gather, scatter

_MAGIC: Final = b"SFJ1"
_FIELDS: Final = struct.Struct("<4sBII32s16s")
SLOT_HEADER_BYTES: Final = _FIELDS.size + HASH_BYTES
SLOT_BYTES: Final = SLOT_HEADER_BYTES + MAX_CHUNK_BYTES


class Place(Base, Sink, Protocol):
    """The sections, read and written where they lie."""

    def sync(self) -> None:
        """Make everything written durable."""
        ...


class ChunkJournal(Protocol):
    """One slot, as long as `chunk_extent` says; never above `SLOT_BYTES`."""

    def read(self) -> bytes:
        """Return what is in the slot, whatever it is."""
        ...

    def write(self, header: bytes, payload: bytes) -> None:
        """Write the payload, then the header before it; durable when this returns."""
        ...


@dataclass(frozen=True, slots=True)
class InPlaceReport:
    """What one run did.

    Attributes:
        chunks: Chunks of the delta.
        written: Chunks written by this run.
        healed: Whether the run began with a torn chunk.
    """

    chunks: int
    written: int
    healed: bool


@dataclass(frozen=True, slots=True)
class _Slot:
    record: int
    payload: bytes


def patch_in_place(
    place: Place,
    open_patch: Callable[[], BinaryIO],
    journal: ChunkJournal,
    *,
    delta_sha256: str,
    reverse: bool = False,
) -> InPlaceReport:
    """Bring every chunk of the streams to its new bytes, or with `reverse` to its old ones.

    Sections coded whole are not touched. Hash the sections before you use them.

    Args:
        place: Holds the sections, in any mixture of old and new chunks, one of them perhaps torn.
        open_patch: Returns the delta file from its first byte; called once or twice.
        journal: The slot; bytes of another delta in it are ignored.
        delta_sha256: Digest of the delta file, which the caller has checked.
        reverse: Direction.

    Raises:
        DeltaBaseError: A chunk is neither old nor new, and the journal does not know it.
        DeltaResultError: The bytes made are not those promised.
        DeltaDirectionError: The delta moves bytes within sections.
        DeltaError: The file is malformed; see the subclasses.
    """
    identity = bytes.fromhex(delta_sha256)
    slot = _read_slot(journal.read(), identity)
    healed = False
    if slot is not None:
        with open_patch() as patch:
            healed = _heal(place, patch, slot)
    chunks = written = 0
    with open_patch() as patch:
        for index, record, payload, extents in _chunks(patch):
            chunks += 1
            after = _due(place, record, payload, extents, reverse=reverse)
            if after is None:
                continue
            journal.write(_slot_header(index, after, identity, reverse=reverse), after)
            scatter(place, extents, after)
            place.sync()
            written += 1
    return InPlaceReport(chunks, written, healed)


def _due(
    place: Place, record: DeltaRecord, payload: bytes, extents: list[Extent], *, reverse: bool
) -> bytes | None:
    """Return what a chunk shall be, or None if it is that already."""
    before = gather(place, extents)
    source, target = record.old_hash, record.new_hash
    if reverse:
        source, target = target, source
    found = chunk_hash(before)
    if found == target:
        return None
    if found != source:
        raise DeltaBaseError(f"{record.kind.name}: other bytes at {record.offset}")
    after = decode_chunk(record.kind, record.mode, before, payload, reverse=reverse)
    if chunk_hash(after) != target:
        raise DeltaResultError("a chunk came out different")
    return after


def chunk_extent(patch: BinaryIO) -> tuple[int, int]:
    """Return how many records of a delta are chunks, and the slot that they need, bytes.

    Chunks come before all pieces in the file.
    """
    lengths = [record.length for _, record, _, _ in _chunks(patch)]
    return len(lengths), SLOT_HEADER_BYTES + max(lengths, default=0)


def _heal(place: Place, patch: BinaryIO, slot: _Slot) -> bool:
    """Write the chunk of the slot again if it is torn; return whether it was."""
    for index, record, _, extents in _chunks(patch):
        if index != slot.record:
            continue
        if chunk_hash(slot.payload) not in (record.old_hash, record.new_hash):
            raise DeltaBaseError("the journal holds a chunk that is not the delta's")
        if chunk_hash(gather(place, extents)) in (record.old_hash, record.new_hash):
            return False
        scatter(place, extents, slot.payload)
        place.sync()
        return True
    return False


def _chunks(patch: BinaryIO) -> Iterator[tuple[int, DeltaRecord, bytes, list[Extent]]]:
    """Yield the number, record, payload and extents of every chunk; reads the file to its end."""
    header: DeltaHeader = parse_header(patch.read)
    if not all(section.is_plain for section in header.sections):
        raise DeltaDirectionError("a delta with alignments or replays cannot be applied in place")
    walks = cursors(header)
    for index, (record, payload) in enumerate(read_records(patch.read, header)):
        if record.kind in STREAMS:
            yield index, record, payload, walks[record.kind].take(record.length)


def _slot_header(record: int, payload: bytes, identity: bytes, *, reverse: bool) -> bytes:
    fields = _FIELDS.pack(_MAGIC, reverse, record, len(payload), identity, chunk_hash(payload))
    return fields + chunk_hash(fields)


def _read_slot(data: bytes, identity: bytes) -> _Slot | None:
    """Return the chunk in the slot; None if it is torn, empty, or of another delta."""
    fields, seal = data[: _FIELDS.size], data[_FIELDS.size : SLOT_HEADER_BYTES]
    if len(data) < SLOT_HEADER_BYTES or chunk_hash(fields) != seal:
        return None
    magic, _, record, length, owner, digest = _FIELDS.unpack(fields)
    payload = data[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + length]
    if magic != _MAGIC or owner != identity or chunk_hash(payload) != digest:
        return None
    return _Slot(record, payload)
