"""Encode a delta between two bundles in memory: try every way, keep the smallest.

Each record is decoded again before it is accepted, so an encoder that is wrong fails on the server.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from compiler.contract.delta import (
    MAX_CHUNK_BYTES,
    MAX_PIECE_BYTES,
    MAX_PIECE_SOURCE_BYTES,
    NO_SHA256,
    STREAM_KINDS,
    DeltaHeader,
    DeltaRecord,
    DeltaSection,
    Mode,
    RecordKind,
    chunk_hash,
    header_bytes,
)
from compiler.contract.planes import require_component
from compiler.delta.blobs import make_frame
from compiler.delta.bsdiff import make_bsdiff4
from compiler.delta.chunks import decode_chunk, encode_chunk
from compiler.delta.pieces import NO_SOURCE_HASH, SOURCE_RANGE, decode_piece
from compiler.delta.report import DeltaReport, ReportBuilder
from compiler.delta.sections import MemorySections, SectionBytes
from compiler.delta.streams import StreamCursor, gather
from compiler.errors import CompilerError

_SHORTEST_SOURCE: Final = 8  # zstd ignores a raw dictionary below this


class DeltaEncodeError(CompilerError):
    """What was encoded does not decode to the same bytes; nothing may be published."""

    code: ClassVar[str] = "build.app.delta"


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """How to encode.

    Attributes:
        chunk_bytes: Bytes of a stream record, a multiple of 4 up to `MAX_CHUNK_BYTES`.
        piece_bytes: Bytes of a piece, up to `MAX_PIECE_BYTES`.
        store_reverse: Whether sections coded whole get pieces for the way back too.
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


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """A delta file and what it cost."""

    data: bytes
    report: DeltaReport


def encode_delta(
    old: Mapping[str, SectionBytes],
    new: Mapping[str, SectionBytes],
    options: EncodeOptions | None = None,
) -> EncodedDelta:
    """Return the delta that leads from the bundle `old` to the bundle `new`.

    Sections that are equal, or that only `old` has, do not appear in it. The same input gives the
    same bytes as long as the versions of zstd and bzip2 stay the same.

    Args:
        old: Component to section.
        new: Component to section.
        options: How to encode; the defaults if None.

    Raises:
        ContractError: A component name is outside the grammar, or the delta breaks a limit.
        DeltaEncodeError: A record does not decode to the bytes it was made of.
    """
    return _Encoder(old, new, options or EncodeOptions()).encode()


def changed_sections(
    old: Mapping[str, SectionBytes], new: Mapping[str, SectionBytes]
) -> tuple[DeltaSection, ...]:
    """Return the sections of `new` that `old` does not have like that, in component order.

    Raises:
        ContractError: A component name is outside the grammar.
    """
    entries = []
    for component in sorted(new):
        after = new[component]
        before = old.get(require_component(component))
        if before is not None and before.data == after.data:
            continue
        same_layout = before is not None and before.planes == after.planes
        entries.append(
            DeltaSection(
                component,
                before.sha256 if before is not None else NO_SHA256,
                after.sha256,
                len(before.data) if before is not None else 0,
                len(after.data),
                after.planes if same_layout else (),
            )
        )
    return tuple(entries)


