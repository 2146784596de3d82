"""The header and the record layout: what is written is read, everything else is refused."""

import io
import struct
import zlib

import pytest

from compiler.contract.delta import (
    MAX_CHUNK_BYTES,
    MAX_DELTA_BYTES,
    MAX_EXTENTS,
    MAX_PIECE_BYTES,
    MAX_PLANES,
    MAX_RECORDS,
    MAX_SECTIONS,
    MAX_TABLE_BYTES,
    NO_SHA256,
    RECORD_BYTES,
    DeltaFormatError,
    DeltaLimitError,
    DeltaRecord,
    DeltaSection,
    DeltaTruncatedError,
    DeltaVersionError,
    Mode,
    RecordKind,
    header_bytes,
    parse_header,
    read_records,
)
from compiler.contract.planes import MAX_SECTION_BYTES, Plane

FIXED = struct.Struct("<4sHHQIIIII")
FIELDS = (
    "magic", "version", "flags", "file_length", "records", "sections", "layouts", "table", "stored"
)  # fmt: skip
PLANES = (Plane("codes4", 0, 64), Plane("f32", 64, 16))
OLD, NEW = "11" * 32, "22" * 32
WEIGHTS = DeltaSection("expert.L0.E0", OLD, NEW, 80, 80, PLANES)
PLAN = DeltaSection("plan", NO_SHA256, NEW, 0, 10, ())


def _parse(data: bytes):
    return parse_header(io.BytesIO(data).read)


def _header(*sections: DeltaSection, records: int = 0, length: int = 0) -> bytes:
    return header_bytes(sections, reversible=False, record_count=records, records_length=length)


def _fixed(**fields: object) -> bytes:
    data = _header(WEIGHTS, PLAN, records=3, length=300)
    values = dict(zip(FIELDS, FIXED.unpack_from(data), strict=True)) | fields
    return FIXED.pack(*values.values()) + data[FIXED.size :]


def _table(table: bytes, *, sections: int = 1, layouts: int = 0, packed: bool = False) -> bytes:
    stored = zlib.compress(table) if packed else table
    length = FIXED.size + len(stored)
    return FIXED.pack(b"SFD1", 1, 0, length, 0, sections, layouts, len(table), len(stored)) + stored


def _section(
    name: bytes = b"plan",
    old: str = OLD,
    new: str = NEW,
    lengths: tuple[int, int] = (1, 1),
    layout: int = 0,
) -> bytes:
    body = bytes.fromhex(old) + bytes.fromhex(new) + struct.pack("<QQI", *lengths, layout)
    return bytes([len(name)]) + name + body


def _layout(*planes: tuple[int, int], count: int | None = None) -> bytes:
    rows = b"".join(struct.pack("<BQ", *plane) for plane in planes)
    return struct.pack("<I", len(planes) if count is None else count) + rows


def test_it_reads_what_it_wrote():
    header = _parse(_header(WEIGHTS, PLAN, records=3, length=300))
    assert header.sections == (WEIGHTS, PLAN)
    assert header.record_count == 3
    assert header.file_length == header.header_length + 300
    assert list(header.spans()) == [
        (RecordKind.CODES4, 0, 64),
        (RecordKind.F32, 0, 16),
        (RecordKind.PIECE, 1, 10),
    ]


def test_it_writes_a_layout_once_and_small():
    many = [
        DeltaSection(f"expert.L1.E{n}", OLD, f"{n:064x}", 80, 80, PLANES) for n in range(10, 90)
    ]
    assert len(_header(*many)) < 80 * 32


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"magic": b"SFD2"}, DeltaFormatError),
        ({"version": 0}, DeltaVersionError),
        ({"version": 2}, DeltaVersionError),
        ({"flags": 2}, DeltaFormatError),
        ({"file_length": MAX_DELTA_BYTES + 1}, DeltaLimitError),
        ({"file_length": 0}, DeltaFormatError),
        ({"records": MAX_RECORDS + 1}, DeltaLimitError),
        ({"records": 300}, DeltaFormatError),
        ({"sections": MAX_SECTIONS + 1}, DeltaLimitError),
        ({"sections": 60_000}, DeltaFormatError),
        ({"sections": 1}, DeltaFormatError),
        ({"layouts": 3}, DeltaFormatError),
        ({"layouts": 0}, DeltaFormatError),
        ({"table": MAX_TABLE_BYTES + 1}, DeltaLimitError),
        ({"table": MAX_TABLE_BYTES}, DeltaFormatError),
        ({"table": 1}, DeltaFormatError),
        ({"stored": 1 << 31}, DeltaFormatError),
        ({"stored": 0}, DeltaFormatError),
    ],
)
def test_it_refuses_a_fixed_part_that_lies(fields, error):
    with pytest.raises(error):
        _parse(_fixed(**fields))


