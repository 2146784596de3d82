"""The guard's table, its thread, its scrubber, and what it does when nothing helps."""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from errno import ENOMEM

import pytest

from compiler.contract.backend import BackendCrashedError
from compiler.contract.degrade import Rung
from compiler.contract.errors import ContractError, LimitExceededError
from compiler.contract.native_errors import (
    BadIndexError,
    ContextLostError,
    ExpertAbsentError,
    NativeError,
    NotFiniteError,
)
from compiler.contract.operations import ExpertEvent
from compiler.contract.pager import PagerSwitch, PrefetchStallError
from device_agent.config import AgentConfig
from device_agent.errors import BundleError, RequestError, UnfitError
from device_agent.runtime.answers import AnswerRecord, Outcome, Question
from device_agent.runtime.custody import MAX_STUCK, Opened
from device_agent.runtime.faults import AS_ASKED, REMEDIES, FaultKind, Way, kind_of
from device_agent.runtime.guard import InferenceGuard
from device_agent.runtime.hand import Hand, StuckError
from device_agent.runtime.scrubber import SLICE_BYTES, Scrubber
from device_agent.update.probation import Probation

SHA = "a" * 64
QUESTION = Question(b"", "question", ("no",))


def no_memory() -> NativeError:
    error = NativeError("cannot map 64 bytes")
    error.__cause__ = OSError(ENOMEM, "Cannot allocate memory")
    return error


class TestKinds:
    def test_there_are_twelve_and_each_has_a_row(self) -> None:
        assert len(FaultKind) == 12
        assert set(REMEDIES) == set(FaultKind)

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (MemoryError(), FaultKind.OUT_OF_MEMORY),
            (no_memory(), FaultKind.OUT_OF_MEMORY),
            (NotFiniteError("x"), FaultKind.NOT_FINITE),
            (TimeoutError(), FaultKind.TIMEOUT),
            (ExpertAbsentError("x"), FaultKind.MISSING_EXPERT),
            (ContextLostError("x"), FaultKind.CRASH),
            (BackendCrashedError("x"), FaultKind.CRASH),
            (ZeroDivisionError(), FaultKind.CRASH),
            (RequestError("x"), FaultKind.BAD_INPUT),
            (LimitExceededError("x"), FaultKind.BAD_INPUT),
            (BadIndexError("x"), FaultKind.KERNEL_STATUS),
            (ContractError("x"), FaultKind.KERNEL_STATUS),
            (OSError(5, "Input/output error"), FaultKind.DISK),
            (PrefetchStallError("x"), FaultKind.PREFETCH_STALL),
        ],
    )
    def test_an_exception_has_one(self, error: Exception, kind: FaultKind) -> None:
        assert kind_of(error) is kind

    def test_a_pager_that_does_not_fetch_ahead_is_told_of_no_prefetch(self) -> None:
        told: list[ExpertEvent] = []
        switch = PagerSwitch(lambda event, _weight: not told.append(event))
        switch.is_fetching_ahead = False
        assert [switch(event, 1) for event in ExpertEvent] == [False, True, True]
        switch.is_fetching_ahead = True
        assert switch(ExpertEvent.PREFETCH, 1)
        assert told == [ExpertEvent.LOAD, ExpertEvent.USE, ExpertEvent.PREFETCH]


class TestHand:
    def test_it_returns_and_raises_what_was_done(self) -> None:
        hand = Hand("test")
        assert hand.call(lambda: threading.current_thread().name, 60) == "test"
        with pytest.raises(LookupError, match="gone"):
            hand.call(lambda: (_ for _ in ()).throw(LookupError("gone")), 60)
        threads = threading.active_count()
        hand.close()
        assert threading.active_count() == threads - 1
        assert hand.call(lambda: 5, 60) == 5
        hand.close()

    def test_a_stuck_one_is_left_and_says_when_it_comes_back(self) -> None:
        hand, never, back = Hand("test"), threading.Event(), threading.Event()
        with pytest.raises(StuckError):
            hand.call(lambda: never.wait(60), 0.01, back.set)
        assert hand.call(lambda: 5, 60) == 5
        assert not back.is_set()
        never.set()
        assert back.wait(60)
        hand.close()


class Memory:
    """Sections in memory."""

    def __init__(self, **sections: bytes) -> None:
        self.held = {name: bytearray(data) for name, data in sections.items()}
        self.damaged: set[str] = set()
        self.experts: dict[str, bool] = {}
        self.asked: list[int] = []

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.held)

    def section(self, name: str) -> memoryview:
        return memoryview(self.held[name])

    def check_experts(self, most_bytes: int) -> dict[str, bool]:
        self.asked.append(most_bytes)
        looked, self.experts = self.experts, dict.fromkeys(self.experts, True)
        return looked


