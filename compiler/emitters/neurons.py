"""Packed W4 weights neuron by neuron and back: `Kind.W4_UP_ROWS`, `Kind.W4_COLUMNS` from bytes.

`emit_plan` packs, `read_packed` unpacks (for frozen grids and for the simulator over a bundle). The
layouts are described in `compiler.contract.neurons`.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.neurons import COLUMN_BLOCK, ROW_BLOCK, ROW_BLOCK_GROUPS, record_bytes
from compiler.contract.plan_format import Kind, weight_parts
from compiler.quant.w4 import (
    GROUP,
    PANEL,
    Grid,
    GridReport,
    PackedW4,
    W4Matrix,
    pack_stored,
    pack_w4,
    unpack_w4,
    whole_codes,
)

Array = NDArray[Any]
_CELLS: Final = 4
_HALF: Final = COLUMN_BLOCK // 2


def pack_neurons(packed: PackedW4, kind: Kind) -> tuple[bytes, ...] | None:
    """Return the stored arrays of `kind`; None if it cannot store the weight."""
    if kind is Kind.W4_COLUMNS:
        return _pack_columns(unpack_w4(packed))
    return _pack_up_rows(unpack_w4(packed)) if packed.n % 2 == 0 else None


def unpack_neurons(kind: Kind, n: int, k: int, data: bytes) -> PackedW4:
    """Return the packed weight (n, k) whose stored arrays of `kind` are `data`."""
    parts = [data[at : at + length] for at, length in weight_parts(kind, n, k)]
    return _unpack_columns(n, k, parts) if kind is Kind.W4_COLUMNS else _unpack_up_rows(n, k, parts)


def _pack_columns(matrix: W4Matrix) -> tuple[bytes, ...]:
    k = matrix.shape[1]
    codes, scales, rows = _padded(matrix, COLUMN_BLOCK, GROUP)
    halves = codes[:, :k].T.reshape(k, -1, 2, _HALF)
    stored = halves[:, :, 0] | halves[:, :, 1] << 4
    return stored.tobytes(), scales.T.tobytes(), rows.tobytes()


def _unpack_columns(n: int, k: int, parts: list[bytes]) -> PackedW4:
    stored = np.frombuffer(parts[0], np.uint8).reshape(k, -1, 1, _HALF)
    codes = np.concatenate([stored & 15, stored >> 4], axis=2).reshape(k, -1).T
    scales = np.frombuffer(parts[1], np.uint8).reshape(-(-k // GROUP), -1).T
    return pack_stored(codes[:n], scales[:n], np.frombuffer(parts[2], "<f4")[:n])


def _pack_up_rows(matrix: W4Matrix) -> tuple[bytes, ...]:
    half = matrix.shape[0] // 2
    gate, up = (_part(matrix, slice(at, at + half)) for at in (0, half))
    panels = pack_w4(gate)
    codes, scales, rows = _padded(up, PANEL, ROW_BLOCK)
    codes, scales = codes[:half], scales[:half]
    cells = codes.reshape(half, -1, ROW_BLOCK_GROUPS, _CELLS, 2, 4).transpose(0, 1, 3, 2, 4, 5)
    stored = (cells[..., 0, :] | cells[..., 1, :] << 4).reshape(half, -1)
    records = np.zeros((half, record_bytes(matrix.shape[1])), np.uint8)
    records[:, : stored.shape[1]] = stored
    records[:, stored.shape[1] : stored.shape[1] + scales.shape[1]] = scales
    return panels.codes, panels.scales, records.tobytes(), panels.rows + rows.tobytes()


def _unpack_up_rows(n: int, k: int, parts: list[bytes]) -> PackedW4:
    half, blocks, groups = n // 2, -(-k // ROW_BLOCK), -(-k // GROUP)
    rows = np.frombuffer(parts[3], "<f4").reshape(2, -1)
    gate = unpack_w4(PackedW4(half, k, parts[0], parts[1], rows[0].tobytes()))
    records = np.frombuffer(parts[2], np.uint8).reshape(half, -1)
    width = blocks * ROW_BLOCK // 2
    cells = records[:, :width].reshape(half, blocks, _CELLS, ROW_BLOCK_GROUPS, 1, 4)
    both = np.concatenate([cells & 15, cells >> 4], axis=4).transpose(0, 1, 3, 2, 4, 5)
    codes = np.concatenate([gate.codes, both.reshape(half, -1)[:, :k]])
    scales = np.concatenate([gate.grid.scales, records[:, width : width + groups]])
    return pack_stored(codes, scales, np.concatenate([gate.grid.rows, rows[1, :half]]))


def _part(matrix: W4Matrix, rows: slice) -> W4Matrix:
    grid = Grid(matrix.grid.scales[rows], matrix.grid.rows[rows])
    return W4Matrix(matrix.codes[rows], grid, GridReport(grid.scales.size))


def _padded(matrix: W4Matrix, high: int, wide: int) -> tuple[Array, Array, Array]:
    """Return codes, scales and row scales of whole blocks of `high` rows and `wide` columns."""
    n, codes = matrix.shape[0], whole_codes(matrix.codes, high, wide)
    scales = np.ones((len(codes), codes.shape[1] // GROUP), np.uint8)
    steps = np.zeros(len(codes), "<f4")
    scales[:n, : matrix.grid.scales.shape[1]] = matrix.grid.scales
    steps[:n] = matrix.grid.rows
    return codes, scales, steps
