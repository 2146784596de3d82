"""Byte layout of `Kind.W4_TILES`: W4 weights of which only the live tiles are stored.

A tile is one panel of 16 rows by one group of 32 columns. Five arrays, each at a multiple of
ALIGNMENT from the weight's start, for `live` stored tiles in order of panel, then group:

    codes   [live][256] u8, scales [live][16] u8, as in `Kind.W4`
    rows    [panels][16] f32
    first   [panels + 1] u32, the first stored tile of each panel, then `live`
    index   [live] u8, the group of each stored tile, ascending within a panel

A tile that is not stored has only the code of zero; leaving it out changes no bit, because it adds
an integer zero to an integer sum. The number of stored tiles follows from the bytes.
"""

from typing import Final

PANEL: Final = 16
GROUP: Final = 32
TILE_BYTES: Final = PANEL * GROUP // 2
MAX_GROUPS: Final = 256
_ALIGNMENT: Final = 64


def tile_parts(rows: int, live: int) -> tuple[tuple[int, int], ...]:
    """Return (offset, length) in bytes of the five arrays, relative to the weight's start."""
    panels = -(-rows // PANEL)
    lengths = (live * TILE_BYTES, live * PANEL, panels * PANEL * 4, 4 * (panels + 1), live)
    parts, at = [], 0
    for length in lengths:
        parts.append((at, length))
        at += -(-length // _ALIGNMENT) * _ALIGNMENT
    return tuple(parts)


def tile_bytes(rows: int, live: int) -> int:
    """Return how many bytes a weight with `live` stored tiles takes."""
    offset, length = tile_parts(rows, live)[-1]
    return offset + length


def live_tiles(rows: int, cols: int, length: int) -> int | None:
    """Return how many tiles a weight of `length` bytes stores; None if no number fits."""
    most = -(-rows // PANEL) * -(-cols // GROUP)
    guess = (length - tile_bytes(rows, 0)) // (TILE_BYTES + PANEL + 1)
    for live in (guess, guess - 1):
        fits = 1 <= live <= most and -(-cols // GROUP) <= MAX_GROUPS
        if fits and tile_bytes(rows, live) == length:
            return live
    return None
