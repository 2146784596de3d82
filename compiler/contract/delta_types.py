"""Values, limits and errors of the delta format; import them from `compiler.contract.delta`."""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from compiler.contract.delta_alignment import Alignment, Alone, Kept
from compiler.contract.delta_errors import DeltaBaseError
from compiler.contract.planes import PLANE_KINDS, Plane

MAX_DELTA_BYTES: Final = 1 << 34
MAX_TABLE_BYTES: Final = 16 * 1024 * 1024
MAX_SECTIONS: Final = 65_536
MAX_PLANES: Final = 1 << 16  # in all layouts of a file
MAX_EXTENTS: Final = 1 << 18  # planes of all sections
MAX_RECORDS: Final = 1 << 20
MAX_CHUNK_BYTES: Final = 512 * 1024
MAX_PIECE_BYTES: Final = 1024 * 1024
MAX_PIECE_SOURCE_BYTES: Final = 2 * 1024 * 1024
MAX_REPLAY_BYTES: Final = 64 * 1024 * 1024
MAX_REPLAY_PAYLOAD_BYTES: Final = 2 * 1024 * 1024
MAX_PAYLOAD_SLACK_BYTES: Final = 64 * 1024
HASH_BYTES: Final = 16
NO_SHA256: Final = "0" * 64
STREAM_KINDS: Final = PLANE_KINDS

RECORD_LAYOUT: Final = struct.Struct("<BBIQII16s16s")
RECORD_BYTES: Final = RECORD_LAYOUT.size


class RecordKind(IntEnum):
    """What a record covers: a range of a virtual stream, or a part of one section.

    From version 3 on (2 never was): ADDED and DROPPED are what an alignment leaves alone, in the
    order of plane kinds; REPLAY is a plane of codes made by `compiler.delta.lowrank`.
    """

    CODES4 = 0
    SCALES8 = 1
    F32 = 2
    RAW = 3
    PIECE = 4
    PIECE_BACK = 5
    ADDED = 6
    DROPPED = 7
    REPLAY = 8


class Mode(IntEnum):
    """How the payload says the difference; which mode fits which kind is in `MODES`."""

    SAME = 0
    GAPS = 1
    DENSE = 2
    BLOCKS = 3
    BITS = 4
    WORDS = 5
    SPARSE_WORDS = 6
    COUNTERS = 7
    QUADS = 8
    DENSE_AFTER = 9
    QUADS_AFTER = 10
    HALVES = 11
    WIDE_GAPS = 12
    ZSTD = 16
    ZSTD_SOURCE = 17
    BSDIFF4 = 18
    LOWRANK = 19


_BYTE_MODES: Final = frozenset({Mode.SAME, Mode.DENSE, Mode.BLOCKS})
AFTER_MODES: Final = frozenset({Mode.DENSE_AFTER, Mode.QUADS_AFTER})
"""Modes of ADDED and DROPPED that start from the kept unit before each range."""
_ALONE_MODES: Final = AFTER_MODES | {Mode.DENSE, Mode.QUADS}
_PIECE_MODES: Final = frozenset({Mode.ZSTD, Mode.ZSTD_SOURCE, Mode.BSDIFF4})
MODES: Final[Mapping[RecordKind, frozenset[Mode]]] = {
    RecordKind.CODES4: _BYTE_MODES | {Mode.GAPS, Mode.HALVES, Mode.WIDE_GAPS},
    RecordKind.SCALES8: _BYTE_MODES,
    RecordKind.F32: frozenset({Mode.SAME, Mode.WORDS, Mode.SPARSE_WORDS}),
    RecordKind.RAW: _BYTE_MODES | {Mode.BITS, Mode.COUNTERS},
    RecordKind.PIECE: _PIECE_MODES,
    RecordKind.PIECE_BACK: _PIECE_MODES,
    RecordKind.ADDED: _ALONE_MODES,
    RecordKind.DROPPED: _ALONE_MODES,
    RecordKind.REPLAY: frozenset({Mode.LOWRANK}),
}
NEWER_MODES: Final = frozenset({Mode.COUNTERS, Mode.HALVES, Mode.WIDE_GAPS})
"""Modes of older kinds that only version 3 has."""
WORD_MODES: Final = frozenset(
    {Mode.WORDS, Mode.SPARSE_WORDS, Mode.COUNTERS, Mode.QUADS, Mode.QUADS_AFTER}
)
"""Modes whose records hold whole words of four bytes."""
STREAMS: Final = frozenset(RecordKind(number) for number in range(len(STREAM_KINDS)))
PIECES: Final = frozenset({RecordKind.PIECE, RecordKind.PIECE_BACK})


