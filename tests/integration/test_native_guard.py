"""Faults of twelve kinds, made for real in native EdgeCard: what comes back, and afterwards."""

import json
import mmap
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compiler.contract.native import NativePlan
from compiler.contract.operations import ExpertEvent
from compiler.contract.pager import PrefetchStallError
from compiler.contract.plan_format import Kind
from device_agent.errors import AnswerError, RequestError
from device_agent.runtime.answers import Outcome, Question, require_answered
from device_agent.runtime.evaluation import load_evaluation
from device_agent.runtime.faults import FaultKind
from device_agent.runtime.heat import CriticalHeat
from device_agent.runtime.process_backend import ProcessBackend
from tests.factories.guarded import Guarded, Installed, installed

F = FaultKind
ASKED = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guarded")


@pytest.fixture(scope="module")
def at(folder: Path) -> Installed:
    return installed(folder)


@pytest.fixture(scope="module")
def asked(at: Installed, folder: Path) -> tuple[Question, ...]:
    return load_evaluation(folder / "v1" / "evaluation.json").cards[0][:ASKED]


@pytest.fixture(scope="module")
def expected(at: Installed, asked: tuple[Question, ...]) -> list[tuple[Any, str]]:
    """Return words and bits of each question, asked without a fault."""
    subject = Guarded(at)
    found = [subject.ask(question) for question in asked]
    subject.guard.close()
    return [(record.words, bits) for record, bits in found]


@pytest.fixture
def guarded(at: Installed) -> Iterator[Callable[..., Guarded]]:
    made: list[Guarded] = []

    def make(**changes: Any) -> Guarded:
        made.append(Guarded(at, **changes))
        return made[-1]

    yield make
    for subject in made:
        subject.guard.close()


class Case:
    """A guard, what is asked, and what a device without faults says."""

    def __init__(self, subject: Guarded, asked: Any, expected: Any) -> None:
        self.subject, self.asked, self.expected = subject, asked, expected

    def same(self, at: int = 0, *faults: FaultKind) -> None:
        """Ask: the same bits in spite of these faults, each counted."""
        before = dict(self.subject.guard.counts.faults)
        record, bits = self.subject.ask(self.asked[at])
        assert record.faults == faults, record
        assert (record.words, bits) == self.expected[at]
        assert (record.outcome, record.degraded) == (Outcome.ENDED, False)
        self._require_counted(before, faults)

    def failed(self, at: int = 0, *faults: FaultKind, outcome: Outcome = Outcome.ERROR) -> None:
        """Ask: no answer, said so and counted; nothing raised."""
        before = dict(self.subject.guard.counts.faults)
        record, _ = self.subject.ask(self.asked[at])
        assert record.faults == faults, record
        assert (record.outcome, record.words, record.degraded) == (outcome, (), True)
        assert not record.correct
        assert {fault.value for fault in faults} == set(record.reasons)
        with pytest.raises(AnswerError):
            require_answered(record)
        self._require_counted(before, faults)

    def fewer(self, at: int, *faults: FaultKind) -> None:
        """Ask: an answer with fewer experts or without any, marked and counted."""
        record, _ = self.subject.ask(self.asked[at])
        assert record.faults == faults, record
        assert (record.outcome, record.degraded) == (Outcome.ENDED, True)
        assert set(record.reasons) == {fault.value for fault in faults}
        assert self.subject.guard.counts.degraded[faults[0].value] >= 1

    def _require_counted(self, before: dict[FaultKind, int], faults: tuple[FaultKind, ...]) -> None:
        now = self.subject.guard.counts.faults
        for fault in set(faults):
            assert now[fault] - before.get(fault, 0) == faults.count(fault)


@pytest.fixture
def case(guarded: Any, asked: Any, expected: Any) -> Callable[..., Case]:
    return lambda **changes: Case(guarded(**changes), asked, expected)


def first_scale(plan: NativePlan) -> memoryview:
    """Return four bytes in the weights that are a float: NaN there makes no activation finite."""
    record = next(weight for weight in plan.plan.weights if weight.kind is Kind.F32)
    name = plan.plan.sections[record.section].name
    return plan.weights.section(name)[record.offset : record.offset + 4]


class Paging:
    """A pager that a test breaks: `fails(event)` may raise, or say that the expert is not there."""

    def __init__(self) -> None:
        self.fails: Callable[[ExpertEvent], bool] = lambda _event: False

    def __call__(self, event: ExpertEvent, _weight: int) -> bool:
        return not self.fails(event)


def quiet(_event: ExpertEvent) -> bool:
    return False


