"""The `schedule` section: what the tape does beside each routed layer, in the order of layers.

    compiler -(moe.schedule)-> tape of the plan, and this section
    device   -(parse_schedule)-> schedule_order.verify_schedule(plan, schedule)

`prefetch(d)` beside layer l: load the likely experts of layer l + d while l computes.
`foresee(d)` beside layer l: before l computes, the router of layer l + d says what it would choose
of what is known then; that is loaded while l computes. A distance of 0 is before l's attention.
`defer(k)`: the k weakest experts of layer l may be added one layer later; no tape does that yet, so
no plan obeys a schedule with it. Nothing else here changes what is computed. Canonical JSON, schema
`sparsefleet.schedule/1`, unknown fields refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.errors import ContractError
from compiler.contract.fields import (
    require_fields,
    require_integer,
    require_list,
    require_object,
    require_text,
)

SCHEMA: Final = "sparsefleet.schedule/1"
LEAST_AMOUNT: Final[Mapping[str, int]] = MappingProxyType({"foresee": 0, "prefetch": 1, "defer": 1})
"""Kinds of steps in the order in which they stand beside a layer, with their least amounts."""
_REPEATED: Final = "foresee"
"""May stand beside a layer with several amounts."""
STEP_KINDS: Final = tuple(LEAST_AMOUNT)
MAX_SCHEDULE_BYTES: Final = 1024 * 1024
MAX_PROGRAMS: Final = 16
MAX_STEPS: Final = 8192
MAX_LAYERS: Final = 4096
_MAX_KIND: Final = 16
_FIELDS: Final = frozenset(("schema", "programs"))
_STEP: Final = 3


@dataclass(frozen=True, slots=True)
class Step:
    """One step beside layer `layer`: `amount` is a distance in layers, or the k of defer."""

    layer: int
    kind: str
    amount: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps by program."""

    programs: Mapping[str, tuple[Step, ...]]

    def to_bytes(self) -> bytes:
        """Return the canonical bytes of the section."""
        programs: dict[str, Json] = {
            name: [[step.layer, step.kind, step.amount] for step in steps]
            for name, steps in self.programs.items()
        }
        return canonical_bytes({"schema": SCHEMA, "programs": programs})

    def beside(self, program: str, layer: int) -> tuple[Step, ...]:
        """Return the steps of one layer."""
        return tuple(step for step in self.programs.get(program, ()) if step.layer == layer)


def parse_schedule(data: bytes) -> Schedule:
    """Parse and check a `schedule` section.

    Raises:
        LimitExceededError: Longer than `MAX_SCHEDULE_BYTES`, or a list beyond its limit.
        ContractError: A field is missing, unknown, of the wrong type or out of range; steps are not
            in order of layer or twice; or the bytes are not canonical.
    """
    document = parse_object(data, limit_bytes=MAX_SCHEDULE_BYTES)
    fields = require_fields(document, _FIELDS, "schedule")
    if fields["schema"] != SCHEMA:
        raise ContractError(f"schedule schema {fields['schema']!r}, expected {SCHEMA!r}")
    programs = require_object(fields["programs"], "programs", MAX_PROGRAMS)
    schedule = Schedule({name: _steps(value) for name, value in programs.items()})
    if schedule.to_bytes() != data:
        raise ContractError("schedule section is not in canonical form")
    return schedule


def _steps(value: Json) -> tuple[Step, ...]:
    steps = tuple(_step(item) for item in require_list(value, "steps", MAX_STEPS))
    order = [step_place(step.layer, step.kind, step.amount) for step in steps]
    if order != sorted(set(order)):
        raise ContractError("steps are not in order of layer, or one stands twice")
    return steps


def step_place(layer: int, kind: str, amount: int) -> tuple[int, int, int]:
    """Return what steps are ordered by; no two of a program have the same."""
    return layer, STEP_KINDS.index(kind), amount if kind == _REPEATED else 0


def _step(value: Json) -> Step:
    item = require_list(value, "step", _STEP)
    if len(item) != _STEP:
        raise ContractError("a step is [layer, kind, amount]")
    kind = require_text(item[1], "kind", _MAX_KIND)
    if kind not in STEP_KINDS:
        raise ContractError(f"unknown step {kind!r}")
    return Step(
        require_integer(item[0], "layer", 0, MAX_LAYERS),
        kind,
        require_integer(item[2], "amount", LEAST_AMOUNT[kind], MAX_LAYERS),
    )