@dataclass(frozen=True, slots=True)
class DeltaSection:
    """One changed section.

    Attributes:
        component: Name in the closed grammar.
        old_sha256: Digest of the section in the old bundle, `NO_SHA256` if it has none.
        new_sha256: Digest of the section in the new bundle.
        old_length: Bytes.
        new_length: Bytes.
        planes: The layout in the new bundle; empty if the section is coded whole.
        old_planes: The layout in the old bundle, where an alignment says what became of it; else
            empty: the layout is the same, and every plane stays where it is.
        alignment: See `compiler.contract.delta_alignment`; there if `old_planes` is.
        replays: Numbers of the planes of codes that are made by replay, ascending.
    """

    component: str
    old_sha256: str
    new_sha256: str
    old_length: int
    new_length: int
    planes: tuple[Plane, ...]
    old_planes: tuple[Plane, ...] = ()
    alignment: Alignment | None = None
    replays: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether version 1 of the format can say it."""
        return self.alignment is None and not self.replays

    def kept(self, kind: str) -> Iterator[Kept]:
        """Yield the ranges that are in both sections and coded as differences, in stream order."""
        if self.alignment is not None:
            yield from self.alignment.kept(self.old_planes, self.planes, kind)
            return
        for number, plane in enumerate(self.planes):
            if plane.kind == kind and number not in self.replays:
                yield Kept(plane.offset, plane.offset, plane.length)

    def kept_lengths(self, kind: str) -> Iterator[int]:
        """Yield how many bytes each plane of `kind` keeps, in the order of `kept`."""
        if self.alignment is not None:
            return self.alignment.kept_lengths(self.planes, kind)
        return (kept.length for kept in self.kept(kind))

    def alone(self, kind: str, *, dropped: bool) -> Iterator[Iterator[Alone]]:
        """Yield, plane by plane, what only the new section holds, or only the old one."""
        if self.alignment is None:
            return iter(())
        return self.alignment.alone(self.old_planes, self.planes, kind, dropped=dropped)


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """Everything in front of the records.

    Attributes:
        sections: Changed sections in ascending component order.
        reversible: Whether the file makes the old sections from the new ones too.
        record_count: Records that follow.
        header_length: Bytes in front of the first record.
        file_length: Bytes of the whole file.
        version: Of the format.
    """

    sections: tuple[DeltaSection, ...]
    reversible: bool
    record_count: int
    header_length: int
    file_length: int
    version: int = 1

    def spans(self) -> Iterator[tuple[RecordKind, int, int]]:
        """Yield (kind, section index, length in bytes) of all ranges in file order.

        The index is 0 for a virtual stream; empty ranges are left out. Records fill each range
        from 0 to its length before the next one begins.
        """
        for number, kind in enumerate(STREAM_KINDS):
            total = sum(length for item in self.sections for length in item.kept_lengths(kind))
            if total:
                yield RecordKind(number), 0, total
        for record, dropped in ((RecordKind.ADDED, False), (RecordKind.DROPPED, True)):
            total = sum(self.alone_lengths(dropped=dropped))
            if total and (self.reversible or not dropped):
                yield record, 0, total
        for index, section in enumerate(self.sections):
            for plane in section.replays:
                yield RecordKind.REPLAY, index, section.planes[plane].length
            if not section.planes and section.new_length:
                yield RecordKind.PIECE, index, section.new_length
            if not section.planes and section.old_length and self.reversible:
                yield RecordKind.PIECE_BACK, index, section.old_length

    def alone(self, *, dropped: bool) -> Iterator[tuple[str, Alone]]:
        """Yield (component, range) of the stream ADDED, or of DROPPED."""
        for kind in STREAM_KINDS:
            for section in self.sections:
                for plane in section.alone(kind, dropped=dropped):
                    for alone in plane:
                        yield section.component, alone

    def alone_lengths(self, *, dropped: bool) -> Iterator[int]:
        """Yield how many bytes each plane has in that stream."""
        for kind in STREAM_KINDS:
            for section in self.sections:
                for plane in section.alone(kind, dropped=dropped):
                    yield sum(alone.length for alone in plane)

    def require_bundles(self, old: Mapping[str, str], new: Mapping[str, str]) -> None:
        """Check that this file leads from the bundle `old` to the bundle `new`.

        Args:
            old: Component to SHA-256 of every section of the old release manifest.
            new: The same of the new one. Sections not named by the delta must be equal in both.

        Raises:
            DeltaBaseError: The delta starts from, or leads to, other sections, or leaves one out.
        """
        listed = {section.component: section for section in self.sections}
        for section in self.sections:
            if old.get(section.component, NO_SHA256) != section.old_sha256:
                raise DeltaBaseError(f"{section.component}: the delta starts from other bytes")
            if new.get(section.component) != section.new_sha256:
                raise DeltaBaseError(f"{section.component}: the delta leads to other bytes")
        for component, digest in new.items():
            if component not in listed and old.get(component) != digest:
                raise DeltaBaseError(f"{component}: changed, but not in the delta")


@dataclass(frozen=True, slots=True)
class DeltaRecord:
    """One record, without its payload.

    Attributes:
        kind: What it covers.
        mode: How the payload is coded.
        section: Index of the section for pieces, 0 for streams.
        offset: First byte in the stream, or in the section to be made.
        length: Bytes covered.
        payload_length: Bytes behind the record header.
        old_hash: BLAKE2b-128 of the bytes needed: the chunk before, or the source range of a
            piece (zeros if it has none).
        new_hash: BLAKE2b-128 of the bytes made.
    """

    kind: RecordKind
    mode: Mode
    section: int
    offset: int
    length: int
    payload_length: int
    old_hash: bytes
    new_hash: bytes

    def to_bytes(self) -> bytes:
        """Return the fixed-size record header."""
        return RECORD_LAYOUT.pack(
            self.kind,
            self.mode,
            self.section,
            self.offset,
            self.length,
            self.payload_length,
            self.old_hash,
            self.new_hash,
        )
