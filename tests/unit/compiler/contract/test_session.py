"""The greedy loop, over a runner whose answers are easy to foresee."""

from collections.abc import Mapping

import pytest

from compiler.contract.errors import ContractError, LimitExceededError
from compiler.contract.session import Session, pack_i32, step_inputs
from tests.unit.compiler.contract.test_pipeline import PIPELINE

EOS = 1


class CountingPlan:
    """Sees a picture as 3 rows; the token after a step is the last id less one (1 ends)."""

    def __init__(self) -> None:
        self.kv_length = 9
        self.calls: list[tuple[str, int, dict[str, list[int]]]] = []

    def run(self, program: str, inputs: Mapping[str, bytes]) -> Mapping[str, memoryview]:
        before = self.kv_length
        numbers = {
            role: [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
            for role, data in inputs.items()
            if program == "step"
        }
        self.calls.append((program, before, numbers))
        if program == "see":
            self.kv_length += 3
            return {}
        self.kv_length += len(numbers["token_ids"])
        return {"token": memoryview(pack_i32([numbers["token_ids"][-1] - 1]))}


def _session() -> tuple[CountingPlan, Session]:
    plan = CountingPlan()
    session = Session(plan, PIPELINE)
    session.see(bytes(6))
    return plan, session


def test_it_answers_until_the_end_token() -> None:
    plan, session = _session()
    answer = session.answer([6, 4])
    assert (answer.tokens, answer.stopped, answer.calls) == ((3, 2), True, 3)
    assert [(name, before) for name, before, _ in plan.calls] == [
        ("see", 0),
        ("step", 3),
        ("step", 5),
        ("step", 6),
    ]
    assert plan.calls[1][2] == {"token_ids": [6, 4], "positions": [64, 65]}
    assert plan.calls[3][2] == {"token_ids": [2], "positions": [67]}


def test_it_cuts_an_answer_off_at_the_limit() -> None:
    _, session = _session()
    answer = session.answer([40])
    assert (len(answer.tokens), answer.stopped, answer.calls) == (4, False, 4)


def test_it_answers_each_question_from_the_picture_alone() -> None:
    plan, session = _session()
    first = session.answer([6, 4])
    assert session.answer([6, 4]) == first
    assert plan.calls[4][1] == 3


def test_it_feeds_a_long_prompt_in_chunks() -> None:
    plan, session = _session()
    answer = session.answer([5] * 9 + [2])
    assert (answer.tokens, answer.calls) == ((), 2)
    assert plan.calls[1][2]["positions"] == list(range(64, 72))
    assert plan.calls[2][2] == {"token_ids": [5, 2], "positions": [72, 73]}


def test_it_stops_when_the_cache_is_full() -> None:
    plan, session = _session()
    answer = session.answer([40] * 12)
    assert (len(answer.tokens), answer.stopped) == (2, False)
    assert plan.kv_length == PIPELINE.max_context


def test_it_answers_in_words() -> None:
    _, session = _session()
    assert session.ask("question", ["what"]) == ("<q>",)


def test_it_refuses_what_it_cannot_take() -> None:
    _, session = _session()
    with pytest.raises(ContractError, match="picture of 5 bytes"):
        session.see(bytes(5))
    with pytest.raises(ContractError, match="empty prompt"):
        session.answer([])
    with pytest.raises(LimitExceededError, match="room for 13"):
        session.answer([5] * 14)
    with pytest.raises(ContractError, match="32-bit"):
        pack_i32([1 << 31])


def test_it_packs_ids_and_positions() -> None:
    assert step_inputs([7], 2) == {
        "token_ids": b"\x07\x00\x00\x00",
        "positions": b"\x02\x00\x00\x00",
    }
