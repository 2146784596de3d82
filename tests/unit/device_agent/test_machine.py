from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from compiler.contract.errors import DigestMismatchError
from compiler.contract.protocol import Offer, OfferKind, UpdateState
from device_agent.errors import (
    AgentError,
    CrashLoopError,
    DiskFullError,
    NetworkError,
    SelfTestFailedError,
    UnfitError,
)
from device_agent.machine import COMPACT_BYTES, MAX_RESUMES, Facts, StepResult, UpdateMachine
from device_agent.states import Event, SlotFact, State
from device_agent.storage.journal import Journal
from device_agent.update.context import UpdateContext
from tests.simulators.disk import FastDisk, FullDisk

OFFER = Offer(5, 1, OfferKind.INSTALL, "2", "a" * 64)
FORWARD = {
    State.VERIFYING: Event.VERIFIED,
    State.DOWNLOADING: Event.DOWNLOADED,
    State.APPLYING: Event.APPLIED,
    State.STAGING: Event.STAGED,
    State.ACTIVATING: Event.ACTIVATED,
    State.PROBATION: Event.PASSED,
    State.COMMITTING: Event.COMMITTED,
    State.ROLLING_BACK: Event.RESTORED,
    State.CLEANING: Event.CLEANED,
}
Raises = Mapping[State, Exception]


class Rig:
    """A machine whose steps do what the table expects, or raise what a test says."""

    def __init__(self, folder: Path, raises: Raises | None = None, disk=None) -> None:
        self.raises = dict(raises or {})
        self.released = 0
        self.ran: list[State] = []
        self.journal = Journal(disk or FastDisk(), folder / "journal")
        facts = Facts(lambda: "b" * 64, lambda _context: 42, self.release)
        steps = {state: self.step(state) for state in FORWARD}
        self.machine = UpdateMachine(self.journal, steps, facts)

    def release(self, _context: UpdateContext) -> None:
        self.released += 1

    def step(self, state: State) -> Callable[[UpdateContext], StepResult | None]:
        def run(context: UpdateContext) -> StepResult | None:
            self.ran.append(state)
            if state in self.raises:
                raise self.raises[state]
            done = state is State.COMMITTING
            return StepResult(FORWARD[state], context.succeeded() if done else context)

        return run

    def go(self) -> "Rig":
        while self.machine.advance():
            pass
        return self

    @property
    def states(self) -> list[UpdateState]:
        return [report.state for report in self.machine.pending]


def test_it_goes_through_every_state_and_reports_each_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.machine.start(OFFER)
    rig.go()
    assert rig.ran == [state for state in FORWARD if state is not State.ROLLING_BACK]
    assert rig.machine.state is State.IDLE
    assert [report.seq for report in rig.machine.pending] == list(range(1, 8))
    last = rig.machine.pending[-1]
    assert (last.state, last.running_manifest_sha256, last.downloaded_bytes) == (
        UpdateState.SUCCEEDED,
        "b" * 64,
        42,
    )


@pytest.mark.parametrize(
    ("state", "error", "outcome", "code"),
    [
        (State.VERIFYING, NetworkError("x"), UpdateState.FAILED, "agent.network"),
        (State.DOWNLOADING, DiskFullError("x"), UpdateState.FAILED, "agent.disk_full"),
        (State.APPLYING, DigestMismatchError("x"), UpdateState.FAILED, "agent.protocol"),
        (State.STAGING, ZeroDivisionError("x"), UpdateState.FAILED, "agent.error"),
        (State.ACTIVATING, SelfTestFailedError("x"), UpdateState.FAILED, "agent.self_test"),
        (State.PROBATION, UnfitError("x"), UpdateState.ROLLED_BACK, "agent.unfit"),
        (State.PROBATION, MemoryError("x"), UpdateState.ROLLED_BACK, "agent.error"),
    ],
)
def test_it_turns_whatever_a_step_raises_into_an_outcome(
    tmp_path: Path, state: State, error: Exception, outcome: UpdateState, code: str
) -> None:
    rig = Rig(tmp_path, {state: error})
    rig.machine.start(OFFER)
    rig.go()
    assert rig.machine.state is State.IDLE
    assert rig.machine.pending[-1].state is outcome
    assert rig.machine.pending[-1].code == code
    assert (State.ROLLING_BACK in rig.ran) == (state in (State.ACTIVATING, State.PROBATION))
    assert rig.released == isinstance(error, DiskFullError)


