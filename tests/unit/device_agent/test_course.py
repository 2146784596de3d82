"""Answers token by token over a plan that fails: what is said, why it ended, what is counted."""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from compiler.contract.backend import BackendCrashedError
from compiler.contract.errors import ContractError
from compiler.contract.native_errors import (
    BadIndexError,
    ContextLostError,
    ExpertAbsentError,
    NotFiniteError,
)
from compiler.contract.pager import PrefetchStallError
from compiler.contract.session import Buffer
from device_agent.errors import AnswerError, BundleError, RequestError
from device_agent.runtime.assembly import Opening
from device_agent.runtime.bundle import LoadedBundle
from device_agent.runtime.course import MAX_REMEDIES
from device_agent.runtime.faults import FaultKind
from device_agent.runtime.generation import Generation, Reason
from device_agent.runtime.hand import Hand
from device_agent.runtime.moe_runtime import MoERuntime
from tests.simulators.broken_process import wait_for
from tests.unit.device_agent.test_guard import Memory
from tests.unit.device_agent.test_runtime import PIPELINE, FakeRunner, TestDoingLess

F = FaultKind
PICTURE = bytes(range(4))
SEEN, ASKED = 3, 3
"""Rows of the picture and of the prompt."""
SAYS = (4, 5, 4, 2)
WORDS = ("yes", "no", "yes")
RUNS = 5
"""Of one answer: the picture and four steps."""


@dataclass
class Device:
    """A bundle over plans that say the same, but for what a test does before a run.

    Attributes:
        before, after: Called with the number of each run, all plans together.
        memory: Weights that are watched; None for none.
        banded: Whether it has a variant with fewer experts.
    """

    before: Callable[[int], None] = lambda _run: None
    after: Callable[[int], None] = lambda _run: None
    memory: Memory | None = None
    banded: bool = False
    says: list[int] = field(default_factory=lambda: list(SAYS))
    ran: list[str] = field(default_factory=list)
    plans: list["Plan"] = field(default_factory=list)
    refuses: bool = False

    def load(self) -> LoadedBundle:
        if self.refuses:
            raise BundleError("it is gone")
        plan: Any = Plan(self)
        self.plans.append(plan)
        bands = TestDoingLess.bands() if self.banded else None
        bundle = LoadedBundle("a" * 64, plan, PIPELINE, b"", bands=bands)
        if self.memory is None:
            return bundle
        signed = {name: bytes(data) for name, data in self.memory.held.items()}
        sections = {n: (hashlib.sha256(d).hexdigest(), len(d)) for n, d in signed.items()}
        return replace(bundle, sections=sections, read=lambda name: memoryview(signed[name]))

    def open(self, **settings: Any) -> MoERuntime:
        return MoERuntime(Opening(self.load), **settings)


