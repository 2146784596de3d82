"""Byte layouts of W4 weights that store elements or small blocks: `W4_CSR`, `W4_COO`, `W4_ELL`.

Called by the emitter, which writes them, and by `parse_plan`, which only believes lengths that some
count gives. Arrays start at multiples of ALIGNMENT from the weight's start; `count` stands for the
stored elements (CSR, COO) or the blocks of a row of blocks (ELL). For N rows and K columns:

    CSR  rows [N padded to 16] f32 | first [N + 1] u32 | entry [count] u32
    COO  rows [N padded to 16] f32 | entry [count] u32 | row [count] u16
    ELL  rows [N padded to 32] f32 | codes [N / 32][count][64] u8 | scales [N / 32][count][32] u8
         | block column [N / 32][count] u16

An entry is `column | (q - 8) << 16 | s << 24` with q - 8 as a signed byte: an element with its code
and the scale of its group, as in `Kind.W4`. Elements stand in order of row, then column; `first` is
the first entry of each row, then `count`. A block has 32 rows and 4 columns; byte
`32*j + 4*r + i` of its codes holds `q[16j + r][i] | q[16j + 8 + r][i] << 4`, r in 0..7. Rows of
blocks with fewer live blocks than `count` end with blocks of code 8, scale 1, block column 0.

What is not stored has code 8, the code of zero. Leaving it out changes no bit, because it adds an
integer zero to an integer sum. Only LINEAR reads these kinds, as its weight 0.
"""

from typing import Final

from compiler.contract.plan_format import Kind, align

ELL_ROWS: Final = 32
ELL_COLS: Final = 4
ELL_BYTES: Final = ELL_ROWS * ELL_COLS // 2
MAX_COO_ROWS: Final = 1 << 16
ELEMENT_KINDS: Final = frozenset({Kind.W4_CSR, Kind.W4_COO})
SMALL_KINDS: Final = frozenset({*ELEMENT_KINDS, Kind.W4_ELL})
LINEAR_KINDS: Final = frozenset({*SMALL_KINDS, Kind.W4_NM})
"""What only LINEAR reads, as its weight 0."""
WORKSPACE_BUDGET_BYTES: Final = 2 * 1024 * 1024
"""What a layout may need beside its operands, if nobody says otherwise."""
_PANEL: Final = 16


def workspace_bytes(kind: Kind, cols: int) -> int:
    """Return what LINEAR takes beside its operands: CSR and COO spread eight rows, i16 each."""
    return align(16 * cols) if kind in ELEMENT_KINDS else 0


def stored_parts(kind: Kind, rows: int, count: int) -> tuple[tuple[int, int], ...]:
    """Return (offset, length) in bytes of each array, relative to the weight's start."""
    blocks = -(-rows // ELL_ROWS)
    lengths = {
        Kind.W4_CSR: (4 * align(rows, _PANEL), 4 * (rows + 1), 4 * count),
        Kind.W4_COO: (4 * align(rows, _PANEL), 4 * count, 2 * count),
        Kind.W4_ELL: (
            4 * blocks * ELL_ROWS,
            blocks * count * ELL_BYTES,
            blocks * count * ELL_ROWS,
            2 * blocks * count,
        ),
    }[kind]
    parts, at = [], 0
    for length in lengths:
        parts.append((at, length))
        at += align(length)
    return tuple(parts)


def stored_bytes(kind: Kind, rows: int, count: int) -> int:
    """Return how many bytes a weight with `count` stored elements or blocks takes."""
    offset, length = stored_parts(kind, rows, count)[-1]
    return offset + length


def stored_count(kind: Kind, rows: int, cols: int, length: int) -> int | None:
    """Return the count that a weight of `length` bytes stores; None if no count fits."""
    most = -(-cols // ELL_COLS) if kind is Kind.W4_ELL else rows * cols
    if kind is Kind.W4_COO and rows > MAX_COO_ROWS:
        return None
    low, high = 1, most
    while low < high:  # the length grows with the count
        middle = (low + high) // 2
        if stored_bytes(kind, rows, middle) < length:
            low = middle + 1
        else:
            high = middle
    return low if low <= most and stored_bytes(kind, rows, low) == length else None
