"""Simulated stages for tests of the gate: counts with known truth, looked at every second."""

import math
from dataclasses import dataclass

import numpy as np

from fleet.gates import ArmCounts, Decision, Evidence, GateSpec, Increment, InstallCounts, decide
from fleet.gates.evidence import Mode
from fleet.gates.spec import Metric


@dataclass(frozen=True, slots=True)
class Run:
    """Truth of one simulated stage; rates are (treatment, control)."""

    devices: tuple[int, int] = (3, 12)
    answers_per_s: float = 3.0
    failure_rates: tuple[float, float] = (0.0005, 0.0005)
    slow_rates: tuple[float, float] = (0.1, 0.1)
    burst: float = 1.0  # variance of the latency noise, drawn anew for each arm and look
    looks: int = 90
    stop_at_pass: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the stage ended."""

    decision: Decision
    seconds: int


def simulate_stage(spec: GateSpec, run: Run, *, seed: int) -> Outcome:
    """Look every second until the gate decides."""
    rng = np.random.default_rng(seed)
    totals = np.zeros((2, 3), dtype=int)  # arm x (answers, failures, slow)
    installs = InstallCounts(run.devices[0], run.devices[0], run.devices[0], 0, run.devices[0])
    harm, safe, since = {}, {}, None
    for second in range(1, run.looks + 1):
        answers = rng.poisson(np.array(run.devices) * run.answers_per_s)
        noise = rng.gamma(1 / run.burst, run.burst, size=2) if run.burst else np.ones(2)
        failures = rng.binomial(answers, run.failure_rates)
        slow = rng.binomial(answers, np.minimum(1.0, np.array(run.slow_rates) * noise))
        totals += np.stack([answers, failures, slow], axis=1)
        rows = tuple(
            Increment(metric, "a", int(events[0]), int(events[1]), int(answers[0]), int(answers[1]))
            for metric, events in ((Metric.FAILURES, failures), (Metric.SLOW, slow))
            if answers.all()
        )
        verdict = decide(
            spec,
            Evidence(
                mode=Mode.COMPARE,
                stage=0,
                stage_age_s=float(second),
                holding_s=0.0 if since is None else float(second - since),
                treatment=_arm(run.devices[0], totals[0]),
                control=_arm(run.devices[1], totals[1]),
                fresh_answers=int(totals[0, 0]),
                installs=installs,
                installs_total=installs,
                increments=rows,
                harm_ledger=harm,
                safe_ledger=safe,
            ),
        )
        harm, safe = verdict.harm_ledger, verdict.safe_ledger
        high = verdict.log_evidence >= math.log(spec.hold_evidence)
        since = (since if since is not None else second) if high else None
        ends = {Decision.FAIL} | ({Decision.PASS} if run.stop_at_pass else set())
        if verdict.decision in ends:
            break
    return Outcome(verdict.decision, second)


def _arm(devices: int, totals: np.ndarray) -> ArmCounts:
    answers, failures, slow = (int(value) for value in totals)
    return ArmCounts(devices, devices, 0, answers, failures, answers, slow)
