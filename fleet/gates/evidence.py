"""What a gate looks at; stored with every look, so that it can be replayed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, TypeVar

from builds.common.errors import InvalidInputError
from fleet.gates.spec import Metric

SCHEMA: Final = "sparsefleet.evidence/1"


class Mode(StrEnum):
    """What kind of stage is looked at."""

    COMPARE = "compare"  # treatment against concurrent control
    FIRST_INSTALL = "first_install"  # no device runs anything: no control is possible
    RELEASE = "release"  # the control slice of the last stage gets the proven version


@dataclass(frozen=True, slots=True)
class ArmCounts:
    """Counts of one arm since the stage opened.

    Attributes:
        devices: Devices of the arm.
        heard: Those heard from since they were enrolled.
        silent: Those heard before and silent now.
        answers, failures: Answers, and those that did not end.
        timed, slow: Answers with a latency that counts (after warm-up), and those above the
            device's slow threshold.
        scored, correct: Answers with a known right answer, and the right ones.
        degraded: Answers given in a degraded mode.
        drained, thirsty: Windows of answering over which a battery counted its loss, and those in
            which it lost more than is usual for the device.
    """

    devices: int = 0
    heard: int = 0
    silent: int = 0
    answers: int = 0
    failures: int = 0
    timed: int = 0
    slow: int = 0
    scored: int = 0
    correct: int = 0
    degraded: int = 0
    drained: int = 0
    thirsty: int = 0


@dataclass(frozen=True, slots=True)
class InstallCounts:
    """Updates of one stage or of all stages of a rollout.

    Attributes:
        enrolled: Treatment devices.
        reached: Those whose update is beyond `queued`.
        succeeded: Updates that succeeded.
        failed: Updates that failed, rolled back locally, were rejected or timed out.
        answering: Devices that succeeded and whose answers by the new version were counted.
    """

    enrolled: int = 0
    reached: int = 0
    succeeded: int = 0
    failed: int = 0
    answering: int = 0

    @property
    def settled(self) -> int:
        """Return how many updates came to an end on the device."""
        return self.succeeded + self.failed


@dataclass(frozen=True, slots=True)
class Increment:
    """New events of one metric in one stratum, counted in both arms over the same time.

    Attributes:
        events_t, events_c: Events in treatment and control.
        exposure_t, exposure_c: Answers (or devices at risk) that they came from; both above zero.
    """

    metric: Metric
    stratum: str
    events_t: int
    events_c: int
    exposure_t: int
    exposure_c: int


Ledger = Mapping[Metric, Sequence[float]]  # running log-likelihoods on the metric's grid of ratios


@dataclass(frozen=True, slots=True)
class Evidence:
    """Input of one look.

    Attributes:
        mode: Kind of stage.
        stage: Index of the stage.
        stage_age_s: Seconds since the stage opened (server clock).
        holding_s: For how long the e-value of harm has been at or above `hold_evidence`, at the
            previous look.
        treatment: All devices that run the new version, since the stage opened.
        control: Control devices of this stage.
        fresh_answers: Answers of the stage's own new devices by the new version.
        installs: Updates of this stage.
        installs_total: Updates of the whole rollout.
        increments: New events, in both arms at the same time.
        harm_ledger: Log-likelihoods of the whole rollout before this look.
        safe_ledger: Log-likelihoods of this stage before this look.
        error: Why the counts cannot be trusted, or empty.
    """

    mode: Mode
    stage: int
    stage_age_s: float
    holding_s: float
    treatment: ArmCounts
    control: ArmCounts
    fresh_answers: int
    installs: InstallCounts
    installs_total: InstallCounts
    increments: tuple[Increment, ...] = ()
    harm_ledger: Ledger = field(default_factory=dict)
    safe_ledger: Ledger = field(default_factory=dict)
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; floats survive the round trip exactly."""
        return {
            "schema": SCHEMA,
            "mode": self.mode.value,
            "stage": self.stage,
            "stage_age_s": self.stage_age_s,
            "holding_s": self.holding_s,
            "treatment": asdict(self.treatment),
            "control": asdict(self.control),
            "fresh_answers": self.fresh_answers,
            "installs": asdict(self.installs),
            "installs_total": asdict(self.installs_total),
            "increments": [
                [
                    row.metric.value,
                    row.stratum,
                    row.events_t,
                    row.events_c,
                    row.exposure_t,
                    row.exposure_c,
                ]
                for row in self.increments
            ],
            "harm_ledger": ledger_to_json(self.harm_ledger),
            "safe_ledger": ledger_to_json(self.safe_ledger),
            "error": self.error,
        }


def ledger_to_json(ledger: Ledger) -> dict[str, list[float]]:
    """Return the JSON form of a ledger."""
    return {metric.value: list(values) for metric, values in ledger.items()}


def ledger_from_json(document: Mapping[str, Sequence[float]]) -> dict[Metric, tuple[float, ...]]:
    """Read a ledger back."""
    return {
        Metric(name): tuple(float(value) for value in values) for name, values in document.items()
    }


def evidence_from_json(document: Mapping[str, Any]) -> Evidence:
    """Read stored evidence back.

    Raises:
        InvalidInputError: Not evidence of this schema.
    """
    if document.get("schema") != SCHEMA:
        raise InvalidInputError(f"evidence schema must be {SCHEMA!r}")
    try:
        return Evidence(
            mode=Mode(document["mode"]),
            stage=int(document["stage"]),
            stage_age_s=float(document["stage_age_s"]),
            holding_s=float(document["holding_s"]),
            treatment=_counts(ArmCounts, document["treatment"]),
            control=_counts(ArmCounts, document["control"]),
            fresh_answers=int(document["fresh_answers"]),
            installs=_counts(InstallCounts, document["installs"]),
            installs_total=_counts(InstallCounts, document["installs_total"]),
            increments=tuple(
                Increment(Metric(name), str(stratum), *(int(number) for number in numbers))
                for name, stratum, *numbers in document["increments"]
            ),
            harm_ledger=ledger_from_json(document["harm_ledger"]),
            safe_ledger=ledger_from_json(document["safe_ledger"]),
            error=str(document["error"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(f"stored evidence cannot be read: {error}") from error


_CountsT = TypeVar("_CountsT", ArmCounts, InstallCounts)


_LATER: Final = frozenset({"drained", "thirsty"})
"""Counts that evidence stored before there were any does not have; none then."""


def _counts(kind: type[_CountsT], document: Mapping[str, Any]) -> _CountsT:
    names = [item.name for item in fields(kind) if item.name in document or item.name not in _LATER]
    return kind(**{name: int(document[name]) for name in names})
