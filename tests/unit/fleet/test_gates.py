"""The gate: no false alarms beyond alpha, bad versions caught, nothing promoted on silence."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.gates import (
    PROFILES,
    ArmCounts,
    Decision,
    Evidence,
    GateSpecError,
    Increment,
    InstallCounts,
    decide,
    engine,
    evidence_from_json,
    spec_from_json,
    spec_from_stored,
)
from fleet.gates.evidence import Mode
from fleet.gates.spec import Metric
from tests.factories.gate_runs import Run, simulate_stage

LAB = PROFILES["lab"]
DONE = InstallCounts(enrolled=3, reached=3, succeeded=3, failed=0, answering=3)


def evidence(**changes):
    base = Evidence(
        mode=Mode.COMPARE,
        stage=0,
        stage_age_s=60.0,
        holding_s=0.0,
        treatment=ArmCounts(3, 3, 0, 1_000, 1, 1_000, 50),
        control=ArmCounts(12, 12, 0, 4_000, 4, 4_000, 200),
        fresh_answers=1_000,
        installs=DONE,
        installs_total=DONE,
        increments=(
            Increment(Metric.FAILURES, "a", 1, 4, 1_000, 4_000),
            Increment(Metric.SLOW, "a", 50, 200, 1_000, 4_000),
        ),
    )
    return replace(base, **changes)


def test_it_promotes_a_version_that_is_shown_to_be_safe():
    verdict = decide(LAB, evidence())
    assert verdict.decision == Decision.PASS
    assert verdict.evidence_ratio < 1
    assert verdict.metrics[Metric.SLOW].ratio_low < 1 < verdict.metrics[Metric.SLOW].ratio_high


def test_it_fails_a_version_that_is_shown_to_harm():
    verdict = decide(
        LAB,
        evidence(
            treatment=ArmCounts(3, 3, 0, 200, 12, 200, 90),
            increments=(
                Increment(Metric.FAILURES, "a", 12, 0, 200, 800),
                Increment(Metric.SLOW, "a", 90, 40, 200, 800),
            ),
        ),
    )
    assert verdict.decision == Decision.FAIL
    assert "100 : 1" in verdict.reasons[0]
    assert verdict.metrics[Metric.FAILURES].log_harm > math.log(100)


@pytest.mark.parametrize(
    ("changes", "decision", "reason"),
    [
        ({"error": "ledger is from another rollout"}, Decision.ERROR, "ledger"),
        ({"treatment": ArmCounts(3, 3)}, Decision.NO_DATA, "by the new version"),
        ({"control": ArmCounts(12, 12)}, Decision.NO_DATA, "control devices"),
        ({"control": ArmCounts()}, Decision.NO_DATA, "no control"),
        ({"stage_age_s": 1.0}, Decision.INCONCLUSIVE, "dwell"),
        ({"fresh_answers": 59}, Decision.INCONCLUSIVE, "59 of 60 answers"),
        (
            {"increments": (), "treatment": ArmCounts(3, 3, 0, 70, 0, 70, 14)},
            Decision.INCONCLUSIVE,
            "safety",
        ),
        ({"installs": InstallCounts()}, Decision.INCONCLUSIVE, "no devices"),
        ({"installs": InstallCounts(3, 1, 1, 0, 1)}, Decision.INCONCLUSIVE, "1 of 3 devices"),
        ({"installs": InstallCounts(3, 3, 2, 0, 2)}, Decision.INCONCLUSIVE, "2 of 3 installa"),
        ({"installs": InstallCounts(3, 3, 2, 1, 2)}, Decision.INCONCLUSIVE, "only 2 of 3"),
        ({"installs": InstallCounts(3, 3, 3, 0, 1)}, Decision.INCONCLUSIVE, "answered"),
    ],
)
def test_it_never_promotes_without_what_was_promised(changes, decision, reason):
    verdict = decide(LAB, evidence(**changes))
    assert verdict.decision == decision
    assert any(reason in text for text in verdict.reasons)


def test_it_lets_a_fleet_that_became_faster_pass_although_few_events_compare_badly():
    """Twice as many slow answers as control, but both far below what was slow before."""
    quiet = evidence(
        treatment=ArmCounts(12, 12, 0, 1_500, 0, 1_500, 40),
        control=ArmCounts(3, 3, 0, 375, 0, 375, 5),
        increments=(Increment(Metric.SLOW, "a", 40, 5, 1_500, 375),),
    )
    assert decide(LAB, quiet).decision == Decision.PASS


def test_it_fails_when_the_new_version_silences_its_devices():
    silent = ArmCounts(3, 3, 3, 100, 0, 100, 5)
    assert decide(LAB, evidence(treatment=silent)).decision == Decision.FAIL
    both = evidence(treatment=silent, control=ArmCounts(12, 12, 12, 400, 0, 400, 20))
    assert decide(LAB, both).decision == Decision.INCONCLUSIVE  # an outage, not the version


def test_it_fails_when_installations_fail():
    counts = InstallCounts(enrolled=3, reached=3, succeeded=0, failed=3, answering=0)
    verdict = decide(LAB, evidence(installs=counts, installs_total=counts))
    assert verdict.decision == Decision.FAIL
    one = InstallCounts(enrolled=3, reached=3, succeeded=2, failed=1, answering=2)
    assert decide(LAB, evidence(installs=one, installs_total=one)).decision != Decision.FAIL


def test_it_fails_when_strong_suspicion_lasts():
    counts = InstallCounts(enrolled=2, reached=2, succeeded=0, failed=2, answering=0)
    suspicious = evidence(installs=counts, installs_total=counts)
    assert LAB.hold_evidence < decide(LAB, suspicious).evidence_ratio < 1 / LAB.alpha
    assert decide(LAB, suspicious).decision == Decision.INCONCLUSIVE
    lasting = replace(suspicious, holding_s=LAB.sustained_s)
    assert decide(LAB, lasting).decision == Decision.FAIL


def test_it_says_that_a_first_installation_cannot_be_compared():
    spec = PROFILES["none-first-install"]
    first = evidence(mode=Mode.FIRST_INSTALL, control=ArmCounts(), increments=(), fresh_answers=30)
    verdict = decide(spec, first)
    assert verdict.decision == Decision.PASS
    assert "no control was possible" in verdict.reasons[0]
    unheard = replace(first, installs=InstallCounts(3, 3, 3, 0, 0))
    assert decide(spec, unheard).decision == Decision.INCONCLUSIVE


def test_it_gates_accuracy_only_when_asked():
    worse = evidence(
        treatment=ArmCounts(3, 3, 0, 1_000, 1, 1_000, 50, 1_000, 700),
        control=ArmCounts(12, 12, 0, 4_000, 4, 4_000, 200, 4_000, 3_600),
    )
    worse = replace(
        worse, increments=(*worse.increments, Increment(Metric.WRONG, "a", 300, 400, 1_000, 4_000))
    )
    assert decide(LAB, worse).decision == Decision.PASS
    spec = spec_from_json({"profile": "lab", "min_accuracy_drop": 0.05}, PROFILES)
    assert decide(spec, worse).decision == Decision.FAIL
    spec = spec_from_json({"profile": "lab", "min_accuracy_drop": 0.3}, PROFILES)
    assert decide(spec, worse).decision == Decision.PASS


def drained(new: tuple[int, int], old: tuple[int, int], **changes):
    """Return evidence with so many thirsty windows of so many, in treatment and control."""
    base = evidence(**changes)
    rows = base.increments
    if new[1] and old[1]:
        rows += (Increment(Metric.DRAIN, "a", new[0], old[0], new[1], old[1]),)
    return replace(
        base,
        treatment=replace(base.treatment, thirsty=new[0], drained=new[1]),
        control=replace(base.control, thirsty=old[0], drained=old[1]),
        increments=rows,
    )


NEEDS_DRAIN = spec_from_json(
    {"profile": "lab", "metrics": {"drain": {"safe_ratio": 2.0}}}, PROFILES
)


def test_it_rolls_back_a_version_that_empties_batteries():
    """Nine in ten windows thirsty instead of one: harm by the formula of the engine, by hand."""
    verdict = decide(LAB, drained((270, 300), (120, 1_200)))
    row = verdict.metrics[Metric.DRAIN]
    assert (row.rate_treatment, row.rate_control) == (0.9, 0.1)
    spec = LAB.metrics[Metric.DRAIN]
    grid = engine.grid_of(spec)

    def likelihood(ratio):
        both = ratio * 300 + 1_200
        return (270 * math.log(ratio * 300 / both) + 120 * math.log(1_200 / both)) / spec.dispersion

    null = min(ratio for ratio in grid if ratio >= spec.harm_ratio)
    above = [ratio for ratio in grid if ratio >= 1.25 * null]
    mean = sum(math.exp(likelihood(ratio) - likelihood(null)) for ratio in above) / len(above)
    assert row.log_harm == pytest.approx(math.log(mean))
    assert verdict.decision == Decision.FAIL


def test_it_lets_a_version_pass_that_drains_as_before():
    verdict = decide(LAB, drained((30, 300), (120, 1_200)))
    assert verdict.decision == Decision.PASS
    assert verdict.metrics[Metric.DRAIN].log_harm < 0


@pytest.mark.parametrize(
    ("new", "old", "missing"),
    [
        ((0, 0), (0, 0), ("no treatment device counted", "no control device counted")),
        ((0, 0), (100, 1_000), ("no treatment device counted",)),
        ((30, 300), (0, 0), ("no control device counted",)),
        ((1, 10), (100, 1_000), ("drain: safety is shown",)),
    ],
)
def test_without_counters_nothing_is_promoted_that_needs_them(new, old, missing):
    verdict = decide(NEEDS_DRAIN, drained(new, old))
    assert verdict.decision == Decision.INCONCLUSIVE
    for words in missing:
        assert any(words in reason for reason in verdict.reasons)
    assert decide(NEEDS_DRAIN, drained((60, 800), (300, 3_200))).decision == Decision.PASS


def test_a_fleet_that_counts_nothing_is_decided_by_the_other_metrics():
    assert decide(LAB, drained((0, 0), (0, 0))).decision == Decision.PASS


def test_looks_from_before_there_was_a_metric_are_decided_as_they_were():
    stored = json.loads(json.dumps(LAB.to_json()))
    del stored["metrics"]["drain"]
    stored["metrics"]["failures"]["weight"] = 0.4
    spec = spec_from_stored(stored, PROFILES)
    assert Metric.DRAIN not in spec.metrics
    assert spec.to_json() == stored
    seen = json.loads(json.dumps(drained((270, 300), (120, 1_200)).to_json()))
    for arm in ("treatment", "control"):
        for name in ("drained", "thirsty"):
            del seen[arm][name]
    again = evidence_from_json(seen)
    assert (again.treatment.drained, again.control.thirsty) == (0, 0)
    verdict = decide(spec, again)
    assert (verdict.decision, Metric.DRAIN in verdict.metrics) == (Decision.PASS, False)


counts = st.integers(0, 50)
exposures = st.integers(50, 5_000)
increments = st.lists(
    st.builds(
        Increment,
        st.sampled_from(Metric),
        st.sampled_from(["a", "b"]),
        counts,
        counts,
        exposures,
        exposures,
    ),
    max_size=12,
)


@given(increments)
@settings(max_examples=50)
def test_it_replays_stored_evidence_bit_for_bit(rows):
    seen = evidence(increments=tuple(rows))
    again = evidence_from_json(json.loads(json.dumps(seen.to_json())))
    assert again == evidence_from_json(seen.to_json())
    spec = spec_from_stored(json.loads(json.dumps(LAB.to_json())), PROFILES)
    assert decide(spec, again).to_json() == decide(LAB, seen).to_json()


@given(increments, st.integers(0, 12))
@settings(max_examples=50)
def test_it_adds_the_same_in_one_look_and_in_two(rows, cut):
    whole = decide(LAB, evidence(increments=tuple(rows)))
    first = decide(LAB, evidence(increments=tuple(rows[:cut])))
    second = decide(
        LAB,
        evidence(
            increments=tuple(rows[cut:]),
            harm_ledger=first.harm_ledger,
            safe_ledger=first.safe_ledger,
        ),
    )
    assert second.log_evidence == pytest.approx(whole.log_evidence, rel=1e-9, abs=1e-9)


@given(exposures, exposures)
def test_it_learns_nothing_from_exposure_without_events(treatment, control):
    verdict = decide(
        LAB, evidence(increments=(Increment(Metric.SLOW, "a", 0, 0, treatment, control),))
    )
    assert verdict.metrics[Metric.SLOW].log_harm == pytest.approx(0.0)


@pytest.mark.parametrize(("ratio", "bound"), [(1.0, 0.01), (1.5, 0.03)])
def test_it_keeps_its_false_alarms_below_alpha_at_every_look(ratio, bound):
    """Peek at each of 40 looks; 1.5 is the worst good version there is (exactly at the margin)."""
    rng = np.random.default_rng(20_26)
    row = LAB.metrics[Metric.FAILURES]
    grid = engine.grid_of(row)
    alarms = 0
    runs = 150
    for _ in range(runs):
        ledger: tuple[float, ...] = ()
        base = rng.uniform(0.01, 0.2)
        for _ in range(40):
            treatment, control = (int(n) for n in rng.integers(2, 40, size=2))
            drift = rng.uniform(0.3, 1.0)
            event = Increment(
                Metric.FAILURES,
                "a",
                int(rng.binomial(treatment, min(1.0, ratio * base * drift))),
                int(rng.binomial(control, base * drift)),
                treatment,
                control,
            )
            ledger = engine.add(ledger, grid, (event,))
            if engine.log_harm(ledger, grid, row.harm_ratio, 1.0) >= -math.log(LAB.alpha):
                alarms += 1
                break
    assert alarms <= bound * runs


def test_it_promotes_a_good_version_and_soon():
    runs = [simulate_stage(LAB, Run(), seed=seed) for seed in range(12)]
    assert {run.decision for run in runs} == {Decision.PASS}
    assert np.median([run.seconds for run in runs]) <= 20


def test_it_catches_the_bad_version_of_the_demo_fast():
    """5 % of answers cut off, most answers slower than nearly all of the old version's."""
    bad = Run(failure_rates=(0.05, 0.0005), slow_rates=(0.55, 0.1))
    runs = [simulate_stage(LAB, bad, seed=seed) for seed in range(12)]
    assert {run.decision for run in runs} == {Decision.FAIL}
    assert np.median([run.seconds for run in runs]) <= 20


