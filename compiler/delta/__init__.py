"""The delta codec, both directions: pure, streaming, numpy and zstandard only.

The format, its limits and its errors are in `compiler.contract.delta`. Encoding may use bsdiff4 for
pieces; nothing that a device runs needs it.
"""

from compiler.delta.apply import AppliedReport, SectionResult, apply_delta, verify_sections
from compiler.delta.encode import EncodedDelta, encode_delta, write_delta
from compiler.delta.in_place import (
    SLOT_BYTES,
    ChunkJournal,
    InPlaceReport,
    Place,
    chunk_extent,
    patch_in_place,
)
from compiler.delta.records import DeltaEncodeError, EncodeOptions
from compiler.delta.report import DeltaReport, SectionReport
from compiler.delta.sections import (
    Base,
    MemorySections,
    SectionBytes,
    SectionFile,
    SectionSource,
    Sink,
    with_planes,
)

__all__ = [
    "SLOT_BYTES",
    "AppliedReport",
    "Base",
    "ChunkJournal",
    "DeltaEncodeError",
    "DeltaReport",
    "EncodeOptions",
    "EncodedDelta",
    "InPlaceReport",
    "MemorySections",
    "Place",
    "SectionBytes",
    "SectionFile",
    "SectionReport",
    "SectionResult",
    "SectionSource",
    "Sink",
    "apply_delta",
    "chunk_extent",
    "encode_delta",
    "patch_in_place",
    "verify_sections",
    "with_planes",
    "write_delta",
]
