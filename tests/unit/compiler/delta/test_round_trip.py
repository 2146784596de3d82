"""Every kind of update, forwards and backwards, in one chunk and in many."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.contract.delta import DeltaDirectionError, parse_header, read_records
from compiler.delta import EncodeOptions, SectionBytes, encode_delta
from tests.unit.compiler.delta.bundles import (
    Bundle,
    assert_round_trip,
    draw_codes,
    expert,
    move_codes,
    pack_codes,
    run,
    section,
)

SMALL = EncodeOptions(chunk_bytes=1024, piece_bytes=1000)
WEIGHTS = 32_768


def _update(kind: str) -> tuple[SectionBytes, SectionBytes]:
    """An expert before and after one kind of update."""
    rng = np.random.default_rng(sum(kind.encode()))
    codes, scales = draw_codes(rng, WEIGHTS), rng.integers(1, 256, WEIGHTS // 32)
    rows = rng.random(64).astype("<f4")
    old = expert(rng, codes, scales, rows)
    if kind == "sparse":
        codes = move_codes(rng, codes, 0.01)
    elif kind == "dense":
        codes = move_codes(rng, codes, 0.6)
    elif kind == "redrawn":
        codes = rng.permutation(codes)
    elif kind == "tiles":
        codes = codes.copy()
        codes[512 * 5 : 512 * 8] = draw_codes(rng, 512 * 3)
    elif kind == "scales":
        scales = np.clip(scales + rng.integers(-3, 4, scales.size), 1, 255)
    elif kind == "one scale":
        scales = scales.copy()
        scales[77] ^= 1
    elif kind == "rows":
        rows = (rows * 1.001).astype("<f4")
    elif kind == "one row":
        rows = rows.copy()
        rows[3] = -0.0
    elif kind == "specials":
        rows = np.resize(np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], "<f4"), rows.size)
    return old, expert(rng, codes, scales, rows)


KINDS = [
    "sparse", "dense", "redrawn", "tiles", "scales", "one scale", "rows", "one row", "specials"
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [None, SMALL], ids=["one chunk", "many chunks"])
def test_it_carries_an_update_both_ways(kind, options):
    old, new = _update(kind)
    assert_round_trip({"expert.L0.E7": old}, {"expert.L0.E7": new}, options)


def test_it_carries_flipped_mask_bits_both_ways():
    rng = np.random.default_rng(1)
    mask = rng.integers(0, 256, 4096).astype(np.uint8)
    flipped = mask.copy()
    flipped[rng.choice(4096, 40, replace=False)] ^= 16
    old, new = (section(("raw", data.tobytes())) for data in (mask, flipped))
    assert_round_trip({"weights.shared": old}, {"weights.shared": new})


def test_it_takes_no_record_for_a_section_that_did_not_change():
    old, new = _update("sparse")
    data = assert_round_trip(
        {"expert.L0.E0": old, "expert.L0.E1": old}, {"expert.L0.E0": new, "expert.L0.E1": old}
    )
    header = parse_header(io.BytesIO(data).read)
    assert [part.component for part in header.sections] == ["expert.L0.E0"]


def test_it_encodes_two_equal_bundles_as_an_empty_file_of_a_valid_header():
    old, _ = _update("sparse")
    data = assert_round_trip({"weights.shared": old}, {"weights.shared": old})
    assert parse_header(io.BytesIO(data).read).record_count == 0


def test_it_joins_small_sections_into_one_record_per_kind():
    old: Bundle = {}
    new: Bundle = {}
    for number in range(30):
        name = f"expert.L0.E{number}"
        old[name], new[name] = _update("sparse")
    stream = io.BytesIO(assert_round_trip(old, new))
    header = parse_header(stream.read)
    assert len(list(read_records(stream.read, header))) == 3
    assert len({id(part.planes) for part in header.sections}) == 1


def test_it_carries_sections_of_different_layouts_in_one_stream():
    rng = np.random.default_rng(3)
    codes = draw_codes(rng, 1000)
    raw = rng.bytes(77)
    old = {
        "expert.L0.E0": section(("codes4", pack_codes(codes)), ("raw", raw)),
        "expert.L0.E1": section(("raw", raw), ("codes4", pack_codes(codes[:300]))),
        "weights.shared": section(("f32", bytes(400)), ("codes4", pack_codes(codes[:100]))),
    }
    moved = move_codes(rng, codes, 0.2)
    new = {
        "expert.L0.E0": section(("codes4", pack_codes(moved)), ("raw", raw[::-1])),
        "expert.L0.E1": section(("raw", raw), ("codes4", pack_codes(moved[:300]))),
        "weights.shared": section(
            ("f32", bytes(396) + b"abcd"), ("codes4", pack_codes(moved[:100]))
        ),
    }
    for options in (None, SMALL, EncodeOptions(chunk_bytes=4)):
        assert_round_trip(old, new, options)


def test_it_codes_a_section_whole_when_its_layout_changed():
    old, new = _update("sparse")
    longer = section(*[(p.kind, new.data[p.offset : p.end]) for p in new.planes], ("raw", b"more"))
    data = assert_round_trip({"weights.shared": old}, {"weights.shared": longer}, SMALL)
    header = parse_header(io.BytesIO(data).read)
    assert header.sections[0].planes == ()
    assert not header.reversible
    with pytest.raises(DeltaDirectionError):
        run(data, {"weights.shared": longer}, reverse=True)


def test_it_stores_the_way_back_of_whole_sections_on_request():
    rng = np.random.default_rng(4)
    code = rng.bytes(3000)
    old = {"kernels": SectionBytes(code), "plan": SectionBytes(b"one")}
    new = {"kernels": SectionBytes(code[:1500] + b"!" + code[1500:]), "plan": SectionBytes(b"")}
    data = assert_round_trip(old, new, EncodeOptions(piece_bytes=700, store_reverse=True))
    assert parse_header(io.BytesIO(data).read).reversible


@pytest.mark.parametrize("before", [None, 0, 1, 7, 8, 16, 5000])
@pytest.mark.parametrize("after", [0, 1, 16, 5000])
def test_it_carries_whole_sections_of_any_size(before, after):
    rng = np.random.default_rng(5)
    old = {} if before is None else {"pipeline": SectionBytes(rng.bytes(before))}
    new = {"pipeline": SectionBytes(rng.bytes(after))}
    for options in (EncodeOptions(store_reverse=True), SMALL):
        assert_round_trip(old, new, options)


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["codes4", "scales8", "f32", "raw"])
def test_it_carries_planes_of_a_few_bytes(kind, size):
    size = max(size, 4) if kind == "f32" else size
    old, new = section((kind, bytes(size))), section((kind, b"\xff" * size))
    assert_round_trip({"weights.shared": old}, {"weights.shared": new})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_carries_any_pair_of_bundles(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    old: Bundle = {}
    new: Bundle = {}
    for number in range(data.draw(st.integers(0, 4))):
        kinds = data.draw(
            st.lists(st.sampled_from(["codes4", "scales8", "f32", "raw"]), max_size=4)
        )
        parts = [(kind, rng.bytes(4 * int(rng.integers(1, 200)))) for kind in kinds]
        name = f"expert.L{number}.E0"
        new[name] = section(*[(kind, _change(rng, data, part)) for kind, part in parts])
        if data.draw(st.booleans()) or parts:
            old[name] = section(*parts)
    options = EncodeOptions(
        chunk_bytes=4 * data.draw(st.integers(1, 300)),
        piece_bytes=data.draw(st.integers(1, 900)),
        store_reverse=data.draw(st.booleans()),
        try_bsdiff4=data.draw(st.booleans()),
    )
    if len(new) and sum(len(part.data) for part in new.values()) / options.chunk_bytes > 60:
        options = SMALL
    assert_round_trip(old, new, options)


def _change(rng: np.random.Generator, data: st.DataObject, part: bytes) -> bytes:
    share = data.draw(st.sampled_from([0.0, 0.01, 0.2, 1.0]))
    changed = np.frombuffer(part, np.uint8).copy()
    where = rng.random(changed.size) < share
    changed[where] = rng.integers(0, 256, int(where.sum()))
    return changed.tobytes()


def test_it_gives_the_same_bytes_for_the_same_input():
    old, new = _update("dense")
    first, second = (
        encode_delta({"weights.shared": old}, {"weights.shared": new}).data for _ in range(2)
    )
    assert first == second
