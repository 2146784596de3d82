"""The bound that updates are compared with."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.delta_bound import Parts, entropy_bytes

N, K = 64, 128


def _parts() -> Parts:
    random = np.random.default_rng(3)
    codes = random.integers(0, 16, N * K).astype(np.uint8)
    scales = np.full(N * K // 32, 9, np.uint8)
    return Parts(
        codes=codes,
        spread=np.repeat(scales, 32),
        scales=scales,
        rows=np.ones(N, np.float32),
        mask=np.zeros(1024, np.bool_),
        shapes=((N, K),),
    )


def test_nothing_that_changed_needs_nothing():
    assert entropy_bytes(_parts(), _parts()) == 0


def test_flipped_bits_need_their_binary_entropy():
    mask = np.zeros(1024, np.bool_)
    mask[:256] = True
    quarter = -(0.25 * np.log2(0.25) + 0.75 * np.log2(0.75))
    assert entropy_bytes(_parts(), replace(_parts(), mask=mask)) == pytest.approx(128 * quarter)


def test_a_block_drawn_anew_needs_its_place_and_four_bits_a_code_at_most():
    old = _parts()
    codes = old.codes.reshape(N, K).copy()
    codes[:4, :4] = (codes[:4, :4] + np.arange(1, 17).reshape(4, 4) % 15 + 1) % 16
    bound = entropy_bytes(old, replace(old, codes=codes.ravel()))
    blocks = N * K // 16
    place = np.log2(blocks) + (blocks - 1) * np.log2(blocks / (blocks - 1))
    assert place / 8 <= bound <= (place + 16 * 4) / 8


def test_a_shift_of_all_scales_alike_needs_nothing_but_scales_of_two_kinds_need_a_bit_each():
    old = _parts()
    assert entropy_bytes(old, replace(old, scales=old.scales + 1)) == 0
    halves = old.scales + np.arange(old.scales.size, dtype=np.uint8) % 2
    assert entropy_bytes(old, replace(old, scales=halves)) == pytest.approx(old.scales.size / 8)
