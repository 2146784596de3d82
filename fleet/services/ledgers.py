"""The gate's bookkeeping of one stage: what was counted, what was already used as evidence.

`Stage.ledger` holds, as JSON:

    opening        stratum -> counts of treatment when the stage opened (earlier stages' devices)
    consumed       arm -> stratum -> counts that have become evidence
    harm, safe     running log-likelihoods (see `fleet.gates.engine`)
    holding_since  when the evidence of harm reached the level that holds, or null

An increment is taken only when both arms have answered in a stratum since the last one, because the
test conditions on the exposure of both. When to look never depends on what the answers were.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from django.db.models import Q, Sum

from fleet.gates.evidence import Increment
from fleet.gates.spec import Metric
from fleet.models import EnrolmentStats, Stage
from fleet.states import Arm

FIELDS: Final = (
    *("answers", "failures", "timed", "slow", "scored", "correct", "degraded"),
    *("drained", "thirsty"),
)
# metric -> exposure field, event field; a minus sign counts the exposure that is not an event
_SOURCES: Final[Mapping[Metric, tuple[str, str]]] = {
    Metric.FAILURES: ("answers", "failures"),
    Metric.SLOW: ("timed", "slow"),
    Metric.WRONG: ("scored", "-correct"),
    Metric.DRAIN: ("drained", "thirsty"),
}
Counts = dict[str, int]
ByStratum = dict[str, Counts]


@dataclass(slots=True)
class StageLedger:
    """The ledger of a stage in memory; see the module's text."""

    opening: ByStratum = field(default_factory=dict)
    consumed: dict[str, ByStratum] = field(default_factory=dict)
    harm: dict[str, list[float]] = field(default_factory=dict)
    safe: dict[str, list[float]] = field(default_factory=dict)
    holding_since: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "opening": self.opening,
            "consumed": self.consumed,
            "harm": self.harm,
            "safe": self.safe,
            "holding_since": self.holding_since,
        }


def ledger_of(stage: Stage) -> StageLedger:
    """Return the ledger that is stored with a stage."""
    return StageLedger(**stage.ledger)


def ledger_open(stage: Stage, *, harm: Mapping[str, list[float]]) -> StageLedger:
    """Return the ledger of a stage that opens now; evidence of harm goes on over the rollout."""
    treatment = stage_sums(stage)[Arm.TREATMENT.value]
    return StageLedger(
        opening={name: dict(counts) for name, counts in treatment.items()},
        consumed={Arm.TREATMENT.value: treatment, Arm.CONTROL.value: {}},
        harm={name: list(values) for name, values in harm.items()},
    )


def stage_sums(stage: Stage) -> dict[str, ByStratum]:
    """Return arm -> stratum -> counts. One query.

    Treatment is every treated device of the rollout so far; control is that of this stage.
    """
    control = Q(enrolment__arm=Arm.CONTROL.value, enrolment__stage=stage)
    rows = (
        EnrolmentStats.objects.filter(Q(enrolment__arm=Arm.TREATMENT.value) | control)
        .filter(enrolment__rollout_id=stage.rollout_id)
        .order_by()
        .values_list("enrolment__arm", "enrolment__stratum")
        .annotate(*(Sum(name) for name in FIELDS))
    )
    sums: dict[str, ByStratum] = {arm.value: {} for arm in Arm}
    for arm, stratum, *values in rows:
        sums[arm][stratum] = dict(zip(FIELDS, values, strict=True))
    return sums


def take_increments(ledger: StageLedger, sums: Mapping[str, ByStratum]) -> tuple[Increment, ...]:
    """Return what is new in both arms, and note in `ledger` that it was taken."""
    treatment, control = sums[Arm.TREATMENT.value], sums[Arm.CONTROL.value]
    taken = []
    for stratum in sorted(treatment.keys() & control.keys()):
        for metric, (exposure, events) in _SOURCES.items():
            new_t = _new(ledger, Arm.TREATMENT.value, stratum, treatment, exposure, events)
            new_c = _new(ledger, Arm.CONTROL.value, stratum, control, exposure, events)
            if new_t[0] <= 0 or new_c[0] <= 0:
                continue
            taken.append(Increment(metric, stratum, new_t[1], new_c[1], new_t[0], new_c[0]))
            _consume(ledger, Arm.TREATMENT.value, stratum, treatment, exposure, events)
            _consume(ledger, Arm.CONTROL.value, stratum, control, exposure, events)
    return tuple(taken)


def since_opening(ledger: StageLedger, treatment: ByStratum) -> Counts:
    """Return the treatment's counts since the stage opened, all strata together."""
    total = dict.fromkeys(FIELDS, 0)
    for stratum, counts in treatment.items():
        before = ledger.opening.get(stratum, {})
        for name in FIELDS:
            total[name] += counts[name] - before.get(name, 0)
    return total


def all_strata(control: ByStratum) -> Counts:
    """Return the counts of all strata together."""
    return {name: sum(counts[name] for counts in control.values()) for name in FIELDS}


def _new(
    ledger: StageLedger, arm: str, stratum: str, sums: ByStratum, exposure: str, events: str
) -> tuple[int, int]:
    before = ledger.consumed.get(arm, {}).get(stratum, {})
    seen = sums[stratum][exposure] - before.get(exposure, 0)
    name = events.removeprefix("-")
    count = sums[stratum][name] - before.get(name, 0)
    return seen, seen - count if events.startswith("-") else count


def _consume(
    ledger: StageLedger, arm: str, stratum: str, sums: ByStratum, exposure: str, events: str
) -> None:
    place = ledger.consumed.setdefault(arm, {}).setdefault(stratum, dict.fromkeys(FIELDS, 0))
    for name in (exposure, events.removeprefix("-")):
        place[name] = sums[stratum][name]
