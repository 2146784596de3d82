"""Masks that changed: what both sections hold is kept, the rest is dropped and added."""

import io
from array import array
from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.delta import (
    DeltaFormatError,
    DeltaLimitError,
    header_bytes,
    parse_header,
    read_records,
)
from compiler.contract.delta_alignment import (
    MAX_STEPS,
    AlignedPlanes,
    Alignment,
    PlanePair,
    parse_alignment,
)
from compiler.contract.delta_types import DeltaSection
from compiler.contract.planes import Plane
from compiler.delta import EncodeOptions, SectionBytes, encode_delta
from compiler.delta.compare import bsdiff4_size
from compiler.kernels.program import COO, CSR, DENSE, ELL, TILES
from tests.unit.compiler.delta.bundles import Bundle, assert_round_trip
from tests.unit.compiler.delta.masked import (
    UNITS,
    Masked,
    blocks,
    bundle,
    live_blocks,
    masks,
    update_bound,
)


@pytest.mark.parametrize("store_reverse", [False, True])
@pytest.mark.parametrize("woken", [0.5, 1, 2])
@pytest.mark.parametrize("layout", UNITS)
def test_it_aligns_what_both_masks_keep(layout: str, woken: float, store_reverse: bool) -> None:
    rng = np.random.default_rng(40)
    pairs = [masks(rng, layout, 64, 1024, 0.05, woken)[:2] for _ in range(3)]
    old, new = bundle([pair[0] for pair in pairs]), bundle([pair[1] for pair in pairs])
    same = old["weights.shared"].planes == new["weights.shared"].planes
    assert same == (woken == 1) or layout == ELL
    options = EncodeOptions(store_reverse=store_reverse)
    rows = {row.component: row for row in encode_delta(old, new, options).report.sections}
    assert rows["weights.shared"].codec == "aligned"
    assert_round_trip(old, new, options)


def test_it_aligns_codes_that_changed_with_the_mask() -> None:
    rng = np.random.default_rng(41)
    old, new, live = masks(rng, TILES, 512, 2048, 0.02)
    tuned = new.tuned(rng, 0.05)
    data = assert_round_trip(bundle([old]), bundle([tuned]))
    assert len(data) < 1.1 * update_bound(old, tuned, live)


@pytest.mark.parametrize(
    ("layout", "rows", "cols", "share", "most"),
    [(TILES, 1024, 2048, 0.02, 1.2), (ELL, 1024, 2048, 0.02, 1.2), (CSR, 2048, 2048, 0.02, 1.2),
     (COO, 2048, 4096, 0.02, 1.2)],
)  # fmt: skip
def test_a_change_of_the_mask_costs_little_more_than_its_entropy(
    layout: str, rows: int, cols: int, share: float, most: float
) -> None:
    rng = np.random.default_rng(42)
    old, new, live = masks(rng, layout, rows, cols, share)
    data = assert_round_trip(bundle([old]), bundle([new]))
    assert len(data) < most * update_bound(old, new, live)


def test_it_aligns_a_dense_weight_that_lost_its_tiles() -> None:
    rng = np.random.default_rng(43)
    live = live_blocks(rng, TILES, 256, 1024)
    dense = Masked.draw(rng, np.ones((256, 1024), bool), DENSE)
    sparse = replace(dense, mask=blocks(live), layout=TILES)
    for old, new in ((dense, sparse), (sparse, dense)):
        encoded = encode_delta(bundle([old]), bundle([new]))
        codecs = {row.component: row.codec for row in encoded.report.sections}
        assert codecs["weights.shared"] == "aligned"
        assert_round_trip(bundle([old]), bundle([new]))
    assert len(encode_delta(bundle([dense]), bundle([sparse])).data) < 2000


def test_aligned_sections_beat_bsdiff4() -> None:
    rng = np.random.default_rng(44)
    old, new, _ = masks(rng, TILES, 512, 1024, 0.02)
    before, after = bundle([old]), bundle([new.tuned(rng, 0.04)])
    assert 1.1 * len(encode_delta(before, after).data) < bsdiff4_size(before, after)


def test_it_codes_a_section_whole_where_nothing_is_known_of_it() -> None:
    rng = np.random.default_rng(45)
    old, new, _ = masks(rng, TILES, 64, 256, 0.05, 2)
    before, after = bundle([old]), bundle([new])
    blind = {name: part for name, part in before.items() if name != "plan"}
    for base in (blind, blind | {"plan": SectionBytes(b"a plan of another time")}):
        rows = {row.component: row.codec for row in encode_delta(base, after).report.sections}
        assert rows["weights.shared"] not in ("planes", "aligned")
        assert_round_trip(base, after)


OLD = (Plane("codes4", 0, 64), Plane("scales8", 64, 8), Plane("raw", 72, 8))
NEW = (Plane("codes4", 0, 48), Plane("scales8", 48, 6), Plane("raw", 54, 10))


