"""Quantise and pack every W4 weight of a lowered module."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from compiler.delta.lowrank import Factors
from compiler.kernels.program import Module, Weight
from compiler.quant.grid_search import OutputError, search_grid
from compiler.quant.merge import Seeds, replay_merge
from compiler.quant.record import CalibrationRecord, InputSample
from compiler.quant.w4 import (
    Floats,
    Grid,
    GridReport,
    PackedW4,
    pack_w4,
    quantise_w4,
    unpack_w4,
)


class PackedWeight(NamedTuple):
    """One packed matrix, how much of its frozen grid survived, and what its search achieved."""

    packed: PackedW4
    report: GridReport
    error: OutputError | None = None


@dataclass(frozen=True, slots=True)
class PackedModule:
    """What became of weights, by weight id.

    Attributes:
        packed: Packed weights.
        reports: How much of frozen grids survived.
        errors: Of grids that were searched.
        factors: Of adapters that were replayed on a base.
    """

    packed: Mapping[int, PackedW4]
    reports: Mapping[int, GridReport]
    errors: Mapping[int, OutputError] = field(default_factory=dict)
    factors: Mapping[int, Factors] = field(default_factory=dict)


def pack_weight(
    array: Floats, grid: Grid | None, sample: InputSample | None = None
) -> PackedWeight:
    """Quantise and pack one (N, K) matrix.

    Args:
        array: The matrix.
        grid: Scales to keep.
        sample: Without a grid, scales are searched for the least error on these rows.

    Raises:
        QuantError: The weight cannot be packed.
    """
    if grid is not None or sample is None:
        matrix = quantise_w4(array, grid)
        return PackedWeight(pack_w4(matrix), matrix.report)
    matrix, error = search_grid(array, sample)
    return PackedWeight(pack_w4(matrix), matrix.report, error)


def pack_module(
    module: Module,
    *,
    base: Mapping[int, PackedW4] | None = None,
    record: CalibrationRecord | None = None,
    pack: Callable[[Floats, Grid | None, InputSample | None], PackedWeight] = pack_weight,
    seeds: Seeds | None = None,
) -> PackedModule:
    """Quantise and pack the `w4` weights of a module.

    Args:
        module: A lowered module.
        base: Packed weights of an older version, by weight id. Where one has the same shape its
            scales are frozen, so that unchanged values keep their bytes.
        record: What calibration saw; scales that are not frozen are searched for the least error
            on it.
        pack: Packs one weight; the driver gives one that remembers.
        seeds: By weight id, where adapters that were merged are replayed on the base.

    Raises:
        QuantError: A weight cannot be packed.
        MergeBaseError: An adapter was merged into a weight that has another shape in the base.
    """
    found: dict[int, PackedWeight] = {}
    factors: dict[int, Factors] = {}
    for weight in module.weights:
        if weight.kind == "w4":
            replayed = _replayed(weight, base or {}, seeds or {})
            if replayed is not None:
                packed, factors[weight.id] = replayed
                found[weight.id] = PackedWeight(packed, GridReport(len(packed.scales)))
                continue
            grid = _grid_of((base or {}).get(weight.id), weight.array)
            sample = record.sample(weight.id) if record and grid is None else None
            found[weight.id] = pack(weight.array, grid, sample)
    return PackedModule(
        packed={at: one.packed for at, one in found.items()},
        reports={at: one.report for at, one in found.items()},
        errors={at: one.error for at, one in found.items() if one.error is not None},
        factors=factors,
    )


def _replayed(
    weight: Weight, base: Mapping[int, PackedW4], seeds: Seeds
) -> tuple[PackedW4, Factors] | None:
    """Return a weight with its adapters replayed on the base, if that can be."""
    if weight.merged is None or weight.id not in base or weight.id not in seeds:
        return None
    return replay_merge(weight.merged, base[weight.id], seeds[weight.id])


def _grid_of(old: PackedW4 | None, array: Floats) -> Grid | None:
    if old is None or (old.n, old.k) != array.shape:
        return None
    return unpack_w4(old).grid
