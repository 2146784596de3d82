"""A forked process is refused what native code its parent opened; the parent goes on."""

import os
import signal
import threading
import weakref
from collections.abc import Callable

import pytest

from compiler.contract.native import NativePlan
from compiler.contract.native_errors import NativeError
from compiler.contract.pool_abi import PoolKnob
from compiler.contract.pooled_weights import PooledWeights
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.pools import pooled
from tests.integration.test_native_pool import conversation, decoder, talk

LIMIT_S = 60
ASKS: dict[str, Callable[[NativePlan, PooledWeights], object]] = {
    "run": lambda plan, _: talk(plan, conversation()),
    "kv_length": lambda plan, _: plan.kv_length,
    "threads": lambda plan, _: setattr(plan, "threads", 1),
    "policy": lambda plan, _: plan.policy,
    "steering": lambda plan, _: plan.steering,
    "is_resident": lambda plan, _: plan.is_resident(0),
    "counts": lambda _, weights: weights.pool.counts(),
    "states": lambda _, weights: weights.check_experts(1),
    "trace": lambda _, weights: weights.pool.trace(None),
    "bring": lambda _, weights: weights.pool.fill(),
}


def told_in_a_fork(act: Callable[[], None]) -> str:
    """Fork, act there, and return what went wrong; a process that hangs is ended by SIGALRM."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        try:
            act()
            os.write(writing, b"fine")
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the parent tells it
            os.write(writing, repr(error).encode()[:4000])
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0, "it hung"
    return told


def refuse_all(plan: NativePlan, weights: PooledWeights) -> None:
    for name, ask in ASKS.items():
        with pytest.raises(NativeError, match="is a fork") as error:
            ask(plan, weights)
        assert "after a fork" in error.value.hint, name
    plan.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_a_pooled_plan_runs_is_refused_and_ends() -> None:
    case = Case.of(decoder())
    target = native_targets()[0]
    with case.native(target) as plain:
        expected = talk(plain, conversation())
    with pooled(case, target, 0.25) as (plan, weights):
        plan.threads = 3
        weights.pool.set(PoolKnob.DELAY_US, 200)
        stop, wrong = threading.Event(), []

        def run() -> None:
            while not stop.is_set():
                plan.kv_length = 0
                wrong.extend(one for one in [talk(plan, conversation())] if one != expected)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            for _ in range(5):
                assert told_in_a_fork(lambda: refuse_all(plan, weights)) == "fine"
        finally:
            stop.set()
            thread.join()
        assert wrong == []
        plan.kv_length = 0
        assert raw(plan.run("step", next(conversation()))) == expected[0]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_that_exits_waits_for_none_of_its_parents_threads() -> None:
    case = Case.of(decoder())
    with pooled(case, native_targets()[0], 0.25) as (plan, _):
        plan.threads = 3
        expected = talk(plan, conversation())
        assert told_in_a_fork(weakref.finalize._exitfunc) == "fine"  # what an exit calls
        plan.kv_length = 0
        assert talk(plan, conversation()) == expected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_plan_on_one_thread_runs_in_a_fork_too_and_with_lent_ones_it_does_not() -> None:
    case = Case.of(decoder())
    with case.native(native_targets()[0]) as plan:
        expected = talk(plan, conversation())
        plan.kv_length = 0

        def run_and_close() -> None:
            with plan.policy._lock:
                assert plan.policy.present is None
            assert talk(plan, conversation()) == expected
            plan.close()

        with plan.policy._lock:
            assert told_in_a_fork(run_and_close) == "fine"
        assert talk(plan, conversation()) == expected
        plan.threads = 2

        def be_refused() -> None:
            with pytest.raises(NativeError, match="is a fork"):
                talk(plan, conversation())
            plan.close()

        assert told_in_a_fork(be_refused) == "fine"
        plan.kv_length = 0
        assert talk(plan, conversation()) == expected
