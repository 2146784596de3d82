"""The scales and router widths of an older bundle, for a new version of the same model.

Weights are paired by section and by their order inside it. That needs no names: the same structure
lowers to the same order. A pair of different shapes keeps nothing (checked when grids are used).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from compiler.contract.errors import ContractError
from compiler.contract.plan import Plan, parse_plan
from compiler.contract.plan_format import CODE_BYTES, KIND_NAMES
from compiler.contract.planes import Plane
from compiler.emitters.plan import read_packed
from compiler.errors import CompilerError
from compiler.kernels.program import Module
from compiler.quant.w4 import PackedW4

KEPT_SHARE: Final = 16
_EXPERT: Final = "expert."
Place = tuple[str, int]
"""(section, number of the W4 weight inside it)."""


@dataclass(frozen=True, slots=True)
class KeptCodes:
    """How many 4-bit codes of a new version equal those of the base.

    Attributes:
        codes: Codes of all W4 weights, padding included.
        same: Those that are unchanged.
    """

    codes: int
    same: int

    @property
    def ratio(self) -> float:
        """Share of unchanged codes."""
        return self.same / self.codes if self.codes else 1.0


def base_weights(
    module: Module,
    sections: Mapping[str, bytes],
    planes: Mapping[str, tuple[Plane, ...]] | None,
) -> dict[int, PackedW4]:
    """Return the older packed weights by weight id of `module`; empty without a base.

    Raises:
        CompilerError: The base is no bundle: its plan does not parse, a section is missing or has
            another length, or its planes contradict its plan.
    """
    if not sections:
        return {}
    try:
        plan = parse_plan(sections["plan"])
        _check_base(plan, sections, planes or {})
    except (ContractError, KeyError) as error:
        raise CompilerError(f"the base bundle cannot be used: {error}") from error
    packed = read_packed(plan, sections)
    old = dict(zip(_plan_places(plan), packed.values(), strict=True))
    return {weight: old[place] for place, weight in _module_places(module) if place in old}


def base_widths(module: Module, sections: Mapping[str, bytes]) -> dict[int, int]:
    """Return the widths at which the base stores row codes, by weight id of `module`.

    Weights are paired by section and by their order inside it, all kinds counted. The base must be
    one that `base_weights` accepted.
    """
    if not sections:
        return {}
    plan = parse_plan(sections["plan"])
    names = [plan.sections[weight.section].name for weight in plan.weights]
    old = dict(zip(_places(names), plan.weights, strict=True))
    new = zip(_places([weight.section for weight in module.weights]), module.weights, strict=True)
    return {
        weight.id: 8 * CODE_BYTES[old[place].kind]
        for place, weight in new
        if place in old and old[place].kind in CODE_BYTES
    }


def _places(sections: Iterable[str]) -> list[Place]:
    counts: dict[str, int] = {}
    places = []
    for name in sections:
        places.append((name, counts.setdefault(name, 0)))
        counts[name] += 1
    return places


def kept_codes(packed: Mapping[int, PackedW4], base: Mapping[int, PackedW4]) -> KeptCodes:
    """Compare the codes of new packed weights with those of the base, pair by pair."""
    total = same = 0
    for weight, new in packed.items():
        total += 2 * len(new.codes)
        old = base.get(weight)
        if old is not None and (old.n, old.k) == (new.n, new.k):
            same += _same_nibbles(old.codes, new.codes)
    return KeptCodes(total, same)


def changed_experts(sections: Mapping[str, bytes], base: Mapping[str, bytes]) -> int | None:
    """Return how many experts differ from those of the base, if nothing else does and few do.

    Then what was measured on the base is kept for the new version.

    Args:
        sections: All weights of the new version, by section.
        base: Sections of the base.

    Returns:
        The number, or None if more than one expert in `KEPT_SHARE` differs, or another weight.
    """
    changed = {name for name, data in sections.items() if data != base.get(name)}
    experts = {name for name in sections if name.startswith(_EXPERT)}
    is_kept = changed <= experts and KEPT_SHARE * len(changed) <= len(experts)
    return len(changed) if is_kept else None


def _same_nibbles(old: bytes, new: bytes) -> int:
    difference = np.frombuffer(old, np.uint8) ^ np.frombuffer(new, np.uint8)
    return int(np.count_nonzero(difference & 15 == 0) + np.count_nonzero(difference >> 4 == 0))


def _check_base(
    plan: Plan, sections: Mapping[str, bytes], planes: Mapping[str, tuple[Plane, ...]]
) -> None:
    for section in plan.sections:
        if len(sections[section.name]) != section.length:
            raise ContractError(f"section {section.name!r} does not have {section.length} bytes")
        ranges = planes.get(section.name)
        if ranges and ranges[-1].end != section.length:
            raise ContractError(f"planes of {section.name!r} end at {ranges[-1].end}")


def _plan_places(plan: Plan) -> Iterable[Place]:
    counts: dict[str, int] = {}
    for weight in plan.weights:
        if KIND_NAMES[weight.kind] == "w4":
            name = plan.sections[weight.section].name
            yield name, counts.setdefault(name, 0)
            counts[name] += 1


def _module_places(module: Module) -> Iterable[tuple[Place, int]]:
    counts: dict[str, int] = {}
    for weight in module.weights:
        if weight.kind == "w4":
            yield (weight.section, counts.setdefault(weight.section, 0)), weight.id
            counts[weight.section] += 1
