"""Two back ends under one plan: who runs what, in which order, and whose memory is read."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from compiler.contract.backend import Backend, BackendError
from compiler.contract.pipeline import PREFILL, SEE, ProgramSpec
from compiler.contract.session import Buffer, Session, pack_i32
from device_agent.runtime.spanning import SpannedPlan, address_of
from tests.unit.compiler.contract.test_pipeline import PIPELINE, PRUNED

WAIT_S = 60.0


class Toy(Backend):
    """Sees as many rows as the first pixel says; its arena changes with the next run."""

    name = "toy"

    def __init__(self, on_run: Callable[[str], None] = lambda program: None) -> None:
        super().__init__()
        self.arena = bytearray(200)
        self.given: list[tuple[int, list[int]]] = []
        self.on_run = on_run
        self.length = 0

    @property
    def kv_length(self) -> int:
        return self.length

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        self.length = length

    def _load(self) -> Mapping[str, ProgramSpec]:
        return PRUNED.programs

    def _unload(self) -> None:
        self.arena.clear()

    def _execute(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        self.on_run(program)
        view = memoryview(self.arena)
        if program == SEE:
            first = bytes(inputs["image"])[1]
            tokens = pack_i32(n for n in range(first, first + 5) for _ in range(4))
            self.arena[:] = bytes(200)
            self.arena[:100] = tokens + pack_i32(range(0, 10, 2))
            self.arena[100:104] = pack_i32([bytes(inputs["image"])[0]])
            return {"tokens": view[:80], "positions": view[80:100], "count": view[100:104]}
        if program == PREFILL:
            rows = memoryview(inputs["tokens"])
            self.given.append((address_of(rows), list(bytes(rows)[::16])))
            self.length += len(rows) // 16
            return {"embeds": view[:16]}
        self.length += len(memoryview(inputs["token_ids"])) // 4
        return {"token": memoryview(pack_i32([PIPELINE.tokens.eos]))}


def picture(rows: int, first: int) -> bytes:
    return bytes([rows, first, 0, 0, 0, 0])


def spanned(eyes: int = 2, **changes: object) -> tuple[list[Toy], Toy, SpannedPlan]:
    seeing, voice = [Toy() for _ in range(eyes)], Toy()
    for each in (*seeing, voice):
        each.init()
    return seeing, voice, SpannedPlan(seeing, voice, replace(PRUNED, **changes))


@pytest.mark.parametrize("eyes", [1, 2])
def test_rows_are_read_where_they_were_made(eyes: int) -> None:
    seeing, voice, plan = spanned(eyes)
    assert plan.see_slices([picture(3, 10), picture(5, 20), picture(1, 30)]) == 9
    assert [rows for _, rows in voice.given] == [[10, 11, 12], [20, 21, 22, 23, 24], [30]]
    places = [address_of(memoryview(seeing[epoch % eyes].arena)) for epoch in (1, 2, 3)]
    assert [pointer for pointer, _ in voice.given] == places
    assert (plan.kv_length, plan.epoch) == (9, 3)


def test_many_rows_go_over_in_chunks() -> None:
    _, voice, plan = spanned(1, max_step_tokens=2)
    assert plan.see_slices([picture(5, 10)]) == 5
    assert [rows for _, rows in voice.given] == [[10, 11], [12, 13], [14]]


def test_the_next_slice_is_seen_while_the_last_one_is_kept() -> None:
    seen, waited = [threading.Event() for _ in range(3)], []
    eyes, voice, plan = spanned()

    def see(program: str) -> None:
        seen[plan.epoch - 1].set()

    def keep(program: str) -> None:
        if len(waited) < 2:
            waited.append(seen[len(waited) + 1].wait(WAIT_S))

    for eye in eyes:
        eye.on_run = see
    voice.on_run = keep
    plan.see_slices([picture(2, 10), picture(2, 20), picture(2, 30)])
    assert waited == [True, True]
    assert [rows for _, rows in voice.given] == [[10, 11], [20, 21], [30, 31]]


def test_rows_that_were_overwritten_are_refused() -> None:
    _, _, plan = spanned(1)
    first = plan._look(picture(2, 10))
    plan._look(picture(2, 20))
    with pytest.raises(BackendError, match="epoch 1 were overwritten"):
        plan._keep(first)
    moved = {
        role: replace(record, view=memoryview(bytearray(80))) for role, record in first.items()
    }
    with pytest.raises(BackendError, match="epoch 1 have moved"):
        moved["tokens"].part(0, 16)


def test_a_slice_that_fails_leaves_those_before() -> None:
    _, voice, plan = spanned()
    with pytest.raises(BackendError, match="picture of 9 tokens"):
        plan.see_slices([picture(2, 10), picture(9, 20), picture(2, 30)])
    assert voice.given[0][1] == [10, 11]
    assert plan.see_slices([]) == 0


def test_a_session_runs_over_it() -> None:
    _, voice, plan = spanned()
    session = Session(plan, PRUNED)
    session.see(picture(3, 10))
    assert session.seen == 3
    assert session.answer([5]).stopped
    assert voice.length == 4
    assert voice.given[0][1] == [10, 11, 12]


def test_what_cannot_be_cut_is_refused() -> None:
    eyes, voice, _ = spanned()
    with pytest.raises(BackendError, match="fills its cache while it sees") as error:
        SpannedPlan(eyes, voice, PIPELINE)
    assert "adaptive pruning" in error.value.hint
    for wrong in ([], [*eyes, Toy()], [voice]):
        with pytest.raises(BackendError, match="one or two eyes"):
            SpannedPlan(wrong, voice, PRUNED)
