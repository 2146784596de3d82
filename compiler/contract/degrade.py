"""Degrade rules `sparsefleet.degrade/1`: when a device does less, and how much less.

A rule moves the device down to a rung of one ladder while a condition holds, and lets go when
another one does. The compiler checks the ladder of a bundle (`require_falling`), the server checks
the rules it sends, the device checks both again and follows them (`device_agent.runtime.degrade`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.errors import ContractError
from compiler.contract.rule_language import (
    Comparator,
    Comparison,
    Condition,
    Signal,
    SignalKind,
    comparisons,
    parse_condition,
)

SCHEMA: Final = "sparsefleet.degrade/1"
MAX_RULES_BYTES: Final = 64 * 1024
MAX_RULES: Final = 32
MAX_NAME: Final = 48
MAX_PRIORITY: Final = 100
MAX_COOLDOWN_S: Final = 86_400.0
_FIELDS: Final = frozenset({"name", "when", "leave", "rung", "priority", "cooldown_s"})

SIGNALS: Final[Mapping[str, Signal]] = MappingProxyType(
    {
        "temperature": Signal(SignalKind.GAUGE, "C"),
        "memory_pressure": Signal(SignalKind.GAUGE, "%"),
        "fragmentation": Signal(SignalKind.GAUGE, "%"),
        "battery": Signal(SignalKind.GAUGE, "%"),
        "power": Signal(SignalKind.GAUGE, "W"),
        "answer_p99": Signal(SignalKind.GAUGE, "ms"),
        "expert_misses": Signal(SignalKind.GAUGE, "%"),
        "faults": Signal(SignalKind.COUNTER),
        "stalls": Signal(SignalKind.COUNTER),
    }
)
"""What a rule may look at. Percentages are of what there is; `expert_misses` of lookups."""


class Rung(IntEnum):
    """How much less a device does: each rung keeps what the one before gave up."""

    NORMAL = 0
    NO_PREFETCH = 1
    FEWER_BITS = 2
    """The low bit plane of experts is not read."""
    FEWER_EXPERTS = 3
    """One expert a token instead of two."""
    SHARED_ONLY = 4
    """Only the experts that every token has, where a model has such."""
    NARROW_DENSE = 5
    """A narrow dense layer instead of each routed one, fitted by the compiler."""

    @property
    def changes_answers(self) -> bool:
        """Whether an answer on it may have other bits than one at NORMAL: it is degraded then."""
        return self > Rung.NO_PREFETCH

    @property
    def in_bundles(self) -> bool:
        """Whether any bundle can have it: no format stores weights as bit planes."""
        return self is not Rung.FEWER_BITS


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        name: For logs and telemetry.
        when: It takes effect when this holds.
        leave: It lets go when this holds; not the opposite of `when`, so that it does not flap.
        rung: Where the device goes at least.
        priority: Of several that take effect at once the highest goes first, one a time.
        cooldown_s: Least time between two times of taking effect, seconds.
    """

    name: str
    when: Condition
    leave: Condition
    rung: Rung
    priority: int
    cooldown_s: float


def parse_rules(data: bytes) -> tuple[Rule, ...]:
    """Parse a rules document.

    Raises:
        ContractError: Too long, a field is missing or unknown, a condition does not parse, two
            rules have one name, or a rule can never let go.
    """
    document = parse_object(data, limit_bytes=MAX_RULES_BYTES)
    if document.keys() != {"schema", "rules"} or document["schema"] != SCHEMA:
        raise ContractError(f"a document has the fields schema, which is {SCHEMA!r}, and rules")
    rows = document["rules"]
    if not isinstance(rows, list) or len(rows) > MAX_RULES:
        raise ContractError(f"rules must be a list of at most {MAX_RULES}")
    rules = tuple(_rule(row) for row in rows)
    names = [rule.name for rule in rules]
    if len(set(names)) != len(names):
        raise ContractError("two rules have the same name")
    return rules


