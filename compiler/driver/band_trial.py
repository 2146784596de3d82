"""Measure on calibration cards in which entropy bands a variant of `step` costs no accuracy.

    every question with `step`            -> entropies of all steps, questions answered as expected
    quantiles of their running means      -> bands of equal share
    per band, fewest experts first        -> every question with that band's variant alone
    all bands that stayed within the loss -> every question once more; while together they lose
                                             more than is allowed, the worst band is dropped

The bands are those that a device moves between, with its hysteresis. Native code and simulator give
the same bits, so it does not matter where this runs: the driver runs it in a process of its own on
native code, or in its own process in the simulator where this machine runs no target.

    python -m compiler.driver.band_trial BUNDLE_DIRECTORY SUBMISSION_DIRECTORY
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from compiler.contract.bands import (
    LEAST_BANDS,
    MAX_BANDS,
    MILLI,
    MILLION,
    PREFIX,
    STEP,
    Band,
    BandedRunner,
    Bands,
    is_within,
    mean_entropy,
    most_lost,
    parse_bands,
)
from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.pipeline import Pipeline
from compiler.contract.plan import Plan
from compiler.contract.selftest_process import load_plan
from compiler.contract.session import Buffer, PlanRunner, RunnerBefore
from compiler.driver.cards import Card, read_calibration
from compiler.driver.evaluate import answer_cards
from compiler.driver.forks import map_forked

MAX_LOSS: Final = 5_000
"""The most accuracy that variants may lose, millionths of the questions: 0.5 %, with the confidence
of `compiler.contract.bands.most_lost`."""
TOO_FEW: Final = "steps of the calibration set are alike: there are no bands to tell apart"
LEAST_STEPS: Final = 32
"""A variant that was taken fewer times on the calibration set has proved nothing."""
MOST_REASONS: Final = 4
WINDOW: Final = 1
"""Steps whose mean a band is chosen by. On EdgeCard the last step alone tells the next one best:
two of five bands do with one expert, with means over two or three steps only one."""
MARGIN: Final = 50


@dataclass(frozen=True, slots=True)
class Trial:
    """What was measured.

    Attributes:
        bands: All bands; those without a variant say why.
        steps: Steps of the run with all variants at work, by program.
    """

    bands: Bands
    steps: Mapping[str, int]


Changes = Callable[[Bands], tuple[int, int, Mapping[str, int]]]
"""Returns the questions that bands lose and win, and the steps taken, by program."""


class _Listener(RunnerBefore):
    """A runner that keeps the entropies of the steps."""

    def __init__(self, runner: PlanRunner) -> None:
        super().__init__(runner)
        self.entropies: list[float] = []

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        outputs = self._runner.run(program, inputs)
        if program == STEP:
            self.entropies.append(mean_entropy(outputs))
        return outputs


def try_bands(
    runner: PlanRunner,
    pipeline: Pipeline,
    cards: Sequence[Card],
    top_k: int,
    max_loss: int = MAX_LOSS,
    each: Callable[[Callable[[int], Band], Sequence[int]], Iterable[Band]] = map,
) -> Trial:
    """Return the bands of a plan whose variants are called `step.band<k>`.

    Args:
        runner: The plan, native or simulated.
        pipeline: Its words and programs.
        cards: At least one question.
        top_k: Experts per token of `step`; there is a variant for every smaller number.
        max_loss: The most accuracy that may be lost, millionths.
        each: `map`, or one that tries several bands at once.
    """
    listener = _Listener(runner)
    before = _marks(listener, pipeline, cards)
    measured = _cut(listener.entropies, top_k)
    bands = Bands(WINDOW, MARGIN, len(before), sum(before), max_loss, 0, 0, measured)

    def changes(some: Bands) -> tuple[int, int, Mapping[str, int]]:
        banded = BandedRunner(runner, some)
        after = _marks(banded, pipeline, cards)
        pairs = list(zip(before, after, strict=True))
        return pairs.count((True, False)), pairs.count((False, True)), banded.ran

    if len(measured) >= LEAST_BANDS:
        alone = bands
        rows = each(lambda at: _chosen(alone, at, top_k, changes), range(len(measured)))
        bands = replace(bands, bands=tuple(rows))
    return _together(bands, top_k, changes)


def _cut(entropies: Sequence[float], top_k: int) -> tuple[Band, ...]:
    """Return bands of about equal share of the steps, all of them `step` so far.

    They are cut by what a device goes by, the mean over the last steps.
    """
    last = [entropies[max(0, at - WINDOW) : at] for at in range(1, len(entropies) + 1)]
    milli = np.asarray([sum(values) / len(values) for values in last]) * MILLI
    edges = np.quantile(milli, np.linspace(0, 1, MAX_BANDS + 1)[1:-1])
    lows = sorted({0, *(int(edge) for edge in edges if edge >= 1)})
    ends = [*lows[1:], float("inf")]
    return tuple(
        Band(low, STEP, top_k, int(1000 * np.mean((milli >= low) & (milli < end))), 0, 0, TOO_FEW)
        for low, end in zip(lows, ends, strict=True)
    )


def _chosen(bands: Bands, at: int, top_k: int, changes: Changes) -> Band:
    """Return band `at` with the fewest experts that it can do with, or with the reason why not."""
    lost = []
    for fewer in range(1, top_k):
        tried = replace(bands.bands[at], program=f"{PREFIX}{fewer}", top_k=fewer)
        rows = (*bands.bands[:at], tried, *bands.bands[at + 1 :])
        worse, better, steps = changes(replace(bands, bands=rows))
        lost.append(f"top-{fewer} loses {worse} and wins {better} questions")
        if steps.get(tried.program, 0) < LEAST_STEPS:
            return replace(bands.bands[at], reason=f"fewer than {LEAST_STEPS} steps were in it")
        if is_within(worse, better, bands.questions, bands.max_loss):
            return replace(tried, worse=worse, better=better, reason=lost[-1])
    return replace(bands.bands[at], reason=f"{', '.join(lost[-MOST_REASONS:])}: {_allowed(bands)}")


def _allowed(bands: Bands) -> str:
    return f"more than {bands.max_loss / MILLION:.2%} of {bands.questions} with confidence"


def _together(bands: Bands, top_k: int, changes: Changes) -> Trial:
    """Run all variants together; drop the worst one until the loss is within bounds."""
    while True:
        worse, better, steps = changes(bands)
        if is_within(worse, better, bands.questions, bands.max_loss):
            return Trial(replace(bands, worse=worse, better=better), dict(sorted(steps.items())))
        left = [at for at, band in enumerate(bands.bands) if band.program != STEP]
        worst = max(left, key=lambda at: (_most_lost(bands.bands[at]), at))
        reason = (
            f"together {worse} are lost and {better} won: {_allowed(bands)}; alone this lost most"
        )
        dropped = replace(
            bands.bands[worst], program=STEP, top_k=top_k, worse=0, better=0, reason=reason
        )
        rows = (*bands.bands[:worst], dropped, *bands.bands[worst + 1 :])
        bands = replace(bands, bands=rows)


def _most_lost(band: Band) -> float:
    return most_lost(band.worse, band.better)


def trial_bytes(trial: Trial) -> bytes:
    """Return a trial as `read_trial` takes it."""
    document: dict[str, Json] = {
        "bands": trial.bands.to_bytes().decode(),
        "steps": dict(trial.steps),
    }
    return canonical_bytes(document)


def read_trial(data: bytes) -> Trial:
    """Return what `trial_bytes` wrote."""
    fields: dict[str, Any] = parse_object(data)
    return Trial(parse_bands(fields["bands"].encode()), fields["steps"])


def top_k_of(plan: Plan) -> int:
    """Return the experts per token of `step`: one more than the plan has variants."""
    return 1 + sum(program.name.startswith(PREFIX) for program in plan.programs)


def _marks(runner: PlanRunner, pipeline: Pipeline, cards: Sequence[Card]) -> list[bool]:
    """Return, per question, whether it is answered as expected."""
    return [outcome.is_right for outcome in answer_cards(runner, pipeline, cards)]


def _at_once(choose: Callable[[int], Band], places: Sequence[int]) -> list[Band]:
    """Choose several bands at the same time, each in a copy of this process."""
    texts = map_forked(lambda at: json.dumps(asdict(choose(at))), places)
    return [Band(**json.loads(text)) for text in texts]


def main(bundle: Path, submission: Path) -> int:
    """Print the trial of a bundle as JSON."""
    asked = read_calibration(bundle, submission)
    if asked is None:
        return 1
    pipeline, cards = asked
    with load_plan(bundle) as plan:
        trial = try_bands(plan, pipeline, cards, top_k_of(plan.plan), each=_at_once)
    sys.stdout.write(trial_bytes(trial).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
