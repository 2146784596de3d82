"""The `substitutes` section: what a device may run in place of the routed layers.

    rung, or trouble with a router -(SubstituteRunner)-> program `step.narrow` instead of `step`

A substitute is a way to do without routers: only the experts that every token has (`shared_only`),
a narrow dense layer that the compiler fitted (`narrow_dense`), or all experts at their mean gates
(`full_dense`). For each program with routed layers the plan has a variant `<program>.<suffix>` that
takes what the program takes, gives what of its results needs no router, and appends to the same
layers of the same cache: a switch takes effect with the next run. The first two are rungs of the
ladder (`compiler.contract.degrade`); the third reads more than any and is only ever a fallback.

Schema `sparsefleet.substitutes/1`, canonical JSON, unknown fields refused:

    {"schema", "questions", "right", "max_loss", "substitutes": [{"kind", "worse", "better"}]}

`right` counts the calibration questions that the bundle answers as expected without a substitute;
`worse` and `better` those that stop and start to be answered so with it in every program. Bytes
whose own figures break `max_loss` (millionths) with the confidence of `compiler.contract.bands` are
refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Final

from compiler.contract.bands import MILLION, STEP, is_within
from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.degrade import Rung
from compiler.contract.errors import ContractError
from compiler.contract.expert_pages import ROUTED, experts_of
from compiler.contract.fields import require_fields, require_integer, require_list, require_text
from compiler.contract.operations import Op
from compiler.contract.pipeline import PREFILL, SEE
from compiler.contract.plan import Plan, PlanProgram
from compiler.contract.plan_format import Direction
from compiler.contract.session import Buffer, PlanRunner, RunnerBefore

SCHEMA: Final = "sparsefleet.substitutes/1"
SECTION: Final = "substitutes"
MAX_BYTES: Final = 16 * 1024
MAX_COUNT: Final = 1 << 32
_MAX_KIND: Final = 16
_FIELDS: Final = ("schema", "questions", "right", "max_loss", "substitutes")
_ROW: Final = ("kind", "worse", "better")
_NEEDED: Final = ("token", "logits")
"""Results that a variant gives wherever its program does: by them an answer goes on."""
_PICTURES: Final = frozenset((SEE, PREFILL))


class SubstitutesError(ContractError):
    """Plan and substitutes of a bundle contradict each other: drop both."""

    code: ClassVar[str] = "contract.substitutes"


class Substitute(StrEnum):
    """What stands in for the routed layers; in the order in which they stand in a section."""

    SHARED_ONLY = "shared_only"
    NARROW_DENSE = "narrow_dense"
    FULL_DENSE = "full_dense"

    @property
    def suffix(self) -> str:
        """What follows the name of a program, after a point, in the name of its variant."""
        return self.partition("_")[0]


BY_RUNG: Final[Mapping[Rung, Substitute]] = MappingProxyType(
    {Rung.SHARED_ONLY: Substitute.SHARED_ONLY, Rung.NARROW_DENSE: Substitute.NARROW_DENSE}
)
"""Which substitute a device takes on a rung."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Calibration questions that one substitute loses and wins."""

    kind: Substitute
    worse: int
    better: int


@dataclass(frozen=True, slots=True)
class Substitutes:
    """All substitutes of a bundle, and what they cost in answers.

    Attributes:
        questions: Calibration questions asked.
        right: Those that the bundle without a substitute answered as expected.
        max_loss: The most accuracy that a substitute may lose, millionths.
        rows: In the order of `Substitute`.
    """

    questions: int
    right: int
    max_loss: int
    rows: tuple[Trial, ...]

    @property
    def kinds(self) -> tuple[Substitute, ...]:
        """Those that the bundle has."""
        return tuple(row.kind for row in self.rows)

    def to_bytes(self) -> bytes:
        """Return the canonical bytes of the section."""
        rows: list[Json] = [
            {"kind": row.kind.value, "worse": row.worse, "better": row.better} for row in self.rows
        ]
        return canonical_bytes(
            {
                "schema": SCHEMA,
                "questions": self.questions,
                "right": self.right,
                "max_loss": self.max_loss,
                "substitutes": rows,
            }
        )


def variant_name(program: str, kind: Substitute) -> str:
    """Return the name of the variant of a program."""
    return f"{program}.{kind.suffix}"


def parse_substitutes(data: bytes) -> Substitutes:
    """Parse and check a `substitutes` section.

    Raises:
        LimitExceededError: Longer than `MAX_BYTES`, or a list beyond its limit.
        ContractError: A field is missing, unknown, of the wrong type or out of range; none, two of
            a kind or another order; one loses more than is allowed; or the bytes are not canonical.
    """
    fields = require_fields(
        parse_object(data, limit_bytes=MAX_BYTES), frozenset(_FIELDS), "substitutes"
    )
    if fields["schema"] != SCHEMA:
        raise ContractError(f"substitutes schema {fields['schema']!r}, expected {SCHEMA!r}")
    questions = require_integer(fields["questions"], "questions", 1, MAX_COUNT)
    items = require_list(fields["substitutes"], "substitutes", len(Substitute))
    found = Substitutes(
        questions,
        require_integer(fields["right"], "right", 0, questions),
        require_integer(fields["max_loss"], "max_loss", 0, MILLION),
        tuple(_row(item, questions) for item in items),
    )
    order = [list(Substitute).index(kind) for kind in found.kinds]
    if not order or order != sorted(set(order)):
        raise ContractError("substitutes are none, twice the same, or out of order")
    for row in found.rows:
        if not is_within(row.worse, row.better, questions, found.max_loss):
            raise ContractError(f"{row.kind} loses more than is allowed")
    if found.to_bytes() != data:
        raise ContractError("substitutes section is not in canonical form")
    return found