def raises(error: Exception, *events: ExpertEvent) -> Callable[[ExpertEvent], bool]:
    def fails(event: ExpertEvent) -> bool:
        if event in events:
            raise error
        return False

    return fails


PAGER_FAULTS = (
    raises(OSError(5, "Input/output error"), ExpertEvent.PREFETCH),
    raises(OSError(5, "Input/output error"), ExpertEvent.LOAD),
    raises(MemoryError(), ExpertEvent.PREFETCH),
    raises(PrefetchStallError("late"), ExpertEvent.PREFETCH),
    raises(ZeroDivisionError(), ExpertEvent.USE),
    lambda event: event is ExpertEvent.USE,
)


def damage(plan: NativePlan, draw: random.Random) -> None:
    """Flip a bit somewhere in the weights."""
    section = plan.weights.section(draw.choice(plan.weights.names))
    section[draw.randrange(len(section))] ^= 1 << draw.randrange(8)


class TestWithoutFaults:
    def test_the_guard_changes_nothing_and_counts_nothing(self, case: Any) -> None:
        subject = case()
        for at in range(ASKED):
            subject.same(at)
        facts = subject.subject.guard.facts["guard"]
        assert facts["faults"] == facts["degraded"] == {}
        assert facts["weights"]["hashed_bytes"] > 0


class TestWeights:
    def test_a_flipped_bit_is_found_between_answers_and_mended(self, case: Any) -> None:
        subject = case()
        subject.same()
        plan = subject.subject.plan
        for at in range(4):
            plan.weights.section("expert.L2.E5")[100 * at] ^= 1 << at
        found = []
        for _ in range(200):
            found += subject.subject.ask(subject.asked[0])[0].faults
            if found:
                break
        assert found == [F.CORRUPT_WEIGHTS]
        facts = subject.subject.guard.facts["guard"]["weights"]
        assert (facts["repairs"], facts["damaged"]) == (1, 0)
        assert facts["suspect_answers"] >= 1
        for at in range(ASKED):
            subject.same(at)

    def test_without_a_whole_copy_nothing_is_answered(self, case: Any, at: Installed) -> None:
        subject = case()
        plan, store = subject.subject.plan, at.store
        scrubber = subject.subject.guard._opened.scrubber
        name = "expert.L0.E3"
        path = store.path(scrubber._digests[name])
        whole = path.read_bytes()
        path.write_bytes(b"\xff" + whole[1:])
        plan.weights.section(name)[0] ^= 0x40
        scrubber.check_all()
        subject.failed(0, F.CORRUPT_WEIGHTS)
        subject.failed(1, F.CORRUPT_WEIGHTS)
        store.put(whole, scrubber._digests[name])
        for index in range(ASKED):
            subject.same(index)

    def test_a_weight_that_is_no_number_is_loaded_again(self, case: Any) -> None:
        subject = case()
        subject.same()
        first_scale(subject.subject.plan)[:] = b"\xff\xff\xff\x7f"
        record, bits = subject.subject.ask(subject.asked[1])
        assert (record.words, bits) == subject.expected[1]
        assert set(record.faults) <= {F.NOT_FINITE, F.CORRUPT_WEIGHTS, F.KERNEL_STATUS}
        assert F.CORRUPT_WEIGHTS in record.faults
        subject.same(2)

    def test_what_is_no_number_is_no_answer(self, case: Any) -> None:
        subject = case(scrubbed=False)
        where = first_scale(subject.subject.plan)
        before = bytes(where)
        where[:] = b"\xff\xff\xff\x7f"
        subject.failed(0, F.NOT_FINITE, F.NOT_FINITE)
        where[:] = before
        subject.same(0)