@pytest.mark.parametrize("state", [State.COMMITTING, State.CLEANING])
def test_it_tries_again_what_must_finish(tmp_path: Path, state: State) -> None:
    rig = Rig(tmp_path, {state: DiskFullError("x")})
    rig.machine.start(OFFER)
    rig.go()
    assert rig.machine.state is state
    rig.raises.clear()
    rig.go()
    assert rig.machine.pending[-1].state is UpdateState.SUCCEEDED


@pytest.mark.parametrize("stop", [state for state in FORWARD if state is not State.ROLLING_BACK])
def test_it_goes_on_where_it_was(tmp_path: Path, stop: State) -> None:
    first = Rig(tmp_path)
    first.machine.start(OFFER)
    while first.machine.state is not stop:
        first.machine.advance()
    reported = first.states
    first.machine.close()
    second = Rig(tmp_path)
    assert second.machine.state is stop
    fact = SlotFact.NOT_RUNNING
    if stop in (State.PROBATION, State.COMMITTING, State.CLEANING):
        fact = SlotFact.ON_TRIAL
    second.machine.resume(fact)
    second.go()
    assert second.machine.state is State.IDLE
    assert second.states[: len(reported)] == reported
    assert second.states[-1] is UpdateState.SUCCEEDED
    assert [report.seq for report in second.machine.pending] == list(
        range(1, len(second.states) + 1)
    )


def test_it_gives_up_a_step_that_brings_the_agent_down_each_time(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.machine.start(OFFER)
    for _ in range(MAX_RESUMES + 1):
        rig.machine.close()
        rig = Rig(tmp_path)
        rig.machine.resume(SlotFact.NOT_RUNNING)
    rig.go()
    assert rig.machine.pending[-1].code == "agent.crash_loop"
    assert rig.ran == [State.CLEANING]


def test_it_rolls_back_when_a_start_was_given_up(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.machine.start(OFFER)
    while rig.machine.state is not State.ACTIVATING:
        rig.machine.advance()
    rig.machine.close()
    rig = Rig(tmp_path)
    rig.machine.resume(SlotFact.ON_TRIAL, CrashLoopError("again and again"))
    rig.go()
    assert rig.ran == [State.ROLLING_BACK, State.CLEANING]
    assert rig.machine.pending[-1].state is UpdateState.ROLLED_BACK


def test_it_remembers_which_reports_were_sent(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.machine.start(OFFER)
    rig.go()
    rig.machine.sent(5)
    rig.machine.close()
    assert [report.seq for report in Rig(tmp_path).machine.pending] == [6, 7]


def test_it_keeps_the_journal_short(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for number in range(60):
        rig.machine.start(replace(OFFER, update_id=number))
        rig.go()
        rig.machine.sent(len(rig.machine.pending))
    assert rig.journal.size_bytes < COMPACT_BYTES * 2
    rig.machine.close()
    again = Rig(tmp_path)
    assert again.machine.context is not None
    assert again.machine.context.update_id == 59
    assert again.machine.pending == ()


def test_it_changes_nothing_when_the_journal_cannot_be_written(tmp_path: Path) -> None:
    disk = FullDisk(10**9, 10**9)
    rig = Rig(tmp_path, disk=disk)
    rig.machine.start(OFFER)
    disk.first, disk.last = 0, 10**9
    with pytest.raises(AgentError):
        rig.machine.advance()
    assert rig.machine.state is State.VERIFYING
    disk.last = -1
    rig.go()
    assert rig.machine.pending[-1].state is UpdateState.SUCCEEDED
    rig.machine.close()
    assert Rig(tmp_path).machine.state is State.IDLE


def test_it_passes_over_records_of_another_format(tmp_path: Path) -> None:
    journal = Journal(FastDisk(), tmp_path / "journal")
    journal.open()
    journal.append({"t": "state", "state": "dancing", "context": None, "reports": []})
    journal.append({"t": "state", "state": "idle", "context": {"kind": 3}})
    journal.close()
    assert Rig(tmp_path).machine.state is State.IDLE


def test_it_repeats_an_outcome_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.machine.repeat_outcome()
    assert rig.states == []
    rig.machine.start(OFFER)
    rig.go()
    rig.machine.sent(len(rig.states))
    rig.machine.repeat_outcome()
    rig.machine.repeat_outcome()
    assert rig.states == [UpdateState.SUCCEEDED]
    assert rig.machine.pending[0].seq == 8
