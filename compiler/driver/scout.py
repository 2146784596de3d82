"""Find questions that reach rare experts, by running the calibration set natively.

The simulator needs seconds for what native code does in milliseconds, so native code looks and the
simulator records what was found. A scout's word is only a hint: what counts is what the simulator
reaches. It runs in a process of its own and may fail without harm.

    python -m compiler.driver.scout BUNDLE_DIRECTORY SUBMISSION_DIRECTORY
"""

import json
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from compiler.contract.native import NativePlan
from compiler.contract.pipeline import Pipeline, parse_pipeline
from compiler.contract.selftest_process import load_plan
from compiler.contract.session import Buffer, see
from compiler.driver.cards import Card, read_cards
from compiler.driver.plan_facts import expert_place
from compiler.driver.provenance import CALIBRATION
from compiler.driver.selftest import Hint, card_order, feed_steps

ROUTING: Final = "routing"
MAX_QUESTIONS: Final = 20_000
HINTS_PER_EXPERT: Final = 2
_INDEX: Final = struct.Struct("<i")


def scout(
    plan: NativePlan, pipeline: Pipeline, cards: Sequence[Card], experts: frozenset[str]
) -> list[Hint]:
    """Return, per question, the experts that its answer's last rows go through.

    Args:
        plan: The bundle on this machine.
        pipeline: Its words and programs.
        cards: The calibration set.
        experts: Sections to look for; output `routing` has one group of ids for each of their
            layers. The search ends when each was seen `HINTS_PER_EXPERT` times.
    """
    layers = len({expert_place(name)[0] for name in experts})
    hints: list[Hint] = []
    times: Counter[str] = Counter()
    seen, rows = -1, 0
    for card, question in islice(card_order(cards), MAX_QUESTIONS):
        if card != seen:
            plan.kv_length = 0
            see(plan, pipeline, cards[card].image)
            seen, rows = card, plan.kv_length
        plan.kv_length = rows
        reached = frozenset(_experts(plan, pipeline, cards[card], question, layers))
        hints.append(Hint(card, question, reached))
        times.update(reached & experts)
        if len(times) == len(experts) and min(times.values()) >= HINTS_PER_EXPERT:
            break
    return hints


def parse_hints(text: str) -> list[Hint]:
    """Return the hints that the process printed."""
    return [Hint(card, question, frozenset(names)) for card, question, names in json.loads(text)]


def _experts(
    plan: NativePlan, pipeline: Pipeline, card: Card, question: int, layers: int
) -> Iterator[str]:
    assert pipeline.tokens is not None
    item = card.questions[question]
    for outputs in feed_steps(plan, pipeline, pipeline.tokens.prompt(item.prompt, item.words)):
        yield from _routed(outputs, layers)


def _routed(outputs: Mapping[str, Buffer], layers: int) -> Iterator[str]:
    ids = [item for (item,) in _INDEX.iter_unpack(outputs[ROUTING])]
    for at, expert in enumerate(ids):
        yield f"expert.L{at * layers // len(ids)}.E{expert}"


def main(bundle: Path, submission: Path) -> int:
    """Print the hints of a bundle as JSON."""
    pipeline = parse_pipeline((bundle / "pipeline").read_bytes())
    if pipeline.image is None or ROUTING not in pipeline.programs["step"].outputs:
        return 1
    cards = read_cards(submission, CALIBRATION, pipeline.image)
    experts = frozenset(path.name for path in bundle.glob("expert.*"))
    with load_plan(bundle) as plan:
        hints = scout(plan, pipeline, cards, experts)
    rows = [[hint.card, hint.question, sorted(hint.experts)] for hint in hints]
    sys.stdout.write(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
