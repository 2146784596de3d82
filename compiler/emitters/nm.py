"""Halve packed W4 weights of which every panel keeps 8 of 16 columns: `Kind.W4_NM` from bytes.

    codes   [N/16][K/32][2 cells][64 bytes], cells as in `Kind.W4`: the columns kept of 16, in order
    scales  [N/16][K/32][16] u8, rows [N/16][16] f32, as there
    index   [N/16][K/32][8] u8: 16 places of 4 bits, low ones first, each within its 16 columns

Two of every four columns, alike for the 16 rows of a panel, are such a weight. `emit_plan` packs,
`read_packed` unpacks. Places that nothing fills have the code of zero.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.plan_format import GROUP, PANEL
from compiler.quant.w4 import ZERO_CODE, PackedW4, pack_stored, unpack_w4, whole_codes

Array = NDArray[Any]
HALF: Final = 16
KEPT: Final = 8


def pack_nm(packed: PackedW4) -> tuple[bytes, ...] | None:
    """Return the four stored arrays; None if some panel needs more columns."""
    matrix = unpack_w4(packed)
    halves = _halves(matrix.codes)
    live = (halves != ZERO_CODE).any(axis=1)
    if (live.sum(axis=-1) > KEPT).any():
        return None
    places = np.argsort(~live, axis=-1, kind="stable")[..., :KEPT]
    kept = np.take_along_axis(halves, places[:, None], axis=-1)
    cells = kept.reshape(*kept.shape[:-1], 2, 4)
    codes = (cells[..., 0, :] | cells[..., 1, :] << 4).transpose(0, 2, 3, 1, 4)
    nibbles = places.astype(np.uint8).reshape(*places.shape[:-1], KEPT // 2, 2)
    index = nibbles[..., 0] | nibbles[..., 1] << 4
    return codes.tobytes(), packed.scales, packed.rows, index.tobytes()


def unpack_nm(n: int, k: int, parts: tuple[bytes, ...]) -> PackedW4:
    """Return the packed weight (n, k) whose stored arrays are `parts`."""
    panels, groups = -(-n // PANEL), -(-k // GROUP)
    cells = np.frombuffer(parts[0], np.uint8).reshape(panels, groups, 2, PANEL, 4)
    kept = np.stack([cells & 15, cells >> 4], axis=-2).reshape(panels, groups, 2, PANEL, KEPT)
    index = np.frombuffer(parts[3], np.uint8).reshape(panels, groups, 2, KEPT // 2)
    places = np.stack([index & 15, index >> 4], axis=-1).reshape(panels, groups, 2, KEPT)
    halves = np.full((panels, PANEL, groups, 2, HALF), ZERO_CODE, np.uint8)
    spread = np.broadcast_to(places[:, None], (panels, PANEL, groups, 2, KEPT)).astype(np.intp)
    np.put_along_axis(halves, spread, kept.transpose(0, 3, 1, 2, 4), axis=-1)
    codes = halves.reshape(panels * PANEL, groups * GROUP)[:n, :k]
    scales = np.frombuffer(parts[1], np.uint8).reshape(panels, groups, PANEL)
    scales = scales.transpose(0, 2, 1).reshape(-1, groups)[:n]
    return pack_stored(codes, scales, np.frombuffer(parts[2], "<f4")[:n])


def _halves(codes: Array) -> Array:
    """Return codes (N, K) as (panels, 16 rows, groups, 2, 16), padded by the code of zero."""
    whole = whole_codes(codes, PANEL, GROUP)
    return whole.reshape(len(whole) // PANEL, PANEL, -1, 2, HALF)
