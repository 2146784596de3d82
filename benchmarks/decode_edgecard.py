"""Accuracy of EdgeCard in the configurations of the table that `benchmarks.decode` prints.

Three of them differ in what they answer: the f32 graphs in ONNX Runtime, native code with every
visual token and two experts per token, and native code that adapts both, tokens by the rule that
`make bench-prune` chooses and experts by entropy bands. All are judged on the evaluation cards.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.answer import build
from compiler.contract.bands import BandedRunner, parse_bands
from compiler.contract.native import NativePlan
from compiler.contract.pipeline import Pipeline, parse_pipeline
from compiler.contract.session import PlanRunner, see
from compiler.driver.cards import EVALUATION, Card, read_cards
from compiler.driver.choose_pruning import ALL, rule_json
from compiler.driver.evaluate import answer_cards, score
from compiler.frontend.pipeline_json import FILE_NAME
from compiler.passes.pipeline_spec import PruneSpec
from examples.edgecard.materialise import VERSIONS, load_cards, materialise, vocabulary
from examples.edgecard.measure_reference import prompt_ids, reference_model

VERSION: Final = "v1"
ADAPTIVE: Final = PruneSpec(p=0.85, min_keep=8, max_keep=64, merge=4, score="row")
"""What `make bench-prune` chooses on the calibration cards."""
TOKENS: Final = 64
"""Visual tokens of a card before pruning."""
EVERY: Final = replace(ALL, min_keep=TOKENS)


@dataclass(frozen=True, slots=True)
class EdgeCardFacts:
    """What EdgeCard's evaluation cards say.

    Attributes:
        float_accuracy: Of the f32 graphs.
        static_accuracy: Of native code that adapts nothing.
        adaptive_accuracy: Of native code that adapts visual tokens and experts.
        rows: Visual rows that the adaptive one keeps of `TOKENS`, on average.
        single: Share of its steps that took one expert per token.
    """

    float_accuracy: float
    static_accuracy: float
    adaptive_accuracy: float
    rows: float
    single: float


def edgecard_facts() -> EdgeCardFacts:
    """Compile both native configurations and evaluate all three."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        submission = materialise(VERSION, Path(name))
        _, pipeline, whole = _loaded(stack, submission, EVERY)
        cards = _cards(submission, pipeline)
        static = _accuracy(whole, pipeline, cards)
        sections, pipeline, plan = _loaded(stack, submission, ADAPTIVE)
        bands = parse_bands(sections["bands"])
        banded = BandedRunner(plan, bands)
        adaptive = _accuracy(banded, pipeline, cards)
        singles = {band.program for band in bands.bands if band.top_k == 1}
        single = sum(n for program, n in banded.ran.items() if program in singles)
        rows = [_rows(plan, pipeline, card) for card in cards]
    return EdgeCardFacts(
        float_accuracy=_float_accuracy(),
        static_accuracy=static,
        adaptive_accuracy=adaptive,
        rows=sum(rows) / len(rows),
        single=single / sum(banded.ran.values()),
    )


def _loaded(
    stack: ExitStack, submission: Path, rule: PruneSpec
) -> tuple[Mapping[str, bytes], Pipeline, NativePlan]:
    """Compile the submission with a rule as a release is, and load the bundle."""
    path = submission / FILE_NAME
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "prune": rule_json(rule)}))
    sections = build(submission).sections
    plan = stack.enter_context(NativePlan(sections["kernels"], sections["plan"], sections))
    return sections, parse_pipeline(sections["pipeline"]), plan


def _cards(submission: Path, pipeline: Pipeline) -> Sequence[Card]:
    assert pipeline.image is not None
    return read_cards(submission, EVALUATION, pipeline.image)


def _accuracy(runner: PlanRunner, pipeline: Pipeline, cards: Sequence[Card]) -> float:
    return score(answer_cards(runner, pipeline, cards)).accuracy


def _rows(plan: NativePlan, pipeline: Pipeline, card: Card) -> int:
    plan.kv_length = 0
    see(plan, pipeline, card.image)
    return plan.kv_length


def _float_accuracy() -> float:
    """Return the share of questions that the f32 graphs answer as expected."""
    model, ids = reference_model(VERSION), {token: at for at, token in enumerate(vocabulary())}
    cards = load_cards(VERSIONS[VERSION].evaluation)
    right = []
    for image, questions in zip(cards.images, cards.questions, strict=True):
        context = model.see(image)
        for question in questions:
            expected = [ids[word] for word in question["answer"]]
            right.append(model.answer(context, prompt_ids(question, ids)) == expected)
    return sum(right) / len(right)
