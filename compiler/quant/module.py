"""Quantise and pack every W4 weight of a lowered module."""

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.kernels.program import Module
from compiler.quant.w4 import Grid, GridReport, PackedW4, pack_w4, quantise_w4, unpack_w4


@dataclass(frozen=True, slots=True)
class PackedModule:
    """Packed weights by id, and how much of the frozen grids survived (by id)."""

    packed: Mapping[int, PackedW4]
    reports: Mapping[int, GridReport]


def pack_module(module: Module, *, base: Mapping[int, PackedW4] | None = None) -> PackedModule:
    """Quantise and pack the `w4` weights of a module.

    Args:
        module: A lowered module.
        base: Packed weights of an older version, by weight id. Where one has the same shape its
            scales are frozen, so that unchanged values keep their bytes.

    Raises:
        QuantError: A weight cannot be packed.
    """
    packed: dict[int, PackedW4] = {}
    reports: dict[int, GridReport] = {}
    for weight in module.weights:
        if weight.kind == "w4":
            matrix = quantise_w4(weight.array, _grid_of((base or {}).get(weight.id), weight.array))
            packed[weight.id], reports[weight.id] = pack_w4(matrix), matrix.report
    return PackedModule(packed, reports)


def _grid_of(old: PackedW4 | None, array: object) -> Grid | None:
    if old is None or (old.n, old.k) != getattr(array, "shape", None):
        return None
    return unpack_w4(old).grid
