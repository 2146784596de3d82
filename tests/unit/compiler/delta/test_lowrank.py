"""Replay of adapters: the same bits however it is done, both ways, and small."""

import hashlib
import struct
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from compiler.contract.delta import (
    DeltaBaseError,
    DeltaFormatError,
    DeltaLimitError,
    DeltaResultError,
    DeltaSection,
)
from compiler.delta import EncodeOptions, SectionBytes, encode_delta
from compiler.delta.blobs import BlobReader, pack_blob
from compiler.delta.compare import bsdiff4_size
from compiler.delta.lowrank import (
    MAX_RANK,
    Factors,
    Stripes,
    quantise_factors,
    read_factors,
    replay_codes,
)
from compiler.delta.replay import SectionReplay
from tests.unit.compiler.delta.bundles import Bundle, run
from tests.unit.compiler.delta.merged import MERGED, TUNED, adapter, merged, weight

HEAD = struct.Struct("<IIHHI16s")


def nibbles(codes: bytes, panels: int, groups: int) -> np.ndarray:
    """Codes (rows, cols) of packed bytes, read off the layout one code at a time."""
    table = np.zeros((panels * 16, groups * 32), np.int64)
    for at, byte in enumerate(codes):
        tile, place = divmod(at, 256)
        cell, place = divmod(place, 64)
        row, i = divmod(place, 4)
        panel, group = divmod(tile, groups)
        column = 32 * group + 8 * cell + i
        table[16 * panel + row, column] = byte & 15
        table[16 * panel + row, column + 4] = byte >> 4
    return table