PAIRS = (PlanePair(0, 0, 8), PlanePair(1, 1, 1))


def aligned(*steps: int, pairs: tuple[PlanePair, ...] = PAIRS) -> Alignment:
    return Alignment((AlignedPlanes(pairs, array("Q", steps)),))


def test_an_alignment_reads_as_it_was_written() -> None:
    found = parse_alignment(aligned(1, 0, 3, 2, 1, 2).to_bytes(), OLD, NEW)
    assert found == aligned(1, 0, 3, 2, 1, 2)
    assert [*found.kept(OLD, NEW, "codes4")] == [(8, 0, 24), (48, 32, 16)]
    assert alone(found, "codes4", dropped=False) == [(24, 8, 24, 8)]
    assert alone(found, "scales8", dropped=True) == [(64, 1, -1, 1), (68, 2, 50, 1)]
    assert alone(found, "raw", dropped=False) == [(54, 10, -1, 1)]
    assert alone(found, "raw", dropped=True) == [(72, 8, -1, 1)]


def alone(found: Alignment, kind: str, *, dropped: bool) -> list[tuple[int, ...]]:
    return [part for plane in found.alone(OLD, NEW, kind, dropped=dropped) for part in plane]


@pytest.mark.parametrize(
    "steps",
    [(1, 0, 3), (0, 0, 8), (2, 0, 7), (0, 0, 0, 2, 0, 6), (3, 1, 6), (2, 0, 2**34)],
    ids=["too short", "too long", "too far", "nowhere", "old too long", "overflow"],
)
def test_a_walk_that_does_not_fit_its_planes_is_refused(steps: tuple[int, ...]) -> None:
    with pytest.raises(DeltaFormatError):
        parse_alignment(aligned(*steps).to_bytes(), OLD, NEW)


@pytest.mark.parametrize(
    "pairs",
    [(PlanePair(0, 0, 0),), (PlanePair(3, 0, 8),), (PlanePair(0, 3, 8),), (PlanePair(0, 1, 8),),
     (PlanePair(0, 0, 8), PlanePair(0, 0, 8))],
    ids=["no unit", "no old plane", "no new plane", "other kinds", "twice"],
)  # fmt: skip
def test_pairs_that_cannot_be_are_refused(pairs: tuple[PlanePair, ...]) -> None:
    with pytest.raises(DeltaFormatError):
        parse_alignment(aligned(2, 0, 6, pairs=pairs).to_bytes(), OLD, NEW)


def test_words_are_not_split_by_a_unit() -> None:
    planes = (Plane("f32", 0, 12),), (Plane("f32", 0, 8),)
    with pytest.raises(DeltaFormatError, match="splits"):
        parse_alignment(aligned(2, 0, 4, pairs=(PlanePair(0, 0, 2),)).to_bytes(), *planes)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"\x01", b"\x80", b"\xff" * 6, b"\x80\x00", b"\x7f\0\0\x08", b"\x01\0\0\x08\0",
     b"\x01\0\0\x08\x7f\0"],
)  # fmt: skip
def test_bytes_that_are_no_alignment_are_refused(data: bytes) -> None:
    with pytest.raises(DeltaFormatError):
        parse_alignment(data, OLD, NEW)


def test_a_number_of_steps_is_limited_before_they_are_read() -> None:
    with pytest.raises(DeltaLimitError):
        parse_alignment(b"\x01\0\0\x08\xff\xff\xff\x7f", OLD, NEW)
    assert MAX_STEPS < 2**28 - 1


def test_sections_of_both_forms_read_as_they_were_written() -> None:
    first = DeltaSection("expert.L0.E0", "11" * 32, "22" * 32, 80, 64, NEW, OLD, aligned(2, 0, 6))
    second = DeltaSection("expert.L0.E1", "33" * 32, "44" * 32, 64, 64, NEW)
    data = header_bytes([first, second], reversible=False, record_count=0, records_length=0)
    header = parse_header(io.BytesIO(data).read)
    assert header.sections == (first, second)
    assert header.version == 3
    plain = header_bytes([second], reversible=False, record_count=0, records_length=0)
    assert parse_header(io.BytesIO(plain).read).version == 1


def test_an_older_reader_still_reads_what_it_can() -> None:
    """A file says version 1 unless it uses more."""
    rng = np.random.default_rng(46)
    old, new, _ = masks(rng, TILES, 64, 256, 0.05)
    versions = {}
    cases: dict[str, tuple[Bundle, Bundle]] = {
        "tuned": (bundle([old]), bundle([old.tuned(rng, 0.1)])),
        "masked": (bundle([old]), bundle([new])),
    }
    for name, (before, after) in cases.items():
        stream = io.BytesIO(encode_delta(before, after).data)
        header = parse_header(stream.read)
        versions[name] = header.version
        assert sum(1 for _ in read_records(stream.read, header)) == header.record_count
    assert versions == {"tuned": 1, "masked": 3}
