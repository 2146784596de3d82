"""Judge substitutes of routers on calibration cards that nothing was fitted on.

    every question, by the routed layers            -> answers as expected
    per substitute, every question by its programs  -> the same

Cards that calibration recorded are left out, unless all were. The driver runs it in a process of
its own, on native code:

    python -m compiler.driver.substitute_trial BUNDLE_DIRECTORY SUBMISSION_DIRECTORY
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from compiler.contract.pipeline import Pipeline
from compiler.contract.selftest_process import load_plan
from compiler.contract.session import PlanRunner
from compiler.contract.substitutes import Substitute, SubstituteRunner, substitutes_in
from compiler.driver.cards import Card, read_calibration
from compiler.driver.evaluate import answer_cards
from compiler.driver.forks import map_forked
from compiler.driver.questions import evenly, held_out

MOST_CARDS: Final = 48


def trial_cards(cards: Sequence[Card]) -> list[Card]:
    """Return the cards of a calibration set that substitutes are judged on."""
    return evenly(held_out(cards), MOST_CARDS)


def marks(
    runner: PlanRunner, pipeline: Pipeline, cards: Sequence[Card], kind: Substitute | None
) -> list[bool]:
    """Return, per question, whether it is answered as expected with a substitute, None without."""
    substituted = SubstituteRunner(runner, () if kind is None else (kind,), pipeline.programs)
    substituted.taken = kind
    return [outcome.is_right for outcome in answer_cards(substituted, pipeline, cards)]


def main(bundle: Path, submission: Path) -> int:
    """Print the marks without a substitute and with each one, as JSON by kind."""
    asked = read_calibration(bundle, submission)
    if asked is None:
        return 1
    pipeline, cards = asked[0], trial_cards(asked[1])
    with load_plan(bundle) as plan:
        kinds = (None, *substitutes_in(plan.plan))
        texts = map_forked(lambda kind: json.dumps(marks(plan, pipeline, cards, kind)), kinds)
    found = {kind or "": json.loads(text) for kind, text in zip(kinds, texts, strict=True)}
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
