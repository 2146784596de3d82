"""Packed W4 weights as elements or blocks and back: `Kind.W4_CSR`, `W4_COO`, `W4_ELL` from bytes.

`emit_plan` packs, `read_packed` unpacks (for frozen grids and for the simulator over a bundle).
What has the code of zero is left out, whatever its scale; put back, the scale of a group without
elements is 1. The layouts are described in `compiler.contract.elements`.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.elements import (
    ELL_BYTES,
    ELL_COLS,
    ELL_ROWS,
    MAX_COO_ROWS,
    stored_count,
    stored_parts,
)
from compiler.contract.plan_format import Kind
from compiler.quant.w4 import (
    GROUP,
    PANEL,
    ZERO_CODE,
    PackedW4,
    W4Matrix,
    pack_stored,
    unpack_w4,
    whole_codes,
)

Array = NDArray[Any]
_EMPTY_BLOCK: Final = ZERO_CODE * 17
"""A byte of two codes of zero."""


def pack_elements(packed: PackedW4, kind: Kind) -> tuple[bytes, ...] | None:
    """Return the stored arrays of `kind`; None if it cannot store the weight, or it is empty."""
    matrix = unpack_w4(packed)
    if not (matrix.codes != ZERO_CODE).any():
        return None
    if kind is Kind.W4_ELL:
        return _pack_blocks(matrix)
    rows, cols = np.nonzero(matrix.codes != ZERO_CODE)
    entries = _entries(matrix, rows, cols).tobytes()
    scales = _row_scales(matrix, PANEL)
    if kind is Kind.W4_CSR:
        counts = np.bincount(rows, minlength=packed.n)
        first = np.concatenate([[0], np.cumsum(counts)]).astype("<u4")
        return scales, first.tobytes(), entries
    if packed.n > MAX_COO_ROWS:
        return None
    return scales, entries, rows.astype("<u2").tobytes()


def unpack_elements(kind: Kind, n: int, k: int, data: bytes) -> PackedW4:
    """Return the packed weight (n, k) whose stored arrays of `kind` are `data`."""
    count = stored_count(kind, n, k, len(data))
    assert count is not None  # parse_plan checked the length
    parts = [data[at : at + length] for at, length in stored_parts(kind, n, count)]
    codes = np.full((n, k), ZERO_CODE, np.uint8)
    scales = np.ones((n, -(-k // GROUP)), np.uint8)
    if kind is Kind.W4_ELL:
        _unpack_blocks(parts, codes, scales)
    else:
        entries = np.frombuffer(parts[2 if kind is Kind.W4_CSR else 1], "<u4")
        rows = _entry_rows(kind, parts, n)
        cols = entries & 0xFFFF
        codes[rows, cols] = (entries >> 16 & 0xFF).astype(np.uint8).view(np.int8) + ZERO_CODE
        scales[rows, cols // GROUP] = entries >> 24
    return pack_stored(codes, scales, np.frombuffer(parts[0], "<f4")[:n])


def _entry_rows(kind: Kind, parts: list[bytes], n: int) -> Array:
    if kind is Kind.W4_COO:
        return np.frombuffer(parts[2], "<u2")
    first = np.frombuffer(parts[1], "<u4").astype(np.int64)
    return np.repeat(np.arange(n), first[1:] - first[:-1])


def _entries(matrix: W4Matrix, rows: Array, cols: Array) -> Array:
    codes = (matrix.codes[rows, cols].astype(np.int64) - ZERO_CODE) & 0xFF
    scales = matrix.grid.scales[rows, cols // GROUP].astype(np.int64)
    return np.asarray((cols | codes << 16 | scales << 24).astype("<u4"))


def _row_scales(matrix: W4Matrix, to: int) -> bytes:
    padded = np.zeros(-(-len(matrix.codes) // to) * to, "<f4")
    padded[: len(matrix.codes)] = matrix.grid.rows
    return padded.tobytes()


def _pack_blocks(matrix: W4Matrix) -> tuple[bytes, ...]:
    n, k = matrix.shape
    high, wide = -(-n // ELL_ROWS), -(-k // ELL_COLS)
    codes = whole_codes(matrix.codes, ELL_ROWS, ELL_COLS)
    scales = np.ones((high * ELL_ROWS, wide), np.uint8)
    scales[:n] = np.repeat(matrix.grid.scales, GROUP // ELL_COLS, axis=1)[:, :wide]
    blocks = codes.reshape(high, ELL_ROWS, wide, ELL_COLS).swapaxes(1, 2)
    live = (blocks != ZERO_CODE).any(axis=(2, 3))
    slots = int(live.sum(axis=1).max())
    halves = blocks.reshape(high, wide, 2, 2, 8 * ELL_COLS)
    nibbles = halves[:, :, :, 0] | halves[:, :, :, 1] << 4
    stored = np.full((high, slots, ELL_BYTES), _EMPTY_BLOCK, np.uint8)
    factors = np.ones((high, slots, ELL_ROWS), np.uint8)
    index = np.zeros((high, slots), "<u2")
    row, column = np.nonzero(live)
    slot = np.concatenate([np.arange(count) for count in live.sum(axis=1)])
    stored[row, slot] = nibbles[row, column].reshape(-1, ELL_BYTES)
    factors[row, slot] = scales.reshape(high, ELL_ROWS, wide)[row, :, column]
    index[row, slot] = column
    parts = (stored, factors, index)
    return (_row_scales(matrix, ELL_ROWS), *(part.tobytes() for part in parts))


def _unpack_blocks(parts: list[bytes], codes: Array, scales: Array) -> None:
    """Fill codes (n, k) and scales (n, k / GROUP) from stored blocks; empty blocks say nothing."""
    n, k = codes.shape
    high, wide = -(-n // ELL_ROWS), -(-k // ELL_COLS)
    stored = np.frombuffer(parts[1], np.uint8).reshape(high, -1, 2, 1, 8 * ELL_COLS)
    both = np.concatenate([stored & 15, stored >> 4], axis=3)
    blocks = both.reshape(high, -1, ELL_ROWS, ELL_COLS)
    factors = np.frombuffer(parts[2], np.uint8).reshape(high, -1, ELL_ROWS)
    index = np.frombuffer(parts[3], "<u2").reshape(high, -1)
    full = np.full((high, wide, ELL_ROWS, ELL_COLS), ZERO_CODE, np.uint8)
    spread = np.ones((high, wide, ELL_ROWS), np.uint8)
    row, slot = np.nonzero((blocks != ZERO_CODE).any(axis=(2, 3)))
    full[row, index[row, slot]] = blocks[row, slot]
    spread[row, index[row, slot]] = factors[row, slot]
    codes[:] = full.swapaxes(1, 2).reshape(high * ELL_ROWS, -1)[:n, :k]
    per_row = spread.swapaxes(1, 2).reshape(high * ELL_ROWS, wide)[:n]
    live = (full != ZERO_CODE).any(axis=3).swapaxes(1, 2).reshape(high * ELL_ROWS, wide)[:n]
    rows, columns = np.nonzero(live)
    scales[rows, columns * ELL_COLS // GROUP] = per_row[rows, columns]
