"""Find the alignment of a section whose masks changed, for the encoder.

A mask that wakes as much as it kills leaves all lengths as they were and still moves what it keeps.

The plan says which weight stands where and how it is stored; the index of a packed weight says
which tiles, elements or blocks it holds. What is in both weights, by its place in the matrix, is
kept, whatever its codes became; so a change of the mask costs what it drops and adds. The device
needs none of this: it walks `compiler.contract.delta_alignment`.

    stored as   a unit is         keys come from
    W4          a tile            all tiles, in order
    W4_TILES    a tile            first, index
    W4_CSR      an element        first, column of the entry
    W4_COO      an element        row, column of the entry
    W4_ELL      a block           column; padding by its number

Left out: weights whose shape or kind of unit changed. They are added whole.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compiler.contract.delta_alignment import MAX_STEPS, AlignedPlanes, Alignment, PlanePair
from compiler.contract.elements import ELL_BYTES, ELL_ROWS, SMALL_KINDS, stored_count, stored_parts
from compiler.contract.errors import ContractError
from compiler.contract.plan import PlanWeight, parse_plan
from compiler.contract.plan_format import MAX_PLAN_BYTES, Kind, weight_parts
from compiler.contract.planes import Plane
from compiler.contract.tiles import GROUP, PANEL, TILE_BYTES, live_tiles, tile_parts
from compiler.delta.sections import SectionSource

Keys = npt.NDArray[np.int64]
Part = tuple[int, int]

LEAST_KEPT: Final = 0.3
"""Share of the new bytes below which nothing was aligned."""
_WHOLE: Final = 0
_STEP: Final = 3
_HIGH: Final = 32
_PADDING: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Units:
    """A weight as units.

    Attributes:
        family: Weights of one family can be aligned with each other.
        parts: Name -> (offset in the section, length, bytes of a unit or 0 for a part as a whole).
        keys: Place of each unit in the matrix, ascending, (n,).
    """

    family: str
    parts: Mapping[str, tuple[int, int, int]]
    keys: Keys


WeightsBySection = Mapping[str, Sequence[PlanWeight]]


def weights_by_section(plan: SectionSource | None) -> WeightsBySection:
    """Return the weights of a plan by the name of their section; empty if there is no plan."""
    found: defaultdict[str, list[PlanWeight]] = defaultdict(list)
    if plan is None or plan.length > MAX_PLAN_BYTES:
        return {}
    try:
        parsed = parse_plan(plan.read(plan.length, 0))
    except ContractError:
        return {}  # a plan of another time: nothing is known about its weights
    for weight in parsed.weights:
        found[parsed.sections[weight.section].name].append(weight)
    return found


def align(
    old: SectionSource,
    new: SectionSource,
    old_weights: Sequence[PlanWeight],
    new_weights: Sequence[PlanWeight],
    most_steps: int = MAX_STEPS,
) -> Alignment | None:
    """Return how the planes of `old` became those of `new`, or None if that would not help.

    Args:
        old: A section with planes.
        new: The same section in the new bundle, with other planes.
        old_weights: The weights in `old`, in the order of its plan.
        new_weights: Those in `new`.
        most_steps: Steps that are left in the file.
    """
    groups: list[AlignedPlanes] = []
    numbers = _numbers(old.planes), _numbers(new.planes)
    for before, after in zip(old_weights, new_weights, strict=False):
        if (before.rows, before.cols) == (after.rows, after.cols):
            groups += _aligned_weight(_units(old, before), _units(new, after), numbers)
    found = Alignment(tuple(groups))
    if old.planes == new.planes and all(len(group.steps) == _STEP for group in groups):
        return None  # nothing moved
    kept = sum(
        pair.unit * keep for group in groups for pair in group.pairs for _, _, keep in group.walk()
    )
    if not groups or found.steps > most_steps or kept < LEAST_KEPT * new.length:
        return None
    return found


def _numbers(planes: Sequence[Plane]) -> dict[tuple[int, int], int]:
    return {(plane.offset, plane.length): number for number, plane in enumerate(planes)}


def _aligned_weight(
    old: Units, new: Units, numbers: tuple[Mapping[Part, int], Mapping[Part, int]]
) -> Iterator[AlignedPlanes]:
    if old.family != new.family:
        return
    moving = []
    for name, after in new.parts.items():
        before = old.parts.get(name, (0, -1, _WHOLE))
        was, now = numbers[0].get(before[:2]), numbers[1].get(after[:2])
        if was is None or now is None:
            continue
        if after[2] != _WHOLE:
            moving.append(PlanePair(was, now, after[2]))
        elif before[1] == after[1]:
            pair = PlanePair(was, now, after[1])
            yield AlignedPlanes((pair,), array("Q", (0, 0, 1)))
    steps = _steps(old.keys, new.keys)
    if moving and steps is not None:
        yield AlignedPlanes(tuple(sorted(moving)), steps)


def _steps(old: Keys, new: Keys) -> "array[int] | None":
    """Return drop, add, keep of the walk from `old` to `new`, or None if nothing is in both."""
    was = np.flatnonzero(np.isin(old, new, assume_unique=True))
    now = np.flatnonzero(np.isin(new, old, assume_unique=True))
    if not was.size:
        return None
    drop, add = np.diff(was, prepend=-1) - 1, np.diff(now, prepend=-1) - 1
    starts = np.flatnonzero((drop > 0) | (add > 0) | (np.arange(was.size) == 0))
    keep = np.diff(starts, append=was.size)
    rows = np.stack((drop[starts], add[starts], keep), axis=1)
    tail = old.size - 1 - was[-1], new.size - 1 - now[-1], 0
    if any(tail):
        rows = np.concatenate((rows, np.array([tail])))
    return array("Q", rows.astype(np.uint64).tobytes())


def _units(section: SectionSource, weight: PlanWeight) -> Units:
    reader = _UNITS.get(weight.kind)
    found = reader(section, weight) if reader is not None else None
    return found if found is not None else _as_it_is(section, weight)


def _as_it_is(section: SectionSource, weight: PlanWeight) -> Units:
    """Parts of a weight that has no units: its planes, by their order."""
    end = weight.offset + weight.length
    inside = [p for p in section.planes if weight.offset <= p.offset and p.end <= end]
    parts = {str(at): (p.offset, p.length, _WHOLE) for at, p in enumerate(inside)}
    return Units(weight.kind.name, parts, np.zeros(0, np.int64))


def _named(
    weight: PlanWeight, places: Sequence[Part], units: Mapping[str, int]
) -> dict[str, tuple[int, int, int]]:
    return {
        name: (weight.offset + at, length, unit)
        for (name, unit), (at, length) in zip(units.items(), places, strict=True)
    }


def _array(section: SectionSource, part: tuple[int, int, int], dtype: str) -> Keys:
    return np.frombuffer(section.read(part[1], part[0]), dtype).astype(np.int64)


def _counted(first: Keys) -> Keys:
    """Return the row of each unit, from the first unit of each row."""
    return np.repeat(np.arange(first.size - 1), np.maximum(np.diff(first), 0))


def _dense(_section: SectionSource, weight: PlanWeight) -> Units:
    places = weight_parts(weight.kind, weight.rows, weight.cols)
    parts = _named(weight, places, {"codes": TILE_BYTES, "scales": PANEL, "rows": _WHOLE})
    panels, groups = -(-weight.rows // PANEL), -(-weight.cols // GROUP)
    keys = (np.arange(panels)[:, None] << _HIGH) + np.arange(groups)
    return Units("tiles", parts, keys.reshape(-1))


def _tiles(section: SectionSource, weight: PlanWeight) -> Units | None:
    live = live_tiles(weight.rows, weight.cols, weight.length)
    if live is None:
        return None
    units = {"codes": TILE_BYTES, "scales": PANEL, "rows": _WHOLE, "first": _WHOLE, "index": 1}
    parts = _named(weight, tile_parts(weight.rows, live), units)
    panels = _counted(_array(section, parts["first"], "<u4"))
    return _keyed("tiles", parts, panels, _array(section, parts["index"], "u1"))


def _small(section: SectionSource, weight: PlanWeight) -> Units | None:
    count = stored_count(weight.kind, weight.rows, weight.cols, weight.length)
    if count is None:
        return None
    places = stored_parts(weight.kind, weight.rows, count)
    return _SMALL[weight.kind](section, weight, places)


def _csr(section: SectionSource, weight: PlanWeight, places: Sequence[Part]) -> Units | None:
    parts = _named(weight, places, {"rows": _WHOLE, "first": _WHOLE, "entry": 4})
    rows = _counted(_array(section, parts["first"], "<u4"))
    return _keyed("csr", parts, rows, _array(section, parts["entry"], "<u4") & 0xFFFF)


def _coo(section: SectionSource, weight: PlanWeight, places: Sequence[Part]) -> Units | None:
    parts = _named(weight, places, {"rows": _WHOLE, "entry": 4, "row": 2})
    rows = _array(section, parts["row"], "<u2")
    return _keyed("coo", parts, rows, _array(section, parts["entry"], "<u4") & 0xFFFF)


def _ell(section: SectionSource, weight: PlanWeight, places: Sequence[Part]) -> Units | None:
    units = {"rows": _WHOLE, "codes": ELL_BYTES, "scales": ELL_ROWS, "column": 2}
    parts = _named(weight, places, units)
    columns = _array(section, parts["column"], "<u2")
    blocks = -(-weight.rows // ELL_ROWS)
    by_row = columns.reshape(blocks, -1)
    padding = np.zeros(by_row.shape, bool)
    padding[:, 1:] = by_row[:, 1:] <= by_row[:, :-1]
    padding = np.logical_or.accumulate(padding, axis=1)
    numbered = np.where(padding, _PADDING + np.arange(by_row.shape[1]), by_row)
    rows = np.repeat(np.arange(blocks), by_row.shape[1])
    return _keyed("ell", parts, rows, numbered.reshape(-1))


def _keyed(
    family: str, parts: Mapping[str, tuple[int, int, int]], rows: Keys, columns: Keys
) -> Units | None:
    """Return units by row and column, or None if the index is no index."""
    if rows.size != columns.size:
        return None
    keys = (rows << _HIGH) + columns
    return Units(family, parts, keys) if bool((np.diff(keys) > 0).all()) else None


_SMALL: Final[
    Mapping[Kind, Callable[[SectionSource, PlanWeight, Sequence[Part]], Units | None]]
] = {Kind.W4_CSR: _csr, Kind.W4_COO: _coo, Kind.W4_ELL: _ell}
_UNITS: Final[Mapping[Kind, Callable[[SectionSource, PlanWeight], Units | None]]] = {
    Kind.W4: _dense,
    Kind.W4_TILES: _tiles,
    **dict.fromkeys(SMALL_KINDS, _small),
}