class TestScrubber:
    @staticmethod
    def of(memory: Memory, read: Callable[[str], memoryview] | None = None) -> Scrubber:
        signed = {name: bytes(data) for name, data in memory.held.items()}
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in signed.items()}
        return Scrubber(memory, digests, read or (lambda name: memoryview(signed[name])))

    def test_experts_that_come_and_go_are_looked_at_too(self) -> None:
        memory = Memory(a=b"x")
        scrubber = self.of(memory)
        memory.experts = {"e0": True, "e1": True}
        assert [scrubber.answered() for _ in range(3)] == [0, 0, 0]
        memory.experts = {"e0": True, "e1": False}
        assert [scrubber.answered() for _ in range(2)] == [1, 0]
        facts = scrubber.facts()
        assert (facts["repairs"], facts["suspect_answers"], facts["damaged"]) == (1, 1, 0)
        memory.experts = {"e0": False, "e1": False}
        assert scrubber.check_all() == 2
        assert set(memory.asked[:-1]) == {SLICE_BYTES}
        assert memory.asked[-1] > 1 << 40

    def test_who_shares_weights_knows_that_they_are_damaged(self) -> None:
        """A plan that is built anew, or a new bundle, gets the memory of the one before."""
        memory, whole = Memory(a=b"xyz"), []

        def read(_name: str) -> memoryview:
            return memoryview(whole[0] if whole else b"")

        before, after = self.of(memory, read), self.of(memory, read)
        memory.held["a"][1] ^= 1
        assert before.answered() == 1
        assert not after.repair()
        assert after.facts()["damaged"] == 1
        whole.append(b"xyz")
        assert after.repair()
        assert before.facts()["damaged"] == 0
        assert memory.held["a"] == b"xyz"

    def test_it_hashes_a_slice_at_a_time_and_finds_each_changed_section(self) -> None:
        memory = Memory(a=b"x" * (2 * SLICE_BYTES + 5), b=b"y" * 7)
        scrubber = self.of(memory)
        assert [scrubber.answered() for _ in range(8)] == [0] * 8
        assert (scrubber.counts.passes, scrubber.counts.hashed_bytes) == (
            2,
            2 * (2 * SLICE_BYTES + 12),
        )
        memory.held["a"][SLICE_BYTES] ^= 1
        memory.held["b"][6] ^= 128
        assert [scrubber.answered() for _ in range(4)] == [0, 0, 1, 1]
        assert scrubber.facts() == {
            "hashed_bytes": 3 * (2 * SLICE_BYTES + 12),
            "passes": 3,
            "repairs": 2,
            "damaged": 0,
            "suspect_answers": 4 + 4,
        }
        assert memory.held["b"] == b"y" * 7
        assert scrubber.check_all() == 0

    def test_it_says_so_while_a_section_cannot_be_loaded_again(self) -> None:
        memory, is_there = Memory(a=b"x" * 7), [False]

        def read(_name: str) -> memoryview:
            if not is_there[0]:
                raise BundleError("object is damaged")
            return memoryview(b"x" * 7)

        scrubber = self.of(memory, read)
        memory.held["a"][0] = 0
        assert [scrubber.answered() for _ in range(3)] == [1, 0, 0]
        assert not scrubber.repair()
        is_there[0] = True
        assert scrubber.repair()
        assert [scrubber.answered() for _ in range(2)] == [0, 0]

    def test_a_section_that_is_paged_out_meanwhile_is_left_out(self) -> None:
        memory = Memory(a=b"x" * (SLICE_BYTES + 1), b=b"y")
        scrubber = self.of(memory)
        scrubber.answered()
        del memory.held["a"]
        assert [scrubber.answered() for _ in range(4)] == [0] * 4
        assert scrubber.counts.passes == 3


@dataclass
class Fake:
    """An answerer that fails as a test wants: what each attempt meets, None for an answer."""

    meets: list[FaultKind | None]
    rungs: frozenset[Rung] = frozenset({Rung.NORMAL})
    ways: list[Way] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)
    lost_threads: int = 0
    closed: bool = False
    has_fallback: bool = False
    hangs: threading.Event | None = None
    manifest_sha256: str = SHA

    @property
    def facts(self) -> dict[str, object]:
        return {"threads": 1}

    def understands(self, question: Question) -> bool:
        return question.prompt == "question"

    def answer(self, question: Question, way: Way = AS_ASKED, limit_s: float = 1.0) -> AnswerRecord:
        self.ways.append(way)
        self.images.append(question.image)
        if self.hangs is not None:
            self.hangs.wait(60)
        met = self.meets.pop(0) if self.meets else None
        outcome = Outcome.ENDED if met is None else Outcome.ERROR
        words = ("yes",) if met is None else ()
        return AnswerRecord(SHA, words, outcome, None, 1.0, faults=() if met is None else (met,))

    def close(self) -> None:
        self.closed = True


def guard_of(*fakes: Fake, **changes: object) -> InferenceGuard:
    left = list(fakes)

    def reopen() -> Opened:
        if not left:
            raise BundleError("it is gone")
        return Opened(left.pop(0))

    return InferenceGuard(reopen, **{"timeout_s": 60.0, **changes})  # type: ignore[arg-type]


