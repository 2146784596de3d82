"""The `steering` section: coefficients of steered routers that the compiler searched and judged.

    calibration answers, steered, with a simulated cache of experts -> points -> the two in use

A point is a set of coefficients with what it costs and saves on the calibration set, while
`resident` of the experts fit in memory. `always` is the point that a device uses without pressure:
its pull is 0, it only lets sure tokens take one expert. `pressed` is the one it moves to as memory
gets short; its pull is the greatest that is ever used. Points that another one beats in both
answers and misses are not listed, but for the first, which steers nothing.

Schema `sparsefleet.steering/1`, canonical JSON, unknown fields refused:

    {"schema", "questions", "right", "resident", "misses", "max_loss", "max_loss_pressed",
     "always", "pressed",
     "points": [{"pull", "protect", "margin", "lean", "mean_k", "misses", "worse", "better"}]}

`questions`, `right`, `worse` and `better` as in `compiler.contract.bands`, and the losses, in
millionths, are what `most_lost` must stay within: bytes whose own figures break them are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, Protocol

from compiler.contract.bands import is_within
from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.errors import ContractError
from compiler.contract.fields import require_fields, require_integer, require_list
from compiler.contract.router_stats import PER_MILLE, RouterStats
from compiler.contract.steering import MAX_K, MAX_PULL, Steering

SCHEMA: Final = "sparsefleet.steering/1"
SECTION: Final = "steering"
MILLI: Final = 1000
MILLION: Final = 1_000_000
MAX_POINTS: Final = 64
MAX_POINTS_BYTES: Final = 64 * 1024
MAX_COUNT: Final = 1 << 40
MAX_LEAN: Final = 64 * MILLI
_HEAD: Final = (
    *("questions", "right", "resident", "misses", "max_loss", "max_loss_pressed"),
    *("always", "pressed"),
)
_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "pull": (0, int(MAX_PULL) * MILLI),
    "protect": (0, MAX_K),
    "margin": (0, MILLI),
    "lean": (0, MAX_LEAN),
    "mean_k": (0, MAX_K * MILLI),
    "misses": (0, MAX_COUNT),
    "worse": (0, MAX_COUNT),
    "better": (0, MAX_COUNT),
}


@dataclass(frozen=True, slots=True)
class Point:
    """Coefficients, and what they did to the calibration answers.

    Attributes:
        pull: Thousandths of a mean spread by which an absent expert is lowered.
        protect: Best experts that are always taken.
        margin: Thousandths of the gates that the best expert must lead by to be taken alone.
        lean: Thousandths of a logit added at a modality bias of 1; see `modality_bias`.
        mean_k: Experts per routed row, thousandths.
        misses: Experts that had to be loaded, with `resident` of them in memory.
        worse, better: Questions lost and won.
    """

    pull: int = 0
    protect: int = 1
    margin: int = MILLI
    lean: int = 0
    mean_k: int = 0
    misses: int = 0
    worse: int = 0
    better: int = 0

    def steering(self, pressure_share: float = 1.0) -> Steering:
        """Return the record of this point, its pull taken in part; without a bias."""
        return Steering(
            pull=self.pull / MILLI * pressure_share,
            protect=self.protect,
            margin=self.margin / MILLI,
        )


@dataclass(frozen=True, slots=True)
class SteeringPoints:
    """All points, and the two in use.

    Attributes:
        questions: Calibration questions asked.
        right: Those answered as expected without steering.
        resident: Share of the experts in memory while points were judged, per mille.
        misses: Experts loaded without steering.
        max_loss, max_loss_pressed: The most accuracy that `always` and `pressed` may lose,
            millionths.
        always, pressed: Positions in `points`.
    """

    questions: int
    right: int
    resident: int
    misses: int
    max_loss: int
    max_loss_pressed: int
    always: int
    pressed: int
    points: tuple[Point, ...]

    def to_bytes(self) -> bytes:
        """Return the canonical bytes of the section."""
        rows: list[Json] = [{name: getattr(p, name) for name in _RANGES} for p in self.points]
        head: dict[str, Json] = {name: getattr(self, name) for name in _HEAD}
        return canonical_bytes({**head, "schema": SCHEMA, "points": rows})


def parse_steering_points(data: bytes) -> SteeringPoints:
    """Parse and check a `steering` section.

    Raises:
        LimitExceededError: Longer than `MAX_POINTS_BYTES`, or too many points.
        ContractError: A field is missing, unknown or out of range, the first point steers, a point
            in use loses more than is allowed, or the bytes are not canonical.
    """
    names = frozenset((*_HEAD, "schema", "points"))
    document = require_fields(parse_object(data, limit_bytes=MAX_POINTS_BYTES), names, "steering")
    if document["schema"] != SCHEMA:
        raise ContractError(f"steering schema {document['schema']!r}, expected {SCHEMA!r}")
    rows = require_list(document["points"], "points", MAX_POINTS)
    highs = {
        **dict.fromkeys(_HEAD, MAX_COUNT),
        "resident": PER_MILLE,
        **dict.fromkeys(("max_loss", "max_loss_pressed"), MILLION),
        **dict.fromkeys(("always", "pressed"), len(rows) - 1),
    }
    head = {name: require_integer(document[name], name, 0, highs[name]) for name in _HEAD}
    found = SteeringPoints(**head, points=tuple(_point(row) for row in rows))
    _check(found)
    if found.to_bytes() != data:
        raise ContractError("steering points are not in canonical form")
    return found


def _point(row: Json) -> Point:
    values = require_fields(row, frozenset(_RANGES), "point")
    return Point(**{n: require_integer(values[n], n, *ends) for n, ends in _RANGES.items()})


def _check(found: SteeringPoints) -> None:
    if not found.questions >= 1 or found.right > found.questions:
        raise ContractError(f"{found.right} right of {found.questions} questions")
    first, always = found.points[0], found.points[found.always]
    if (first.pull, first.margin, first.lean) != (0, MILLI, 0):
        raise ContractError("the first point must steer nothing")
    if always.pull or always.lean:
        raise ContractError("without pressure nothing is pulled")
    for point in found.points:
        if point.worse > found.right or point.better > found.questions - found.right:
            raise ContractError("a point changes more answers than there are")
    pressed = found.points[found.pressed]
    for point, most in ((always, found.max_loss), (pressed, found.max_loss_pressed)):
        if not is_within(point.worse, point.better, found.questions, most):
            raise ContractError(f"a point loses more than {most / MILLION:.2%} of the answers")


class _Weight(Protocol):
    @property
    def section(self) -> int:
        """Number of its section."""


class _Section(Protocol):
    @property
    def name(self) -> str:
        """Its name."""


def modality_bias(
    stats: RouterStats, sections: Sequence[_Section], weights: Sequence[_Weight], lean: float
) -> tuple[float, ...]:
    """Return the bias of a steering record: usage by text minus usage by pictures, times `lean`.

    Args:
        stats: The `router_stats` of the bundle.
        sections: Those of its plan; experts are `expert.L<layer>.E<expert>`.
        weights: Those of its plan.
        lean: Logits at a difference of 1.

    Returns:
        One entry per weight; all weights of an expert have its own, others 0. Empty if all are 0.
    """
    of_expert = {
        f"expert.L{layer.layer}.E{expert}": share / PER_MILLE * lean
        for layer in stats.layers
        for expert, share in enumerate(layer.modality_bias)
    }
    found = tuple(of_expert.get(sections[weight.section].name, 0.0) for weight in weights)
    return found if any(found) else ()


assert {field.name for field in fields(Point)} == {*_RANGES}
