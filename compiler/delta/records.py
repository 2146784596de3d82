"""Make the records between two bundles whose sections were chosen."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from compiler.contract.delta import (
    AFTER_MODES,
    MAX_CHUNK_BYTES,
    MAX_PIECE_BYTES,
    STREAM_KINDS,
    STREAMS,
    DeltaHeader,
    DeltaRecord,
    Mode,
    RecordKind,
    chunk_hash,
)
from compiler.delta.chunks import encode_alone, encode_chunk, is_exact
from compiler.delta.encode_pieces import encode_piece, source_range
from compiler.delta.lowrank import Factors
from compiler.delta.pieces import NO_SOURCE_HASH, decode_piece
from compiler.delta.replay import SectionReplay, encode_replay, weight_planes
from compiler.delta.report import ReportBuilder
from compiler.delta.sections import SectionSource, Sources
from compiler.delta.streams import cursors, gather, gather_before
from compiler.errors import CompilerError

Made = tuple[DeltaRecord, bytes]
Bundle = Mapping[str, SectionSource]
Replays = Mapping[tuple[str, int], Factors]
"""Factors by section and number of the plane of codes that they were merged into."""

LEAST_OWN_BYTES: Final = 4096
LEAST_ALONE_BYTES: Final = 512
"""Planes of this size and above have records of their own where a stream mixes contents."""


class DeltaEncodeError(CompilerError):
    """What was encoded does not decode to the same bytes; nothing may be published."""

    code: ClassVar[str] = "build.app.delta"


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """How to encode.

    Attributes:
        chunk_bytes: Bytes of a stream record, a multiple of 4 up to `MAX_CHUNK_BYTES`.
        piece_bytes: Bytes of a piece, up to `MAX_PIECE_BYTES`.
        store_reverse: Whether what leads only forward is stored for the way back too.
        try_bsdiff4: Whether pieces try bsdiff4; it costs seconds and 17 x the source in memory.

    Raises:
        ValueError: A size is out of range.
    """

    chunk_bytes: int = MAX_CHUNK_BYTES
    piece_bytes: int = MAX_PIECE_BYTES
    store_reverse: bool = False
    try_bsdiff4: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.chunk_bytes <= MAX_CHUNK_BYTES or self.chunk_bytes % 4:
            raise ValueError(f"chunk_bytes {self.chunk_bytes}")
        if not 0 < self.piece_bytes <= MAX_PIECE_BYTES:
            raise ValueError(f"piece_bytes {self.piece_bytes}")


class RecordMaker:
    """One encoding: both bundles, the sections between them and the costs so far."""

    def __init__(
        self,
        old: Bundle,
        new: Bundle,
        header: DeltaHeader,
        options: EncodeOptions,
        replays: Replays,
    ) -> None:
        self._options = options
        self._header = header
        self._old, self._new = Sources(old), Sources(new)
        self._cursors = cursors(header)
        self._replays = iter(
            [(section, plane) for section in header.sections for plane in section.replays]
        )
        self._factors = replays
        self.report = ReportBuilder(header.sections)

    def records(self) -> Iterator[Made]:
        """Yield every record with its payload, in file order.

        Raises:
            DeltaEncodeError: A record does not decode to the bytes it was made of.
        """
        for kind, section, length in self._header.spans():
            if kind in STREAMS:
                yield from self._chunks(kind)
            elif kind in (RecordKind.ADDED, RecordKind.DROPPED):
                yield from self._alone(kind)
            elif kind is RecordKind.REPLAY:
                yield self._replay(section)
            else:
                yield from self._pieces(kind, section, length)

    def _chunks(self, kind: RecordKind) -> Iterator[Made]:
        offset = 0
        for length in self._stream_lengths(kind):
            extents = self._cursors[kind].take(length)
            old, new = gather(self._old, extents), gather(self._new, extents, new=True)
            mode, payload = encode_chunk(kind, old, new)
            self._require(is_exact(kind, mode, payload, old, new), kind, offset)
            record = DeltaRecord(
                kind, mode, 0, offset, length, len(payload), chunk_hash(old), chunk_hash(new)
            )
            self.report.add_chunk(record, extents, old, new)
            yield record, payload
            offset += length

    def _alone(self, kind: RecordKind) -> Iterator[Made]:
        dropped = kind is RecordKind.DROPPED
        here, there = (self._old, self._new) if dropped else (self._new, self._old)
        lengths = self._header.alone_lengths(dropped=dropped)
        offset = 0
        for length in self._cut(lengths, LEAST_ALONE_BYTES):
            extents = self._cursors[kind].take(length)
            content, before = gather(here, extents, new=True), gather_before(there, extents)
            mode, payload = encode_alone(kind, before, content)
            is_after = mode in AFTER_MODES
            before = before if is_after else bytes(length)
            self._require(is_exact(kind, mode, payload, before, content), kind, offset)
            needed = chunk_hash(before) if is_after else NO_SOURCE_HASH
            record = DeltaRecord(
                kind, mode, 0, offset, length, len(payload), needed, chunk_hash(content)
            )
            self.report.add_chunk(record, extents, bytes(length), content)
            yield record, payload
            offset += length

    def _replay(self, index: int) -> Made:
        section, number = next(self._replays)
        planes = weight_planes(section.planes, number)
        factors = self._factors[section.component, number]
        payload = encode_replay(self._old, self._new, section.component, planes, factors)
        if payload is None:
            raise DeltaEncodeError(f"{section.component}: plane {number} is no replay")
        hashes = SectionReplay(section, number, payload, reverse=False).run(self._old, _Nowhere())
        back = SectionReplay(section, number, payload, reverse=True).run(self._new, _Nowhere())
        self._require(tuple(hashes) == (back.after, back.before), RecordKind.REPLAY, 0)
        record = DeltaRecord(
            RecordKind.REPLAY, Mode.LOWRANK, index, 0, planes.codes.length, len(payload), *hashes
        )
        self.report.add_piece(record)
        return record, payload

    def _pieces(self, kind: RecordKind, index: int, total: int) -> Iterator[Made]:
        reverse = kind is RecordKind.PIECE_BACK
        start, goal = (self._new, self._old) if reverse else (self._old, self._new)
        section = self._header.sections[index]
        available = section.new_length if reverse else section.old_length
        for offset in range(0, total, self._options.piece_bytes):
            length = min(self._options.piece_bytes, total - offset)
            piece = goal.pread(section.component, length, offset)
            source_at, source_length = source_range(offset, length, available)
            source = start.pread(section.component, source_length, source_at)
            mode, payload = encode_piece(
                piece, source, source_at, try_bsdiff4=self._options.try_bsdiff4
            )
            old_hash = NO_SOURCE_HASH if mode is Mode.ZSTD else chunk_hash(source)
            record = DeltaRecord(
                kind, mode, index, offset, length, len(payload), old_hash, chunk_hash(piece)
            )
            made = decode_piece(record, payload, section, start, reverse=reverse)
            self._require(made == piece, kind, offset)
            self.report.add_piece(record)
            yield record, payload

    def _stream_lengths(self, kind: RecordKind) -> Iterator[int]:
        name = STREAM_KINDS[kind]
        lengths = [n for item in self._header.sections for n in item.kept_lengths(name)]
        return self._cut(lengths if kind is RecordKind.RAW else [sum(lengths)], LEAST_OWN_BYTES)

    def _cut(self, lengths: Iterable[int], least: int) -> Iterator[int]:
        """Yield lengths of records: ranges of `least` bytes and above are not mixed with others."""
        waiting = 0
        for length in lengths:
            if length >= least:
                yield from self._whole(waiting)
                yield from self._whole(length)
                waiting = 0
            else:
                waiting += length
        yield from self._whole(waiting)

    def _whole(self, length: int) -> Iterator[int]:
        for offset in range(0, length, self._options.chunk_bytes):
            yield min(self._options.chunk_bytes, length - offset)

    @staticmethod
    def _require(holds: bool, kind: RecordKind, offset: int) -> None:
        if not holds:
            raise DeltaEncodeError(f"{kind.name} at {offset} is not exact")


class _Nowhere:
    """A sink for what is only hashed."""

    def pwrite(self, component: str, data: bytes, offset: int) -> None:
        """Forget `data`."""
