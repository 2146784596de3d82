"""Quantise and pack every W4 weight of a lowered module."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compiler.kernels.program import Module
from compiler.quant.w4 import (
    Floats,
    Grid,
    GridReport,
    PackedW4,
    pack_w4,
    quantise_w4,
    unpack_w4,
)

PackedWeight = tuple[PackedW4, GridReport]


@dataclass(frozen=True, slots=True)
class PackedModule:
    """Packed weights by id, and how much of the frozen grids survived (by id)."""

    packed: Mapping[int, PackedW4]
    reports: Mapping[int, GridReport]


def pack_weight(array: Floats, grid: Grid | None) -> PackedWeight:
    """Quantise and pack one (N, K) matrix, onto a frozen grid if there is one.

    Raises:
        QuantError: The weight cannot be packed.
    """
    matrix = quantise_w4(array, grid)
    return pack_w4(matrix), matrix.report


def pack_module(
    module: Module,
    *,
    base: Mapping[int, PackedW4] | None = None,
    pack: Callable[[Floats, Grid | None], PackedWeight] = pack_weight,
) -> PackedModule:
    """Quantise and pack the `w4` weights of a module.

    Args:
        module: A lowered module.
        base: Packed weights of an older version, by weight id. Where one has the same shape its
            scales are frozen, so that unchanged values keep their bytes.
        pack: Packs one weight; the driver gives one that remembers.

    Raises:
        QuantError: A weight cannot be packed.
    """
    packed: dict[int, PackedW4] = {}
    reports: dict[int, GridReport] = {}
    for weight in module.weights:
        if weight.kind == "w4":
            grid = _grid_of((base or {}).get(weight.id), weight.array)
            packed[weight.id], reports[weight.id] = pack(weight.array, grid)
    return PackedModule(packed, reports)


def _grid_of(old: PackedW4 | None, array: Floats) -> Grid | None:
    if old is None or (old.n, old.k) != array.shape:
        return None
    return unpack_w4(old).grid