@pytest.mark.parametrize(
    "data",
    [
        _table(_section(b"../etc")),
        _table(_section(b"plan\0")),
        _table(_section("plän".encode())),
        _table(_section(b"expert.L01.E0")),
        _table(_section(b"plan") + b"x"),
        _table(_section(b"plan") + _section(b"kernels"), sections=2),
        _table(_section(b"plan") + _section(b"plan"), sections=2),
        _table(_section(new=NO_SHA256)),
        _table(_section(new=OLD)),
        _table(_section(old=NO_SHA256)),
        _table(_section(layout=1)),
        _table(_layout((0, 1)) + _section(), layouts=1),
        _table(_layout((0, 2)) + _section(layout=1), layouts=1),
        _table(_layout((0, 1)) + _section(lengths=(0, 1), layout=1), layouts=1),
        _table(_layout((0, 0)) + _section(lengths=(0, 0), layout=1), layouts=1),
        _table(_layout((4, 1)) + _section(layout=1), layouts=1),
        _table(_layout((2, 2)) + _section(lengths=(2, 2), layout=1), layouts=1),
        _table(_layout((0, 1), count=0) + _section(layout=1), layouts=1),
        _table(_layout((0, 1), count=(1 << 32) - 1) + _section(layout=1), layouts=1),
        _table(_layout((0, (1 << 64) - 1)) + _section(layout=1), layouts=1),
        _table(
            _layout((0, 1)) * 2 + _section(layout=1) + _section(b"selftest", layout=2),
            sections=2,
            layouts=2,
        ),
        _table(
            _layout((0, 1))
            + _layout((1, 1))
            + _section(layout=2)
            + _section(b"selftest", layout=1),
            sections=2,
            layouts=2,
        ),
    ],
)
def test_it_refuses_a_table_that_lies(data):
    with pytest.raises(DeltaFormatError):
        _parse(data)
    assert _parse(_table(_section())).sections[0].component == "plan"


def test_it_refuses_sections_and_extents_above_the_limit():
    with pytest.raises(DeltaLimitError):
        _parse(_table(_section(lengths=(0, MAX_SECTION_BYTES + 1))))
    planes = 60_000
    names = sorted(f"expert.L0.E{number}" for number in range(10))
    table = _layout(*[(3, 1)] * planes) + b"".join(
        _section(name.encode(), lengths=(planes, planes), layout=1) for name in names
    )
    assert planes * len(names) > MAX_EXTENTS
    with pytest.raises(DeltaLimitError):
        _parse(_table(table, sections=len(names), layouts=1, packed=True))


def test_it_refuses_planes_above_the_limit_over_all_layouts():
    half = MAX_PLANES // 2 + 1
    table = _layout(*[(3, 1)] * half) + _layout(*[(3, 1)] * (half + 1))
    table += _section(lengths=(half, half), layout=1)
    table += _section(b"selftest", lengths=(half + 1, half + 1), layout=2)
    with pytest.raises(DeltaLimitError, match="planes"):
        _parse(_table(table, sections=2, layouts=2, packed=True))


def test_it_stops_inflating_a_table_at_the_declared_length():
    bomb = zlib.compress(bytes(1 << 26), 9)
    fixed = FIXED.pack(b"SFD1", 1, 0, FIXED.size + len(bomb), 0, 1, 0, len(bomb) + 1, len(bomb))
    with pytest.raises(DeltaFormatError, match="inflates"):
        _parse(fixed + bomb)


def _records(*records: DeltaRecord, count: int | None = None, tail: bytes = b"") -> list[object]:
    body = b"".join(record.to_bytes() + bytes(record.payload_length) for record in records) + tail
    data = _header(
        WEIGHTS, PLAN, records=len(records) if count is None else count, length=len(body)
    )
    stream = io.BytesIO(data + body)
    return list(read_records(stream.read, parse_header(stream.read)))


