"""Right answers: which are asked for, and how probable a model finds them."""

import struct

import numpy as np
import pytest

from compiler.contract.session import Session
from compiler.driver.cards import Card, Question
from compiler.driver.gain import LEAST, MICRO
from compiler.driver.gain_trial import answer_scores
from compiler.driver.questions import (
    MAX_CARDS,
    QUESTIONS_PER_CARD,
    RightAnswer,
    chosen_cards,
    questions_sha256,
)
from tests.unit.compiler.contract.test_pipeline import PIPELINE

TOKENS = PIPELINE.tokens
assert TOKENS is not None


class Biased:
    """A plan that gives the same logits at every step, and counts its rows."""

    def __init__(self, favoured: int) -> None:
        assert TOKENS is not None
        self.kv_length = 0
        self.fed: list[int] = []
        self.logits = np.zeros(len(TOKENS.vocabulary), "<f4")
        self.logits[favoured] = 2.0
        self.favoured = favoured

    def run(self, program, inputs):
        if program != "step":
            return {"count": memoryview(struct.pack("<i", 1))}
        self.fed += np.frombuffer(inputs["token_ids"], "<i4").tolist()
        token = memoryview(struct.pack("<i", self.favoured))
        return {"token": token, "logits": memoryview(self.logits.tobytes())}


def question(*answer: str) -> Question:
    return Question("k", "question", (), answer)


def chance(favoured: bool) -> float:
    assert TOKENS is not None
    total = np.exp(2.0) + len(TOKENS.vocabulary) - 1
    return float(np.log((np.exp(2.0) if favoured else 1.0) / total))


def test_it_adds_up_the_right_tokens_and_the_end() -> None:
    assert TOKENS is not None
    plan = Biased(favoured=TOKENS.eos)
    right = RightAnswer(TOKENS, question("<a>"))
    session = Session(plan, PIPELINE)
    session.answer(TOKENS.prompt("question", ()), right.forced())
    assert right.is_known
    assert right.score == round((chance(False) + chance(True)) * MICRO)
    assert plan.fed[-1] == TOKENS.ids(["<a>"])[0]


def test_watching_tells_the_same_where_the_model_is_right() -> None:
    assert TOKENS is not None
    plan = Biased(favoured=TOKENS.eos)
    right = RightAnswer(TOKENS, question())
    assert right.watch(plan.run("step", {"token_ids": b""})) == TOKENS.eos
    assert right.is_known
    assert right.score == round(chance(True) * MICRO)


def test_watching_stops_where_the_model_goes_wrong() -> None:
    assert TOKENS is not None
    plan = Biased(favoured=TOKENS.eos)
    right = RightAnswer(TOKENS, question("<a>", "<q>"))
    for _ in range(3):
        assert right.watch(plan.run("step", {"token_ids": b""})) == TOKENS.eos
    assert not right.is_known
    assert right.score == LEAST


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_impossible_answer_counts_its_least(bad: float) -> None:
    assert TOKENS is not None
    unknown = RightAnswer(TOKENS, question("never heard"))
    assert (unknown.is_known, unknown.score) == (True, LEAST)
    plan = Biased(favoured=TOKENS.eos)
    plan.logits[TOKENS.eos] = bad
    right = RightAnswer(TOKENS, question())
    right.watch(plan.run("step", {"token_ids": b""}))
    assert right.score == LEAST


def test_a_plan_is_asked_every_chosen_question() -> None:
    assert TOKENS is not None
    cards = [Card(bytes(6), (question("<a>"), question("never heard"), question()))] * 30
    chosen = chosen_cards(cards)
    assert len(chosen) <= MAX_CARDS
    assert all(len(asked) <= QUESTIONS_PER_CARD for _, asked in chosen)
    scores = answer_scores(Biased(favoured=TOKENS.eos), PIPELINE, cards)
    assert len(scores) == sum(len(asked) for _, asked in chosen)
    wanted = {
        question("<a>"): round((chance(False) + chance(True)) * MICRO),
        question("never heard"): LEAST,
        question(): round(chance(True) * MICRO),
    }
    assert scores == [wanted[one] for _, asked in chosen for one in asked]


def test_other_sets_are_other_questions() -> None:
    digests = {"calibration.json": "1" * 64}
    assert questions_sha256(digests) == questions_sha256(dict(digests))
    assert questions_sha256(digests) != questions_sha256({"calibration.json": "2" * 64})
