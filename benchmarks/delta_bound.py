"""The plug-in entropy of an update: what an ideal coder with the same contexts would need.

Not Shannon-absolute: a coder that knew how the change came about (a low-rank product, say) needs
less. Of several descriptions of the codes the cheapest counts:

    residual, given the old code                                       every code by itself
    residual, given the old code and how the group's scale changed     after fresh scales
    which aligned blocks changed, then the residuals inside them       structured updates

Scales and mask bits as independent symbols, row scales as the byte planes of their differences.
Called by `benchmarks.delta`. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

CODES: Final = 16
BLOCKS: Final = ((4, 4), (16, 32))
RATIO_STEPS: Final = 4
"""Buckets to either side into which the change of a group's scale is divided."""
RATIO_WIDTH: Final = 0.01

Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Parts:
    """An expert as numbers, all flat.

    Attributes:
        codes: u8 0..15, (n,), row by row of each matrix.
        spread: Scale of each code, u8 (n,).
        scales: u8, one per group.
        rows: f32, one per row.
        mask: bool, one per block.
        shapes: (N, K) of each matrix.
    """

    codes: Numbers
    spread: Numbers
    scales: Numbers
    rows: Numbers
    mask: Numbers
    shapes: tuple[tuple[int, int], ...]


def entropy_bytes(old: Parts, new: Parts) -> float:
    """Return the bound for the update from `old` to `new`, bytes."""
    codes = min(_code_bits(old, new))
    scales = _bits((new.scales.astype(np.int16) - old.scales) + 255)
    flips = _bits((old.mask ^ new.mask).astype(np.int64))
    return (codes + scales + flips + _row_bits(old.rows, new.rows)) / 8


def _code_bits(old: Parts, new: Parts) -> Iterator[float]:
    residual = (new.codes.astype(np.int8) - old.codes) % CODES
    yield _bits(residual, old.codes)
    if not np.array_equal(old.spread, new.spread):
        ratio = np.log2(new.spread.astype(np.float32) / old.spread)
        bucket = np.clip(np.rint(ratio / RATIO_WIDTH), -RATIO_STEPS, RATIO_STEPS) + RATIO_STEPS
        yield _bits(residual, old.codes + bucket.astype(np.uint8) * CODES)
    for high, wide in BLOCKS:
        yield _block_bits(residual, old, high, wide)


def _block_bits(residual: Numbers, old: Parts, high: int, wide: int) -> float:
    flags, inside, given, at = [], [], [], 0
    for n, k in old.shapes:
        tiles = _tiled(residual[at : at + n * k], n, k, high, wide)
        codes = _tiled(old.codes[at : at + n * k], n, k, high, wide)
        changed = tiles.any(1)
        flags.append(changed)
        inside.append(tiles[changed].ravel())
        given.append(codes[changed].ravel())
        at += n * k
    which = _bits(np.concatenate(flags).astype(np.int64))
    return which + _bits(np.concatenate(inside), np.concatenate(given))


def _tiled(values: Numbers, n: int, k: int, high: int, wide: int) -> Numbers:
    tiles = values.reshape(n // high, high, k // wide, wide).transpose(0, 2, 1, 3)
    return tiles.reshape(-1, high * wide)


def _row_bits(old: Numbers, new: Numbers) -> float:
    a, b = old.astype("<f4").view("<i4").astype(np.int64), new.astype("<f4").view("<i4")
    planes = np.abs(b - a).astype("<u4").view(np.uint8).reshape(-1, 4)
    return sum(_bits(planes[:, at].astype(np.int64)) for at in range(4))


def _bits(symbols: Numbers, contexts: Numbers | None = None) -> float:
    """Return the empirical entropy of symbols 0..511, given contexts 0..255 if there are any."""
    if not symbols.size:
        return 0.0
    if contexts is None:
        return _of_counts(np.bincount(symbols))
    joint = contexts.astype(np.int64) * CODES + symbols
    counts = np.bincount(joint, minlength=256 * CODES)[: 256 * CODES].reshape(-1, CODES)
    return sum(_of_counts(row) for row in counts if row.any())


def _of_counts(counts: Numbers) -> float:
    seen = counts[counts > 0].astype(np.float64)
    return float((seen * np.log2(seen.sum() / seen)).sum())
