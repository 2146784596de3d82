"""From evidence to a verdict: one pure function, `decide`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from fleet.gates import engine
from fleet.gates.evidence import ArmCounts, Evidence, Ledger, Mode, ledger_to_json
from fleet.gates.spec import GateSpec, Metric, MetricSpec

ACCURACY_WEIGHT: Final = 0.2


class Decision(StrEnum):
    """What a look says about the stage."""

    PASS = "pass"  # noqa: S105 -- a verdict, not a secret
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    NO_DATA = "no_data"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class MetricVerdict:
    """What one metric says.

    Attributes:
        log_harm: ln of the e-value of harm, over the whole rollout.
        log_safe: ln of the e-value of safety, over this stage; None when safety need not be shown.
        ratio_low, ratio_high: Ends of the 95 % confidence sequence of the rate ratio (treatment :
            control).
        rate_treatment, rate_control: Plain rates of this stage, or None without exposure.
    """

    log_harm: float
    log_safe: float | None
    ratio_low: float
    ratio_high: float
    rate_treatment: float | None
    rate_control: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one look.

    Attributes:
        reasons: For people; why it failed, or what is missing for a promotion.
        log_evidence: ln of the e-value of harm of the whole rollout (weighted mean over the
            metrics).
        log_install: ln of the e-value of failed installations.
        metrics: Per metric.
        harm_ledger, safe_ledger: Running sums including this look; input of the next look.
    """

    decision: Decision
    reasons: tuple[str, ...]
    log_evidence: float
    log_install: float
    metrics: Mapping[Metric, MetricVerdict]
    harm_ledger: Ledger
    safe_ledger: Ledger

    @property
    def evidence_ratio(self) -> float:
        """Return the e-value of harm: "N : 1 against the new version"."""
        return math.exp(self.log_evidence)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form that is stored and compared by the replay."""
        return {
            "decision": self.decision.value,
            "reasons": list(self.reasons),
            "log_evidence": self.log_evidence,
            "log_install": self.log_install,
            "metrics": {name.value: asdict(row) for name, row in self.metrics.items()},
            "harm_ledger": ledger_to_json(self.harm_ledger),
            "safe_ledger": ledger_to_json(self.safe_ledger),
        }


def decide(spec: GateSpec, evidence: Evidence) -> Verdict:
    """Return the verdict of one look. Pure: the same input gives the same verdict, bit for bit.

    Fails on shown harm, promotes only on shown safety; everything else waits and says what is
    missing.
    """
    grids = {metric: engine.grid_of(row) for metric, row in spec.metrics.items()}
    harm = _add(grids, evidence.harm_ledger, evidence)
    safe = _add(grids, evidence.safe_ledger, evidence)
    metrics = {
        metric: _metric_verdict(
            metric, row, grids[metric], harm[metric], safe[metric], spec, evidence
        )
        for metric, row in spec.metrics.items()
    }
    total = evidence.installs_total
    log_install = engine.log_rate_above(total.failed, total.settled, spec.install_failure_rate)
    log_evidence = _total(spec, metrics, log_install)
    decision, reasons = _decide(spec, evidence, metrics, log_evidence)
    return Verdict(decision, reasons, log_evidence, log_install, metrics, harm, safe)


def _add(
    grids: Mapping[Metric, tuple[float, ...]], ledger: Ledger, evidence: Evidence
) -> dict[Metric, tuple[float, ...]]:
    return {
        metric: engine.add(
            ledger.get(metric, ()),
            grid,
            (row for row in evidence.increments if row.metric == metric),
        )
        for metric, grid in grids.items()
    }


def _metric_verdict(
    metric: Metric,
    row: MetricSpec,
    grid: tuple[float, ...],
    harm: tuple[float, ...],
    safe: tuple[float, ...],
    spec: GateSpec,
    evidence: Evidence,
) -> MetricVerdict:
    events_t, exposure_t = _events(metric, evidence.treatment)
    events_c, exposure_c = _events(metric, evidence.control)
    margin = row.harm_ratio
    if metric == Metric.WRONG:
        margin += (spec.min_accuracy_drop or 0.0) * (exposure_c + 2) / (events_c + 1)
    low, high = engine.band(safe, grid, row.dispersion)
    return MetricVerdict(
        log_harm=engine.log_harm(harm, grid, margin, row.dispersion),
        log_safe=_log_safe(row, grid, safe, events_t, exposure_t),
        ratio_low=low,
        ratio_high=high,
        rate_treatment=events_t / exposure_t if exposure_t else None,
        rate_control=events_c / exposure_c if exposure_c else None,
    )


def _log_safe(
    row: MetricSpec, grid: tuple[float, ...], safe: tuple[float, ...], events: int, exposure: int
) -> float | None:
    """Return ln S; either way to safety is valid against "neither holds", and so is their mean."""
    ways = []
    if row.safe_ratio > 0:
        ways.append(engine.log_safe(safe, grid, row.safe_ratio, row.dispersion))
    if row.safe_rate > 0:
        ways.append(engine.log_rate_below(events, exposure, row.safe_rate, row.dispersion))
    if not ways:
        return None
    return engine.log_weighted_mean((1 / len(ways), value) for value in ways)


def _events(metric: Metric, arm: ArmCounts) -> tuple[int, int]:
    return {
        Metric.FAILURES: (arm.failures, arm.answers),
        Metric.SLOW: (arm.slow, arm.timed),
        Metric.SILENCE: (arm.silent, arm.heard),
        Metric.WRONG: (arm.scored - arm.correct, arm.scored),
        Metric.DRAIN: (arm.thirsty, arm.drained),
    }[metric]


def _total(spec: GateSpec, metrics: Mapping[Metric, MetricVerdict], log_install: float) -> float:
    gates_accuracy = spec.min_accuracy_drop is not None
    scale = 1 - ACCURACY_WEIGHT if gates_accuracy else 1.0
    rows = [
        (scale * spec.metrics[metric].weight, row.log_harm)
        for metric, row in metrics.items()
        if metric != Metric.WRONG
    ]
    rows.append((scale * spec.install_weight, log_install))
    if gates_accuracy and Metric.WRONG in metrics:
        rows.append((ACCURACY_WEIGHT, metrics[Metric.WRONG].log_harm))
    return engine.log_weighted_mean(rows)


def _decide(
    spec: GateSpec,
    evidence: Evidence,
    metrics: Mapping[Metric, MetricVerdict],
    log_evidence: float,
) -> tuple[Decision, tuple[str, ...]]:
    if evidence.error:
        return Decision.ERROR, (evidence.error,)
    failed = tuple(_failures(spec, evidence, log_evidence))
    if failed:
        return Decision.FAIL, failed
    missing = tuple(_missing_installs(spec, evidence))
    if evidence.mode == Mode.COMPARE:
        empty = tuple(_missing_data(evidence))
        if empty:
            return Decision.NO_DATA, (*empty, *missing)
        missing += tuple(_missing_safety(spec, evidence, metrics, log_evidence))
    if missing:
        return Decision.INCONCLUSIVE, missing
    return Decision.PASS, _PASS_REASONS[evidence.mode]


_PASS_REASONS: Final[Mapping[Mode, tuple[str, ...]]] = {
    Mode.COMPARE: ("every metric is shown to be inside its margin, against a concurrent control",),
    Mode.FIRST_INSTALL: (
        "first version: no device ran anything, so no control was possible; "
        "installed and answering",
    ),
    Mode.RELEASE: ("the control slice of a proven version: installed and answering",),
}


def _failures(spec: GateSpec, evidence: Evidence, log_evidence: float) -> Iterator[str]:
    if log_evidence >= -math.log(spec.alpha):
        yield (
            f"evidence against the new version is {_odds(log_evidence)}; a good one reaches "
            f"{1 / spec.alpha:.0f} : 1 in fewer than {spec.alpha:.1%} of rollouts"
        )
    elif (
        log_evidence >= math.log(spec.hold_evidence) and evidence.holding_s >= spec.sustained_s > 0
    ):
        yield (
            f"evidence against the new version has been at least {spec.hold_evidence:.0f} : 1 "
            f"for {evidence.holding_s:.0f} s"
        )
    arm, control = evidence.treatment, evidence.control
    if (
        evidence.mode == Mode.COMPARE
        and arm.silent == arm.heard > 0
        and 2 * (control.heard - control.silent) >= control.heard > 0
    ):
        yield (
            f"all {arm.silent} devices with the new version went silent, "
            f"{control.heard - control.silent} of {control.heard} control devices did not"
        )


def _missing_data(evidence: Evidence) -> Iterator[str]:
    if evidence.control.devices == 0:
        yield "no control: at least one device of the group has to stay on the old version"
    elif evidence.control.answers == 0:
        yield "no answers of the control devices were heard"
    if evidence.treatment.answers == 0:
        yield "no answers by the new version were heard"


def _missing_installs(spec: GateSpec, evidence: Evidence) -> Iterator[str]:
    installs = evidence.installs
    if evidence.stage_age_s < spec.min_dwell_s:
        yield f"dwell {evidence.stage_age_s:.0f} of {spec.min_dwell_s:.0f} s"
    if installs.enrolled == 0:
        yield "the stage has no devices"
        return
    if installs.reached < spec.min_heard_ratio * installs.enrolled:
        yield f"{installs.reached} of {installs.enrolled} devices were heard from"
    if installs.settled < max(1, installs.reached):
        yield f"{installs.settled} of {installs.reached} installations came to an end"
    elif installs.succeeded < spec.min_installed_ratio * installs.settled:
        yield f"only {installs.succeeded} of {installs.settled} installations succeeded"
    if installs.answering < max(1, spec.min_heard_ratio * installs.succeeded):
        yield f"{installs.answering} of {installs.succeeded} installed devices answered questions"


def _missing_safety(
    spec: GateSpec,
    evidence: Evidence,
    metrics: Mapping[Metric, MetricVerdict],
    log_evidence: float,
) -> Iterator[str]:
    if evidence.fresh_answers < spec.min_answers:
        yield f"{evidence.fresh_answers} of {spec.min_answers} answers by the stage's new devices"
    if evidence.control.answers < spec.min_answers:
        yield f"{evidence.control.answers} of {spec.min_answers} answers by control devices"
    if log_evidence >= math.log(spec.calm_evidence):
        yield f"evidence of harm is {_odds(log_evidence)}"
    if evidence.treatment.silent:
        yield f"{evidence.treatment.silent} devices with the new version are silent"
    for metric, row in metrics.items():
        if row.log_safe is not None and row.log_safe < math.log(spec.safe_evidence):
            if metric == Metric.DRAIN:
                yield from _missing_counters(evidence)
            needed = f"{spec.safe_evidence:.0f} : 1"
            yield f"{metric.value}: safety is shown {_odds(row.log_safe)}, needed is {needed}"


def _missing_counters(evidence: Evidence) -> Iterator[str]:
    for name, arm in (("treatment", evidence.treatment), ("control", evidence.control)):
        if not arm.drained:
            yield f"no {name} device counted what its battery loses; estimates do not count"


def _odds(log_value: float) -> str:
    value = math.exp(min(log_value, math.log(1e9)))
    if log_value >= math.log(1e9):
        return "more than a billion : 1"
    return f"{value:,.0f} : 1" if value >= 10 else f"{value:.2g} : 1"
