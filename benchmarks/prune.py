"""Adaptive pruning of EdgeCard's visual tokens: accuracy, rows kept and time to see a card.

    python -m benchmarks.prune [--check]

The rule is chosen on the calibration cards and judged on the evaluation cards, all in native code
with W4 weights. Rows of the table: no pruning, the model's own 32 of 64, the sweep of shares with
and without context tokens, and scores from all tokens (`mean`) as for a model without class token.
Seeing a card is vision and prefill; it is timed over the same cards, candidates in turn.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.answer import CACHE, build
from benchmarks.runner import Claim, faster_claim, interleaved, main
from compiler.contract.native import NativePlan
from compiler.contract.pipeline import Pipeline, parse_pipeline
from compiler.contract.session import see
from compiler.driver.cards import EVALUATION, Card
from compiler.driver.choose_pruning import (
    ALL,
    MAX_LOSS,
    PrunablePlans,
    PruneTrial,
    choose_pruning,
    sweep,
    try_rule,
)
from compiler.driver.evaluate import evaluate_bundle
from compiler.driver.native_check import host_target
from compiler.driver.options import CompiledBundle
from examples.edgecard.materialise import materialise

ROUNDS: Final = 9
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
        rules = (ALL, *sweep(), *sweep(MEAN_SHARES, score="mean"))
        trials = [try_rule(plans, rule, cards) for rule in rules]
    unpruned = trials[0]
    chosen = next(trial for trial in trials if trial.rule == choice.chosen.rule)
    seconds = _see_seconds(plans, [unpruned, chosen], bundle, cards[:TIMED_CARDS])
    sweep_times = _sweep_times(plans, trials, cards[:TIMED_CARDS])
    return [
        _loss_claim(unpruned, chosen, choice.chosen),
        _spread_claim(chosen),
        _time_claim(seconds, target.id),
        _accuracy_claim(
            "fixed32", fixed, unpruned, f"as the model says; see {_ms(seconds, 'model')}"
        ),
        *(
            _accuracy_claim(
                _name(trial), trial.accuracy, unpruned, f"{_rows(trial)}; see {time:.3f} ms"
            )
            for trial, time in zip(trials, sweep_times, strict=True)
        ),
    ]


def _loss_claim(unpruned: PruneTrial, chosen: PruneTrial, calibrated: PruneTrial) -> Claim:
    note = f"p {chosen.rule.p:g}, merge {chosen.rule.merge}, chosen on calibration at "
    return Claim(
        id="prune.edgecard.chosen_accuracy",
        value=chosen.accuracy,
        unit="share",
        peer=PEER,
        peer_version="v1 W4",
        peer_value=unpruned.accuracy,
        ratio=1.0 - max(0.0, unpruned.accuracy - chosen.accuracy),
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


def _time_claim(seconds: Mapping[str, list[float]], target: str) -> Claim:
    return faster_claim(
        "prune.edgecard.see",
        seconds["chosen"],
        seconds["unpruned"],
        per=TIMED_CARDS / MILLISECONDS,
        unit="ms",
        peer=PEER,
        peer_version="v1 W4",
        bar=None,
        label="host",
        note=f"{target}, vision and prefill, {TIMED_CARDS} cards, one thread; "
        f"the model's own 32: {_ms(seconds, 'model')}",
    )


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


def _see_seconds(
    plans: PrunablePlans,
    trials: Sequence[PruneTrial],
    bundle: CompiledBundle,
    cards: Sequence[Card],
) -> dict[str, list[float]]:
    """Time seeing the cards without pruning, with the chosen rule, and as the model says."""
    with ExitStack() as stack:
        candidates = {
            name: _seeing(stack, *plans.sections(trial.rule), cards)
            for name, trial in zip(("unpruned", "chosen"), trials, strict=True)
        }
        pipeline = parse_pipeline(bundle.sections["pipeline"])
        candidates["model"] = _seeing(stack, pipeline, dict(bundle.sections), cards)
        return interleaved(candidates, ROUNDS)


def _sweep_times(
    plans: PrunablePlans, trials: Sequence[PruneTrial], cards: Sequence[Card]
) -> list[float]:
    """Return the median milliseconds per card of each trial, all in turn."""
    with ExitStack() as stack:
        candidates = {
            _name(trial): _seeing(stack, *plans.sections(trial.rule), cards) for trial in trials
        }
        seconds = interleaved(candidates, ROUNDS)
    return [median(seconds[_name(trial)]) / len(cards) * MILLISECONDS for trial in trials]


def _seeing(
    stack: ExitStack, pipeline: Pipeline, sections: Mapping[str, bytes], cards: Sequence[Card]
) -> Callable[[], None]:
    plan = stack.enter_context(NativePlan(sections["kernels"], sections["plan"], sections))

    def run() -> None:
        for card in cards:
            plan.kv_length = 0
            see(plan, pipeline, card.image)

    return run


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
