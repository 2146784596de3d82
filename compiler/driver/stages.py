"""What the stages of a compilation hand over, and how long they took."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.errors import ContractError
from compiler.contract.plan import Plan, parse_plan
from compiler.contract.planes import Plane
from compiler.driver.options import STAGES, Progress

_SHARES: Final[Mapping[str, float]] = {
    "import": 0.0,
    "raise": 0.1,
    "quantise": 0.2,
    "plan": 0.3,
    "kernels": 0.6,
    "selftest": 0.8,
    "manifest": 0.97,
}
_SECTION: Final = "section/"
ORIGINS: Final = "origins"
"""The fact that names the nodes of the files; it goes into the explain document."""


class StageClock:
    """Reports progress and keeps seconds per stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._seconds: dict[str, float] = {}
        self._cached: set[str] = set()
        self._notes: dict[str, dict[str, Json]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; entered twice, its times add up."""
        self._progress(name, _SHARES[name])
        self._cached.discard(name)
        start = perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + perf_counter() - start

    def within(self, name: str) -> Callable[[float], None]:
        """Return a function that reports the share done of a stage."""
        later = [share for share in _SHARES.values() if share > _SHARES[name]]
        start, end = _SHARES[name], min(later, default=1.0)
        return lambda share: self._progress(name, start + (end - start) * share)

    def skip(self, name: str) -> None:
        """Note that a stage's result came from the cache; work in it later takes that back."""
        self._progress(name, _SHARES[name])
        self._cached.add(name)

    def note(self, name: str, **facts: Json) -> None:
        """Add facts to the row of a stage."""
        self._notes.setdefault(name, {}).update(facts)

    def rows(self) -> list[Json]:
        """Return one row per stage, in order."""
        return [
            {
                "name": name,
                "seconds": round(self._seconds.get(name, 0.0), 3),
                "cached": name in self._cached,
                **self._notes.get(name, {}),
            }
            for name in STAGES
        ]


@dataclass(frozen=True, slots=True)
class Portable:
    """What is the same for every target.

    Attributes:
        sections: `plan`, `pipeline`, and all sections with weights.
        planes: Planes of the sections with weights.
        facts: Rows of the report.
        plan: What section `plan` says.
        replays: Factors of merged adapters, `compiler.delta.replay_file`; empty without any.
    """

    sections: dict[str, bytes]
    planes: dict[str, tuple[Plane, ...]]
    ir_text: str
    facts: dict[str, Json]
    plan: Plan
    replays: bytes = b""

    def to_parts(self) -> dict[str, bytes]:
        """Return the parts of a cache entry."""
        planes: dict[str, Json] = {
            name: [[plane.kind, plane.offset, plane.length] for plane in items]
            for name, items in self.planes.items()
        }
        return {
            "planes": canonical_bytes(planes),
            "ir": self.ir_text.encode(),
            "facts": canonical_bytes(self.facts),
            "replays": self.replays,
            **{_SECTION + name: data for name, data in self.sections.items()},
        }

    @classmethod
    def from_parts(cls, parts: Mapping[str, bytes]) -> "Portable":
        """Return what `to_parts` wrote."""
        sections = {
            name.removeprefix(_SECTION): data
            for name, data in parts.items()
            if name.startswith(_SECTION)
        }
        return cls(
            sections=sections,
            plan=parse_plan(sections["plan"]),
            planes={name: _planes(items) for name, items in parse_object(parts["planes"]).items()},
            ir_text=parts["ir"].decode(),
            facts=parse_object(parts["facts"]),
            replays=parts["replays"],
        )


def _planes(items: Json) -> tuple[Plane, ...]:
    if not isinstance(items, list):
        raise ContractError("planes must be a list")
    return tuple(Plane(*item) for item in items)
