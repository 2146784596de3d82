"""Bounds of sizes: against the entropy of an update, and against bsdiff4 on the same bytes."""

import numpy as np
import pytest

from compiler.contract.planes import Plane
from compiler.delta import SectionBytes, encode_delta
from compiler.delta.compare import bsdiff4_size
from compiler.kernels.program import DENSE
from tests.unit.compiler.delta.bundles import (
    Bundle,
    assert_round_trip,
    draw_codes,
    edgecard_like,
    move_codes,
    pack_codes,
    section,
)
from tests.unit.compiler.delta.masked import Masked, blocks, bundle, entropy_bytes

WEIGHTS = 1 << 20
BLOCKS = [(4, 4), (4, 8), (1, 8), (16, 32)]


def weights(codes: np.ndarray, scales: np.ndarray, rows: np.ndarray) -> Bundle:
    return {
        "weights.shared": section(
            ("codes4", pack_codes(codes)),
            ("scales8", scales.astype(np.uint8).tobytes()),
            ("f32", rows.astype("<f4").tobytes()),
        )
    }


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize(("high", "wide"), BLOCKS)
def test_blocks_cost_little_more_than_their_entropy(high: int, wide: int, killed: bool) -> None:
    """5 % of blocks are redrawn, or killed by a mask, in a dense weight."""
    rng = np.random.default_rng(70)
    old = Masked.draw(rng, np.ones((512, 2048), bool), DENSE)
    live = rng.random((512 // high, 2048 // wide)) < 0.05
    touched = blocks(live, high, wide)
    codes = old.codes.copy()
    codes[touched] = draw_codes(rng, np.count_nonzero(touched))
    new = old.with_mask(~touched) if killed else Masked(codes, old.scales, old.mask, DENSE)
    residual = (new.stored_codes - old.stored_codes) & 15
    bound = entropy_bytes(live) + entropy_bytes(residual[touched])
    data = assert_round_trip(bundle([old]), bundle([new]))
    assert len(data) < 1.1 * bound


def test_a_mask_of_bits_costs_little_more_than_its_entropy() -> None:
    """One bit for 16 weights, 1 % of them flipped; all else stays."""
    rng = np.random.default_rng(71)
    codes, mask = pack_codes(draw_codes(rng, 4 * WEIGHTS)), rng.integers(0, 2, WEIGHTS // 2)
    flips = rng.random(mask.size) < 0.01
    sides = (np.packbits(mask).tobytes(), np.packbits(mask ^ flips).tobytes())
    planes = (Plane("codes4", 0, len(codes)), Plane("raw", len(codes), len(sides[0])))
    old, new = ({"weights.shared": SectionBytes(codes + side, planes)} for side in sides)
    data = assert_round_trip(old, new)
    assert len(data) < 1.2 * entropy_bytes(flips)


def scaled(rng: np.random.Generator, scales: np.ndarray, share: float) -> np.ndarray:
    moved = scales + rng.choice([-1, 1], scales.size) * (rng.random(scales.size) < share)
    return np.clip(moved, 1, 255)


@pytest.mark.parametrize(
    ("codes_share", "scales_share", "gain"),
    [(0.0005, 0, 1.0), (0.008, 0, 1.05), (0.04, 0, 1.1), (0.04, 0.9, 1.1), (0.13, 0, 1.1),
     (0.4, 0.5, 1.1), (0, 0.9, 1.0)],
)  # fmt: skip
def test_it_is_never_larger_than_bsdiff4(
    codes_share: float, scales_share: float, gain: float
) -> None:
    rng = np.random.default_rng(72)
    codes, scales = draw_codes(rng, WEIGHTS), rng.integers(60, 256, WEIGHTS // 32)
    rows = rng.random(512)
    old = weights(codes, scales, rows)
    new = weights(move_codes(rng, codes, codes_share), scaled(rng, scales, scales_share), rows)
    assert gain * len(encode_delta(old, new).data) <= bsdiff4_size(old, new)


@pytest.mark.parametrize("experts", [1, 4, 32])
def test_small_experts_share_what_they_cost(experts: int) -> None:
    old, new = edgecard_like(73, experts=experts, weights=16_384)
    assert len(encode_delta(old, new).data) <= bsdiff4_size(old, new)


@pytest.mark.parametrize("shift", [8, 1000, 40_000])
def test_it_finds_bytes_that_moved_in_a_section_of_the_same_layout(shift: int) -> None:
    rng = np.random.default_rng(74)
    codes = draw_codes(rng, WEIGHTS // 2)
    moved = np.roll(codes, 2 * shift)
    old, new = ({"weights.shared": section(("codes4", pack_codes(c)))} for c in (codes, moved))
    encoded = encode_delta(old, new)
    assert encoded.report.sections[0].codec != "planes"
    assert len(encoded.data) <= bsdiff4_size(old, new) + 300  # digests, hashes and table
    assert_round_trip(old, new)


def test_one_code_costs_no_more_than_its_records() -> None:
    """What bsdiff4 has not: header, table with two digests, a record for each stream."""
    rng = np.random.default_rng(75)
    codes, rows = draw_codes(rng, WEIGHTS), rng.random(512)
    scales = rng.integers(60, 256, WEIGHTS // 32)
    changed = codes.copy()
    changed[777] ^= 1
    old, new = weights(codes, scales, rows), weights(changed, scales, rows)
    assert len(encode_delta(old, new).data) < bsdiff4_size(old, new) + 300