@pytest.mark.full
def test_it_keeps_the_promise_over_many_whole_rollouts():
    """Noise in bursts (gamma, per arm and look), never stopping at a promotion."""
    good = Run(failure_rates=(0.002, 0.002), burst=1.0, looks=60, stop_at_pass=False)
    alarms = sum(
        simulate_stage(LAB, good, seed=seed).decision == Decision.FAIL for seed in range(1_000)
    )
    assert alarms <= 10


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"profile": "no-such"}, "unknown gate profile"),
        ({"alhpa": 0.1}, "unknown gate fields"),
        ({"alpha": 0.9}, "alpha must be in"),
        ({"alpha": True}, "alpha must be a number"),
        ({"min_dwell_s": float("nan")}, "must be a number"),
        ({"min_answers": 1.5}, "must be an integer"),
        ({"metrics": {"speed": {}}}, "unknown metrics"),
        ({"metrics": {"slow": {"harm": 2}}}, "unknown fields"),
        ({"metrics": {"slow": {"harm_ratio": 4.0}}}, "safe_ratio must be at least"),
        ({"metrics": {"slow": {"weight": 1.0}}}, "weights"),
        ({"metrics": []}, "must be an object"),
    ],
)
def test_it_refuses_an_impossible_specification(document, reason):
    with pytest.raises(GateSpecError, match=reason):
        spec_from_json(document, PROFILES)


@pytest.mark.parametrize("name", PROFILES)
def test_it_ships_profiles_that_pass_their_own_checks(name):
    again = spec_from_json(PROFILES[name].to_json(), PROFILES)
    assert again == PROFILES[name]
