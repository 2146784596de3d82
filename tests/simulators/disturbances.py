"""What can disturb a `SoakedAgent`, and what may follow of it: one table.

A disturbance acts between two answers, or has the next answer meet something: at a random run, or
when a run asks for an expert. Faults are made for real where a process survives them.
"""

import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from compiler.contract.backend import BackendCrashedError
from compiler.contract.canonical import sha256_hex
from compiler.contract.degrade import Rung
from compiler.contract.native_errors import NativeError
from compiler.contract.operations import ExpertEvent
from compiler.contract.pager import PrefetchStallError
from compiler.contract.plan_format import Kind
from compiler.contract.policy import CELLS, LEGAL, Cell
from compiler.contract.pool_abi import Eviction, PoolKnob
from device_agent.errors import BundleError
from device_agent.runtime.answers import Question
from device_agent.runtime.assembly import Opening
from device_agent.runtime.bundle import load_bundle
from device_agent.runtime.custody import HARD_LIMIT
from device_agent.runtime.degrade_keeper import DegradeKeeper
from device_agent.runtime.faults import FaultKind
from device_agent.runtime.moe_runtime import MoERuntime
from tests.factories.pools import RUN
from tests.factories.soaked import SIDE, TOKENS, Steered
from tests.simulators.broken_process import CONTEXT_MAGIC, wait_for
from tests.simulators.soaked_agent import SoakedAgent

F = FaultKind
RUNS_MET, EVENTS_MET = 10, 100
"""Of how many the one is drawn that meets a fault; an answer with fewer meets none."""
STUCK_S = 0.02
_LEGAL = [LEGAL[Cell.at(cell).kind] for cell in range(CELLS)]
HUGE_BYTES = 1 << 62


@dataclass
class Scene:
    """One answer, before it is asked for.

    Attributes:
        is_bad: Whether the question cannot be asked.
        is_spoilt: Whether weights may be wrong until the next answer.
        undo: What ends with the answer.
        after: Called with the view, and the words that a device without faults says.
    """

    agent: SoakedAgent
    random: random.Random
    steered: tuple[Steered, ...]
    question: Question
    is_bad: bool = False
    is_spoilt: bool = False
    undo: list[Callable[[], None]] = field(default_factory=list)
    after: list[Callable[[bytes, tuple[str, ...]], None]] = field(default_factory=list)

    def at_a_run(self, act: Callable[[], None]) -> None:
        """Have one run of the answer do something first."""
        left = [self.random.randrange(RUNS_MET)]

        def run() -> None:
            left[0] -= 1
            if left[0] == -1:
                act()

        self.agent.meets.run = run

    def at_an_event(self, act: Callable[[], bool], *kinds: ExpertEvent) -> None:
        """Have one event of an expert end as `act` says: whether it is there."""
        left = [self.random.randrange(EVENTS_MET)]

        def page(event: ExpertEvent, _weight: int) -> bool:
            if kinds and event not in kinds:
                return True
            left[0] -= 1
            return left[0] != -1 or act()

        self.agent.meets.page = page


def oom(scene: Scene) -> None:
    def act() -> bool:
        mmap.mmap(-1, HUGE_BYTES)
        return True

    scene.at_an_event(act)


