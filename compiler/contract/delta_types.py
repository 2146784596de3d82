"""Values, limits and errors of the delta format; import them from `compiler.contract.delta`."""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Final

from compiler.contract.errors import ContractError
from compiler.contract.planes import PLANE_KINDS, Plane

MAX_DELTA_BYTES: Final = 1 << 34
MAX_TABLE_BYTES: Final = 16 * 1024 * 1024
MAX_SECTIONS: Final = 65_536
MAX_PLANES: Final = 1 << 16  # in all layouts of a file
MAX_EXTENTS: Final = 1 << 18  # planes of all sections
MAX_RECORDS: Final = 1 << 20
MAX_CHUNK_BYTES: Final = 512 * 1024
MAX_PIECE_BYTES: Final = 4 * 1024 * 1024
MAX_PIECE_SOURCE_BYTES: Final = 8 * 1024 * 1024
MAX_PAYLOAD_SLACK_BYTES: Final = 64 * 1024
HASH_BYTES: Final = 16
NO_SHA256: Final = "0" * 64
STREAM_KINDS: Final = PLANE_KINDS

RECORD_LAYOUT: Final = struct.Struct("<BBIQII16s16s")
RECORD_BYTES: Final = RECORD_LAYOUT.size


class DeltaError(ContractError):
    """Root of what a delta file can do wrong; the base is untouched, fetch the sections whole."""

    code: ClassVar[str] = "contract.delta"


class DeltaFormatError(DeltaError):
    """The bytes do not keep the format: a broken encoder or a changed file; do not retry."""

    code: ClassVar[str] = "contract.delta.format"


class DeltaTruncatedError(DeltaError):
    """The file ends early: fetch the rest and start again."""

    code: ClassVar[str] = "contract.delta.truncated"
    retryable: ClassVar[bool] = True


class DeltaLimitError(DeltaError):
    """A length or count is above its named limit; nothing was allocated for it."""

    code: ClassVar[str] = "contract.delta.limit"


class DeltaVersionError(DeltaError):
    """The file has a version that this reader does not know."""

    code: ClassVar[str] = "contract.delta.version"


class DeltaBaseError(DeltaError):
    """The bytes to start from are not those of the delta: fetch the sections whole."""

    code: ClassVar[str] = "contract.delta.base"


class DeltaResultError(DeltaError):
    """The bytes made are not those promised: drop them and fetch the sections whole."""

    code: ClassVar[str] = "contract.delta.result"


class DeltaDirectionError(DeltaError):
    """Backwards was asked of a file that stores only the way forward."""

    code: ClassVar[str] = "contract.delta.direction"


class RecordKind(IntEnum):
    """What a record covers: a range of a virtual stream, or a piece of one section."""

    CODES4 = 0
    SCALES8 = 1
    F32 = 2
    RAW = 3
    PIECE = 4
    PIECE_BACK = 5


class Mode(IntEnum):
    """How the payload says the difference; which mode fits which kind is in `MODES`."""

    SAME = 0
    GAPS = 1
    DENSE = 2
    BLOCKS = 3
    BITS = 4
    WORDS = 5
    SPARSE_WORDS = 6
    ZSTD = 16
    ZSTD_SOURCE = 17
    BSDIFF4 = 18


_BYTE_MODES: Final = frozenset({Mode.SAME, Mode.DENSE, Mode.BLOCKS})
_PIECE_MODES: Final = frozenset({Mode.ZSTD, Mode.ZSTD_SOURCE, Mode.BSDIFF4})
MODES: Final[Mapping[RecordKind, frozenset[Mode]]] = {
    RecordKind.CODES4: _BYTE_MODES | {Mode.GAPS},
    RecordKind.SCALES8: _BYTE_MODES,
    RecordKind.F32: frozenset({Mode.SAME, Mode.WORDS, Mode.SPARSE_WORDS}),
    RecordKind.RAW: _BYTE_MODES | {Mode.BITS},
    RecordKind.PIECE: _PIECE_MODES,
    RecordKind.PIECE_BACK: _PIECE_MODES,
}


@dataclass(frozen=True, slots=True)
class DeltaSection:
    """One changed section.

    Attributes:
        component: Name in the closed grammar.
        old_sha256: Digest of the section in the old bundle, `NO_SHA256` if it has none.
        new_sha256: Digest of the section in the new bundle.
        old_length: Bytes.
        new_length: Bytes.
        planes: The layout, the same in both bundles; empty if the section is coded whole.
    """

    component: str
    old_sha256: str
    new_sha256: str
    old_length: int
    new_length: int
    planes: tuple[Plane, ...]


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """Everything in front of the records.

    Attributes:
        sections: Changed sections in ascending component order.
        reversible: Whether the file makes the old sections from the new ones too.
        record_count: Records that follow.
        header_length: Bytes in front of the first record.
        file_length: Bytes of the whole file.
    """

    sections: tuple[DeltaSection, ...]
    reversible: bool
    record_count: int
    header_length: int
    file_length: int

    def spans(self) -> Iterator[tuple[RecordKind, int, int]]:
        """Yield (kind, section index, length in bytes) of all ranges in file order.

        The index is 0 for a virtual stream; empty ranges are left out. Records fill each range
        from 0 to its length before the next one begins.
        """
        totals = dict.fromkeys(STREAM_KINDS, 0)
        for section in self.sections:
            for plane in section.planes:
                totals[plane.kind] += plane.length
        for number, kind in enumerate(STREAM_KINDS):
            if totals[kind]:
                yield RecordKind(number), 0, totals[kind]
        for index, section in enumerate(self.sections):
            if not section.planes and section.new_length:
                yield RecordKind.PIECE, index, section.new_length
            if not section.planes and section.old_length and self.reversible:
                yield RecordKind.PIECE_BACK, index, section.old_length

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
