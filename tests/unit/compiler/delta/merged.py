"""Releases that were merged with an adapter by replay."""

import numpy as np

from compiler.delta import SectionBytes
from compiler.delta.lowrank import Factors, quantise_factors, replay_codes
from tests.unit.compiler.delta.bundles import Bundle, draw_codes, move_codes, pack_codes, section

MERGED = "expert.L0.E0"
TUNED = "expert.L0.E1"


def weight(rng: np.random.Generator, rows: int, cols: int) -> tuple[bytes, bytes, bytes]:
    """Codes, group scales and row scales of a W4 matrix, padded as the compiler does."""
    panels, groups = -(-rows // 16), -(-cols // 32)
    codes = pack_codes(draw_codes(rng, panels * groups * 512))
    scales = np.clip(rng.normal(150, 25, panels * groups * 16), 60, 255).astype(np.uint8)
    steps = np.zeros(panels * 16, "<f4")
    steps[:rows] = rng.uniform(0.8e-4, 1.2e-4, rows)
    return codes, scales.tobytes(), steps.tobytes()


def adapter(rng: np.random.Generator, rows: int, cols: int, rank: int, size: float) -> Factors:
    """Factors whose product has a standard deviation of `size`."""
    left = rng.standard_normal((rows, rank)).astype(np.float32)
    right = rng.standard_normal((rank, cols)).astype(np.float32)
    right *= np.exp(rng.normal(0, 0.7, (rank, 1))).astype(np.float32)
    right *= np.float32(size) / (left @ right).std()
    return quantise_factors(left, right, rng.bytes(16))


def packed(codes: bytes, scales: bytes, rows: bytes) -> SectionBytes:
    """The weight as a section, with the gap that alignment leaves."""
    gap = -(len(codes) + len(scales)) % 64
    parts = [("codes4", codes), ("scales8", scales), ("raw", bytes(gap)), ("f32", rows)]
    return section(*(part for part in parts if part[1]))


def merged(
    rng: np.random.Generator, *, rows: int, cols: int, rank: int, size: float = 0.002
) -> tuple[Bundle, Bundle, dict[tuple[str, int], Factors]]:
    """A bundle of two experts before and after: one merged by replay, one tuned."""
    codes, scales, steps = weight(rng, rows, cols)
    other = weight(rng, 16, 64)
    factors = adapter(rng, rows, cols, rank, size)
    made = replay_codes(codes, scales, steps, factors)
    shared = np.frombuffer(other[0], np.uint8)
    moved = move_codes(rng, np.stack((shared & 15, shared >> 4), axis=1).reshape(-1), 0.05)
    old = {MERGED: packed(codes, scales, steps), TUNED: packed(*other)}
    new = {MERGED: packed(made, scales, steps), TUNED: packed(pack_codes(moved), *other[1:])}
    return old, new, {(MERGED, 0): factors}