class _Encoder:
    """One encoding: both bundles, the sections between them and the costs so far."""

    def __init__(
        self,
        old: Mapping[str, SectionBytes],
        new: Mapping[str, SectionBytes],
        options: EncodeOptions,
    ) -> None:
        self._options = options
        self._sections = changed_sections(old, new)
        self._old = _memory(old, self._sections)
        self._new = _memory(new, self._sections)
        self._report = ReportBuilder(self._sections)

    def encode(self) -> EncodedDelta:
        """Make all records, then the header that counts them."""
        reversible = self._options.store_reverse or all(
            section.planes or not section.old_length for section in self._sections
        )
        draft = DeltaHeader(self._sections, reversible, 0, 0, 0)
        records = [
            record
            for kind, section, length in draft.spans()
            for record in self._span(kind, section, length)
        ]
        header = header_bytes(
            self._sections,
            reversible=reversible,
            record_count=len(records),
            records_length=sum(map(len, records)),
        )
        data = header + b"".join(records)
        return EncodedDelta(data, self._report.build(len(data)))

    def _span(self, kind: RecordKind, section: int, length: int) -> Iterator[bytes]:
        if kind < RecordKind.PIECE:
            return self._chunks(kind, length)
        return self._pieces(kind, section, length)

    def _chunks(self, kind: RecordKind, total: int) -> Iterator[bytes]:
        cursor = StreamCursor(self._sections, STREAM_KINDS[kind])
        for offset in range(0, total, self._options.chunk_bytes):
            length = min(self._options.chunk_bytes, total - offset)
            extents = cursor.take(length)
            old, new = gather(self._old, extents), gather(self._new, extents)
            mode, payload = encode_chunk(kind, old, new)
            if (
                decode_chunk(kind, mode, old, payload, reverse=False) != new
                or decode_chunk(kind, mode, new, payload, reverse=True) != old
            ):
                raise DeltaEncodeError(f"{kind.name} at {offset}: {mode.name} is not exact")
            record = DeltaRecord(
                kind, mode, 0, offset, length, len(payload), chunk_hash(old), chunk_hash(new)
            )
            data = record.to_bytes() + payload
            self._report.add_chunk(record, len(data), extents, old, new)
            yield data

    def _pieces(self, kind: RecordKind, index: int, total: int) -> Iterator[bytes]:
        reverse = kind is RecordKind.PIECE_BACK
        start, goal = (self._new, self._old) if reverse else (self._old, self._new)
        section = self._sections[index]
        available = section.new_length if reverse else section.old_length
        for offset in range(0, total, self._options.piece_bytes):
            length = min(self._options.piece_bytes, total - offset)
            piece = goal.pread(section.component, length, offset)
            source_at, source_length = _source_range(offset, length, available)
            source = start.pread(section.component, source_length, source_at)
            mode, payload = self._encode_piece(piece, source, source_at)
            old_hash = NO_SOURCE_HASH if mode is Mode.ZSTD else chunk_hash(source)
            record = DeltaRecord(
                kind, mode, index, offset, length, len(payload), old_hash, chunk_hash(piece)
            )
            if decode_piece(record, payload, section, start, reverse=reverse) != piece:
                raise DeltaEncodeError(f"{section.component} at {offset}: {mode.name} is not exact")
            data = record.to_bytes() + payload
            self._report.add_piece(record, len(data))
            yield data

    def _encode_piece(self, piece: bytes, source: bytes, source_at: int) -> tuple[Mode, bytes]:
        candidates = [(Mode.ZSTD, make_frame(piece))]
        if len(source) >= _SHORTEST_SOURCE:
            prefix = SOURCE_RANGE.pack(source_at, len(source))
            candidates.append((Mode.ZSTD_SOURCE, prefix + make_frame(piece, source=source)))
            patch = make_bsdiff4(source, piece) if self._options.try_bsdiff4 else None
            if patch is not None:
                candidates.append((Mode.BSDIFF4, prefix + patch))
        return min(candidates, key=lambda candidate: len(candidate[1]))


def _source_range(offset: int, length: int, available: int) -> tuple[int, int]:
    """Return (offset, length) of the source of a piece: around its place, as much as is allowed."""
    margin = (MAX_PIECE_SOURCE_BYTES - length) // 2
    start = max(0, min(offset - margin, available - MAX_PIECE_SOURCE_BYTES))
    return start, min(MAX_PIECE_SOURCE_BYTES, available - start)


def _memory(bundle: Mapping[str, SectionBytes], sections: Sequence[DeltaSection]) -> MemorySections:
    return MemorySections(
        {
            section.component: bundle[section.component].data
            for section in sections
            if section.component in bundle
        }
    )
