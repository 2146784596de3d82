"""Choice of self-test vectors: enough of them, every expert reached, or an error that names it."""

import dataclasses
import hashlib

import pytest

from compiler.contract.pipeline import Pipeline, Port, ProgramSpec
from compiler.contract.selftest import parse_selftest, run_selftest
from compiler.contract.session import pack_i32
from compiler.driver.cards import Card, Question
from compiler.driver.selftest import Hint, card_order, make_selftest
from compiler.errors import SelfTestError
from tests.unit.compiler.contract.test_pipeline import PIPELINE

GRAPH = Pipeline(
    "graph", None, None, 0, 4, {"forward": ProgramSpec({"tensor": Port(4, 2, "f32", True)}, {})}
)


class ExpertPlan:
    """Token t goes through expert t of layer 0; pictures through expert 0 of layer 1."""

    def __init__(self, shift: int = 0) -> None:
        self.kv_length = 0
        self.shift = shift
        self.reached: set[str] = set()
        self.reported: set[str] = set()
        self.pictures = 0

    def run(self, program, inputs):
        data = b"".join(inputs[role] for role in sorted(inputs))
        if program == "see":
            self.kv_length += 3
            self.pictures += 1
            self.reached.add("expert.L1.E0")
            return {"index": memoryview(data)}
        if program == "step":
            ids = inputs["token_ids"]
            tokens = [int.from_bytes(ids[at : at + 4], "little") for at in range(0, len(ids), 4)]
            self.reached |= {f"expert.L0.E{token}" for token in tokens}
            self.kv_length += len(tokens)
            digest = hashlib.sha256(data + bytes([self.kv_length + self.shift])).digest()
            return {
                "token": memoryview(pack_i32([max(tokens[-1] - 1, 1)])),
                "logits": memoryview(digest),
            }
        self.reached.add(f"expert.L0.E{data[0] % 4}")
        return {"tensor": memoryview(data)}

    def take_reached(self):
        fresh, self.reported = self.reached - self.reported, set(self.reached)
        return frozenset(fresh)


def _cards(count: int) -> list[Card]:
    words = [("what",), ("what", "what"), ()]
    questions = tuple(Question(f"k{len(item)}", "question", item, ()) for item in words)
    return [Card(bytes([at] * 6), questions) for at in range(count)]


def test_it_records_what_a_native_plan_must_repeat() -> None:
    selftest = make_selftest(
        ExpertPlan(), PIPELINE, _cards(8), ["expert.L1.E0", "expert.L0.E2"], 16
    )
    assert len(selftest.vectors) == 16
    data = selftest.to_bytes()
    assert parse_selftest(data) == selftest
    assert run_selftest(ExpertPlan(), data).passed
    assert not run_selftest(ExpertPlan(shift=1), data).passed


def test_it_mixes_cards_and_kinds_of_questions() -> None:
    selftest = make_selftest(ExpertPlan(), PIPELINE, _cards(6), [], 16)
    names = [vector.name for vector in selftest.vectors[:6]]
    assert [name.split()[1] for name in names] == list("000111")
    assert {name.split()[3] for name in names[:3]} == set("012")


def test_it_asks_every_question_of_every_card_once() -> None:
    for count in range(1, 14):
        cards = [Card(b"", (Question("k", "question", (), ()),) * count)] * 3
        assert sorted(card_order(cards)) == [
            (card, item) for card in range(3) for item in range(count)
        ]


def test_it_sees_a_card_once_for_all_its_questions() -> None:
    plan = ExpertPlan()
    selftest = make_selftest(plan, PIPELINE, _cards(6), [], 16)
    assert plan.pictures == 6
    assert all(vector.runs[0].program == "see" for vector in selftest.vectors)
    assert run_selftest(ExpertPlan(), selftest.to_bytes()).passed


def test_it_feeds_the_answer_back_and_stops_at_the_end_token() -> None:
    selftest = make_selftest(ExpertPlan(), PIPELINE, _cards(6), [], 16)
    runs = selftest.vectors[0].runs
    # the prompt ends with <a> = 3, so the tokens are 2, then 1 = <eos>
    assert [run.program for run in runs] == ["see", "step", "step"]
    assert runs[2].inputs["token_ids"] == pack_i32([2])
    assert [run.kv_length for run in runs] == [0, 3, 6]


def test_it_adds_vectors_until_every_expert_is_reached() -> None:
    unseen_in_cards = "expert.L0.E6"
    selftest = make_selftest(
        ExpertPlan(), PIPELINE, _cards(8), ["expert.L1.E0", unseen_in_cards], 16
    )
    assert len(selftest.vectors) == 17
    assert selftest.vectors[-1].name.startswith("random prompt")
    assert 6 in selftest.experts[0]


def test_it_follows_hints_to_rare_experts() -> None:
    rare = Question("rare", "question", ("what", "là"), ())
    cards = [*_cards(6), Card(bytes(6), (rare,))]
    wrong = Hint(0, 1, frozenset({"expert.L0.E6", "expert.L0.E5"}))
    right = Hint(6, 0, frozenset({"expert.L0.E6"}))
    selftest = make_selftest(
        ExpertPlan(), PIPELINE, cards, ["expert.L0.E6"], 16, hints=lambda: [wrong, right]
    )
    assert len(selftest.vectors) == 17
    assert selftest.vectors[-1].name == "card 6 question 0 (rare)"


def test_it_names_the_experts_that_nothing_reaches() -> None:
    with pytest.raises(SelfTestError, match=r"reaches expert\.L0\.E99, expert\.L2\.E0"):
        make_selftest(
            ExpertPlan(), PIPELINE, _cards(8), ["expert.L2.E0", "expert.L0.E99", "expert.L1.E0"], 16
        )


def test_it_names_a_dozen_of_a_thousand_experts_that_nothing_reaches() -> None:
    absent = [f"expert.L9.E{at}" for at in range(1000)]
    with pytest.raises(SelfTestError, match=r"expert\.L9\.E11 and 988 more$"):
        make_selftest(ExpertPlan(), PIPELINE, _cards(8), absent, 16)


def test_it_makes_the_same_vectors_twice() -> None:
    first, second = (
        make_selftest(ExpertPlan(), PIPELINE, _cards(3), ["expert.L0.E6"], 16).to_bytes()
        for _ in range(2)
    )
    assert first == second


def test_it_works_without_a_calibration_set() -> None:
    selftest = make_selftest(ExpertPlan(), PIPELINE, [], ["expert.L0.E2"], 16)
    assert {vector.name.split()[0] for vector in selftest.vectors} == {"random"}


def test_it_feeds_seeded_rows_to_a_graph() -> None:
    selftest = make_selftest(ExpertPlan(), GRAPH, [], [f"expert.L0.E{at}" for at in range(4)], 16)
    lengths = {len(vector.runs[0].inputs["tensor"]) // 8 for vector in selftest.vectors}
    assert lengths == {1, 2, 3, 4}
    fixed = dataclasses.replace(
        GRAPH, programs={"forward": ProgramSpec({"tensor": Port(3, 2, "f32", False)}, {})}
    )
    selftest = make_selftest(ExpertPlan(), fixed, [], [], 16)
    assert {len(vector.runs[0].inputs["tensor"]) for vector in selftest.vectors} == {24}
