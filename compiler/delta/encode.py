"""Encode a delta between two bundles: try every way that may win, keep the smallest.

Both bundles are read a chunk at a time and records go to a temporary file, so memory does not grow
with the model. Each record is decoded again before it is accepted, so an encoder that is wrong
fails on the server.
"""

import io
import shutil
import tempfile
from dataclasses import dataclass
from typing import IO, Final

from compiler.contract.delta import NEWER_MODES, DeltaHeader, header_bytes
from compiler.delta.choose import choose_sections
from compiler.delta.records import Bundle, EncodeOptions, RecordMaker, Replays
from compiler.delta.report import DeltaReport

SPOOLED_BYTES: Final = 4 * 1024 * 1024
"""Records up to here stay in memory."""


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """A delta file and what it cost."""

    data: bytes
    report: DeltaReport


def encode_delta(
    old: Bundle,
    new: Bundle,
    options: EncodeOptions | None = None,
    *,
    replays: Replays | None = None,
) -> EncodedDelta:
    """Return the delta that leads from the bundle `old` to the bundle `new`; see `write_delta`."""
    out = io.BytesIO()
    report = write_delta(old, new, out, options, replays=replays)
    return EncodedDelta(out.getvalue(), report)


def write_delta(
    old: Bundle,
    new: Bundle,
    out: IO[bytes],
    options: EncodeOptions | None = None,
    *,
    replays: Replays | None = None,
) -> DeltaReport:
    """Write the delta that leads from the bundle `old` to the bundle `new`.

    Sections that are equal, or that only `old` has, do not appear in it. The same input gives the
    same bytes as long as the versions of zstd and bzip2 stay the same.

    Args:
        old: Component to section.
        new: Component to section.
        out: Where the file goes.
        options: How to encode; the defaults if None.
        replays: Factors that weights of `new` were merged with, by section and number of the plane
            of codes. Used where the bytes come out the same and the file becomes smaller.

    Raises:
        ContractError: A component name is outside the grammar, or the delta breaks a limit.
        DeltaEncodeError: A record does not decode to the bytes it was made of.
    """
    options, replays = options or EncodeOptions(), replays or {}
    sections = choose_sections(old, new, options, replays)
    reversible = options.store_reverse or all(
        section.alignment is None and (section.planes or not section.old_length)
        for section in sections
    )
    maker = RecordMaker(old, new, DeltaHeader(sections, reversible, 0, 0, 0), options, replays)
    count, newer_modes = 0, False
    with tempfile.SpooledTemporaryFile(SPOOLED_BYTES) as body:
        for record, payload in maker.records():
            count += 1
            newer_modes |= record.mode in NEWER_MODES
            body.write(record.to_bytes() + payload)
        length = body.tell()
        head = header_bytes(
            sections,
            reversible=reversible,
            record_count=count,
            records_length=length,
            newer_modes=newer_modes,
        )
        out.write(head)
        body.seek(0)
        shutil.copyfileobj(body, out)
    return maker.report.build(len(head) + length)
