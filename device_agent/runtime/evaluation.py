"""Questions from an evaluation set (`sparsefleet.cards/1`), as CI ships them.

`<stem>.json` holds cards with questions and right answers, `<stem>.npz` the pictures as uint8.
"""

import io
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from device_agent.errors import EvaluationSetError
from device_agent.runtime.answers import Question

SCHEMA: Final = "sparsefleet.cards/1"
MAX_SET_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """All questions, card by card."""

    cards: tuple[tuple[Question, ...], ...]

    @property
    def questions(self) -> tuple[Question, ...]:
        """Return every question in order."""
        return tuple(question for card in self.cards for question in card)


def load_evaluation(path: Path) -> EvaluationSet:
    """Read an evaluation set.

    Args:
        path: The `.json` file; the pictures lie beside it.

    Raises:
        EvaluationSetError: A file is missing, too large, or not of this schema.
    """
    try:
        document = json.loads(_read(path))
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise EvaluationSetError(f"{path.name} is no set of schema {SCHEMA!r}")
        images = _images(path.with_name(Path(str(document["images"])).name))
        cards = tuple(_card(card, images) for card in document["cards"])
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise EvaluationSetError(f"{path.name}: {type(error).__name__}: {error}") from error
    if not any(cards):
        raise EvaluationSetError(f"{path.name} holds no question")
    return EvaluationSet(cards)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_SET_BYTES:
            raise EvaluationSetError(f"{path.name} is larger than {MAX_SET_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise EvaluationSetError(f"{path.name} cannot be read: {error.strerror}") from error


def _images(path: Path) -> np.ndarray:
    data = io.BytesIO(_read(path))
    try:
        with np.load(data, allow_pickle=False) as archive:
            images = np.asarray(archive["images"])
    except Exception as error:  # an archive that is none ends in errors of many kinds
        raise EvaluationSetError(f"{path.name}: {type(error).__name__}: {error}") from error
    if images.dtype != np.uint8 or images.ndim < 2:
        raise EvaluationSetError(f"{path.name}: images must be uint8, one per row")
    return images


def _card(card: Mapping[str, Any], images: np.ndarray) -> tuple[Question, ...]:
    image = images[int(card["image"])].tobytes()
    return tuple(
        Question(
            image=image,
            prompt=str(item["prompt"]),
            words=_words(item["words"]),
            expected=_words(item["answer"]),
        )
        for item in card["questions"]
    )


def _words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError("words must be a list")
    return tuple(str(word) for word in value)


class QuestionSource:
    """The questions of a set, over and over, in an order of its own for every device."""

    def __init__(self, evaluation: EvaluationSet, seed: str) -> None:
        self._questions = list(evaluation.questions)
        self._random = random.Random(seed)  # noqa: S311 -- an order, not a secret
        self._at = len(self._questions)

    def next(self) -> Question:
        """Return the next question; the order changes after every round."""
        if self._at >= len(self._questions):
            self._random.shuffle(self._questions)
            self._at = 0
        question = self._questions[self._at]
        self._at += 1
        return question
