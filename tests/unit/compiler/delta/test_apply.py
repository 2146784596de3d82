"""Applying: wrong bases, wrong results, kills and restarts."""

import dataclasses
import io

import numpy as np
import pytest

from compiler.contract.delta import (
    DeltaBaseError,
    DeltaError,
    DeltaFormatError,
    DeltaLimitError,
    DeltaRecord,
    DeltaResultError,
    DeltaTruncatedError,
    Mode,
    RecordKind,
    chunk_hash,
    header_bytes,
    parse_header,
    read_records,
)
from compiler.delta import (
    EncodeOptions,
    MemorySections,
    SectionBytes,
    apply_delta,
    encode_delta,
    verify_sections,
)
from compiler.delta.pieces import SOURCE_RANGE
from tests.unit.compiler.delta.bundles import Bundle, edgecard_like, memory, run

SMALL = EncodeOptions(chunk_bytes=2048, piece_bytes=600)


@pytest.fixture(scope="module")
def pair() -> tuple[Bundle, Bundle, bytes]:
    old, new = edgecard_like(1, experts=3, weights=4096)
    kernels = np.random.default_rng(2).bytes(2000)
    old["kernels"] = SectionBytes(kernels)
    new["kernels"] = SectionBytes(kernels[:900] + b"patch" + kernels[905:])
    new["plan"] = SectionBytes(b"a plan that was not there before")
    return old, new, encode_delta(old, new, SMALL).data


class KilledError(Exception):
    """Power went away."""


