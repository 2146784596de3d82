"""What each way to write a residual would take, from its histogram: to leave out what cannot win.

The figures are order-0 entropies. They miss repeats, which a match finder would see, so they decide
for large chunks only, whose repeats are rare, and leave a margin. Used by the encoder alone.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from compiler.contract.delta import Mode, RecordKind

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]

BLOCK_LOGS: Final = (0, 2, 4, 6, 7, 8)
HALF_LOGS: Final = (2, 4, 6)
THOROUGH_BYTES: Final = 16 * 1024
"""Chunks up to here try every way."""
MARGIN: Final = 1.05
BLOCKS_PENALTY: Final = 1.1
"""Blocks of one byte tell what gaps tell, in as many bits; code them where they tell less."""
_WORD_LOG: Final = 2
WIDE_LEAST: Final = 32
HALVES_LEAST: Final = 4
"""Bytes for each changed code, from which on a mode is looked at."""
_LOW_CODE: Final = 15
HALVES_PENALTY: Final = 1.1
"""Half blocks are for updates of blocks; what is spread evenly, gaps tell better."""
_PROBE_BYTES: Final = 1 << 16
_VALUES: Final = np.arange(256)
_BITS: Final = np.array([value.bit_count() for value in range(256)])
_NIBBLES: Final = (_VALUES & 15 != 0).astype(np.int64) + (_VALUES >> 4 != 0)


def entropy_bytes(counts: Counts) -> float:
    """Return the order-0 entropy in bytes of symbols that occur `counts` times, (n,)."""
    found = counts[counts > 0].astype(float)
    total = found.sum()
    return float((found * (np.log2(total) - np.log2(found))).sum() / 8) if total else 0.0


def content_bytes(data: Bytes) -> float:
    """Return the order-0 entropy of `data`, (n,): what it takes without anything to start from."""
    return entropy_bytes(_histogram(data))


def block_bytes(residual: Bytes) -> dict[int, float]:
    """Return what BLOCKS would take by the logarithm of the block size, where it may be used."""
    counts = _histogram(residual)
    changed = residual != 0
    costs, log = {}, 0
    for longer in BLOCK_LOGS:
        if residual.size % (1 << longer):
            break
        if longer == _WORD_LOG:
            changed = residual.view("<u4") != 0
        elif longer > log:
            changed = changed.reshape(-1, 1 << (longer - log)).any(axis=1)
        log = longer
        number = int(np.count_nonzero(changed))
        if 2 * number <= changed.size:
            content = counts.copy()
            content[0] = (number << log) - int(counts[1:].sum())
            costs[log] = _places_bytes(changed.size, number) + _coded_bytes(content)
    return costs


def in_halves(residual: Bytes, log: int) -> Bytes:
    """Return the codes of half blocks, (2 * blocks, 2^log): low ones, then high ones of a block."""
    blocks = residual.reshape(-1, 1, 1 << log)
    return np.concatenate((blocks & 15, blocks >> 4), axis=1).reshape(-1, 1 << log)


def half_bytes(residual: Bytes) -> dict[int, float]:
    """Return what HALVES would take by the logarithm of the block size, where it may be used."""
    counts = _histogram(residual)
    codes = np.bincount(_VALUES & 15, counts, 16) + np.bincount(_VALUES >> 4, counts, 16)
    low, high = (residual & 15) != 0, residual > _LOW_CODE
    costs = {}
    for log in HALF_LOGS:
        if residual.size % (1 << log):
            break
        number = sum(int(side.reshape(-1, 1 << log).any(axis=1).sum()) for side in (low, high))
        places = 2 * residual.size >> log
        if 2 * number <= places:
            content = codes.astype(np.int64)
            content[0] = (number << log) - int(content[1:].sum())
            costs[log] = _places_bytes(places, number) + entropy_bytes(content)
    return costs


def likely_modes(kind: RecordKind, residual: Bytes, modes: frozenset[Mode]) -> list[Mode]:
    """Return the modes worth coding, all of them for small chunks.

    Args:
        kind: A stream kind.
        residual: (n,) packed residual bytes.
        modes: What the kind allows.
    """
    if residual.size <= THOROUGH_BYTES or kind is RecordKind.F32:
        return sorted(modes)
    costs = {mode: cost for mode, cost in mode_bytes(kind, residual).items() if mode in modes}
    most = MARGIN * min(costs.values(), default=math.inf)
    dear = {mode for mode, cost in costs.items() if cost > most or cost == math.inf}
    return sorted(modes - dear)


def mode_bytes(kind: RecordKind, residual: Bytes) -> dict[Mode, float]:
    """Return what modes would take; those that are not in it are not known."""
    counts = _histogram(residual)
    blocks = block_bytes(residual)
    costs = {Mode.DENSE: _coded_bytes(counts)}
    costs[Mode.BLOCKS] = BLOCKS_PENALTY * min(blocks.values(), default=math.inf)
    if kind is RecordKind.CODES4:
        clustered = min((cost for log, cost in blocks.items() if log), default=math.inf)
        costs |= _code_bytes(residual, int((counts * _NIBBLES).sum()), clustered)
    if kind is RecordKind.RAW:
        flipped = int((counts * _BITS).sum())
        costs[Mode.BITS] = math.inf
        if flipped <= residual.size:
            costs[Mode.BITS] = _places_bytes(8 * residual.size, flipped)
        if costs[Mode.DENSE] < residual.size / 64:
            costs[Mode.COUNTERS] = math.inf  # few bytes changed: no counters that shifted
    return costs


def _code_bytes(residual: Bytes, changed: int, clustered: float) -> dict[Mode, float]:
    """Return what modes of codes would take.

    Args:
        residual: (n,) packed codes.
        changed: How many codes differ.
        clustered: What blocks of several bytes would take.
    """
    costs = dict.fromkeys((Mode.GAPS, Mode.WIDE_GAPS, Mode.HALVES), math.inf)
    if changed <= residual.size:
        costs[Mode.GAPS] = _places_bytes(2 * residual.size, changed) + changed / 8
    if changed <= residual.size // WIDE_LEAST:
        costs[Mode.WIDE_GAPS] = costs[Mode.GAPS]
    if changed <= residual.size // HALVES_LEAST and clustered < costs[Mode.GAPS]:
        halves = half_bytes(residual)
        costs[Mode.HALVES] = HALVES_PENALTY * min(halves.values(), default=math.inf)
    return costs


def _places_bytes(places: int, chosen: int) -> float:
    return entropy_bytes(np.array([chosen, places - chosen]))


def _coded_bytes(counts: Counts) -> float:
    """Return what a Huffman code takes: no symbol less than a bit."""
    return max(entropy_bytes(counts), float(counts.sum()) / 8)


def _histogram(data: Bytes) -> Counts:
    counts = np.zeros(256, np.int64)
    for at in range(0, data.size, _PROBE_BYTES):  # bincount widens its argument to 8 bytes
        counts += np.bincount(data[at : at + _PROBE_BYTES], minlength=256)
    return counts