def not_finite(scene: Scene) -> None:
    """Write NaN over a number that some run reads."""
    plan, pool = scene.agent.plan.plan, scene.agent.pool
    floats = [w for w in plan.weights if w.kind is Kind.F32]
    weight = scene.random.choice(floats)
    data = pool.section(plan.sections[weight.section].name)
    at = weight.offset + 4 * scene.random.randrange(weight.length // 4)

    scene.is_spoilt = True

    def act() -> None:
        data[at : at + 4] = b"\xff\xff\xff\x7f"

    scene.at_a_run(act)


def late(scene: Scene) -> None:
    machine = scene.agent.machine

    def act() -> None:
        machine.now += 1000.0

    scene.at_a_run(act)


def stuck(scene: Scene) -> None:
    """Have a native call not return before it is given up."""
    guard, returns = scene.agent.guard, threading.Event()
    before = guard._timeout_s
    guard._timeout_s = STUCK_S / HARD_LIMIT
    scene.at_an_event(lambda: returns.wait(60))

    def undo() -> None:
        returns.set()
        guard._timeout_s = before
        wait_for(lambda: guard._hanging == 0)

    scene.undo.append(undo)


def absent(scene: Scene) -> None:
    scene.at_an_event(lambda: False, ExpertEvent.USE, ExpertEvent.LOAD)


def strict(scene: Scene) -> None:
    """Have no room for an expert that is not there yet."""
    agent, pool = scene.agent, scene.agent.pool.pool
    before, agent.machine.pressure = agent.machine.pressure, 75.0
    pool.set(PoolKnob.STRICT, 1)

    def undo() -> None:
        agent.machine.pressure = before
        pool.set(PoolKnob.STRICT, 0)

    scene.undo.append(undo)


def damaged_file(scene: Scene) -> None:
    """Have one expert's file hold another byte, for as long as the answer takes."""
    _damage_file(scene, scene.random.choice(scene.agent.at.layout.experts).name)


def damaged_twice(scene: Scene) -> None:
    """Have weights that stay differ in memory and on disk."""
    flipped(scene)
    _damage_file(scene, scene.random.choice(scene.agent.at.layout.persistent))


def _damage_file(scene: Scene, name: str) -> None:
    store, section = scene.agent.at.store, scene.agent.at.sections[name]
    path = store.path(section.sha256)
    whole = path.read_bytes() if path.exists() else b""
    if sha256_hex(whole) != section.sha256:  # damaged already, or there is no store just now
        return
    at = scene.random.randrange(len(whole))
    _write(path, at, bytes([whole[at] ^ 1 << scene.random.randrange(8)]))

    def undo() -> None:
        if path.exists():
            _write(path, at, whole[at : at + 1])
        else:  # the agent dropped it; the next update brings it again
            store.put(whole, section.sha256)

    scene.undo.append(undo)


def _write(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), data, at)


def flipped(scene: Scene) -> None:
    """Change a bit of the weights that stay in memory."""
    pool = scene.agent.pool
    data = pool.section(scene.random.choice(pool.names))
    data[scene.random.randrange(len(data))] ^= 1 << scene.random.randrange(8)


def flipped_expert(scene: Scene) -> None:
    """Change a bit of an expert that is in memory; it stays there while it changes."""
    pool = scene.agent.pool.pool
    number = scene.random.randrange(len(pool.files))
    if pool.touch(number):
        data = pool.view(number)
        data[scene.random.randrange(len(data))] ^= 1 << scene.random.randrange(8)
    pool.settle()


def dead_worker(scene: Scene) -> None:
    """Have the lent threads end without being told to by the plan."""
    plan = scene.agent.plan
    if plan.threads == 1:
        plan.threads = 2
    library = plan._library
    assert library is not None
    assert library.release is not None
    library.release(plan._context)
    wait_for(lambda: plan.lost_threads > 0)


def lost_runner(scene: Scene) -> None:
    def act() -> None:
        raise BackendCrashedError("the runner ended")

    scene.at_a_run(act)


def own_error(scene: Scene) -> None:
    def act() -> None:
        raise ZeroDivisionError("an error of our own")

    scene.at_a_run(act)


def bad_question(scene: Scene) -> None:
    asked = scene.question
    if asked.image:
        return
    scene.is_bad = True
    scene.question = scene.random.choice(
        (
            Question(b"\0" * 7, asked.prompt, asked.words),
            Question(asked.image, "no such prompt", ()),
            Question(asked.image, "question", ("unheard-of",)),
            Question(asked.image, "question", TOKENS.vocabulary[1:] * 2),
        )
    )


