"""Apply a delta: read the base, check, make, check, write somewhere else.

Nothing is ever written where the base is, so a device that is killed at any point still has the old
bundle. Running again from the start, or from the record after the last one that is safe on disk,
gives the same bytes. Memory is one chunk or piece and its payload, whatever the size of the model.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Final

from compiler.contract.delta import (
    AFTER_MODES,
    MAX_CHUNK_BYTES,
    NO_SHA256,
    STREAMS,
    DeltaBaseError,
    DeltaDirectionError,
    DeltaHeader,
    DeltaRecord,
    DeltaResultError,
    DeltaSection,
    Mode,
    RecordKind,
    chunk_hash,
    parse_header,
    read_records,
)
from compiler.delta.chunks import decode_chunk
from compiler.delta.pieces import decode_piece
from compiler.delta.replay import SectionReplay
from compiler.delta.sections import Base, Sink
from compiler.delta.streams import cursors, gather, gather_before, read_range, scatter


@dataclass(frozen=True, slots=True)
class SectionResult:
    """One section that was made.

    Attributes:
        component: Its name.
        length: Bytes; a section of 0 bytes is never written to, so create it.
        sha256: What the header promises; compare it with the release manifest.
        verified: Whether all bytes passed through this run in order and hashed to `sha256`. Weight
            sections are written out of order: hash those, see `verify_sections`.
    """

    component: str
    length: int
    sha256: str
    verified: bool


@dataclass(frozen=True, slots=True)
class AppliedReport:
    """What one run of `apply_delta` did.

    Attributes:
        header: The header of the delta.
        sections: The sections made.
        records: Records in the file.
        bytes_written: Bytes handed to the sink in this run.
    """

    header: DeltaHeader
    sections: tuple[SectionResult, ...]
    records: int
    bytes_written: int


def apply_delta(
    source: Base,
    patch: BinaryIO,
    sink: Sink,
    *,
    reverse: bool = False,
    start_record: int = 0,
    on_record: Callable[[int], None] | None = None,
) -> AppliedReport:
    """Make the new sections from the old ones, or with `reverse` the old from the new.

    The digest of the file itself is the caller's to check, before this is called.

    Args:
        source: Sections to start from.
        patch: The delta file from its first byte.
        sink: Where the sections are made; must not be what `source` reads.
        reverse: Direction.
        start_record: Records already written by an earlier run; they are read over.
        on_record: Called with the number of records finished, after the sink took each.

    Returns:
        The sections made. Every chunk was checked; hash the sections before you use them.

    Raises:
        DeltaBaseError: `source` holds other bytes than the delta starts from.
        DeltaResultError: The bytes made are not those promised.
        DeltaDirectionError: `reverse`, and the file leads only forward.
        DeltaError: The file is malformed; see the subclasses.
    """
    header = parse_header(patch.read)
    if reverse and not header.reversible:
        raise DeltaDirectionError("the delta leads only forward")
    run = _Run(header, source, sink, reverse=reverse)
    for index, (record, payload) in enumerate(read_records(patch.read, header)):
        if index < start_record:
            run.skip(record)
            continue
        run.write(record, payload)
        if on_record is not None:
            on_record(index + 1)
    return run.report()


def verify_sections(header: DeltaHeader, sections: Base, *, reverse: bool = False) -> None:
    """Hash all sections that were made, each from its first byte to its last.

    Args:
        header: From the report of `apply_delta`.
        sections: Where they were written.
        reverse: The direction that was applied.

    Raises:
        DeltaResultError: One is too short, or its digest is not that of the header.
    """
    for section in header.sections:
        made = _target(section, reverse=reverse)
        if made is None:
            continue
        length, sha256 = made
        digest = hashlib.sha256()
        for offset in range(0, length, MAX_CHUNK_BYTES):
            want = min(MAX_CHUNK_BYTES, length - offset)
            try:
                digest.update(read_range(sections, section.component, offset, want))
            except DeltaBaseError as error:
                raise DeltaResultError(str(error)) from error
        if digest.hexdigest() != sha256:
            raise DeltaResultError(f"{section.component}: SHA-256 differs")


_PIECES: Final = {False: RecordKind.PIECE, True: RecordKind.PIECE_BACK}
_ALONE: Final = {False: RecordKind.ADDED, True: RecordKind.DROPPED}


class _Run:
    """State of one application: where each stream stands, and digests of sections made in order."""

    def __init__(self, header: DeltaHeader, source: Base, sink: Sink, *, reverse: bool) -> None:
        self._header = header
        self._source = source
        self._sink = sink
        self._reverse = reverse
        self._cursors = cursors(header)
        self._replays = iter(
            [(section, plane) for section in header.sections for plane in section.replays]
        )
        self._digests = {
            index: hashlib.sha256()
            for index, section in enumerate(header.sections)
            if not section.planes
        }
        self._written = 0

    def skip(self, record: DeltaRecord) -> None:
        """Pass over a record that an earlier run has written."""
        if record.kind in self._cursors:
            self._cursors[record.kind].take(record.length)
        elif record.kind is RecordKind.REPLAY:
            next(self._replays)
        elif record.kind is _PIECES[self._reverse]:
            self._digests.pop(record.section, None)

    def write(self, record: DeltaRecord, payload: bytes) -> None:
        """Make the bytes of a record and write them."""
        if record.kind in STREAMS:
            self._write_chunk(record, payload)
        elif record.kind is _ALONE[self._reverse]:
            self._write_alone(record, payload)
        elif record.kind is RecordKind.REPLAY:
            self._write_replay(record, payload)
        elif record.kind is _PIECES[self._reverse]:
            self._write_piece(record, payload)

    def report(self) -> AppliedReport:
        """Check the digests of sections made in order, and sum up."""
        results = []
        for index, section in enumerate(self._header.sections):
            made = _target(section, reverse=self._reverse)
            if made is None:
                continue
            digest = self._digests.get(index)
            if digest is not None and digest.hexdigest() != made[1]:
                raise DeltaResultError(f"{section.component}: SHA-256 differs")
            results.append(SectionResult(section.component, *made, verified=digest is not None))
        return AppliedReport(self._header, tuple(results), self._header.record_count, self._written)

    def _write_chunk(self, record: DeltaRecord, payload: bytes) -> None:
        extents = self._cursors[record.kind].take(record.length)
        before = gather(self._source, extents, new=self._reverse)
        needed, promised = self._hashes(record)
        if chunk_hash(before) != needed:
            raise DeltaBaseError(f"{record.kind.name}: other bytes at {record.offset}")
        after = decode_chunk(record.kind, record.mode, before, payload, reverse=self._reverse)
        if record.mode is not Mode.SAME:
            self._require_result(after, promised)
        scatter(self._sink, extents, after, new=not self._reverse)
        self._written += len(after)

    def _write_alone(self, record: DeltaRecord, payload: bytes) -> None:
        extents = self._cursors[record.kind].take(record.length)
        before = bytes(record.length)
        if record.mode in AFTER_MODES:
            before = gather_before(self._source, extents)
            if chunk_hash(before) != record.old_hash:
                raise DeltaBaseError(f"{record.kind.name}: other bytes before {record.offset}")
        made = decode_chunk(record.kind, record.mode, before, payload, reverse=False)
        self._require_result(made, record.new_hash)
        scatter(self._sink, extents, made)
        self._written += len(made)

    def _write_replay(self, record: DeltaRecord, payload: bytes) -> None:
        section, plane = next(self._replays)
        needed, promised = self._hashes(record)
        replay = SectionReplay(section, plane, payload, reverse=self._reverse)
        made = replay.run(self._source, self._sink)
        if made.before != needed:
            raise DeltaBaseError(f"{section.component}: other codes")
        if made.after != promised:
            raise DeltaResultError(f"{section.component}: a replay came out different")
        self._written += record.length

    def _write_piece(self, record: DeltaRecord, payload: bytes) -> None:
        section = self._header.sections[record.section]
        made = decode_piece(record, payload, section, self._source, reverse=self._reverse)
        self._require_result(made, record.new_hash)
        digest = self._digests.get(record.section)
        if digest is not None:
            digest.update(made)
        self._sink.pwrite(section.component, made, record.offset)
        self._written += len(made)

    def _hashes(self, record: DeltaRecord) -> tuple[bytes, bytes]:
        """Return the hash of what is needed and of what is promised, by direction."""
        if self._reverse:
            return record.new_hash, record.old_hash
        return record.old_hash, record.new_hash

    @staticmethod
    def _require_result(data: bytes, promised: bytes) -> None:
        if chunk_hash(data) != promised:
            raise DeltaResultError("a chunk came out different")


def _target(section: DeltaSection, *, reverse: bool) -> tuple[int, str] | None:
    if not reverse:
        return section.new_length, section.new_sha256
    if section.old_sha256 == NO_SHA256:
        return None
    return section.old_length, section.old_sha256