class DyingSink(MemorySections):
    """Dies at the n-th write, which is torn in the middle."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.writes = writes

    def pwrite(self, component: str, data: bytes, offset: int) -> None:
        if self.writes == 0:
            super().pwrite(component, data[: len(data) // 2], offset)
            raise KilledError
        self.writes -= 1
        super().pwrite(component, data, offset)


def _flip(bundle: Bundle, component: str, at: int) -> Bundle:
    data = bytearray(bundle[component].data)
    data[at] ^= 1
    return bundle | {component: SectionBytes(bytes(data), bundle[component].planes)}


@pytest.mark.parametrize("at", [0, 1500, -1])
@pytest.mark.parametrize("component", ["expert.L0.E0", "expert.L0.E2", "kernels"])
def test_it_refuses_a_base_that_differs_in_one_bit(pair, component, at):
    old, _, data = pair
    with pytest.raises(DeltaBaseError):
        run(data, _flip(old, component, at))


def test_it_refuses_a_base_that_is_short_or_missing(pair):
    old, new, data = pair
    cut = old | {"expert.L0.E1": SectionBytes(old["expert.L0.E1"].data[:-1])}
    for base in (cut, {}, new):
        with pytest.raises(DeltaBaseError):
            run(data, base)


def test_it_verifies_in_passing_what_it_makes_in_order(pair):
    old, _, data = pair
    report, _ = run(data, old)
    verified = {result.component: result.verified for result in report.sections}
    assert verified["kernels"]
    assert verified["plan"]
    assert not verified["expert.L0.E0"]
    assert report.bytes_written == sum(result.length for result in report.sections)


@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_killed_anywhere_and_a_second_run_mends_everything(pair, reverse):
    old, new, _ = pair
    data = encode_delta(old, new, dataclasses.replace(SMALL, store_reverse=True)).data
    base, goal = (new, old) if reverse else (old, new)
    before = {name: part.data for name, part in base.items()}
    for writes in range(200):
        source, sink = memory(base), DyingSink(writes)
        done = [0]
        try:
            apply_delta(source, io.BytesIO(data), sink, reverse=reverse, on_record=done.append)
        except KilledError:
            assert {name: source.section(name) for name in before} == before
        else:
            break
        sink.writes = 1 << 30
        again = apply_delta(source, io.BytesIO(data), sink, reverse=reverse, start_record=done[-1])
        verify_sections(again.header, sink, reverse=reverse)
        assert all(sink.section(name) == goal[name].data for name in goal if name in base)
    assert 5 < writes < 199


def test_it_counts_each_record_once(pair):
    old, _, data = pair
    seen: list[int] = []
    report = apply_delta(memory(old), io.BytesIO(data), MemorySections(), on_record=seen.append)
    assert seen == list(range(1, report.records + 1))
    resumed: list[int] = []
    report = apply_delta(
        memory(old), io.BytesIO(data), MemorySections(), start_record=3, on_record=resumed.append
    )
    assert resumed == seen[3:]


def test_it_refuses_a_file_that_is_cut_anywhere(pair):
    old, _, data = pair
    for length in range(0, len(data), 37):
        with pytest.raises(DeltaTruncatedError):
            run(data[:length], old)


def test_it_refuses_bytes_behind_the_last_record(pair):
    old, _, data = pair
    with pytest.raises(DeltaFormatError, match="left over"):
        run(data + b"\0", old)


def test_it_reads_from_a_source_that_gives_a_byte_at_a_time(pair):
    old, new, data = pair

    class Trickle(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or 0, 1))

    sink = MemorySections()
    apply_delta(memory(old), Trickle(data), sink)
    assert sink.section("kernels") == new["kernels"].data


def test_it_hashes_whole_sections_in_the_end(pair):
    old, _, data = pair
    report, sink = run(data, old)
    sink.pwrite("expert.L0.E1", b"\x55", 100)
    with pytest.raises(DeltaResultError):
        verify_sections(report.header, sink)
    with pytest.raises(DeltaResultError):
        verify_sections(report.header, MemorySections())


def test_a_manifest_pair_is_compared_with_the_header(pair):
    old, new, data = pair
    header = parse_header(io.BytesIO(data).read)
    before = {name: part.sha256 for name, part in old.items()}
    after = {name: part.sha256 for name, part in new.items()}
    header.require_bundles(before, after)
    wrong = "ab" * 32
    for have, want in (
        (before | {"expert.L0.E0": wrong}, after),
        (before | {"plan": wrong}, after),
        ({}, after),
        (before, after | {"kernels": wrong}),
        (before, after | {"pipeline": wrong}),
        (before, {}),
    ):
        with pytest.raises(DeltaBaseError):
            header.require_bundles(have, want)
    header.require_bundles(before | {"pipeline": wrong}, after | {"pipeline": wrong})


def _forge(data: bytes, change) -> bytes:
    """Rewrite each record by `change(record, payload)`, and make the header fit again."""
    stream = io.BytesIO(data)
    header = parse_header(stream.read)
    records = b""
    for record, payload in read_records(stream.read, header):
        record, payload = change(record, payload)
        records += dataclasses.replace(record, payload_length=len(payload)).to_bytes() + payload
    head = header_bytes(
        header.sections,
        reversible=header.reversible,
        record_count=header.record_count,
        records_length=len(records),
    )
    return head + records


def test_it_refuses_a_piece_whose_source_is_outside_the_section(pair):
    old, _, data = pair
    kernels = len(old["kernels"].data)
    for offset, length, error in (
        (kernels, 1, DeltaFormatError),
        (0, kernels + 1, DeltaFormatError),
        ((1 << 64) - 1, 1, DeltaFormatError),
        (0, 0, DeltaFormatError),
        (0, (1 << 32) - 1, DeltaLimitError),
        (1, kernels - 1, DeltaBaseError),
    ):

        def change(record, payload, offset=offset, length=length):
            if record.mode is Mode.ZSTD_SOURCE:
                payload = SOURCE_RANGE.pack(offset, length) + payload[SOURCE_RANGE.size :]
            return record, payload

        with pytest.raises(error):
            run(_forge(data, change), old)


def test_it_refuses_a_chunk_that_comes_out_different(pair):
    old, _, data = pair

    def change(record: DeltaRecord, payload: bytes):
        if record.kind is RecordKind.CODES4 and record.offset:
            record = dataclasses.replace(record, new_hash=chunk_hash(b"something else"))
        return record, payload

    with pytest.raises(DeltaResultError):
        run(_forge(data, change), old)


def test_it_refuses_a_section_digest_that_no_bytes_have(pair):
    old, _, data = pair
    header = parse_header(io.BytesIO(data).read)
    for component, error in (("kernels", "apply"), ("expert.L0.E1", "verify")):
        sections = [
            dataclasses.replace(part, new_sha256="cd" * 32) if part.component == component else part
            for part in header.sections
        ]
        head = header_bytes(
            sections,
            reversible=False,
            record_count=header.record_count,
            records_length=len(data) - header.header_length,
        )
        forged = io.BytesIO(head + data[header.header_length :])
        sink = MemorySections()
        if error == "apply":
            with pytest.raises(DeltaResultError):
                apply_delta(memory(old), forged, sink)
        else:
            report = apply_delta(memory(old), forged, sink)
            with pytest.raises(DeltaResultError):
                verify_sections(report.header, sink)


def test_every_error_has_its_own_code():
    codes = {kind.code for kind in DeltaError.__subclasses__()} | {DeltaError.code}
    assert len(codes) == len(DeltaError.__subclasses__()) + 1 == 8
    assert all(code.startswith("contract.delta") for code in codes)
