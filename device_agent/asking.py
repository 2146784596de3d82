"""Ask the installed bundle from the command line; reads the state folder, changes nothing."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from device_agent.config import AgentConfig
from device_agent.errors import ConfigurationError, EvaluationSetError, NoBundleError
from device_agent.ports import native_engine
from device_agent.runtime.answers import Answerer, Outcome, Question, require_answered
from device_agent.runtime.evaluation import load_evaluation
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer, Slots

MAX_IMAGE_BYTES: Final = 64 << 20
_PGM: Final = re.compile(rb"P5\s+(\d+)\s+(\d+)\s+255\s", re.DOTALL)


def ask(
    config: AgentConfig,
    image: Path | None,
    card: int | None,
    prompt: str,
    words: tuple[str, ...],
) -> Iterator[str]:
    """Yield one line per answer: outcome, milliseconds, words.

    Args:
        config: Of the device.
        image: Picture to ask about, or None.
        card: Number of a card of the evaluation set, whose questions are asked instead.
        prompt: Name of the prompt around `words`.
        words: Words of the question.

    Raises:
        NoBundleError: Nothing is installed.
        AnswerError: The plan failed.
    """
    asked = questions(config, image, card, prompt, words)
    store, current = installed(config)
    answerer = native_engine(store, config).start(current)
    try:
        yield from (answer_line(answerer, question) for question in asked)
    finally:
        answerer.close()


def installed(config: AgentConfig) -> tuple[ObjectStore, Pointer]:
    """Return the sections of this device, and which bundle runs.

    Raises:
        NoBundleError: Nothing is installed.
    """
    store = ObjectStore(Disk(), config.state_dir, max_bytes=config.max_store_bytes)
    current = Slots(Disk(), config.state_dir / "slots").load().current
    if current is None:
        raise NoBundleError("no bundle is installed", hint="run the agent until it has one")
    return store, current


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
    prompt: str,
    words: tuple[str, ...],
) -> tuple[Question, ...]:
    """Return what `ask` asks; arguments as there.

    Raises:
        ConfigurationError: A card is asked for without an evaluation set.
        EvaluationSetError: There is no such card, or the picture cannot be read.
    """
    if card is None:
        pixels = b"" if image is None else read_image(image)
        return (Question(image=pixels, prompt=prompt, words=words),)
    if not config.evaluation:
        raise ConfigurationError("--card needs --evaluation")
    cards = load_evaluation(Path(config.evaluation)).cards
    if not 0 <= card < len(cards):
        raise EvaluationSetError(f"there is no card {card}, the last one is {len(cards) - 1}")
    return tuple(replace(question) for question in cards[card])


def read_image(path: Path) -> bytes:
    """Return the pixels of a picture, uint8.

    Raises:
        EvaluationSetError: It cannot be read, or is neither .npy of uint8 nor binary .pgm.
    """
    try:
        if path.stat().st_size > MAX_IMAGE_BYTES:
            raise EvaluationSetError(f"{path.name} is larger than {MAX_IMAGE_BYTES} bytes")
        if path.suffix == ".npy":
            pixels = np.load(path, allow_pickle=False)
            if pixels.dtype != np.uint8:
                raise EvaluationSetError(f"{path.name}: pixels must be uint8")
            return bytes(pixels.tobytes())
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise EvaluationSetError(f"{path.name} cannot be read: {error}") from error
    match = _PGM.match(data)
    if match is None or len(data) - match.end() != int(match[1]) * int(match[2]):
        raise EvaluationSetError(f"{path.name} is neither .npy nor binary .pgm")
    return data[match.end() :]