class Plan(FakeRunner):
    """Says by the rows of its cache, so that the same prompt has the same answer."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.weights, self.threads = device, device.memory, 2
        self.policy = SimpleNamespace(is_supported=False)

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        number = len(self.device.ran)
        self.device.ran.append(program)
        self.device.before(number)
        if program == "see":
            self.kv_length = SEEN
        else:
            self.kv_length += len(inputs["token_ids"]) // 4
        self.device.after(number)
        if program == "see":
            return {}
        token = self.device.says[self.kv_length - SEEN - ASKED]
        entropy = memoryview(bytes(4))
        return {"token": memoryview(token.to_bytes(4, "little")), "entropy": entropy}


def once(at: int, error: Exception) -> Callable[[int], None]:
    """Have one run fail."""

    def meets(number: int) -> None:
        if number == at:
            raise error

    return meets


def always(error: Exception) -> Callable[[int], None]:
    def meets(_number: int) -> None:
        raise error

    return meets


def told(generation: Generation) -> list[str]:
    return [token.text for token in generation]


MENDED = (
    (MemoryError(), F.OUT_OF_MEMORY),
    (ExpertAbsentError("an expert is not in memory"), F.MISSING_EXPERT),
    (OSError(5, "Input/output error"), F.DISK),
    (PrefetchStallError("late"), F.PREFETCH_STALL),
    (BackendCrashedError("the runner ended"), F.CRASH),
    (ContextLostError("overwritten"), F.CRASH),
    (ZeroDivisionError(), F.CRASH),
    (BadIndexError("an index points outside"), F.KERNEL_STATUS),
    (ContractError("status"), F.KERNEL_STATUS),
)
ENDING = (
    (NotFiniteError("infinite"), F.NOT_FINITE),
    (TimeoutError(), F.TIMEOUT),
)


class TestFaults:
    @pytest.mark.parametrize("at", range(RUNS))
    @pytest.mark.parametrize("meets", ["before", "after"])
    @pytest.mark.parametrize(("error", "kind"), MENDED, ids=lambda value: str(value) or "error")
    def test_one_that_passes_changes_no_answer(
        self, error: Exception, kind: FaultKind, meets: str, at: int
    ) -> None:
        device = Device(**{meets: once(at, error)})
        with device.open() as runtime, runtime.session() as session:
            answer = session.generate("no", image=PICTURE)
            assert told(answer) == list(WORDS)
            assert (answer.reason, answer.ids) == (Reason.ENDED, list(SAYS[:-1]))
            assert answer.stats.faults == (kind,)
            assert (answer.stats.degraded, answer.stats.reasons) == (False, ())
            assert device.plans[-1].kv_length == SEEN + ASKED + len(WORDS)
            guard = runtime.facts["guard"]
            assert isinstance(guard, dict)
            assert (guard["faults"], guard["recovered"]) == ({kind.value: 1}, 1)
            assert session.generate("no").words() == WORDS

    @pytest.mark.parametrize("at", range(RUNS))
    @pytest.mark.parametrize(("error", "kind"), ENDING, ids=lambda value: str(value) or "error")
    def test_one_without_a_remedy_ends_the_answer_with_its_kind(
        self, error: Exception, kind: FaultKind, at: int
    ) -> None:
        device = Device(once(at, error))
        with device.open() as runtime, runtime.session() as session:
            answer = session.generate("no", image=PICTURE)
            assert told(answer) == list(WORDS[: max(0, at - 1)])
            assert (answer.reason, answer.fault) == (Reason.ERROR, kind)
            assert (answer.stats.degraded, answer.stats.reasons) == (True, (kind.value,))
            with pytest.raises(AnswerError, match="broke off"):
                answer.require_answered()
            assert runtime.custody.counts.faults == {kind: 1}
            assert runtime.custody.counts.recovered == 0
            assert session.generate("no").words() == WORDS

    @pytest.mark.parametrize(("error", "kind"), MENDED + ENDING, ids=lambda value: str(value))
    def test_one_that_stays_ends_the_answer_and_not_the_session(
        self, error: Exception, kind: FaultKind
    ) -> None:
        device = Device(always(error))
        with device.open() as runtime, runtime.session() as session:
            answer = session.generate("no")
            assert told(answer) == []
            assert (answer.reason, answer.fault) == (Reason.ERROR, kind)
            assert set(answer.stats.faults) == {kind}
            assert len(device.ran) <= 1 + MAX_REMEDIES
            device.before = lambda _run: None
            assert session.generate("no", image=PICTURE).words() == WORDS

    def test_what_no_remedy_mends_with_all_experts_is_said_with_fewer_and_marked(self) -> None:
        device = Device(banded=True)

        def infinite(_number: int) -> None:
            if device.ran[-1] == "step":
                raise NotFiniteError("infinite")

        device.before = infinite
        with device.open() as runtime, runtime.session() as session:
            answer = session.generate("no", image=PICTURE)
            assert told(answer) == list(WORDS)
            assert (answer.reason, answer.stats.degraded) == (Reason.ENDED, True)
            assert answer.stats.reasons == ("not_finite",)
            assert device.ran == ["see", "step", *["step.band1"] * 4]
            assert len(device.plans) == 1

    def test_a_plan_that_ends_again_and_again_is_built_anew_a_few_times(
        self,
    ) -> None:
        device = Device()

        def ends(_number: int) -> None:
            if device.plans[-1].kv_length == SEEN + ASKED:  # told a token, and never another one
                raise BackendCrashedError("the runner ended")

        device.before = ends
        with device.open() as runtime, runtime.session() as session:
            answer = session.generate("no", image=PICTURE)
            assert told(answer) == ["yes"]
            assert (answer.reason, answer.fault) == (Reason.ERROR, F.CRASH)
            assert 2 <= len(device.plans) <= 1 + MAX_REMEDIES

    def test_a_bundle_that_does_not_load_again_ends_answers_until_it_does(self) -> None:
        device = Device(once(2, BackendCrashedError("the runner ended")))
        with device.open() as runtime, runtime.session() as session:
            answer = session.generate("no", image=PICTURE)
            assert next(answer).text == "yes"
            device.refuses = True
            assert told(answer) == []
            assert (answer.reason, answer.fault) == (Reason.ERROR, F.CRASH)
            assert session.generate("no").words() == ()
            device.refuses = False
            assert session.generate("no").words() == WORDS
            assert device.ran[-RUNS:] == ["see", *["step"] * 4]

    def test_tokens_that_were_told_are_fed_again_and_told_once(self) -> None:
        device = Device(once(3, BackendCrashedError("the runner ended")))
        with device.open() as runtime, runtime.session() as session:
            answer = session.generate("no", image=PICTURE)
            first, second = next(answer), next(answer)
            assert (first.text, second.text) == WORDS[:2]
            assert told(answer) == [WORDS[2]]
            assert [plan.closed for plan in device.plans] == [True, False]
            assert answer.stats.native_calls == len(device.ran) == 4 + RUNS

    def test_the_deadline_ends_remedies_too(self) -> None:
        device = Device(always(OSError(5, "Input/output error")))
        with device.open() as runtime, runtime.session() as session:
            answer = session.generate("no", deadline=1e-9)
            assert told(answer) == []
            assert (answer.reason, device.ran) == (Reason.DEADLINE, ["step"])

    def test_a_prompt_for_which_the_picture_leaves_no_room_is_the_callers(self) -> None:
        device = Device()
        with device.open() as runtime, runtime.session() as session:
            answer = session.generate([4] * 30, image=PICTURE)
            assert told(answer) == []
            assert (answer.fault, answer.stats.degraded) == (F.BAD_INPUT, False)
            with pytest.raises(RequestError, match="room for 29"):
                answer.require_answered()
            with pytest.raises(RequestError, match="room for 29"):
                session.generate([4] * 30)


class TestHanging:
    def test_a_call_that_does_not_return_costs_its_plan_and_not_the_caller(self) -> None:
        returns, device = threading.Event(), Device()

        def hangs(number: int) -> None:
            if number == 2:
                returns.wait(60)

        device.before = hangs
        with device.open() as runtime, runtime.session() as session:
            answer = session.generate("no", image=PICTURE)
            assert next(answer).text == "yes"
            runtime.custody._timeout_s = 0.01
            assert told(answer) == []
            runtime.custody._timeout_s = 60.0
            assert (answer.reason, answer.fault) == (Reason.ERROR, F.TIMEOUT)
            assert runtime.custody.counts.stuck == 1
            assert session.generate("no").words() == WORDS
            assert not device.plans[0].closed
            returns.set()
            wait_for(lambda: device.plans[0].closed)
            assert session.generate("no").words() == WORDS
            assert len(device.plans) == 2

    def test_threads_that_died_are_replaced_before_an_answer(self) -> None:
        device = Device()
        with device.open() as runtime, runtime.session() as session:
            session.generate("no", image=PICTURE).words()
            device.plans[0].lost_threads = 1
            answer = session.generate("no")
            assert answer.words() == WORDS
            assert answer.stats.faults == (F.DEAD_WORKER,)
            assert device.ran.count("see") == 2
            assert [plan.closed for plan in device.plans] == [True, False]

    def test_a_fork_has_a_hand_of_its_own(self) -> None:
        hand = Hand("test")
        child = os.fork()
        if not child:
            os._exit(hand.call(lambda: 7, 60))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert hand.call(lambda: 5, 60) == 5
        hand.close()

    @pytest.mark.parametrize("banded", [False, True])
    def test_critical_heat_is_met_on_one_thread_with_the_fewest_experts(self, banded: bool) -> None:
        device, threads = Device(banded=banded), []
        device.before = lambda _run: threads.append(device.plans[-1].threads)
        with device.open(is_critical=lambda: True) as runtime, runtime.session() as session:
            answer = session.generate("no", image=PICTURE)
            assert answer.words() == WORDS
            assert (answer.stats.faults, answer.stats.degraded) == ((F.THERMAL,), True)
            assert (set(threads), device.plans[-1].threads) == ({1}, 2)
            assert set(device.ran) == {"see", "step.band1" if banded else "step"}


class TestWeights:
    def spoilt(self, at: int, wrong: Mapping[int, int]) -> tuple[Device, MoERuntime]:
        """Return a device whose weights change after its first run, and with them what it says."""
        memory = Memory(a=b"xyz")
        device = Device(memory=memory)

        def spoil(number: int) -> None:
            if number == 1:
                memory.held["a"][1] ^= 1
            is_wrong = bytes(memory.held["a"]) != b"xyz"
            device.says = [wrong.get(i, t) if is_wrong else t for i, t in enumerate(SAYS)]
            if number == at and is_wrong:
                raise NotFiniteError("infinite")

        device.before = spoil
        return device, device.open()

    def test_what_was_said_rightly_with_them_goes_on(self) -> None:
        device, runtime = self.spoilt(3, {})
        with runtime, runtime.session() as session:
            answer = session.generate("no", image=PICTURE)
            assert told(answer) == list(WORDS)
            assert answer.stats.faults == (F.NOT_FINITE, F.CORRUPT_WEIGHTS)
            assert (answer.reason, answer.stats.degraded) == (Reason.ENDED, False)
            assert device.ran.count("see") == 2

    def test_what_does_not_come_out_again_is_no_answer(self) -> None:
        _, runtime = self.spoilt(3, {1: 4})
        with runtime, runtime.session() as session:
            answer = session.generate("no", image=PICTURE)
            assert told(answer) == ["yes", "yes"]
            assert (answer.reason, answer.fault) == (Reason.ERROR, F.CORRUPT_WEIGHTS)
            assert "does not come out again" in answer.detail
            assert answer.stats.degraded
            assert session.generate("no").words() == WORDS

    def test_weights_that_cannot_be_mended_answer_nothing(self) -> None:
        memory = Memory(a=b"xyz")
        device = Device(memory=memory)
        with device.open() as runtime, runtime.session() as session:
            memory.damaged.add("a")
            memory.held["a"][0] ^= 1
            opened: Any = runtime.custody._opened
            opened.scrubber._read = lambda _name: memoryview(b"")
            answer = session.generate("no")
            assert told(answer) == []
            assert (answer.reason, answer.fault) == (Reason.ERROR, F.CORRUPT_WEIGHTS)
            assert device.ran == []

    def test_a_picture_that_changed_weights_may_have_seen_is_looked_at_again(self) -> None:
        memory = Memory(a=b"xyz")
        device = Device(memory=memory)
        with device.open() as runtime, runtime.session() as session:
            session.generate("no", image=PICTURE).words()
            memory.held["a"][0] ^= 1
            answer = session.generate("no")
            assert answer.words() == WORDS
            assert answer.stats.faults == (F.CORRUPT_WEIGHTS,)
            assert device.ran.count("see") == 2