def _row(value: Json, questions: int) -> Trial:
    fields = require_fields(value, frozenset(_ROW), "substitute")
    kind = require_text(fields["kind"], "kind", _MAX_KIND)
    if kind not in list(Substitute):
        raise ContractError(f"unknown substitute {kind!r}")
    worse = require_integer(fields["worse"], "worse", 0, questions)
    better = require_integer(fields["better"], "better", 0, questions - worse)
    return Trial(Substitute(kind), worse, better)


def substitutes_in(plan: Plan) -> tuple[Substitute, ...]:
    """Return the substitutes of which the plan has a variant of some program."""
    names = {program.name for program in plan.programs}
    return tuple(
        kind
        for kind in Substitute
        if any(variant_name(name.partition(".")[0], kind) in names for name in names)
    )


def verify_substitutes(plan: Plan, found: Substitutes | None) -> None:
    """Check that a plan has the variants of its section, no others, and what each of them does.

    Raises:
        SubstitutesError: One is missing or stands beside the section, takes or gives other rows,
            appends to other layers of the cache, or still chooses experts.
    """
    kinds = () if found is None else found.kinds
    there = substitutes_in(plan)
    if set(kinds) != set(there):
        raise SubstitutesError(f"substitutes {sorted(kinds)}, the plan has {sorted(there)}")
    programs = {program.name: program for program in plan.programs}
    if kinds and STEP not in programs:
        raise SubstitutesError(f"substitutes of a plan without {STEP!r}")
    for kind in kinds:
        for program in plan.programs:
            if "." not in program.name and (has_routers(program) or program.name == STEP):
                variant = programs.get(variant_name(program.name, kind))
                if variant is None:
                    raise SubstitutesError(f"program {program.name!r} has no {kind}")
                _verify_variant(plan, program, variant, kind)


def has_routers(program: PlanProgram) -> bool:
    """Return whether a program chooses experts, or runs some."""
    return any(call.op in (Op.ROUTE, *ROUTED) for call in program.calls)


def _verify_variant(
    plan: Plan, program: PlanProgram, variant: PlanProgram, kind: Substitute
) -> None:
    old, new = _ports(plan, program), _ports(plan, variant)
    inputs = {key for key in old if key[0] is Direction.INPUT}
    needed = {key for key in old if key[0] is Direction.OUTPUT and key[1] in _NEEDED}
    if not inputs | needed <= set(new) <= set(old) or any(new[key] != old[key] for key in new):
        raise SubstitutesError(f"{variant.name!r} takes or gives other rows than {program.name!r}")
    if _appended(variant) != _appended(program):
        raise SubstitutesError(f"{variant.name!r} keeps other rows than {program.name!r}")
    if kind is not Substitute.FULL_DENSE and has_routers(variant):
        raise SubstitutesError(f"{variant.name!r} chooses experts")
    for call in variant.calls:
        if call.op is Op.ROUTE and int(call.params["k"]) != plan.weights[call.weights[0]].rows:
            raise SubstitutesError(f"{variant.name!r} chooses some of its experts")
        if call.op is Op.MOE_LAYER and int(call.params["k"]) != len(experts_of(call)):
            raise SubstitutesError(f"{variant.name!r} chooses some of its experts")


def _ports(plan: Plan, program: PlanProgram) -> dict[tuple[Direction, str], object]:
    found: dict[tuple[Direction, str], object] = {}
    for port in program.ports:
        buffer = plan.buffers[port.buffer]
        shape = buffer.rows, buffer.cols, buffer.dtype, buffer.dynamic
        found[port.direction, port.role] = shape
    return found


def _appended(program: PlanProgram) -> list[int]:
    layers = [int(call.params["kv_layer"]) for call in program.calls if call.op is Op.ATTENTION]
    return [layer for layer in layers if layer >= 0]


class SubstituteRunner(RunnerBefore):
    """A plan runner whose programs with routed layers are those of the substitute that is taken.

    Attributes:
        taken: What stands in from the next run on; None = the routed layers themselves.
        ran: Runs by variant.
    """

    def __init__(
        self, runner: PlanRunner, kinds: Iterable[Substitute], programs: Iterable[str]
    ) -> None:
        """Take none.

        Args:
            runner: Of the plan; it is asked for variants by their names.
            kinds: What the bundle has; another one is never taken.
            programs: Names of all programs of the plan.
        """
        super().__init__(runner)
        self.kinds: Final = frozenset(kinds)
        self._programs = frozenset(programs)
        self._pictured: Substitute | None = None
        self._taken: Substitute | None = None
        self.ran: dict[str, int] = {}

    @property
    def taken(self) -> Substitute | None:
        """What stands in."""
        return self._taken

    @taken.setter
    def taken(self, kind: Substitute | None) -> None:
        self._taken = kind if kind in self.kinds else None

    @property
    def is_stale(self) -> bool:
        """Whether what is in the cache of a picture came of another choice than the present one."""
        return self._pictured is not self._taken

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run a program or its variant; see `PlanRunner.run`."""
        if program in _PICTURES:
            self._pictured = self._taken
        if self._taken is None:
            return self._runner.run(program, inputs)
        name = variant_name(program, self._taken)
        if name not in self._programs:
            return self._runner.run(program, inputs)
        outputs = self._runner.run(name, inputs)
        self.ran[name] = self.ran.get(name, 0) + 1
        return outputs
