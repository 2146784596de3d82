"""Native EdgeCard, token by token, while what it needs fails: same words, or a reason why not."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from compiler.contract.native import NativePlan
from compiler.contract.operations import ExpertEvent
from compiler.contract.pager import PrefetchStallError
from compiler.contract.plan_format import Kind
from compiler.contract.session import STEP
from device_agent.runtime.answers import Question
from device_agent.runtime.assembly import Opening
from device_agent.runtime.bundle import LoadedBundle, load_bundle
from device_agent.runtime.evaluation import load_evaluation
from device_agent.runtime.faults import FaultKind
from device_agent.runtime.generation import Generation, Reason
from device_agent.runtime.moe_runtime import MoERuntime, Session
from device_agent.runtime.weights import WeightPool
from tests.factories.guarded import Installed, installed

F = FaultKind
ASKED = 3
DRAWS = 40
EVENTS = 60
"""Of an answer, at least: the one that fails is drawn from them."""


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return installed(tmp_path_factory.mktemp("generated"))


@pytest.fixture(scope="module")
def asked(at: Installed) -> tuple[Question, ...]:
    return load_evaluation(at.folder.parent / "v1" / "evaluation.json").cards[0][:ASKED]


@dataclass
class Native:
    """A runtime whose plans ask a test about every expert.

    Attributes:
        meets: Called with the number of each event; may raise, or say that the expert is absent.
    """

    at: Installed
    threads: int = 1
    meets: Callable[[int], bool] = lambda _number: True
    events: int = 0
    plans: list[NativePlan] = field(default_factory=list)

    def load(self) -> LoadedBundle:
        bundle = load_bundle(self.at.store, self.at.pointer, WeightPool())
        plan = bundle.runner
        assert isinstance(plan, NativePlan)
        plan.threads = self.threads
        plan.set_pager(self._page)
        self.plans.append(plan)
        return replace(bundle, bands=None, steering=None)

    def _page(self, _event: ExpertEvent, _weight: int) -> bool:
        self.events += 1
        return self.meets(self.events)

    @contextmanager
    def session(self) -> Iterator[tuple[MoERuntime, Session]]:
        with MoERuntime(Opening(self.load)) as runtime, runtime.session() as session:
            yield runtime, session


def ask(session: Session, question: Question) -> Generation:
    answer = session.generate(
        " ".join(question.words), template=question.prompt, image=question.image or None
    )
    answer.words()
    return answer


@pytest.fixture(scope="module")
def expected(at: Installed, asked: tuple[Question, ...]) -> list[tuple[str, ...]]:
    with Native(at).session() as (_, session):
        return [ask(session, question).words() for question in asked]


def no_memory() -> bool:
    raise MemoryError


def no_disk() -> bool:
    return bool(Path("/no such file").read_bytes())


def stalls() -> bool:
    raise PrefetchStallError("an expert did not come within 2 ms")


def fails() -> bool:
    raise ZeroDivisionError


FAULTS = {
    F.OUT_OF_MEMORY: no_memory,
    F.DISK: no_disk,
    F.PREFETCH_STALL: stalls,
    F.CRASH: fails,
    F.MISSING_EXPERT: lambda: False,
}


@pytest.mark.parametrize("kind", FAULTS, ids=str)
def test_a_fault_in_any_run_is_met_and_the_words_are_the_same(
    kind: FaultKind, at: Installed, asked: tuple[Question, ...], expected: list[tuple[str, ...]]
) -> None:
    native, draw = Native(at), random.Random(kind.value)
    with native.session() as (runtime, session):
        for turn in range(DRAWS):
            which = turn % ASKED
            fails_at = native.events + draw.randrange(EVENTS)
            native.meets = lambda number, at=fails_at: number != at or FAULTS[kind]()  # type: ignore[misc]
            answer = ask(session, asked[which])
            assert (answer.reason, answer.words()) == (Reason.ENDED, expected[which])
            assert set(answer.stats.faults) <= {kind}
            assert not answer.stats.degraded
        assert runtime.custody.counts.faults[kind] >= DRAWS // 4
        assert runtime.custody.counts.recovered == runtime.custody.counts.faults[kind]


def float_of_a_step(plan: NativePlan) -> memoryview:
    """Return four bytes of a float in the weights that every step reads."""
    step = next(program for program in plan.plan.programs if program.name == STEP)
    used = [plan.plan.weights[at] for call in step.calls for at in call.weights if at >= 0]
    record = next(weight for weight in reversed(used) if weight.kind is Kind.F32)
    data = plan.weights.section(plan.plan.sections[record.section].name)
    return data[record.offset : record.offset + 4]


def test_weights_that_become_no_number_are_loaded_again_in_the_middle_of_an_answer(
    at: Installed, asked: tuple[Question, ...], expected: list[tuple[str, ...]]
) -> None:
    native = Native(at)
    with native.session() as (_, session):
        for question, words in zip(asked, expected, strict=True):
            answer = session.generate(
                " ".join(question.words), template=question.prompt, image=question.image or None
            )
            first = next(answer).text
            plan = native.plans[-1]
            float_of_a_step(plan)[:] = b"\xff\xff\xff\x7f"
            assert (first, *(token.text for token in answer)) == words
            assert answer.stats.faults[-1] is F.CORRUPT_WEIGHTS
            assert (answer.reason, answer.stats.degraded) == (Reason.ENDED, False)


def test_threads_that_die_are_replaced_and_the_picture_is_looked_at_again(
    at: Installed, asked: tuple[Question, ...], expected: list[tuple[str, ...]]
) -> None:
    native = Native(at, threads=2)
    with native.session() as (runtime, session):
        assert ask(session, asked[0]).words() == expected[0]
        plan = native.plans[-1]
        library = plan._library
        assert library is not None
        assert library.release is not None
        library.release(plan._context)
        while not plan.lost_threads:
            pass
        answer = ask(session, replace(asked[1], image=b""))
        assert answer.words() == expected[1]
        assert answer.stats.faults == (F.DEAD_WORKER,)
        assert (len(native.plans), runtime.custody.counts.restarts) == (2, 1)
