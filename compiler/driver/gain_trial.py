"""Ask a quantised plan the calibration questions, and print how probable it finds right answers.

The driver runs it in a process of its own, because it loads native code:

    python -m compiler.driver.gain_trial BUNDLE_DIRECTORY SUBMISSION_DIRECTORY
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from compiler.contract.pipeline import Pipeline
from compiler.contract.selftest_process import load_plan
from compiler.contract.session import PlanRunner, Session
from compiler.driver.cards import Card, read_calibration
from compiler.driver.questions import RightAnswer, chosen_cards


def answer_scores(runner: PlanRunner, pipeline: Pipeline, cards: Sequence[Card]) -> list[int]:
    """Return how probable a plan finds the right answers, millionths of a nat.

    The same questions in the same order as `compiler.driver.calibrate.record_cards` asks.

    Raises:
        ContractError: The plan answers no questions about pictures, or a word of a question is not
            in its vocabulary.
    """
    assert pipeline.tokens is not None
    session, scores = Session(runner, pipeline), []
    for card, questions in chosen_cards(cards):
        session.keep(card.image)
        for question in questions:
            right = RightAnswer(pipeline.tokens, question)
            if not right.is_known:
                prompt = pipeline.tokens.prompt(question.prompt, question.words)
                session.answer(prompt, right.forced())
            scores.append(right.score)
    return scores


def main(bundle: Path, submission: Path) -> int:
    """Print the scores as JSON."""
    asked = read_calibration(bundle, submission)
    if asked is None:
        return 1
    pipeline, cards = asked
    with load_plan(bundle) as plan:
        sys.stdout.write(json.dumps(answer_scores(plan, pipeline, cards)))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
