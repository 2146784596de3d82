"""Adaptive pruning of EdgeCard's visual tokens: accuracy, rows kept and time to see a card.

    python -m benchmarks.prune [--check]

The rule is chosen on the calibration cards; the bundle compiled with it is judged on the evaluation
cards, against the bundle compiled to keep every token, all in native code with W4 weights. Rows of
the sweep are made without the search for scales that a compilation makes: no pruning, shares with
and without context tokens, and scores from all tokens (`mean`) as for a model without class token.
Beside them stands the model's own 32 of 64, compiled. Seeing a card is vision and prefill; both
together and prefill alone are timed over the same cards, candidates in turn.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.answer import CACHE, build
from benchmarks.runner import Claim, faster_claim, interleaved, main
from compiler.contract.native import NativePlan
from compiler.contract.pipeline import PREFILL, Pipeline, parse_pipeline
from compiler.contract.session import Buffer, see
from compiler.driver.cards import EVALUATION, Card
from compiler.driver.choose_pruning import (
    ALL,
    MAX_LOSS,
    PrunablePlans,
    PruneTrial,
    choose_pruning,
    rule_json,
    sweep,
    try_rule,
)
from compiler.driver.evaluate import evaluate_bundle
from compiler.driver.native_check import host_target
from compiler.driver.options import CompiledBundle
from compiler.frontend.pipeline_json import FILE_NAME
from compiler.passes.pipeline_spec import PruneSpec
from examples.edgecard.materialise import materialise

ROUNDS: Final = 5
TIMED_CARDS: Final = 20
MILLISECONDS: Final = 1e3
MEAN_SHARES: Final = (0.8, 0.9, 0.95)
LEAST_SPREAD: Final = 1.2
PEER: Final = "EdgeCard unpruned"


def measure() -> list[Claim]:
    """Choose a rule, judge it and its neighbours, return the claims."""
    target = host_target()
    if target is None:
        raise SystemExit("error: no target runs on this machine")
    with tempfile.TemporaryDirectory() as folder:
        submission = materialise("v1", Path(folder))
        bundle = build(submission)
        choice = choose_pruning(submission, target, cache_dir=CACHE)
        if choice.chosen is None:
            raise SystemExit(f"error: every rule loses more than {MAX_LOSS:.1%}")
        plans = PrunablePlans(submission, target, CACHE)
        cards = plans.cards(submission, EVALUATION)
        fixed = evaluate_bundle(bundle.sections, submission).accuracy
        every = replace(ALL, min_keep=choice.unpruned.least_rows)
        shipped, whole = (
            _compiled_accuracy(submission, rule) for rule in (choice.chosen.rule, every)
        )
        rules = (ALL, *sweep(), *sweep(MEAN_SHARES, score="mean"))
        trials = [try_rule(plans, rule, cards) for rule in rules]
    unpruned = trials[0]
    chosen = next(trial for trial in trials if trial.rule == choice.chosen.rule)
    seconds = _times(plans, trials, bundle, cards[:TIMED_CARDS])
    note = f"as the model says: 32 rows; see {_ms(seconds, 'fixed32 see')}"
    return [
        _loss_claim(whole, shipped, chosen, choice.chosen),
        _spread_claim(chosen),
        *(_time_claim(part, _name(chosen), seconds, target.id) for part in ("see", "prefill")),
        _accuracy_claim("fixed32", fixed, unpruned, note),
        *(_sweep_claim(trial, unpruned, seconds) for trial in trials),
    ]


def _compiled_accuracy(submission: Path, rule: PruneSpec) -> float:
    """Compile the submission with a rule as a release is, and evaluate the bundle."""
    path = submission / FILE_NAME
    plain = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(plain) | {"prune": rule_json(rule)}))
        return evaluate_bundle(build(submission).sections, submission).accuracy
    finally:
        path.write_text(plain)


def _loss_claim(whole: float, shipped: float, chosen: PruneTrial, calibrated: PruneTrial) -> Claim:
    """Claim what the bundle `shipped` loses against the one that keeps every token."""
    note = f"p {chosen.rule.p:g}, merge {chosen.rule.merge}, chosen on calibration at "
    return Claim(
        id="prune.edgecard.chosen_accuracy",
        value=shipped,
        unit="share",
        peer=PEER,
        peer_version="v1 W4",
        peer_value=whole,
        ratio=1.0 - max(0.0, whole - shipped),
        bar=1.0 - MAX_LOSS,
        label="host",
        note=f"{note}{calibrated.accuracy:.4f}; {_rows(chosen)}; ratio = 1 - points lost",
    )


def _spread_claim(chosen: PruneTrial) -> Claim:
    return Claim(
        id="prune.edgecard.keep_adapts",
        value=chosen.mean_rows,
        unit="rows",
        peer="",
        peer_version="",
        peer_value=None,
        ratio=chosen.most_rows / chosen.least_rows,
        bar=LEAST_SPREAD,
        label="host",
        note=f"{_rows(chosen)}; ratio = most / least over the evaluation cards",
    )


def _time_claim(part: str, chosen: str, seconds: Mapping[str, list[float]], target: str) -> Claim:
    what = {"see": "vision and prefill", "prefill": "prefill alone"}[part]
    return faster_claim(
        f"prune.edgecard.{part}",
        seconds[f"{chosen} {part}"],
        seconds[f"all {part}"],
        per=TIMED_CARDS / MILLISECONDS,
        unit="ms",
        peer=PEER,
        peer_version="v1 W4",
        bar=None,
        label="host",
        note=f"{target}, {what} of one card, mean of {TIMED_CARDS} cards, one thread",
    )


def _sweep_claim(
    trial: PruneTrial, unpruned: PruneTrial, seconds: Mapping[str, list[float]]
) -> Claim:
    see_ms, prefill_ms = (_ms(seconds, f"{_name(trial)} {part}") for part in ("see", "prefill"))
    note = f"{_rows(trial)}; see {see_ms}, of it prefill {prefill_ms}"
    return _accuracy_claim(_name(trial), trial.accuracy, unpruned, note)


def _accuracy_claim(name: str, accuracy: float, unpruned: PruneTrial, note: str) -> Claim:
    return Claim(
        id=f"prune.edgecard.sweep.{name}",
        value=accuracy,
        unit="share",
        peer=PEER,
        peer_version="v1 W4",
        peer_value=unpruned.accuracy,
        ratio=accuracy / unpruned.accuracy,
        bar=None,
        label="host",
        note=note,
    )


def _times(
    plans: PrunablePlans,
    trials: Sequence[PruneTrial],
    bundle: CompiledBundle,
    cards: Sequence[Card],
) -> dict[str, list[float]]:
    """Return seconds per round, all in turn.

    Keys: `<trial> see`, `<trial> prefill`, and `fixed32 see`, whose prefill is part of its vision.
    """
    pipeline = parse_pipeline(bundle.sections["pipeline"])
    with ExitStack() as stack:
        fixed = _loaded(stack, bundle.sections)
        candidates = {"fixed32 see": partial(_see_all, fixed, pipeline, cards)}
        for trial in trials:
            own, sections = plans.sections(trial.rule)
            plan = _loaded(stack, sections)
            candidates[f"{_name(trial)} see"] = partial(_see_all, plan, own, cards)
            filled = _prefills(plan, own, cards)
            candidates[f"{_name(trial)} prefill"] = partial(_prefill_all, plan, filled)
        return interleaved(candidates, ROUNDS)


def _loaded(stack: ExitStack, sections: Mapping[str, bytes]) -> NativePlan:
    return stack.enter_context(NativePlan(sections["kernels"], sections["plan"], sections))


def _see_all(plan: NativePlan, pipeline: Pipeline, cards: Sequence[Card]) -> None:
    for card in cards:
        plan.kv_length = 0
        see(plan, pipeline, card.image)


class _Recorder:
    """Runs a plan and keeps what `prefill` was given."""

    def __init__(self, plan: NativePlan) -> None:
        self.plan = plan
        self.filled: list[Mapping[str, Buffer]] = []

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, Buffer]:
        if program == PREFILL:
            self.filled.append(inputs)
        return self.plan.run(program, inputs)


def _prefills(
    plan: NativePlan, pipeline: Pipeline, cards: Sequence[Card]
) -> list[list[Mapping[str, Buffer]]]:
    """Return the runs of `prefill` that each card needs."""
    found = []
    for card in cards:
        recorder = _Recorder(plan)
        plan.kv_length = 0
        see(recorder, pipeline, card.image)
        found.append(recorder.filled)
    return found


def _prefill_all(plan: NativePlan, cards: Sequence[Sequence[Mapping[str, Buffer]]]) -> None:
    for runs in cards:
        plan.kv_length = 0
        for inputs in runs:
            plan.run(PREFILL, inputs)


def _name(trial: PruneTrial) -> str:
    rule = trial.rule
    if rule == ALL:
        return "all"
    return f"{rule.score}_p{rule.p:g}{f'_merge{rule.merge}' if rule.merge else ''}"


def _rows(trial: PruneTrial) -> str:
    return f"{trial.mean_rows:.1f} rows on average, {trial.least_rows} to {trial.most_rows}"


def _ms(seconds: Mapping[str, list[float]], name: str) -> str:
    return f"{median(seconds[name]) / TIMED_CARDS * MILLISECONDS:.3f} ms"


if __name__ == "__main__":
    sys.exit(main("prune", measure, sys.argv[1:]))