class TestRemedies:
    def test_what_a_remedy_gives_is_an_answer(self) -> None:
        fake = Fake([FaultKind.DISK])
        subject = guard_of(fake)
        record = subject.answer(QUESTION)
        assert (record.words, record.faults, record.degraded) == (
            ("yes",), (FaultKind.DISK,), False,
        )  # fmt: skip
        assert fake.ways == [AS_ASKED, Way(prefetch=False)]
        facts = subject.facts["guard"]
        assert isinstance(facts, dict)
        assert (facts["faults"], facts["recovered"]) == ({"disk": 1}, 1)

    def test_fewer_experts_are_tried_only_where_there_are_fewer(self) -> None:
        fails = [FaultKind.KERNEL_STATUS] * 9
        for rungs, ways in (
            ({Rung.NORMAL}, [Way(alone=True)]),
            ({Rung.NORMAL, Rung.FEWER_EXPERTS}, [Way(alone=True), Way(fewest=True)]),
        ):
            first, second = Fake(fails[:]), Fake(fails[:], frozenset(rungs))
            record = guard_of(first, second).answer(QUESTION)
            assert (record.outcome, record.degraded) == (Outcome.ERROR, True)
            assert (first.ways, second.ways) == ([AS_ASKED], ways)
            assert record.reasons == ("kernel_status",)

    def test_a_bundle_that_does_not_load_again_is_tried_with_each_answer(self) -> None:
        first, second = Fake([FaultKind.CRASH]), Fake([])
        opened: list[Fake | None] = [first, None, None, None, second]

        def reopen() -> Opened:
            found = opened.pop(0)
            if found is None:
                raise BundleError("not now")
            return Opened(found)

        subject = InferenceGuard(reopen, 60.0)
        assert subject.answer(QUESTION).outcome is Outcome.ERROR
        assert first.closed
        while opened:
            record = subject.answer(QUESTION)
        assert record.words == ("yes",)

    def test_the_picture_in_view_is_shown_to_the_plan_that_comes_after(self) -> None:
        first = Fake([None, FaultKind.BAD_INPUT, None, FaultKind.CRASH])
        second = Fake([FaultKind.BAD_INPUT])
        subject = guard_of(first, second)
        subject.answer(Question(b"picture", "question", ()))
        subject.answer(Question(b"not understood", "other", ()))
        for _ in range(4):
            subject.answer(QUESTION)
        assert first.images == [b"picture", b"not understood", b"", b""]
        assert second.images == [b"picture", b"picture", b"", b""]

    def test_a_picture_that_damaged_weights_may_have_seen_is_looked_at_again(self) -> None:
        fake, memory = Fake([]), Memory(a=b"xyz")
        subject = InferenceGuard(lambda: Opened(fake, TestScrubber.of(memory)), 60.0)
        subject.answer(Question(b"picture", "question", ()))
        memory.held["a"][1] ^= 1
        records = [subject.answer(QUESTION) for _ in range(2)]
        assert [record.faults for record in records] == [(FaultKind.CORRUPT_WEIGHTS,), ()]
        assert fake.images == [b"picture", b"picture", b""]

    def test_heat_without_a_lower_rung_is_counted_and_answered(self) -> None:
        record = guard_of(Fake([]), is_critical=lambda: True).answer(QUESTION)
        assert (record.faults, record.words) == ((FaultKind.THERMAL,), ("yes",))

    def test_plans_that_hang_are_bounded(self) -> None:
        never = threading.Event()
        fakes = [Fake([], hangs=never) for _ in range(MAX_STUCK + 9)]
        subject = guard_of(*fakes, timeout_s=0.005)
        records = [subject.answer(QUESTION) for _ in range(MAX_STUCK + 4)]
        assert {record.outcome for record in records} == {Outcome.TIMEOUT, Outcome.ERROR}
        assert sum(bool(fake.ways) for fake in fakes) == MAX_STUCK + 1
        never.set()

    def test_a_remedy_that_comes_too_late_is_no_answer(self) -> None:
        now = [0.0]

        def clock() -> float:
            now[0] += 1.0
            return now[0]

        fake = Fake([FaultKind.DISK])
        record = guard_of(fake, timeout_s=4.5, monotonic=clock).answer(QUESTION)
        assert len(fake.ways) == 2
        assert (record.outcome, record.faults) == (
            Outcome.TIMEOUT, (FaultKind.DISK, FaultKind.TIMEOUT),
        )  # fmt: skip
        assert record.degraded


def test_probation_counts_what_only_a_remedy_mended() -> None:
    probation = Probation(AgentConfig(), lambda: 0.0, lambda: 0.0)
    probation.begin(SHA)
    good = AnswerRecord(SHA, ("yes",), Outcome.ENDED, None, 1.0)
    mended = AnswerRecord(SHA, ("yes",), Outcome.ENDED, None, 1.0, faults=(FaultKind.CRASH,))
    for record in (good, mended, mended, good, good):
        probation.record(record)
    with pytest.raises(UnfitError, match="2 of 5"):
        probation.is_passed(0.0)