def rules_bytes(rows: Sequence[Mapping[str, Json]]) -> bytes:
    """Return the canonical bytes of rules; checked.

    Raises:
        ContractError: As `parse_rules`.
    """
    data = canonical_bytes({"schema": SCHEMA, "rules": [dict(row) for row in rows]})
    parse_rules(data)
    return data


def require_falling(planned_bytes: Mapping[Rung, int]) -> None:
    """Check the ladder of a bundle: every rung it has needs less memory than the one above.

    Args:
        planned_bytes: What each rung needs, bytes; a rung that the bundle lacks is left out.

    Raises:
        ContractError: `NORMAL` is missing, or a rung does not lower the bytes.
    """
    if Rung.NORMAL not in planned_bytes:
        raise ContractError("a ladder begins with NORMAL")
    rungs = sorted(planned_bytes)
    for above, below in pairwise(rungs):
        if planned_bytes[below] >= planned_bytes[above]:
            raise ContractError(
                f"{below.name} needs {planned_bytes[below]} bytes, "
                f"{above.name} above it {planned_bytes[above]}",
                hint="leave out a rung that saves nothing: it could not help a device in need",
            )


def _rule(row: Json) -> Rule:
    if not isinstance(row, dict) or row.keys() != _FIELDS:
        keys = sorted(row) if isinstance(row, dict) else row
        raise ContractError(f"a rule has the fields {', '.join(sorted(_FIELDS))}; found {keys}")
    name = _text(row["name"], "name")
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise ContractError(f"a rule's name has 1 to {MAX_NAME} printable characters")
    when, leave = (_condition(row, name, field) for field in ("when", "leave"))
    _require_gap(name, when, leave)
    used = {one.name for one in comparisons(when)}
    if not used & {one.name for one in comparisons(leave)}:
        raise ContractError(
            f"rule {name!r}: 'leave' looks at nothing that 'when' looks at",
            hint="write it about the same signal, with a limit on the other side",
        )
    return Rule(
        name=name,
        when=when,
        leave=leave,
        rung=_rung(row["rung"], name),
        priority=_whole(row["priority"], f"rule {name!r}: priority"),
        cooldown_s=_number(row["cooldown_s"], f"rule {name!r}: cooldown_s", MAX_COOLDOWN_S),
    )


def _require_gap(name: str, when: Condition, leave: Condition) -> None:
    """Refuse two plain comparisons of one signal that can hold at once: such a rule flutters."""
    if not isinstance(when, Comparison) or not isinstance(leave, Comparison):
        return
    rises = when.comparator in (Comparator.ABOVE, Comparator.AT_LEAST)
    falls = leave.comparator in (Comparator.BELOW, Comparator.AT_MOST)
    apart = leave.limit < when.limit if rises else leave.limit > when.limit
    if when.name == leave.name and (rises != falls or not apart):
        raise ContractError(
            f"rule {name!r}: 'when' and 'leave' can hold at once, or nothing lies between them",
            hint="for example when temperature > 55 C, leave temperature < 50 C",
        )


def _condition(row: Mapping[str, Json], name: str, field: str) -> Condition:
    text = _text(row[field], field)
    try:
        return parse_condition(text, SIGNALS)
    except ContractError as error:
        raise ContractError(f"rule {name!r}, {field}: {error}", hint=error.hint) from None


def _rung(value: Json, name: str) -> Rung:
    known = {rung.name.lower(): rung for rung in Rung if rung is not Rung.NORMAL}
    if not isinstance(value, str) or value not in known:
        raise ContractError(
            f"rule {name!r}: unknown rung {value!r}", hint=f"rungs: {', '.join(known)}"
        )
    return known[value]


def _text(value: Json, what: str) -> str:
    if not isinstance(value, str):
        raise ContractError(f"{what} must be text")
    return value


def _whole(value: Json, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PRIORITY:
        raise ContractError(f"{what} must be a whole number of 0..{MAX_PRIORITY}")
    return value


def _number(value: Json, what: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ContractError(f"{what} must be a number of 0..{most:g}")
    return float(value)
