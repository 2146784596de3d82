"""Byte layouts of W4 weights whose single neurons can be left out: `W4_UP_ROWS`, `W4_COLUMNS`.

A ReLU makes most hidden neurons of some models zero. What such a neuron multiplies need not be
read, if its codes lie together. Values, scales and bits are those of `Kind.W4`; arrays start at
multiples of ALIGNMENT from the weight's start. For N rows (F = N / 2 of them gate rows) and K
columns, G groups of 32 columns, B = N / 128 rounded up:

    W4_UP_ROWS  gate rows as `Kind.W4` has them, then up rows one by one:
                codes [F / 16][G][256] u8 | scales [F / 16][G][16] u8 | record [F]
                | rows [2][F padded to 16] f32
    W4_COLUMNS  columns one by one; a group's scales, which 32 columns share, for all rows:
                codes [K][64 * B] u8 | scales [G][128 * B] u8 | rows [128 * B] f32

A record is a row in blocks of 8 groups (256 columns): codes [blocks][128] u8, then scales
[blocks][8] u8, then zeros up to a multiple of 64. Byte `32*c + 4*g + i` of a block holds columns
`8c + i` (low nibble) and `8c + 4 + i` of its group g. Byte j of block b of a column holds rows
`128b + j` (low nibble) and `128b + 64 + j`. What is padded has code 8, scale 1, row scale 0.

An up row is read where the gate is positive, a column where the quantised activation is not zero.
An integer zero added to an exact integer sum changes nothing, so leaving it out changes no bit.
"""

from typing import Final

ROW_BLOCK: Final = 256
ROW_BLOCK_BYTES: Final = 128
ROW_BLOCK_GROUPS: Final = 8
COLUMN_BLOCK: Final = 128
_ALIGNMENT: Final = 64
_PANEL: Final = 16
_GROUP: Final = 32
_TILE_BYTES: Final = 256


def record_bytes(cols: int) -> int:
    """Return the bytes of one up row of `cols` columns."""
    blocks = -(-cols // ROW_BLOCK)
    return _aligned(blocks * (ROW_BLOCK_BYTES + ROW_BLOCK_GROUPS))


def up_rows_lengths(rows: int, cols: int) -> tuple[int, ...]:
    """Return the bytes of the four arrays of a W4_UP_ROWS weight; `rows` is even."""
    panels, groups = -(-(rows // 2) // _PANEL), -(-cols // _GROUP)
    return (
        panels * groups * _TILE_BYTES,
        panels * groups * _PANEL,
        rows // 2 * record_bytes(cols),
        2 * panels * _PANEL * 4,
    )


def columns_lengths(rows: int, cols: int) -> tuple[int, ...]:
    """Return the bytes of the three arrays of a W4_COLUMNS weight."""
    high, groups = -(-rows // COLUMN_BLOCK) * COLUMN_BLOCK, -(-cols // _GROUP)
    return (cols * high // 2, groups * high, high * 4)


def consecutive(lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (offset, length) of arrays that follow each other, each aligned."""
    parts, at = [], 0
    for length in lengths:
        parts.append((at, length))
        at += _aligned(length)
    return tuple(parts)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
