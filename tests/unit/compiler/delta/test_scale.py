"""Large sections: offsets above 4 GiB, and memory that does not grow with the model."""

import dataclasses
import io
import tracemalloc

import numpy as np

from compiler.contract.canonical import sha256_hex
from compiler.contract.delta import (
    MAX_CHUNK_BYTES,
    DeltaRecord,
    DeltaSection,
    Mode,
    RecordKind,
    chunk_hash,
    header_bytes,
)
from compiler.contract.planes import Plane
from compiler.delta import apply_delta
from compiler.delta.blobs import make_frame
from compiler.delta.chunks import encode_chunk
from compiler.delta.pieces import SOURCE_RANGE
from tests.unit.compiler.delta.bundles import draw_codes, move_codes, pack_codes

GIB = 1 << 30
OLD, NEW = "11" * 32, "22" * 32


class RepeatingBase:
    """A section of any length that is one chunk again and again."""

    def __init__(self, chunk: bytes) -> None:
        self._chunk = chunk

    def pread(self, component: str, length: int, offset: int) -> bytes:
        assert offset % len(self._chunk) == 0
        return self._chunk[:length]


class LastWrite:
    """Remembers only the last write."""

    def __init__(self) -> None:
        self.offset = -1
        self.data = b""

    def pwrite(self, component: str, data: bytes, offset: int) -> None:
        self.offset, self.data = offset, data


def _file(section: DeltaSection, records: list[bytes]) -> io.BytesIO:
    body = b"".join(records)
    head = header_bytes(
        [section], reversible=True, record_count=len(records), records_length=len(body)
    )
    return io.BytesIO(head + body)


def _codes_section(chunks: int) -> DeltaSection:
    length = chunks * MAX_CHUNK_BYTES
    return DeltaSection("weights.shared", OLD, NEW, length, length, (Plane("codes4", 0, length),))


def _record(number: int, mode: Mode, payload: bytes, old: bytes, new: bytes) -> bytes:
    offset = number * MAX_CHUNK_BYTES
    record = DeltaRecord(
        RecordKind.CODES4, mode, 0, offset, len(new), len(payload), chunk_hash(old), chunk_hash(new)
    )  # fmt: skip
    return record.to_bytes() + payload


def _update() -> tuple[bytes, bytes]:
    rng = np.random.default_rng(30)
    codes = draw_codes(rng, 2 * MAX_CHUNK_BYTES)
    return pack_codes(codes), pack_codes(move_codes(rng, codes, 0.12))


def test_it_reaches_chunks_above_4_gib():
    old, new = _update()
    last = 5 * GIB // MAX_CHUNK_BYTES
    mode, payload = encode_chunk(RecordKind.CODES4, old, new)
    first = DeltaRecord(
        RecordKind.CODES4, Mode.SAME, 0, 0, MAX_CHUNK_BYTES, 0, chunk_hash(old), chunk_hash(old)
    )
    same = [
        dataclasses.replace(first, offset=number * MAX_CHUNK_BYTES).to_bytes()
        for number in range(last)
    ]
    patch = _file(_codes_section(last + 1), [*same, _record(last, mode, payload, old, new)])
    sink = LastWrite()
    report = apply_delta(RepeatingBase(old), patch, sink, start_record=last)
    assert (sink.offset, sink.data) == (5 * GIB, new)
    assert report.bytes_written == MAX_CHUNK_BYTES


def test_it_reaches_sources_above_4_gib():
    source = bytes(range(256)) * 4
    offset = 5 * GIB
    made = source[::-1] + source
    payload = SOURCE_RANGE.pack(offset, len(source)) + make_frame(made, source=source)
    record = DeltaRecord(
        RecordKind.PIECE, Mode.ZSTD_SOURCE, 0, 0, len(made), len(payload),
        chunk_hash(source), chunk_hash(made),
    )  # fmt: skip
    section = DeltaSection("kernels", OLD, sha256_hex(made), 6 * GIB, len(made), ())
    head = header_bytes(
        [section], reversible=False, record_count=1, records_length=len(record.to_bytes() + payload)
    )
    sink = LastWrite()
    apply_delta(RepeatingBase(source), io.BytesIO(head + record.to_bytes() + payload), sink)
    assert sink.data == made


def test_its_memory_does_not_grow_with_the_section():
    old, new = _update()
    mode, payload = encode_chunk(RecordKind.CODES4, old, new)
    peaks = []
    for chunks in (2, 10):
        records = [_record(number, mode, payload, old, new) for number in range(chunks)]
        patch = _file(_codes_section(chunks), records)
        tracemalloc.start()
        apply_delta(RepeatingBase(old), patch, LastWrite())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 12 * 1024 * 1024
