"""Scores of a plan over an evaluation set."""

from compiler.driver.cards import Card, Question
from compiler.driver.evaluate import answer_cards, score
from tests.unit.compiler.contract.test_pipeline import PIPELINE
from tests.unit.compiler.contract.test_session import CountingPlan

CARD = Card(
    bytes(6),
    (
        Question("easy", "question", (), ("<q>",)),
        Question("easy", "question", ("what",), ("<a>",)),
        Question("caption", "caption", (), ("<a>", "<q>")),
    ),
)


def test_it_scores_answers_per_kind() -> None:
    # <a> is id 3, <cap> is 4: the plan counts down from the last token of the prompt to 1
    outcomes = answer_cards(CountingPlan(), PIPELINE, [CARD, CARD])
    assert [item.answer.tokens for item in outcomes[:3]] == [(2,), (2,), (3, 2)]
    scores = score(outcomes)
    assert scores.questions == 6
    assert scores.cards == 2
    assert scores.accuracy_by_kind == {"caption": 1.0, "easy": 0.5}
    assert abs(scores.accuracy - 2 / 3) < 1e-12
    assert (scores.p99_answer_tokens, scores.cut_off_ratio, scores.calls) == (2, 0.0, 14)
    assert scores.to_json()["mean_answer_tokens"] == 1.333


def test_it_does_not_count_a_cut_off_answer_as_right() -> None:
    class Endless(CountingPlan):
        def run(self, program, inputs):
            outputs = super().run(program, inputs)
            return {"token": memoryview(b"\x02\0\0\0")} if outputs else {}

    question = Question("k", "caption", (), ("<q>",) * 4)
    (outcome,) = answer_cards(Endless(), PIPELINE, [Card(bytes(6), (question,))])
    assert outcome.answer.tokens == (2, 2, 2, 2)
    assert not outcome.is_right
    assert score([outcome]).cut_off_ratio == 1.0