class TestExperts:
    def test_an_absent_expert_is_asked_for_once_more(self, case: Any) -> None:
        paging, missed = Paging(), []

        def once(event: ExpertEvent) -> bool:
            if event is ExpertEvent.LOAD and not missed:
                missed.append(event)
                return True
            return False

        paging.fails = once
        subject = case(pager=paging)
        subject.same(0, F.MISSING_EXPERT)
        subject.same(1)

    def test_an_expert_that_stays_away_is_done_without(self, case: Any) -> None:
        paging = Paging()
        paging.fails = lambda event: event is ExpertEvent.USE
        subject = case(pager=paging, banded=True)
        subject.fewer(0, F.MISSING_EXPERT, F.MISSING_EXPERT, F.MISSING_EXPERT)
        substitutes = subject.subject.guard.facts["substitutes"]
        assert substitutes["ran"]["step.narrow"] > 0
        paging.fails = lambda _event: False
        assert subject.subject.ask(subject.asked[0])[0].faults == ()

    def test_a_disk_that_fails_while_fetching_ahead(self, case: Any, tmp_path: Path) -> None:
        paging = Paging()

        def read(event: ExpertEvent) -> bool:
            if event is ExpertEvent.PREFETCH:
                (tmp_path / "expert").read_bytes()
            return False

        paging.fails = read
        subject = case(pager=paging)
        subject.same(0, F.DISK)
        (tmp_path / "expert").write_bytes(b"here")
        subject.same(1)

    def test_a_disk_that_fails_for_good(self, case: Any, tmp_path: Path) -> None:
        paging = Paging()
        paging.fails = lambda _event: not (tmp_path / "expert").read_bytes()
        subject = case(pager=paging)
        subject.fewer(0, F.DISK, F.DISK)
        (tmp_path / "expert").write_bytes(b"here")
        subject.same(0)

    def test_fetching_ahead_that_stalls(self, case: Any) -> None:
        paging, never = Paging(), threading.Event()

        def stalls(event: ExpertEvent) -> bool:
            if event is ExpertEvent.PREFETCH and not never.wait(0.002):
                raise PrefetchStallError("an expert did not come within 2 ms")
            return False

        paging.fails = stalls
        subject = case(pager=paging)
        subject.same(0, F.PREFETCH_STALL)
        never.set()
        subject.same(1)

    def test_no_memory_for_what_is_fetched_ahead(self, case: Any) -> None:
        paging, mapped = Paging(), []
        subject = case(pager=paging)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits = resource.getrlimit(resource.RLIMIT_AS)

        def maps(event: ExpertEvent) -> bool:
            if event is ExpertEvent.PREFETCH:
                mapped.append(mmap.mmap(-1, 1 << 30))
            return False

        paging.fails = maps
        resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + (256 << 20), limits[1]))
        try:
            subject.same(0, F.OUT_OF_MEMORY)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert not mapped
        paging.fails = lambda _event: False
        subject.same(1)


class TestTime:
    def test_an_answer_that_takes_too_long_ends_between_two_calls(self, case: Any) -> None:
        paging, until = Paging(), time.perf_counter() + 3.0
        paging.fails = lambda _event: bool(time.sleep(max(0.0, until - time.perf_counter())))
        subject = case(pager=paging, timeout_s=2.0)
        subject.failed(0, F.TIMEOUT, outcome=Outcome.TIMEOUT)
        assert subject.subject.guard.counts.stuck == 0

    def test_a_native_call_that_does_not_return_costs_its_plan(self, case: Any) -> None:
        paging, never = Paging(), threading.Event()
        paging.fails = lambda _event: not never.wait(60)
        subject = case(pager=paging, timeout_s=0.5)
        stuck = subject.subject.plan
        subject.failed(0, F.TIMEOUT, outcome=Outcome.TIMEOUT)
        counts = subject.subject.guard.counts
        assert counts.stuck == 1
        paging.fails = lambda _event: False
        subject.subject.guard._timeout_s = 30.0
        record, bits = subject.subject.ask(subject.asked[0])
        assert (record.words, bits) == subject.expected[0]
        assert counts.restarts == 1
        assert subject.subject.plan is not stuck
        never.set()
        for _ in range(2000):
            if stuck._library is None:
                break
            time.sleep(0.01)
        assert stuck._library is None, "closed when its call came back"

    def test_a_text_question_after_a_restart_is_about_the_same_picture(self, case: Any) -> None:
        subject = case()
        subject.same(0)
        subject.subject.guard._restart()
        question = subject.asked[1]
        record, _ = subject.subject.ask(Question(b"", question.prompt, question.words))
        assert record.words == subject.expected[1][0]


