"""Take the dead tiles out of packed W4 weights and put them back: `Kind.W4_TILES` from bytes.

`emit_plan` packs, `read_packed` unpacks (for frozen grids and for the simulator over a bundle). A
tile is dead if all its codes are the code of zero, whatever its scales; put back, its scales are 1.
"""

from typing import Final

import numpy as np

from compiler.contract.tiles import GROUP, PANEL, TILE_BYTES, tile_parts
from compiler.quant.w4 import ZERO_CODE, PackedW4

_ZEROS: Final = ZERO_CODE * 17
"""A byte of two codes of zero."""


def live_mask(packed: PackedW4) -> np.ndarray:
    """Return which tiles hold a code that is not zero: (panels, groups) bool."""
    panels, groups = -(-packed.n // PANEL), -(-packed.k // GROUP)
    codes = np.frombuffer(packed.codes, np.uint8).reshape(panels, groups, TILE_BYTES)
    return np.asarray((codes != _ZEROS).any(axis=2))


def pack_tiles(packed: PackedW4) -> tuple[bytes, ...] | None:
    """Return the five stored arrays; None if no tile is dead, or all are."""
    live = live_mask(packed)
    if live.all() or not live.any():
        return None
    panels, groups = live.shape
    codes = np.frombuffer(packed.codes, np.uint8).reshape(panels, groups, TILE_BYTES)
    scales = np.frombuffer(packed.scales, np.uint8).reshape(panels, groups, PANEL)
    first = np.concatenate([[0], np.cumsum(live.sum(axis=1))]).astype("<u4")
    index = np.nonzero(live)[1].astype(np.uint8)
    arrays = (codes[live], scales[live])
    return (*(array.tobytes() for array in arrays), packed.rows, first.tobytes(), index.tobytes())


def unpack_tiles(n: int, k: int, data: bytes, live: int) -> PackedW4:
    """Return the packed weight whose stored tiles `data` holds."""
    panels, groups = -(-n // PANEL), -(-k // GROUP)
    parts = [data[at : at + length] for at, length in tile_parts(n, live)]
    codes = np.full((panels, groups, TILE_BYTES), _ZEROS, np.uint8)
    scales = np.ones((panels, groups, PANEL), np.uint8)
    first = np.frombuffer(parts[3], "<u4").astype(np.int64)
    panel = np.repeat(np.arange(panels), np.diff(first))
    index = np.frombuffer(parts[4], np.uint8)
    codes[panel, index] = np.frombuffer(parts[0], np.uint8).reshape(live, TILE_BYTES)
    scales[panel, index] = np.frombuffer(parts[1], np.uint8).reshape(live, PANEL)
    return PackedW4(n, k, codes.tobytes(), scales.tobytes(), parts[2])
