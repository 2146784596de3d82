"""The evidence of a gate is shown as it was stored, in words that do not overstate it."""

import json
from datetime import UTC, datetime, timedelta

from compiler.contract.telemetry import Sketch
from dashboards.evidence import (
    MAX_ROWS,
    Y_CEILING,
    GateRow,
    evidence_strip,
    gate_rows,
    latency_comparison,
    look_of,
    odds_of,
)
from fleet.gates import PROFILES, ArmCounts, Evidence, Increment, InstallCounts, Verdict, decide
from fleet.gates.evidence import Mode
from fleet.gates.spec import Metric
from fleet.models import GateLook, Stage
from fleet.selectors.rollout_page import LookPoint

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SPEC = PROFILES["lab"]


def looks(*failures: int, answers: int = 50) -> list[tuple[Evidence, Verdict]]:
    """Return looks at a stage in which treatment fails `failures` times of `answers`."""
    found: list[tuple[Evidence, Verdict]] = []
    harm: dict = {}
    safe: dict = {}
    total = 0
    for index, count in enumerate(failures):
        total += count
        seen = (index + 1) * answers
        evidence = Evidence(
            mode=Mode.COMPARE,
            stage=0,
            stage_age_s=10.0 * (index + 1),
            holding_s=0.0,
            treatment=ArmCounts(devices=2, heard=2, answers=seen, failures=total, timed=seen),
            control=ArmCounts(devices=2, heard=2, answers=seen, timed=seen),
            fresh_answers=seen,
            installs=InstallCounts(2, 2, 2, 0, 2),
            installs_total=InstallCounts(2, 2, 2, 0, 2),
            increments=(Increment(Metric.FAILURES, "x/y", count, 0, answers, answers),)
            if count
            else (),
            harm_ledger=harm,
            safe_ledger=safe,
        )
        verdict = decide(SPEC, evidence)
        harm, safe = dict(verdict.harm_ledger), dict(verdict.safe_ledger)
        found.append((evidence, verdict))
    return found


def points(*failures: int) -> list[LookPoint]:
    return [
        LookPoint(
            at=START + timedelta(seconds=10 * index),
            stage=0,
            decision=verdict.decision.value,
            log_evidence=verdict.log_evidence,
            log_install=verdict.log_install,
            log_harm={name.value: row.log_harm for name, row in verdict.metrics.items()},
        )
        for index, (_, verdict) in enumerate(looks(*failures))
    ]


def rows(*failures: int) -> dict[str, GateRow]:
    """Store the last look as JSON, read it back, and return its decision table by title."""
    evidence, verdict = looks(*failures)[-1]
    stored = GateLook(
        at=START,
        stage=Stage(index=0),
        spec=json.loads(json.dumps(SPEC.to_json())),
        evidence=json.loads(json.dumps(evidence.to_json())),
        verdict=json.loads(json.dumps(verdict.to_json())),
        decision=verdict.decision.value,
    )
    return {row.title: row for row in gate_rows(look_of(stored))}


def test_it_draws_every_look_and_both_limits() -> None:
    strip = evidence_strip(points(0, 1, 4, 5), SPEC)
    assert strip.chart is not None
    assert [level.name for level in strip.chart.drawings[0].levels] == [
        "roll back at 100 : 1",
        "hold at 20 : 1",
    ]
    total = next(line for line in strip.chart.drawings[0].lines if line.name == "All together")
    assert len(total.path.split()) == 4


def test_it_shows_the_same_numbers_in_the_table_newest_first() -> None:
    found = points(0, 1, 4)
    strip = evidence_strip(found, SPEC)
    assert [row.at for row in strip.rows] == [point.at for point in reversed(found)]
    assert strip.rows[0].total == odds_of(found[-1].log_evidence)
    assert len(strip.rows[0].parts) == len(strip.part_titles)


def test_it_is_empty_without_a_look() -> None:
    strip = evidence_strip([], SPEC)
    assert strip.chart is None
    assert strip.rows == ()


def test_it_leaves_out_old_rows_and_says_so() -> None:
    strip = evidence_strip(points(*[0] * (MAX_ROWS + 5)), SPEC)
    assert (len(strip.rows), strip.rows_left_out) == (MAX_ROWS, 5)


def test_it_cuts_overwhelming_evidence_at_the_top_of_the_chart() -> None:
    strip = evidence_strip(points(*[40] * 12), SPEC)
    assert strip.chart is not None
    assert strip.rows[0].total > 10.0**Y_CEILING
    assert strip.rows[0].decision == "fail"
    drawing = strip.chart.drawings[0]
    assert min(tick.at for tick in drawing.y_ticks) >= drawing.frame.top


def test_it_says_harm_shown_when_harm_is_shown() -> None:
    row = rows(20, 20, 20)["Failed answers"]
    assert (row.state, row.word) == ("fail", "Harm shown")
    assert row.treatment == 0.4
    assert row.control == 0.0


def test_it_says_not_yet_known_in_between() -> None:
    assert rows(0)["Failed answers"].word == "Not yet known"


def test_it_says_that_accuracy_is_shown_and_not_gated() -> None:
    assert rows(0)["Wrong answers"].word == "Shown, not gated"


def test_it_caps_odds() -> None:
    assert odds_of(0.0) == 1.0
    assert odds_of(600.0) == odds_of(100.0)


def sketch(*values: float) -> Sketch:
    result = Sketch()
    for value in values:
        result.add(value)
    return result


def test_it_compares_latency_of_both_arms() -> None:
    latency = latency_comparison(
        treatment=sketch(20, 20, 20, 200), control=sketch(10, 10, 10, 10), slow_ms=12.0
    )
    assert latency.chart is not None
    median = latency.rows[0]
    assert median.ratio is not None
    assert abs(median.ratio - 2) < 0.05
    assert (latency.treatment_count, latency.control_count) == (4, 4)
    assert latency.chart.drawings[0].marks[0].name == "slow above 12 ms"
    assert len(latency.chart.drawings[0].x_ticks) >= 3


def test_it_has_no_latency_chart_without_answers() -> None:
    latency = latency_comparison(treatment=Sketch(), control=Sketch())
    assert latency.chart is None
    assert all(row.ratio is None for row in latency.rows)


def test_it_shows_one_arm_alone() -> None:
    latency = latency_comparison(treatment=sketch(5.0), control=Sketch())
    assert latency.chart is not None
    assert "Only one arm" in latency.chart.summary
    assert len(latency.chart.drawings[0].lines) == 1