def test_it_does_what_the_formula_says() -> None:
    """Against exact fractions, code by code."""
    rng = np.random.default_rng(50)
    rows, cols = 20, 40
    codes, scales, steps = weight(rng, rows, cols)
    factors = adapter(rng, rows, cols, 3, 0.004)
    made = nibbles(replay_codes(codes, scales, steps, factors), 2, 2)
    before = nibbles(codes, 2, 2)
    unit = Fraction(factors.numerator, 1 << factors.shift)
    product = factors.left.astype(int) @ factors.right.astype(int)
    row_scales = np.frombuffer(steps, "<f4")
    for row in range(32):
        panel = row // 16
        noise = hashlib.shake_128(factors.seed + panel.to_bytes(4, "little")).digest(2 * 16 * 64)
        dither = np.frombuffer(noise, "<u2").reshape(16, 64)
        for col in range(64):
            scale = scales[(panel * 2 + col // 32) * 16 + row % 16]
            step = Fraction(float(row_scales[row])) * scale
            inside = row < rows and col < cols
            per_unit = int(unit / step * (1 << 30)) if step else 0
            moved = int(product[row, col]) * per_unit if inside else 0
            moved = (moved + (int(dither[row % 16, col]) << 14)) >> 30
            assert made[row, col] == min(max(before[row, col] + moved, 0), 15)


def test_panels_come_out_alike_in_any_order() -> None:
    rng = np.random.default_rng(51)
    codes, scales, steps = weight(rng, 64, 96)
    factors = adapter(rng, 64, 96, 4, 0.002)
    whole = replay_codes(codes, scales, steps, factors)
    stripes = Stripes(factors)
    size, wide = stripes.codes_bytes, stripes.scales_bytes
    for panel in (3, 0, 2, 1):
        made, _ = stripes.replay(
            panel,
            codes[panel * size :][:size],
            scales[panel * wide :][:wide],
            steps[panel * 64 :][:64],
        )
        assert made.tobytes() == whole[panel * size :][:size]


def test_small_changes_survive_by_their_share() -> None:
    """A change of a fiftieth of a step moves one code in fifty, on average by all of it."""
    rng = np.random.default_rng(52)
    codes, scales, _ = weight(rng, 256, 512)
    scales = bytes([100]) * len(scales)
    steps = np.full(256, 1e-4, "<f4").tobytes()
    factors = quantise_factors(
        np.full((256, 1), 0.01, np.float32), np.full((1, 512), 0.02, np.float32), bytes(16)
    )
    before, after = (
        nibbles(codes, 16, 16),
        nibbles(replay_codes(codes, scales, steps, factors), 16, 16),
    )
    open_codes = before < 15
    moved = (after - before)[open_codes]
    assert set(np.unique(moved)) == {0, 1}
    assert abs(moved.mean() - 0.02) < 0.002


def test_it_is_four_times_smaller_than_bsdiff4_at_rank_16() -> None:
    rng = np.random.default_rng(53)
    old, new, factors = merged(rng, rows=2048, cols=4096, rank=16, size=0.0008)
    plain = encode_delta(old, new)
    small = encode_delta(old, new, replays=factors)
    assert {row.component: row.codec for row in small.report.sections} == {
        MERGED: "planes+lowrank", TUNED: "planes"
    }  # fmt: skip
    assert 0.03 < plain.report.changed_codes / plain.report.total_codes < 0.06
    assert len(small.data) * 3 < len(plain.data)
    quarter = slice(0, 1 << 20)  # a quarter of the codes, because bsdiff4 takes long
    was, now = (SectionBytes(side[MERGED].data[quarter]) for side in (old, new))
    assert bsdiff4_size({MERGED: was}, {MERGED: now}) > len(small.data)
    for base, goal, reverse in ((old, new, False), (new, old, True)):
        _, made = run(small.data, base, reverse=reverse)
        assert made.section(MERGED) == goal[MERGED].data


@pytest.mark.parametrize("size", [0.0005, 0.01])
def test_it_leads_both_ways_where_codes_are_clipped(size: float) -> None:
    rng = np.random.default_rng(54)
    old, new, factors = merged(rng, rows=250, cols=500, rank=2, size=size)
    encoded = encode_delta(old, new, replays=factors)
    codecs = {row.component: row.codec for row in encoded.report.sections}
    assert codecs[MERGED] == "planes+lowrank"
    for base, goal, reverse in ((old, new, False), (new, old, True)):
        _, made = run(encoded.data, base, reverse=reverse)
        for name in (MERGED, TUNED):
            assert made.section(name) == goal[name].data


def test_it_is_left_out_where_it_does_not_pay_or_is_not_exact() -> None:
    rng = np.random.default_rng(55)
    old, new, factors = merged(rng, rows=64, cols=64, rank=16, size=1e-5)
    assert codec(old, new, factors) == "planes"
    old, new, factors = merged(rng, rows=250, cols=500, rank=2)
    assert codec(old, new, factors) == "planes+lowrank"
    other = {(MERGED, 0): replace(factors[MERGED, 0], seed=bytes(16))}
    assert codec(old, new, other) == "planes"
    touched = bytearray(new[MERGED].data)
    touched[5] ^= 1
    one = new | {MERGED: SectionBytes(bytes(touched), new[MERGED].planes)}
    assert codec(old, one, factors) == "planes"


def codec(old: Bundle, new: Bundle, factors: dict[tuple[str, int], Factors]) -> str:
    report = encode_delta(old, new, EncodeOptions(), replays=factors).report
    return next(row.codec for row in report.sections if row.component == MERGED)


def test_it_refuses_a_base_and_a_result_that_differ() -> None:
    rng = np.random.default_rng(56)
    old, new, factors = merged(rng, rows=250, cols=500, rank=2)
    data = encode_delta(old, new, replays=factors).data
    planes = old[MERGED].planes
    for at, error in ((7, DeltaBaseError), (planes[1].offset + 3, DeltaBaseError)):
        touched = bytearray(old[MERGED].data)
        touched[at] ^= 1
        with pytest.raises(error):
            run(data, old | {MERGED: SectionBytes(bytes(touched), planes)})
    swapped = bytearray(data)
    seed = data.index(factors[MERGED, 0].seed)
    swapped[seed] ^= 1
    with pytest.raises(DeltaResultError):
        run(bytes(swapped), old)


@pytest.mark.parametrize(
    ("head", "error"),
    [((16, 32, 0, 40, 1 << 31), DeltaFormatError), ((0, 32, 1, 40, 1 << 31), DeltaFormatError),
     ((16, 32, MAX_RANK + 1, 40, 1 << 31), DeltaLimitError),
     ((16, 8193, 1, 40, 1 << 31), DeltaLimitError),
     ((1 << 31, 32, 64, 40, 1 << 31), DeltaLimitError),
     ((16, 32, 1, 256, 1 << 31), DeltaFormatError), ((16, 32, 1, 40, 5), DeltaFormatError)],
)  # fmt: skip
def test_factors_that_cannot_be_are_refused(head: tuple[int, ...], error: type[Exception]) -> None:
    payload = HEAD.pack(*head, bytes(16)) + pack_blob(bytes(16)) + pack_blob(bytes(32))
    with pytest.raises(error):
        read_factors(BlobReader(payload))


def test_factors_of_another_shape_than_the_weight_are_refused() -> None:
    rng = np.random.default_rng(57)
    codes, scales, steps = weight(rng, 64, 96)
    with pytest.raises(DeltaFormatError):
        replay_codes(codes, scales, steps, adapter(rng, 64, 160, 2, 0.01))
    with pytest.raises(DeltaFormatError):
        replay_codes(codes[:-1], scales, steps, adapter(rng, 64, 96, 2, 0.01))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_factors_without_a_size_are_refused(bad: float) -> None:
    left, right = np.full((4, 1), bad, np.float32), np.ones((1, 4), np.float32)
    with pytest.raises(DeltaFormatError):
        quantise_factors(left, right, bytes(16))


def test_rows_without_a_scale_keep_their_codes() -> None:
    rng = np.random.default_rng(58)
    codes, scales, _ = weight(rng, 16, 32)
    factors = Factors(
        np.full((16, 1), 127, np.int8), np.full((1, 32), 127, np.int8), 1 << 31, 20, bytes(16)
    )
    steps = np.ones(16, "<f4")
    odd = np.array([0.0, -1.0, np.nan, np.inf, -np.inf, 1e-42], "<f4")
    steps[: odd.size] = odd
    made = nibbles(replay_codes(codes, scales, steps.tobytes(), factors), 1, 1)
    assert (made[: odd.size] == nibbles(codes, 1, 1)[: odd.size]).all()
    assert (made[odd.size :] == 15).all()


def test_a_payload_that_does_not_fit_its_planes_is_refused() -> None:
    rng = np.random.default_rng(59)
    old, new, factors = merged(rng, rows=48, cols=64, rank=2)
    section = DeltaSection(
        MERGED, old[MERGED].sha256, new[MERGED].sha256, old[MERGED].length, new[MERGED].length,
        old[MERGED].planes, replays=(0,),
    )  # fmt: skip
    good = factors[MERGED, 0].to_bytes() + pack_blob(b"") + pack_blob(b"")
    SectionReplay(section, 0, good, reverse=False)
    large = factors[MERGED, 0].to_bytes() + pack_blob(b"\0") + pack_blob(b"\x10")
    for payload in (good + b"x", good[:-1], large):
        with pytest.raises(DeltaFormatError):
            SectionReplay(section, 0, payload, reverse=False)
    with pytest.raises(DeltaFormatError):
        SectionReplay(section, 1, good, reverse=False)
