"""How often a plan answers as expected: the loop of a device over an evaluation set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compiler.contract.canonical import Json
from compiler.contract.errors import ContractError
from compiler.contract.native import NativePlan
from compiler.contract.pipeline import ImageSpec, Pipeline, parse_pipeline
from compiler.contract.session import Answer, PlanRunner, Session
from compiler.driver.bundle_simulator import BundleSimulator
from compiler.driver.cards import Card, Question, read_cards
from compiler.errors import MalformedModelError

P99 = 0.99


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question and what was answered."""

    card: int
    question: Question
    answer: Answer
    is_right: bool


@dataclass(frozen=True, slots=True)
class Scores:
    """Outcomes in figures.

    Attributes:
        accuracy: Share of questions answered exactly as expected.
        accuracy_by_kind: The same per kind of question.
        mean_answer_tokens, p99_answer_tokens: Lengths of the answers, in tokens.
        cut_off_ratio: Share of answers that the model did not end by itself.
        calls: Native calls of program `step`.
    """

    cards: int
    questions: int
    accuracy: float
    accuracy_by_kind: dict[str, float]
    mean_answer_tokens: float
    p99_answer_tokens: int
    cut_off_ratio: float
    calls: int

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form, ratios rounded to four digits."""
        return {
            "cards": self.cards,
            "questions": self.questions,
            "accuracy": round(self.accuracy, 4),
            "accuracy_by_kind": {
                kind: round(value, 4) for kind, value in self.accuracy_by_kind.items()
            },
            "mean_answer_tokens": round(self.mean_answer_tokens, 3),
            "p99_answer_tokens": self.p99_answer_tokens,
            "cut_off_ratio": round(self.cut_off_ratio, 4),
            "calls": self.calls,
        }


def evaluate_bundle(
    sections: Mapping[str, bytes],
    directory: Path,
    *,
    stem: str = "evaluation",
    most_cards: int | None = None,
    in_simulator: bool = False,
) -> Scores:
    """Return how a bundle scores on a data set, natively or in the simulator.

    Args:
        sections: All sections of the bundle; natively, this machine must run its kernels.
        directory: Where `<stem>.json` and `<stem>.npz` are, format `sparsefleet.cards/1`.
        stem: Which set.
        most_cards: Only the first so many cards.
        in_simulator: Run the bit-exact simulator instead, some hundred times slower.

    Raises:
        MalformedModelError: The set is malformed, or empty.
        ContractError: The bundle sees no pictures, does not load, or a word is unknown.
    """
    pipeline, image = require_answers(sections)
    cards = read_cards(directory, stem, image)[:most_cards]
    if not any(card.questions for card in cards):
        raise MalformedModelError(f"the {stem} set asks nothing")
    if in_simulator:
        return score(answer_cards(BundleSimulator(sections), pipeline, cards))
    with NativePlan(sections["kernels"], sections["plan"], sections) as plan:
        return score(answer_cards(plan, pipeline, cards))


def require_answers(sections: Mapping[str, bytes]) -> tuple[Pipeline, ImageSpec]:
    """Return the pipeline of a bundle that sees pictures and answers in words, and its pictures.

    Raises:
        ContractError: It does something else; the message says what it takes and gives.
    """
    pipeline = parse_pipeline(sections["pipeline"])
    if pipeline.image is not None and pipeline.tokens is not None:
        return pipeline, pipeline.image
    programs = "; ".join(
        f"{name} takes {', '.join(spec.inputs)} and gives {', '.join(spec.outputs)}"
        for name, spec in pipeline.programs.items()
    )
    raise ContractError(
        f"this bundle answers no questions about pictures, so nothing can be scored: {programs}",
        hint=f"`python -m compiler simulate BUNDLE --run {next(iter(pipeline.programs))}=FILE.npz"
        " --compare native` runs it on inputs of your own",
    )


def answer_cards(runner: PlanRunner, pipeline: Pipeline, cards: Sequence[Card]) -> list[Outcome]:
    """Ask every question of every card, of the native plan or of the simulator.

    Raises:
        ContractError: A word is not in the vocabulary, or a picture has the wrong size.
    """
    session = Session(runner, pipeline)
    outcomes = []
    for at, card in enumerate(cards):
        session.see(card.image)
        for question in card.questions:
            answer = session.answer(_prompt(pipeline, question))
            words = _words(pipeline, answer)
            outcomes.append(
                Outcome(at, question, answer, answer.stopped and words == question.answer)
            )
    return outcomes


def score(outcomes: Sequence[Outcome]) -> Scores:
    """Return the figures of at least one outcome."""
    kinds = sorted({item.question.kind for item in outcomes})
    lengths = sorted(len(item.answer.tokens) for item in outcomes)
    return Scores(
        cards=len({item.card for item in outcomes}),
        questions=len(outcomes),
        accuracy=_share([item.is_right for item in outcomes]),
        accuracy_by_kind={
            kind: _share([item.is_right for item in outcomes if item.question.kind == kind])
            for kind in kinds
        },
        mean_answer_tokens=sum(lengths) / len(lengths),
        p99_answer_tokens=lengths[min(len(lengths) - 1, int(P99 * len(lengths)))],
        cut_off_ratio=_share([not item.answer.stopped for item in outcomes]),
        calls=sum(item.answer.calls for item in outcomes),
    )


def _prompt(pipeline: Pipeline, question: Question) -> list[int]:
    assert pipeline.tokens is not None  # a session refuses a pipeline without words
    return pipeline.tokens.prompt(question.prompt, question.words)


def _words(pipeline: Pipeline, answer: Answer) -> tuple[str, ...]:
    assert pipeline.tokens is not None
    return tuple(pipeline.tokens.words(answer.tokens))


def _share(items: Sequence[bool]) -> float:
    return sum(items) / len(items)
