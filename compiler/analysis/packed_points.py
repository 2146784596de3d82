"""What packed rows (`Op.PACK`) save and cost: what `compiler.quant.packing` chooses by.

The bytes follow from the density. The gains are measured: how many times faster one reader is, and
how many times slower the ReLU before them all becomes by packing. Rows of 4096, 1 reader and 5, one
thread, x86-64-v4-vnni, the better of two runs on a loaded machine (`benchmarks.kernels_packed`). On
this processor spreading eight elements takes longer than reading the zeros among them, at every
density: no gain is above one, so rows stay dense.
"""

from typing import Final

from compiler.contract.operand_rules import MASK_BITS

SIZES: Final = (16 << 10, 4 << 20, 32 << 20)
"""Bytes of the dense rows at which was measured."""
READER: Final = (0.68, 0.68, 0.79)
"""Speed of a reader of packed rows, half of them zero, over that of dense rows."""
PACKING: Final = (1.03, 1.20, 2.18)
"""Time of packing behind a ReLU over that of the ReLU."""


def packed_bytes(rows: int, cols: int, density: float) -> int:
    """Return the bytes that are read of packed rows (rows, cols), a share of them not zero."""
    return round(4 * rows * cols * density) + 4 * rows * -(-cols // MASK_BITS)
