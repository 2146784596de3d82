"""The evidence of a rollout's gate as people read it: strip over time, table of a look, latency.

Wording: evidence is odds against the new version, "340 : 1", as in a wager; a good version reaches
1/alpha : 1 in fewer than alpha of all rollouts, however often one looks. It is never called a
probability or a p-value. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from compiler.contract.telemetry import BUCKETS_PER_OCTAVE, Sketch
from dashboards.charts import Chart, Level, Line, Mark, line_chart, round_ticks
from dashboards.templatetags.sparsefleet import odds
from fleet.gates import (
    PROFILES,
    Evidence,
    GateSpec,
    MetricVerdict,
    evidence_from_json,
    spec_from_stored,
)
from fleet.gates.spec import Metric
from fleet.models import GateLook
from fleet.selectors.rollout_page import LookPoint

MAX_ROWS: Final = 40
Y_FLOOR: Final = -2.0
Y_CEILING: Final = 9.0
LOG10: Final = math.log(10.0)
METRIC_TITLES: Final[Mapping[Metric, str]] = {
    Metric.FAILURES: "Failed answers",
    Metric.SLOW: "Slow answers",
    Metric.SILENCE: "Silent devices",
    Metric.WRONG: "Wrong answers",
    Metric.DRAIN: "Battery drain",
}
NOT_GATED_NOTES: Final[Mapping[Metric, str]] = {
    Metric.WRONG: (
        "Not gated: right and wrong is known only for questions with a known answer, so nothing "
        "is decided by it unless the gate sets min_accuracy_drop, for example 0.05."
    ),
}
DRAIN_NOTE: Final = (
    "Windows of ten minutes of answering in which the battery lost more than nine in ten did "
    "before: {treatment:,} windows in treatment, {control:,} in control. Only a battery's own "
    "counter counts; devices without one, and a model's estimates (unverified), decide nothing."
)
METRIC_TONES: Final[Mapping[Metric, str]] = {
    Metric.FAILURES: "bad",
    Metric.SLOW: "warn",
    Metric.SILENCE: "plain",
    Metric.WRONG: "live",
    Metric.DRAIN: "warn",
}
# Room above the curves for the labels of vertical marks: powers of ten, and a share of one.
MARK_ROOM: Final = 0.4
LABEL_SHARE: Final = 0.14
_PREFIXES: Final = ("", "k", "M", "G")
QUANTILES: Final = (0.5, 0.9, 0.95, 0.99)
LATENCY_TICKS_MS: Final = tuple(
    factor * 10.0**power for power in range(-2, 6) for factor in (1, 2, 5)
)


@dataclass(frozen=True, slots=True)
class Look:
    """One stored look at a stage, read back. Only the ledgers are left out."""

    at: datetime
    stage: int
    spec: GateSpec
    evidence: Evidence
    decision: str
    reasons: tuple[str, ...]
    metrics: Mapping[Metric, MetricVerdict]


@dataclass(frozen=True, slots=True)
class StripRow:
    """The numbers of one look; every value is an e-value (N : 1)."""

    at: datetime
    stage: int
    total: float
    parts: tuple[float, ...]
    install: float
    decision: str


@dataclass(frozen=True, slots=True)
class Strip:
    """The evidence over time: the drawing and the same numbers as rows, newest first."""

    chart: Chart | None
    part_titles: tuple[str, ...]
    rows: tuple[StripRow, ...]
    rows_left_out: int


@dataclass(frozen=True, slots=True)
class GateRow:
    """One metric in the table of a look; what only a comparison says is None without a control."""

    title: str
    treatment: float | None
    control: float | None
    ratio_low: float | None
    ratio_high: float | None
    harm_ratio: float
    safe_ratio: float
    harm: float | None
    safe: float | None
    state: str
    word: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One quantile of both arms, in milliseconds."""

    quantile: float
    treatment: float | None
    control: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Latency:
    """Whole-answer latency of both arms: cumulative shares and quantiles."""

    chart: Chart | None
    rows: tuple[LatencyRow, ...]
    treatment_count: int
    control_count: int


def odds_of(log_value: float) -> float:
    """Return an e-value from its logarithm, capped where more digits say nothing more."""
    return math.exp(min(log_value, 100.0))


def look_of(row: GateLook) -> Look:
    """Read a stored look back. Needs `stage` joined."""
    verdict = row.verdict
    return Look(
        at=row.at,
        stage=row.stage.index,
        spec=spec_from_stored(row.spec, PROFILES),
        evidence=evidence_from_json(row.evidence),
        decision=row.decision,
        reasons=tuple(verdict.get("reasons", ())),
        metrics={
            Metric(name): MetricVerdict(**values)
            for name, values in verdict.get("metrics", {}).items()
        },
    )