def _record(
    kind: RecordKind, offset: int, length: int, mode: Mode = Mode.SAME, section: int = 0,
    payload: int = 0,
) -> DeltaRecord:  # fmt: skip
    return DeltaRecord(kind, mode, section, offset, length, payload, bytes(16), bytes(16))


GOOD = (
    _record(RecordKind.CODES4, 0, 40),
    _record(RecordKind.CODES4, 40, 24, Mode.DENSE, payload=9),
    _record(RecordKind.F32, 0, 16),
    _record(RecordKind.PIECE, 0, 10, Mode.ZSTD, section=1, payload=9),
)


def test_it_reads_records_that_cover_every_span_exactly():
    assert len(_records(*GOOD)) == 4


@pytest.mark.parametrize(
    "records",
    [
        GOOD[1:],
        GOOD[:-1],
        (*GOOD, GOOD[-1]),
        (GOOD[0], GOOD[0], *GOOD[1:]),
        (GOOD[1], GOOD[0], *GOOD[2:]),
        (GOOD[0], GOOD[2], GOOD[3]),
        (GOOD[2], GOOD[0], GOOD[1], GOOD[3]),
        (_record(RecordKind.CODES4, 0, 65), *GOOD[2:]),
        (_record(RecordKind.CODES4, 0, 0), *GOOD),
        (_record(RecordKind.CODES4, 0, 64, Mode.WORDS), *GOOD[2:]),
        (_record(RecordKind.CODES4, 0, 64, section=1), *GOOD[2:]),
        (_record(RecordKind.CODES4, 0, 64, payload=1), *GOOD[2:]),
        (*GOOD[:2], _record(RecordKind.F32, 0, 6), _record(RecordKind.F32, 6, 10), GOOD[3]),
        (*GOOD[:3], _record(RecordKind.PIECE, 0, 10, Mode.ZSTD, section=0)),
        (*GOOD[:3], _record(RecordKind.PIECE_BACK, 0, 10, Mode.ZSTD, section=1)),
        (*GOOD[:3], _record(RecordKind.PIECE, 0, 10, Mode.GAPS, section=1)),
    ],
)
def test_it_refuses_records_out_of_place(records):
    with pytest.raises(DeltaFormatError):
        _records(*records)


def test_it_refuses_counts_and_tails_that_do_not_fit():
    for count in (3, 5):
        with pytest.raises((DeltaFormatError, DeltaTruncatedError)):
            _records(*GOOD, count=count, tail=bytes(60) if count == 5 else b"")
    with pytest.raises(DeltaFormatError):
        _records(*GOOD, tail=b"x")


@pytest.mark.parametrize(
    "record",
    [
        _record(RecordKind.CODES4, 0, MAX_CHUNK_BYTES + 1),
        _record(RecordKind.PIECE, 0, MAX_PIECE_BYTES + 1, Mode.ZSTD),
        _record(RecordKind.PIECE, 0, (1 << 32) - 1, Mode.ZSTD),
    ],
)
def test_it_refuses_a_record_above_its_limit_before_reading_its_payload(record):
    with pytest.raises(DeltaLimitError):
        _records(record)


def test_it_refuses_a_payload_above_its_limit_before_reading_it():
    record = _record(RecordKind.CODES4, 0, 64, Mode.DENSE, payload=0)
    forged = bytearray(record.to_bytes())
    struct.pack_into("<I", forged, 18, (1 << 32) - 1)
    data = _header(WEIGHTS, records=1, length=RECORD_BYTES)
    asked: list[int] = []
    stream = io.BytesIO(data + bytes(forged))

    def read(length: int) -> bytes:
        asked.append(length)
        return stream.read(length)

    with pytest.raises(DeltaLimitError, match="payload"):
        list(read_records(read, parse_header(read)))
    assert max(asked) < 1 << 10


@pytest.mark.parametrize(("kind", "mode"), [(9, 0), (0, 99), (255, 255)])
def test_it_refuses_kinds_and_modes_it_does_not_know(kind, mode):
    forged = bytes([kind, mode]) + GOOD[0].to_bytes()[2:]
    stream = io.BytesIO(_header(WEIGHTS, records=1, length=RECORD_BYTES) + forged)
    with pytest.raises(DeltaFormatError, match="kind"):
        list(read_records(stream.read, parse_header(stream.read)))


def test_it_will_not_write_a_header_that_it_would_refuse():
    with pytest.raises(DeltaFormatError):
        _header(PLAN, WEIGHTS)
