"""What an encoding costs, and what it may not do."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from compiler.contract.errors import ContractError
from compiler.contract.planes import Plane
from compiler.delta import (
    DeltaEncodeError,
    EncodeOptions,
    SectionBytes,
    encode_delta,
    encode_pieces,
    records,
)
from compiler.delta.compare import bsdiff4_size
from tests.unit.compiler.delta.bundles import (
    assert_round_trip,
    draw_codes,
    edgecard_like,
    move_codes,
    pack_codes,
    section,
)


def _entropy_bytes(old: np.ndarray, new: np.ndarray) -> float:
    counts = np.bincount((new.astype(int) - old) & 15, minlength=16)
    shares = counts[counts > 0] / old.size
    return float(-(shares * np.log2(shares)).sum() * old.size / 8)


def test_it_beats_bsdiff4_on_small_experts_that_moved_unequally():
    old, new = edgecard_like(7)
    data = assert_round_trip(old, new)
    assert bsdiff4_size(old, new) > 1.12 * len(data)


@pytest.mark.parametrize(("share", "gain"), [(0.01, 1.03), (0.12, 1.15)])
def test_it_is_within_five_percent_of_the_entropy_of_a_large_matrix(share, gain):
    rng = np.random.default_rng(8)
    codes = draw_codes(rng, 1 << 20)
    moved = move_codes(rng, codes, share)
    old = {"weights.shared": section(("codes4", pack_codes(codes)))}
    new = {"weights.shared": section(("codes4", pack_codes(moved)))}
    encoded = encode_delta(old, new)
    assert len(encoded.data) < 1.05 * _entropy_bytes(codes, moved)
    assert len(encoded.data) * gain < bsdiff4_size(old, new)
    assert encoded.report.changed_codes == np.count_nonzero(codes != moved)
    assert encoded.report.total_codes == codes.size


def test_its_report_adds_up_to_the_file():
    old, new = edgecard_like(9, experts=4, weights=8192)
    old["kernels"] = SectionBytes(bytes(range(256)) * 8)
    new["kernels"] = SectionBytes(bytes(range(256)) * 9)
    new["pipeline"] = SectionBytes(b"")
    encoded = encode_delta(old, new, EncodeOptions(chunk_bytes=4096))
    rows = {row.component: row for row in encoded.report.sections}
    total = sum(row.delta_bytes for row in rows.values())
    assert total + encoded.report.overhead_bytes == len(encoded.data)
    assert rows["kernels"].codec in {"zstd", "zstd_source", "bsdiff4"}
    assert rows["pipeline"].codec == "empty"
    assert rows["expert.L0.E1"].codec == "planes"
    assert 0 < rows["expert.L0.E1"].delta_bytes < rows["expert.L0.E1"].new_length


def test_it_uses_the_old_bytes_of_a_rebuilt_library():
    rng = np.random.default_rng(10)
    code = rng.integers(0, 30, 60_000).astype(np.uint8).tobytes()
    rebuilt = code[:20_000] + rng.bytes(300) + code[20_100:]
    for options, most in ((None, 800), (EncodeOptions(try_bsdiff4=False), 800)):
        data = assert_round_trip(
            {"kernels": SectionBytes(code)}, {"kernels": SectionBytes(rebuilt)}, options
        )
        assert len(data) < most


def test_it_takes_bsdiff4_where_weights_grew():
    rng = np.random.default_rng(11)
    codes = draw_codes(rng, 60_000)
    moved = move_codes(rng, codes, 0.02)
    grown = np.concatenate([draw_codes(rng, 256), moved])
    old = {"weights.shared": section(("codes4", pack_codes(codes)))}
    new = {"weights.shared": section(("codes4", pack_codes(grown)))}
    encoded = encode_delta(old, new)
    assert encoded.report.sections[0].codec == "bsdiff4"
    assert_round_trip(old, new)


def test_it_takes_sources_around_the_place_of_a_piece(monkeypatch):
    monkeypatch.setattr(encode_pieces, "MAX_PIECE_SOURCE_BYTES", 900)
    rng = np.random.default_rng(12)
    text = rng.bytes(5000)
    old = {"kernels": SectionBytes(text)}
    new = {"kernels": SectionBytes(text[:2500] + b"inserted" + text[2500:])}
    options = EncodeOptions(piece_bytes=500, try_bsdiff4=False)
    assert len(assert_round_trip(old, new, options)) < 2000


def test_it_refuses_names_outside_the_grammar():
    for name in ("plan2", "expert.L0", "weights/shared", ""):
        with pytest.raises(ContractError):
            encode_delta({}, {name: SectionBytes(b"x")})


def test_it_refuses_planes_that_do_not_cover_their_section():
    for planes in (
        (Plane("raw", 0, 3),),
        (Plane("raw", 0, 5),),
        (Plane("raw", 1, 3),),
        (Plane("raw", 0, 3), Plane("raw", 2, 2)),
    ):
        with pytest.raises(ContractError):
            SectionBytes(b"four", planes)


@pytest.mark.parametrize(
    "fields", [{"chunk_bytes": 0}, {"chunk_bytes": 6}, {"chunk_bytes": 1 << 20},
               {"piece_bytes": 0}, {"piece_bytes": 1 << 30}]
)  # fmt: skip
def test_it_refuses_options_outside_the_limits(fields):
    with pytest.raises(ValueError, match="bytes"):
        EncodeOptions(**fields)


def test_it_publishes_nothing_that_does_not_decode(monkeypatch):
    old, new = edgecard_like(13, experts=1, weights=1024)
    honest = records.encode_chunk

    def broken(kind, before, after):
        mode, payload = honest(kind, before, after[:-1] + bytes([after[-1] ^ 1]))
        return mode, payload

    monkeypatch.setattr(records, "encode_chunk", broken)
    with pytest.raises(DeltaEncodeError):
        encode_delta(old, new)


def test_a_device_needs_no_bsdiff4_to_apply():
    code = (
        "import sys; sys.modules['bsdiff4'] = None; import compiler.delta; "
        "from compiler.delta import apply_delta; "
        "assert not {'onnx', 'django', 'xdsl', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_values_are_frozen():
    encoded = encode_delta({}, {"plan": SectionBytes(b"x")})
    with pytest.raises(dataclasses.FrozenInstanceError):
        encoded.data = b""  # type: ignore[misc]