def evidence_strip(points: Sequence[LookPoint], spec: GateSpec) -> Strip:
    """Lay out log10 of the evidence against the version over all looks.

    Args:
        points: In ascending time.
        spec: Whose limits are drawn.
    """
    metrics = [metric for metric in METRIC_TITLES if _is_weighed(metric, spec)]
    rows = tuple(_strip_row(point, metrics) for point in reversed(points))
    return Strip(
        chart=_strip_chart(points, metrics, spec) if points else None,
        part_titles=tuple(METRIC_TITLES[metric] for metric in metrics),
        rows=rows[:MAX_ROWS],
        rows_left_out=max(0, len(rows) - MAX_ROWS),
    )


def gate_rows(look: Look) -> tuple[GateRow, ...]:
    """Return the decision table of one look, one row per metric that the gate weighs or shows."""
    return tuple(
        _gate_row(metric, look.spec, look.metrics[metric], look.evidence)
        for metric in METRIC_TITLES
        if metric in look.metrics
    )


def latency_comparison(
    *, treatment: Sketch, control: Sketch, slow_ms: float | None = None
) -> Latency:
    """Lay out the latency of both arms as cumulative shares over a logarithmic axis.

    Args:
        treatment: Sketch of whole-answer latency of devices with the new version, milliseconds.
        control: The same of devices with the old version.
        slow_ms: Above this an answer counts as slow; drawn as a mark when given.
    """
    rows = []
    for q in QUANTILES:
        new, old = treatment.quantile(q), control.quantile(q)
        rows.append(LatencyRow(q, new, old, new / old if new and old else None))
    lines = (
        Line("Control", "plain", _cumulative(control)),
        Line("Treatment", "live", _cumulative(treatment)),
    )
    xs = [x for line in lines for x, _ in line.points]
    chart = None
    if xs:
        low, high = min(xs), max(xs) + 1e-6
        chart = line_chart(
            title="Share of answers that were at least this fast",
            summary=_latency_summary(rows),
            lines=lines,
            marks=[Mark(f"slow above {slow_ms:.3g} ms", "warn", math.log10(slow_ms))]
            if slow_ms
            else (),
            x_title="latency of a whole answer, ms (logarithmic)",
            x_range=(low, high),
            y_range=(0.0, 1.0 + LABEL_SHARE),
            x_ticks=_latency_ticks(low, high),
            y_ticks=[(share, f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0)],
        )
    return Latency(chart, tuple(rows), treatment.count, control.count)


def _is_weighed(metric: Metric, spec: GateSpec) -> bool:
    if metric == Metric.WRONG:
        return spec.min_accuracy_drop is not None
    return metric in spec.metrics and spec.metrics[metric].weight > 0


def _log10(log_value: float) -> float:
    return min(Y_CEILING, max(Y_FLOOR, log_value / LOG10))


def _strip_lines(
    points: Sequence[LookPoint], times: Sequence[float], metrics: Sequence[Metric]
) -> list[Line]:
    pairs = list(zip(times, points, strict=True))
    lines = [
        Line(
            METRIC_TITLES[metric],
            METRIC_TONES[metric],
            tuple(
                (t, _log10(point.log_harm[metric.value]))
                for t, point in pairs
                if metric.value in point.log_harm
            ),
            is_dashed=True,
        )
        for metric in metrics
    ]
    lines.append(
        Line("All together", "ink", tuple((t, _log10(point.log_evidence)) for t, point in pairs))
    )
    return lines


def _strip_chart(
    points: Sequence[LookPoint], metrics: Sequence[Metric], spec: GateSpec
) -> Chart | None:
    times = [(point.at - points[0].at).total_seconds() for point in points]
    lines = _strip_lines(points, times, metrics)
    hold, fail = math.log10(spec.hold_evidence), -math.log10(spec.alpha)
    values = [y for line in lines for _, y in line.points]
    low, high = min(-1.0, *values) - 0.1, max(fail + 0.7, *values) + MARK_ROOM
    openings = [
        Mark(f"stage {point.stage + 1}", "plain", t)
        for index, (t, point) in enumerate(zip(times, points, strict=True))
        if index and point.stage != points[index - 1].stage
    ]
    powers = range(math.ceil(low), math.floor(high) + 1)
    return line_chart(
        title="Evidence against the new version, N : 1, over all looks",
        summary=f"At the last look it was {odds(odds_of(points[-1].log_evidence))}.",
        lines=lines,
        levels=(
            Level(f"roll back at {odds(1 / spec.alpha)}", "bad", fail),
            Level(f"hold at {odds(spec.hold_evidence)}", "warn", hold),
        ),
        marks=openings,
        x_title="time since the first look",
        y_range=(low, high),
        x_ticks=_time_ticks(times[-1]),
        y_ticks=[(float(power), _power_label(power)) for power in powers],
    )


