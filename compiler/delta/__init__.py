"""The delta codec, both directions: pure, streaming, numpy and zstandard only.

The format, its limits and its errors are in `compiler.contract.delta`. Encoding may use bsdiff4 for
pieces; nothing that a device runs needs it.
"""

from compiler.delta.apply import AppliedReport, SectionResult, apply_delta, verify_sections
from compiler.delta.encode import EncodedDelta, EncodeOptions, encode_delta
from compiler.delta.report import DeltaReport, SectionReport
from compiler.delta.sections import Base, MemorySections, SectionBytes, Sink

__all__ = [
    "AppliedReport",
    "Base",
    "DeltaReport",
    "EncodeOptions",
    "EncodedDelta",
    "MemorySections",
    "SectionBytes",
    "SectionReport",
    "SectionResult",
    "Sink",
    "apply_delta",
    "encode_delta",
    "verify_sections",
]