def refused_call(scene: Scene) -> None:
    """Have the runtime not know its context in one run."""
    agent = scene.agent

    def act() -> None:
        memory = agent.plan._memory.view
        at = bytes(memory[:4096]).index(CONTEXT_MAGIC)
        memory[at : at + 8] = bytes(8)
        try:
            ids = dict.fromkeys(("token_ids", "positions"), bytes(4))
            agent.plan.run("step", ids)
        finally:
            memory[at : at + 8] = CONTEXT_MAGIC

    scene.at_a_run(act)


def unreadable(scene: Scene) -> None:
    def act() -> bool:
        return bool((scene.agent.at.folder / "no such file").read_bytes())

    scene.at_an_event(act)


def no_store(scene: Scene) -> None:
    """Have a plan end while what it is built from cannot be read."""
    lost_runner(scene)
    objects = scene.agent.at.folder / "objects"
    if objects.exists():
        hidden = objects.rename(objects.with_name("hidden"))
        scene.undo.append(lambda: hidden.rename(objects) and None)


def critical(scene: Scene) -> None:
    machine = scene.agent.machine
    machine.is_critical = True
    scene.undo.append(lambda: setattr(machine, "is_critical", False))


def stall(scene: Scene) -> None:
    def act() -> bool:
        raise PrefetchStallError("an expert did not come within 2 ms")

    scene.at_an_event(act, ExpertEvent.PREFETCH)


def slow_reader(scene: Scene) -> None:
    pool = scene.agent.pool.pool
    pool.set(PoolKnob.DELAY_US, 3000)
    scene.undo.append(lambda: pool.set(PoolKnob.DELAY_US, 0))


def hot(scene: Scene) -> None:
    _sensor(scene, "celsius", 95.0)


def short_of_memory(scene: Scene) -> None:
    _sensor(scene, "pressure", 97.0)


def _sensor(scene: Scene, name: str, value: float) -> None:
    machine = scene.agent.machine
    before = getattr(machine, name)
    setattr(machine, name, value)
    scene.undo.append(lambda: setattr(machine, name, before))


def pressure(scene: Scene) -> None:
    scene.agent.machine.pressure = scene.random.choice((0.0, 20.0, 69.0, 75.0, 91.0))


def threads(scene: Scene) -> None:
    scene.agent.threads = scene.agent.plan.threads = scene.random.randint(1, 4)


def policy(scene: Scene) -> None:
    scene.agent.plan.policy.publish(bytes(map(scene.random.choice, _LEGAL)))


def steering(scene: Scene) -> None:
    """Have routers go by something else, and look at a picture: what was seen keeps its bits."""
    if scene.is_bad:
        return
    image = scene.random.randbytes(SIDE * SIDE)
    scene.question = replace(scene.question, image=image)
    scene.agent.steer(scene.random.choice((None, *scene.steered)))


def other_plan(scene: Scene) -> None:
    try:
        scene.agent.swap()
    except BundleError:
        assert scene.undo, "it does not load, and nothing is wrong with the store"


def budget(scene: Scene) -> None:
    layout = scene.agent.at.layout
    scene.agent.pool.pool.set(
        PoolKnob.RUNS, scene.random.randint(layout.least_runs, scene.agent.pool.layout.runs)
    )


def eviction(scene: Scene) -> None:
    scene.agent.pool.pool.set(PoolKnob.EVICTION, scene.random.choice(list(Eviction)))


def compaction(scene: Scene) -> None:
    """Have what is free given back, and every run that is loaded next change its place."""
    pool, full = scene.agent.pool.pool, scene.agent.pool.layout.runs
    least = scene.agent.at.layout.least_runs
    for value in (least, full):
        pool.set(PoolKnob.RUNS, value)
    for number in scene.random.sample(range(len(pool.files)), 4):
        pool.touch(number)
        pool.settle()
        assert pool.counts()["committed_bytes"] <= full * RUN


