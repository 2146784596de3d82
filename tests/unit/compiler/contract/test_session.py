"""The greedy loop, over a runner whose answers are easy to foresee."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from compiler.contract.errors import ContractError, LimitExceededError
from compiler.contract.pipeline import ImageSpec, Port, ProgramSpec
from compiler.contract.session import Session, pack_i32, see_inputs, step_inputs
from tests.unit.compiler.contract.test_pipeline import PIPELINE, PRUNED

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


class PruningPlan:
    """Keeps as many of five tokens as the first pixel says; tokens are their number, four times.

    Every run overwrites what the last one gave, as an arena does.
    """

    def __init__(self) -> None:
        self.kv_length = 0
        self.arena = bytearray(200)
        self.filled: list[tuple[list[int], list[int]]] = []

    def run(self, program: str, inputs: Mapping[str, bytes]) -> Mapping[str, memoryview]:
        numbers = {
            role: list(memoryview(bytes(data)).cast("B")[::4]) for role, data in inputs.items()
        }
        self.arena[:] = bytes(200)
        if program == "prefill":
            self.filled.append((numbers["tokens"][::4], numbers["positions"]))
            self.kv_length += len(numbers["positions"])
            return {}
        values = [pack_i32(n for n in range(10, 15) for _ in range(4)), pack_i32(range(0, 10, 2))]
        self.arena[:100] = values[0] + values[1]
        self.arena[100:104] = pack_i32([bytes(inputs["image"])[0]])
        view = memoryview(self.arena)
        return {"tokens": view[:80], "positions": view[80:100], "count": view[100:104]}


def _see(kept: int, max_step_tokens: int = 8) -> PruningPlan:
    plan = PruningPlan()
    pipeline = replace(PRUNED, max_step_tokens=max_step_tokens)
    Session(plan, pipeline).see(bytes([kept, 0, 0, 0, 0, 0]))
    return plan


@pytest.mark.parametrize("kept", [1, 3, 5])
def test_it_prefills_the_rows_that_the_picture_kept(kept: int) -> None:
    plan = _see(kept)
    assert plan.filled == [(list(range(10, 10 + kept)), list(range(0, 2 * kept, 2)))]
    assert plan.kv_length == kept


def test_it_prefills_many_rows_in_chunks() -> None:
    assert _see(5, max_step_tokens=2).filled == [
        ([10, 11], [0, 2]),
        ([12, 13], [4, 6]),
        ([14], [8]),
    ]


def test_another_picture_leaves_another_number_of_rows() -> None:
    plan = PruningPlan()
    session = Session(plan, PRUNED)
    for kept in (5, 2, 4):
        session.see(bytes([kept, 0, 0, 0, 0, 0]))
        plan.filled.clear()
        plan.kv_length = 0
    session.see(bytes([2, 0, 0, 0, 0, 0]))
    assert (plan.kv_length, len(plan.filled)) == (2, 1)


@pytest.mark.parametrize("kept", [0, 6, 255])
def test_it_refuses_a_count_that_the_plan_cannot_hold(kept: int) -> None:
    with pytest.raises(ContractError, match=f"picture of {kept} tokens"):
        _see(kept)


@pytest.mark.parametrize(("grid", "columns"), [(None, 3), ((1, 9), 9), ((9, 1), 1)])
def test_it_says_where_each_token_of_a_picture_stands(
    grid: tuple[int, int] | None, columns: int
) -> None:
    places = {r: Port(9, 1, "i32", False) for r in ("positions", "positions_height")}
    places["positions_width"] = Port(9, 1, "i32", False)
    see = ProgramSpec({"image": Port(1, 9, "u8", False), **places}, {})
    pipeline = replace(PIPELINE, image=ImageSpec(3, 3, 1, grid), programs={"see": see})
    inputs = see_inputs(pipeline, bytes(9))
    numbers = range(9)
    assert inputs["positions"] == pack_i32([0] * 9)
    assert inputs["positions_height"] == pack_i32([n // columns for n in numbers])
    assert inputs["positions_width"] == pack_i32([n % columns for n in numbers])


@pytest.mark.parametrize(("grid", "count"), [(None, 8), ((2, 3), 9)])
def test_it_refuses_a_grid_of_another_number_of_tokens(
    grid: tuple[int, int] | None, count: int
) -> None:
    roles = ("positions", "positions_height", "positions_width")
    ports = {role: Port(count, 1, "i32", False) for role in roles}
    see = ProgramSpec({"image": Port(1, 9, "u8", False), **ports}, {})
    pipeline = replace(PIPELINE, image=ImageSpec(3, 3, 1, grid), programs={"see": see})
    with pytest.raises(ContractError, match=f"{count} tokens in a grid"):
        see_inputs(pipeline, bytes(9))
