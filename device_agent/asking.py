"""Ask the installed bundle from the command line; reads the state folder, changes nothing."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from device_agent.config import AgentConfig
from device_agent.errors import ConfigurationError, EvaluationSetError
from device_agent.ports import native_engine
from device_agent.runtime.answers import Answerer, Outcome, Question, require_answered
from device_agent.runtime.bundle import installed_bundle
from device_agent.runtime.evaluation import load_evaluation
from device_agent.runtime.pictures import read_image

QUESTION: Final = "question"
_ASK_HINT: Final = "give words, --template with one that stands alone, or --card with --evaluation"


def ask(
    config: AgentConfig,
    image: Path | None,
    card: int | None,
    template: str | None,
    words: tuple[str, ...],
) -> Iterator[str]:
    """Yield one line per answer: outcome, milliseconds, words.

    Args:
        config: Of the device.
        image: Picture to ask about, or None.
        card: Number of a card of the evaluation set, whose questions are asked instead.
        template: Name of the prompt around `words`; None = `question`.
        words: Words of the question.

    Raises:
        ConfigurationError: Nothing was asked.
        NoBundleError: Nothing is installed.
        AnswerError: The plan failed.
    """
    asked = questions(config, image, card, template, words)
    store, current = installed_bundle(config.state_dir)
    answerer = native_engine(store, config).start(current)
    try:
        yield from (answer_line(answerer, question) for question in asked)
    finally:
        answerer.close()


def answer_line(answerer: Answerer, question: Question) -> str:
    """Ask one question; return the line that tells the answer.

    Raises:
        AnswerError: The plan failed.
    """
    record = require_answered(answerer.answer(question))
    marks = {True: " right", False: " wrong", None: ""}
    cut = " (cut off)" if record.outcome is Outcome.CUT_OFF else ""
    return f"{record.latency_ms:7.2f} ms{marks[record.correct]}{cut}  {' '.join(record.words)}"


def questions(
    config: AgentConfig,
    image: Path | None,
    card: int | None,
    template: str | None,
    words: tuple[str, ...],
) -> tuple[Question, ...]:
    """Return what `ask` asks; arguments as there.

    Raises:
        ConfigurationError: Nothing was asked, a card and words together, or a card without an
            evaluation set.
        EvaluationSetError: There is no such card.
        PictureError: The picture cannot be read.
    """
    if card is None:
        if not words and (template or QUESTION) == QUESTION:  # the one that goes around words
            raise ConfigurationError("nothing was asked", hint=_ASK_HINT)
        pixels = b"" if image is None else read_image(image)
        return (Question(image=pixels, prompt=template or QUESTION, words=words),)
    if words or image is not None or template is not None:
        raise ConfigurationError("--card has questions and a picture of its own", hint=_ASK_HINT)
    if not config.evaluation:
        raise ConfigurationError("--card needs --evaluation")
    cards = load_evaluation(Path(config.evaluation)).cards
    if not 0 <= card < len(cards):
        raise EvaluationSetError(f"there is no card {card}, the last one is {len(cards) - 1}")
    return tuple(replace(question) for question in cards[card])