class TestBrokenForGood:
    """In a process of their own: see `tests.simulators.broken_process`."""

    @pytest.mark.parametrize(
        ("fault", "kind"),
        [
            pytest.param(
                "thread",
                F.DEAD_WORKER,
                marks=pytest.mark.skipif(
                    platform.machine() != "x86_64", reason="the fault is machine code"
                ),
            ),
            ("context", F.KERNEL_STATUS),
        ],
    )
    def test_the_plan_is_built_anew(
        self, expected: Any, folder: Path, fault: str, kind: FaultKind
    ) -> None:
        command = [sys.executable, "-m", "tests.simulators.broken_process", fault, str(folder)]
        done = subprocess.run(command, capture_output=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr.decode()
        found = json.loads(done.stdout)
        assert [(tuple(words), bits) for words, bits, _ in found["told"]] == expected
        assert [faults for _, _, faults in found["told"]] == [[], [kind.value], []]
        assert (found["threads"], found["lost"], found["is_new"]) == (3, 0, True)


class TestProcess:
    def test_a_runner_whose_process_is_killed(self, case: Any, at: Installed) -> None:
        runners: list[Elsewhere] = []

        def wrap(plan: NativePlan) -> Elsewhere:
            runners.append(Elsewhere(at, plan))
            return runners[-1]

        subject = case(wrap=wrap)
        subject.same(0)
        pid = runners[0].backend.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        subject.same(1, F.CRASH)
        assert len(runners) == 2
        subject.same(2)


class TestManyFaults:
    def test_whatever_goes_wrong_an_answer_is_right_or_says_that_it_is_not(self, case: Any) -> None:
        """Faults drawn at random, several at once; a soak of a million steps is another tier."""
        draw = random.Random(7)
        paging = Paging()
        subject = case(pager=paging)
        guard = subject.subject.guard
        expected, words = subject.expected, [words for words, _ in subject.expected]
        silent = met = 0
        for _ in range(150):
            paging.fails = draw.choice((*PAGER_FAULTS, quiet, quiet))
            if draw.random() < 0.2:
                damage(subject.subject.plan, draw)
            elif draw.random() < 0.05:
                guard._restart()
            at = draw.randrange(ASKED)
            record, bits = subject.subject.ask(subject.asked[at])
            met += bool(record.faults)
            if record.outcome is Outcome.ENDED and not record.degraded:
                silent += (record.words, bits) != expected[at]
            elif record.failed:
                assert record.words != words[at] or record.faults
        paging.fails = quiet
        scrubber = guard._opened.scrubber
        scrubber.check_all()
        assert silent <= scrubber.counts.suspects
        assert met > 30
        assert len(guard.counts.faults) >= 5
        for at in range(ASKED):
            subject.same(at)


class TestInputAndHeat:
    def test_what_cannot_be_asked_is_a_typed_error_and_no_fault_of_the_device(
        self, case: Any
    ) -> None:
        subject = case()
        subject.same(0)
        question = subject.asked[1]
        for bad in (
            Question(b"\0" * 7, question.prompt, question.words),
            Question(question.image, "no such prompt", ()),
            Question(question.image, question.prompt, ("unheard-of",)),
        ):
            record, _ = subject.subject.ask(bad)
            assert (record.outcome, record.faults) == (Outcome.ERROR, (F.BAD_INPUT,))
            assert not record.degraded
            with pytest.raises(RequestError):
                require_answered(record)
        assert subject.subject.guard.counts.faults[F.BAD_INPUT] == 3
        assert not subject.subject.guard.counts.degraded
        subject.same(2)

    def test_critical_heat_takes_the_least_until_it_is_over(
        self, case: Any, tmp_path: Path
    ) -> None:
        zone = tmp_path / "sys/class/thermal/thermal_zone0"
        zone.mkdir(parents=True)
        for name, text in {
            "type": "cpu-thermal",
            "temp": "99000",
            "trip_point_0_type": "passive",
            "trip_point_0_temp": "80000",
            "trip_point_1_type": "critical",
            "trip_point_1_temp": "100000",
        }.items():
            (zone / name).write_text(text + "\n")
        now = [0.0]
        heat = CriticalHeat(lambda: now[0], tmp_path)
        subject = case(banded=True, is_critical=heat.is_critical)
        subject.fewer(0, F.THERMAL)
        (zone / "temp").write_text("90000\n")
        now[0] = 2.0
        record, _ = subject.subject.ask(subject.asked[0])
        assert (record.faults, record.degraded) == ((), False)


class Elsewhere:
    """A runner whose plan lives in a process of its own."""

    def __init__(self, at: Installed, plan: NativePlan) -> None:
        self.weights, self.policy, self.lost_threads, self.threads = plan.weights, plan.policy, 0, 1
        module = [sys.executable, "-m", "device_agent.runtime.plan_runner"]
        bundle = [str(at.folder), at.pointer.manifest_sha256, str(at.pointer.size_bytes)]
        self.backend = ProcessBackend([*module, *bundle], plan.plan)
        self.backend.init()
        self.run = self.backend.execute

    @property
    def kv_length(self) -> int:
        return self.backend.kv_length

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        self.backend.kv_length = length

    def close(self) -> None:
        self.backend.close()