def _power_label(power: int) -> str:
    if power < 0:
        return f"1 : {10**-power:,}"
    if power < 4:
        return f"{10**power:,} : 1"
    return f"{10 ** (power % 3)} {_PREFIXES[power // 3]} : 1"


def _time_ticks(span_s: float) -> list[tuple[float, str]]:
    span = max(span_s, 1.0)
    unit, name = next(((u, n) for limit, u, n in _TIME_UNITS if span >= limit), (1.0, "s"))
    return [(value * unit, f"{value:g} {name}") for value in round_ticks(0.0, span / unit)]


_TIME_UNITS: Final = (
    (2 * 86_400.0, 86_400.0, "d"),
    (2 * 3_600.0, 3_600.0, "h"),
    (120.0, 60.0, "min"),
)


def _strip_row(point: LookPoint, metrics: Sequence[Metric]) -> StripRow:
    return StripRow(
        at=point.at,
        stage=point.stage + 1,
        total=odds_of(point.log_evidence),
        parts=tuple(odds_of(point.log_harm.get(metric.value, 0.0)) for metric in metrics),
        install=odds_of(point.log_install),
        decision=point.decision,
    )


def _gate_row(metric: Metric, spec: GateSpec, row: MetricVerdict, evidence: Evidence) -> GateRow:
    margins = spec.metrics[metric]
    state, word = _state_of(metric, spec, row, evidence)
    is_compared = evidence.control.devices > 0
    return GateRow(
        title=METRIC_TITLES[metric],
        treatment=row.rate_treatment,
        control=row.rate_control,
        ratio_low=row.ratio_low if is_compared else None,
        ratio_high=row.ratio_high if is_compared else None,
        harm_ratio=margins.harm_ratio,
        safe_ratio=margins.safe_ratio,
        harm=odds_of(row.log_harm) if is_compared or state == "fail" else None,
        safe=odds_of(row.log_safe) if is_compared and row.log_safe is not None else None,
        state=state,
        word=word,
        note=_note(metric, spec, evidence),
    )


def _note(metric: Metric, spec: GateSpec, evidence: Evidence) -> str:
    if not _is_weighed(metric, spec):
        return NOT_GATED_NOTES.get(metric, "")
    if metric != Metric.DRAIN:
        return ""
    windows = {"treatment": evidence.treatment.drained, "control": evidence.control.drained}
    return DRAIN_NOTE.format(**windows)


def _state_of(
    metric: Metric, spec: GateSpec, row: MetricVerdict, evidence: Evidence
) -> tuple[str, str]:
    """Return where one metric stands: harm shown, safe, not yet known; or shown, not gated."""
    if not _is_weighed(metric, spec):
        return "pending", "Shown, not gated"
    if row.log_harm >= -math.log(spec.alpha):
        return "fail", "Harm shown"
    if not evidence.control.devices:
        return "none", "Not compared"
    if row.log_safe is not None and row.log_safe >= math.log(spec.safe_evidence):
        return "pass", "Safe for the next step"
    if row.rate_treatment is None or (row.rate_control is None and evidence.control.devices):
        return "no_data", "No data"
    if row.log_safe is None:
        return "pass", "No harm shown"
    return "inconclusive", "Not yet known"


def _cumulative(sketch: Sketch) -> tuple[tuple[float, float], ...]:
    total = sketch.count
    points: list[tuple[float, float]] = []
    seen = 0
    for index in sorted(sketch.buckets):
        if not points:
            points.append((_bucket_edge(index), 0.0))
        seen += sketch.buckets[index]
        points.append((_bucket_edge(index + 1), seen / total))
    return tuple(points)


def _bucket_edge(index: int) -> float:
    """Return log10 of the lower edge of a bucket, in milliseconds."""
    return index / BUCKETS_PER_OCTAVE * math.log10(2)


def _latency_ticks(low: float, high: float) -> list[tuple[float, str]]:
    inside = [value for value in LATENCY_TICKS_MS if low <= math.log10(value) <= high]
    if len(inside) > 9:
        inside = [value for value in inside if math.log10(value).is_integer()]
    if len(inside) < 3:
        inside = [float(f"{10 ** (low + (high - low) * step / 4):.3g}") for step in range(5)]
    return [(math.log10(value), f"{value:g}") for value in inside]


def _latency_summary(rows: Sequence[LatencyRow]) -> str:
    tail = rows[-1]
    if tail.treatment is None or tail.control is None:
        return "Only one arm has answered so far."
    return (
        f"99 of 100 answers took at most {tail.treatment:.3g} ms in treatment "
        f"and {tail.control:.3g} ms in control."
    )