def dumped(scene: Scene) -> None:
    """Have the pool go through bytes and back."""
    pool = scene.agent.pool.pool
    for number in scene.random.sample(range(len(pool.files)), 3):
        pool.want(number)
    for _ in range(1000):
        try:
            state = pool.dump()
            pool.restore(state)
        except NativeError:  # a load goes on
            time.sleep(1e-4)
        else:
            return


def tenant(scene: Scene) -> None:
    """Have a runtime of somebody else answer from the same pool, beside the agent."""
    agent, question = scene.agent, scene.question

    def answer(view: bytes, words: tuple[str, ...]) -> None:
        if agent.steered is not None or agent.guard._opened is None or scene.is_spoilt:
            return
        bundle = load_bundle(agent.at.store, agent.at.pointers[0], agent.weights)
        never = DegradeKeeper((), (Rung.NORMAL,), agent.machine.monotonic)
        opening = Opening(lambda: bundle, rules=never)
        with MoERuntime(opening) as runtime, runtime.session() as session:
            assert bundle.runner.weights is agent.plan.weights
            told = session.generate(
                " ".join(question.words), template=question.prompt, image=view or None
            )
            assert tuple(token.text for token in told) == words

    scene.after.append(answer)


@dataclass(frozen=True)
class Disturbance:
    """A row of the table.

    Attributes:
        follows: Faults that may be met; with none the answer is as if nothing had been.
        weight: How often it is drawn, by comparison.
    """

    act: Callable[[Scene], None]
    follows: frozenset[FaultKind] = frozenset()
    weight: float = 20.0


def _row(act: Callable[[Scene], None], *follows: FaultKind, weight: float = 20.0) -> Disturbance:
    return Disturbance(act, frozenset(follows), weight)


DISTURBANCES: Final[Mapping[str, Disturbance]] = {
    "out of memory": _row(oom, F.OUT_OF_MEMORY),
    "a number that is none": _row(not_finite, F.NOT_FINITE, F.KERNEL_STATUS, F.CORRUPT_WEIGHTS),
    "too late": _row(late, F.TIMEOUT),
    "a call that does not return": _row(stuck, F.TIMEOUT, weight=1),
    "an expert that is not there": _row(absent, F.MISSING_EXPERT),
    "no room for experts": _row(strict, F.MISSING_EXPERT),
    "an expert damaged on disk": _row(damaged_file, F.MISSING_EXPERT, F.CRASH),
    "a bit that flips": _row(flipped, F.CORRUPT_WEIGHTS),
    "a bit of an expert that flips": _row(flipped_expert, F.CORRUPT_WEIGHTS),
    "a bit that flips, twice": _row(damaged_twice, F.CORRUPT_WEIGHTS, F.CRASH, weight=3),
    "threads that die": _row(dead_worker, F.DEAD_WORKER, weight=2),
    "a runner that ends": _row(lost_runner, F.CRASH, weight=3),
    "an error of our own": _row(own_error, F.CRASH, weight=2),
    "what cannot be asked": _row(bad_question, F.BAD_INPUT),
    "a call that is refused": _row(refused_call, F.KERNEL_STATUS, weight=3),
    "a file that cannot be read": _row(unreadable, F.DISK),
    "no store": _row(no_store, F.CRASH, weight=2),
    "critical heat": _row(critical, F.THERMAL),
    "fetching ahead stalls": _row(stall, F.PREFETCH_STALL),
    "a reader that is slow": _row(slow_reader, weight=2),
    "heat": _row(hot, weight=2),
    "short of memory": _row(short_of_memory, weight=2),
    "another pressure": _row(pressure),
    "other threads": _row(threads),
    "another policy": _row(policy),
    "other steering": _row(steering),
    "another plan": _row(other_plan, weight=3),
    "another budget": _row(budget),
    "another eviction": _row(eviction),
    "compaction": _row(compaction),
    "dump and restore": _row(dumped, weight=3),
    "a tenant": _row(tenant, weight=2),
}
"""What is drawn from. What `follows` may also be met by the answer after the next one."""
