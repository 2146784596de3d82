"""The delta codec, both directions: pure, streaming, numpy and zstandard only.

The format, its limits and its errors are in `compiler.contract.delta`. Encoding may use bsdiff4 for
pieces; nothing that a device runs needs it.
"""

from compiler.delta.apply import AppliedReport, SectionResult, apply_delta, verify_sections
from compiler.delta.encode import EncodedDelta, encode_delta, write_delta
from compiler.delta.records import DeltaEncodeError, EncodeOptions
from compiler.delta.report import DeltaReport, SectionReport
from compiler.delta.sections import (
    Base,
    MemorySections,
    SectionBytes,
    SectionFile,
    SectionSource,
    Sink,
)

__all__ = [
    "AppliedReport",
    "Base",
    "DeltaEncodeError",
    "DeltaReport",
    "EncodeOptions",
    "EncodedDelta",
    "MemorySections",
    "SectionBytes",
    "SectionFile",
    "SectionReport",
    "SectionResult",
    "SectionSource",
    "Sink",
    "apply_delta",
    "encode_delta",
    "verify_sections",
    "write_delta",
]
