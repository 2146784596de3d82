"""Encode pieces of sections that are coded whole: zstd alone, with the old bytes, or bsdiff4."""

from typing import Final

from compiler.contract.delta import MAX_PIECE_SOURCE_BYTES, Mode
from compiler.delta.blobs import make_frame
from compiler.delta.bsdiff import make_bsdiff4
from compiler.delta.moves import Known
from compiler.delta.pieces import SOURCE_RANGE

THOROUGH_BYTES: Final = 128 * 1024
"""Pieces up to here try every way; larger ones only what the old bytes promise."""
_SHORTEST_SOURCE: Final = 8  # zstd ignores a raw dictionary below this


def encode_piece(
    piece: bytes, source: bytes, source_at: int, *, try_bsdiff4: bool
) -> tuple[Mode, bytes]:
    """Return the mode with the smallest payload, and that payload.

    Args:
        piece: What to make.
        source: A range of the section to start from, empty if there is none.
        source_at: Where in its section the source is.
        try_bsdiff4: Whether bsdiff4 may be tried: a second and 17 x the source in memory.
    """
    candidates = [(Mode.ZSTD, make_frame(piece, thorough=len(piece) <= THOROUGH_BYTES))]
    if len(source) >= _SHORTEST_SOURCE and _may_match(piece, source):
        prefix = SOURCE_RANGE.pack(source_at, len(source))
        candidates.append((Mode.ZSTD_SOURCE, prefix + make_frame(piece, source=source)))
        patch = make_bsdiff4(source, piece) if try_bsdiff4 else None
        if patch is not None:
            candidates.append((Mode.BSDIFF4, prefix + patch))
    return min(candidates, key=lambda candidate: len(candidate[1]))


def source_range(offset: int, length: int, available: int) -> tuple[int, int]:
    """Return (offset, length) of the source of a piece: around its place, as much as is allowed."""
    margin = (MAX_PIECE_SOURCE_BYTES - length) // 2
    start = max(0, min(offset - margin, available - MAX_PIECE_SOURCE_BYTES))
    return start, min(MAX_PIECE_SOURCE_BYTES, available - start)


def _may_match(piece: bytes, source: bytes) -> bool:
    return len(piece) <= THOROUGH_BYTES or Known(source).holds(piece)
