"""Which questions of a calibration set are asked, and how probable a model finds right answers.

    cards -> at most 20, evenly -> of each at most 3 questions, evenly, each card from another one
    dialogue, tokens forced -> sum of ln softmax(logits)[right token], the end token included

The same questions are asked in f64 by `compiler.driver.calibrate` and of the quantised plan by
`compiler.driver.gain_trial`, so that their figures can be compared.
"""

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import numpy as np

from compiler.contract.canonical import Json, canonical_bytes, sha256_hex
from compiler.contract.errors import ContractError
from compiler.contract.pipeline import TokenSpec
from compiler.contract.session import Buffer, Manner, greedy
from compiler.driver.cards import Card, Question
from compiler.driver.gain import LEAST, MICRO

MAX_CARDS: Final = 20
QUESTIONS_PER_CARD: Final = 3
LOGITS: Final = "logits"
Item = TypeVar("Item")


def chosen_cards(cards: Sequence[Card]) -> list[tuple[Card, list[Question]]]:
    """Return the cards that are seen, each with the questions that are asked about it."""
    return [
        (card, evenly(_rotated(card.questions, at), QUESTIONS_PER_CARD))
        for at, card in enumerate(evenly(cards, MAX_CARDS))
    ]


def questions_sha256(calibration: Mapping[str, str]) -> str:
    """Return what tells one choice of questions from another.

    Args:
        calibration: SHA-256 of the files of the calibration set, by name.
    """
    document: dict[str, Json] = {
        "calibration": dict(calibration),
        "cards": MAX_CARDS,
        "questions": QUESTIONS_PER_CARD,
    }
    return sha256_hex(canonical_bytes(document))


class RightAnswer:
    """The right answer to one question, and how probable a model finds it token by token.

    `watch` lets the model choose and looks on while it is right; `force` has it say the answer.
    """

    def __init__(self, tokens: TokenSpec, question: Question) -> None:
        """Begin; an answer with a word that the model does not know is impossible."""
        try:
            self._expected = [*tokens.ids(question.answer), tokens.eos]
        except ContractError:
            self._expected = []
        self._at = 0
        self._nats = 0.0
        self._is_right = True

    @property
    def is_known(self) -> bool:
        """Return whether every token was looked at, so that `score` is final."""
        return self._at == len(self._expected)

    @property
    def score(self) -> int:
        """Return ln P of the answer, millionths of a nat, not below `LEAST`."""
        if not self._expected or not self.is_known:
            return LEAST
        nats = self._nats if np.isfinite(self._nats) else -np.inf
        return int(max(LEAST, min(0.0, round(max(nats * MICRO, LEAST)))))

    def watch(self, outputs: Mapping[str, Buffer]) -> int:
        """Return the token that the model prefers."""
        token = greedy(outputs)
        if self._is_right and not self.is_known:
            expected = self._expected[self._at]
            self._take(outputs)
            self._is_right = token == expected
        return token

    def force(self, outputs: Mapping[str, Buffer]) -> int:
        """Return the right token."""
        token = self._expected[self._at]
        self._take(outputs)
        return token

    def forced(self) -> Manner:
        """Return the manner in which the model says the answer, from its beginning."""
        self._at, self._nats = 0, 0.0
        return Manner(most=len(self._expected), choose=self.force)

    def _take(self, outputs: Mapping[str, Buffer]) -> None:
        self._nats += _log_probability(outputs, self._expected[self._at])
        self._at += 1


def _log_probability(outputs: Mapping[str, Buffer], token: int) -> float:
    """Return ln softmax of the logits of the last row at `token`, in f64."""
    logits = np.frombuffer(outputs[LOGITS], "<f4").astype(np.float64)
    with np.errstate(all="ignore"):
        top = logits.max()
        return float(logits[token] - top - np.log(np.exp(logits - top).sum()))


def _rotated(questions: tuple[Question, ...], by: int) -> tuple[Question, ...]:
    """Start each card at another question, so that all kinds are asked."""
    start = by % max(1, len(questions))
    return questions[start:] + questions[:start]


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` items, spread evenly."""
    step = max(1, -(-len(items) // most))
    return list(items[::step])[:most]


def held_out(cards: Sequence[Item]) -> list[Item]:
    """Return the cards that `chosen_cards` leaves out, or all if it takes all."""
    chosen = set(evenly(range(len(cards)), MAX_CARDS))
    return [card for at, card in enumerate(cards) if at not in chosen] or list(cards)
