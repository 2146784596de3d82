"""Several threads: the same bits with any number of them, and none left behind."""

import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.native import NativePlan
from compiler.contract.native_errors import NativeError
from compiler.contract.native_library import MAX_THREADS
from compiler.kernels.constants import MIN_PIECE_BYTES
from tests.factories.kernels import Case, library, native_targets, raw
from tests.factories.wide_calls import CASES, ROWS, inputs, many_experts

COUNTS = (2, 3, 8)
NAME = "sparsefleet-kernels-"


def load(case: Case, target: str, threads: int) -> NativePlan:
    sections = case.emitted.sections
    return NativePlan(library(target), case.emitted.plan_bytes, sections, threads=threads)


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", native_targets())
def test_it_gives_the_same_bits_with_any_number_of_threads(name: str, target: str) -> None:
    case = CASES[name]
    expected = [raw(load(case, target, 1).run("run", inputs(case, rows))) for rows in (1, ROWS)]
    simulated = case.simulator().run("run", inputs(case, ROWS))
    assert all(bytes(np.asarray(simulated[role]).data) == expected[1][role] for role in simulated)
    for count in COUNTS:
        with load(case, target, count) as plan:
            assert len(ours()) == count - 1
            for _ in range(6):
                for rows, result in zip((1, ROWS), expected, strict=True):
                    assert raw(plan.run("run", inputs(case, rows))) == result
                    plan.kv_length = 0
        assert ours() == []


def test_it_shares_more_entries_than_a_ticket_can_count() -> None:
    case, rows = many_experts(), 1_100
    random = np.random.default_rng(3)
    values = {
        "x0": random.standard_normal((rows, 32)).astype(np.float32),
        "x1": np.stack([random.permutation(64)[:60] for _ in range(rows)]).astype(np.int32),
        "x2": random.standard_normal((rows, 60)).astype(np.float32),
    }
    with load(case, native_targets()[-2], 3) as plan:
        shared = raw(plan.run("run", values))
        plan.threads = 1
        assert raw(plan.run("run", values)) == shared
    simulated = case.simulator().run("run", values)
    assert bytes(np.asarray(simulated["y0"]).data) == shared["y0"]


def test_it_shares_work_that_is_worth_it() -> None:
    case = CASES["linear"]
    assert sum(map(len, case.emitted.sections.values())) > 4 * MIN_PIECE_BYTES
    with load(case, native_targets()[0], 2) as plan:
        before = cpu_ticks(ours()[0])
        end = time.monotonic() + 20
        while cpu_ticks(ours()[0]) == before and time.monotonic() < end:
            plan.run("run", inputs(case, ROWS))
        assert cpu_ticks(ours()[0]) > before


def test_its_threads_sleep_when_there_is_nothing_to_do_and_wake_again() -> None:
    case = CASES["linear"]
    with load(case, native_targets()[0], 3) as plan:
        expected = raw(plan.run("run", inputs(case, ROWS)))
        for _ in range(20):
            wait_until_asleep()
            assert raw(plan.run("run", inputs(case, ROWS))) == expected


def test_it_sends_its_threads_home_when_forgotten() -> None:
    plan = load(CASES["linear"], native_targets()[0], 3)
    assert len(ours()) == 2
    del plan
    gc.collect()
    assert ours() == []
    assert "sparsefleet-kernels" not in Path("/proc/self/maps").read_text()


def test_it_comes_and_goes_while_running() -> None:
    case = CASES["experts"]
    expected = raw(load(case, native_targets()[-1], 1).run("run", inputs(case, ROWS)))
    for count in range(1, 40):
        with load(case, native_targets()[-1], 1 + count % 4) as plan:
            assert raw(plan.run("run", inputs(case, ROWS))) == expected
    assert ours() == []


def test_it_takes_more_and_fewer_threads_between_runs() -> None:
    case = CASES["linear"]
    with load(case, native_targets()[0], 1) as plan:
        expected = raw(plan.run("run", inputs(case, ROWS)))
        for count in (2, 1, 5, 5, 1, 3):
            plan.threads = count
            assert plan.threads == count == len(ours()) + 1
            assert raw(plan.run("run", inputs(case, ROWS))) == expected
    with pytest.raises(NativeError, match="closed"):
        plan.threads = 2


def mask(task: int | None) -> str:
    lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:"))


def test_its_threads_run_where_they_are_told_to_and_the_caller_anywhere() -> None:
    case, allowed = CASES["linear"], sorted(os.sched_getaffinity(0))
    before = mask(threading.get_native_id())
    with load(case, native_targets()[0], 1) as plan:
        expected = raw(plan.run("run", inputs(case, ROWS)))
        for cpu in {allowed[0], allowed[-1]}:
            plan.cpus = {cpu}
            plan.threads = 3
            assert raw(plan.run("run", inputs(case, ROWS))) == expected
            wait_until_asleep()
            assert [mask(thread.native_id) for thread in ours()] == [str(cpu)] * 2
        plan.cpus = {1023}
        plan.threads = 2
        assert raw(plan.run("run", inputs(case, ROWS))) == expected
        wait_until_asleep()
        assert mask(ours()[0].native_id) == before
    assert mask(threading.get_native_id()) == before


@pytest.mark.parametrize("count", [0, -1, MAX_THREADS + 1])
def test_it_refuses_a_number_of_threads_that_makes_no_sense(count: int) -> None:
    with pytest.raises(NativeError, match="threads"):
        load(CASES["linear"], native_targets()[0], count)


def test_it_goes_on_with_fewer_threads_if_the_system_has_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    case = CASES["linear"]
    expected = raw(load(case, native_targets()[0], 1).run("run", inputs(case, ROWS)))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with load(case, native_targets()[0], 4) as plan:
        assert len(ours()) == 1
        assert plan.threads == 2
        assert raw(plan.run("run", inputs(case, ROWS))) == expected


def stat(thread: threading.Thread) -> list[str]:
    text = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return text.rpartition(")")[2].split()


def cpu_ticks(thread: threading.Thread) -> int:
    fields = stat(thread)
    return int(fields[11]) + int(fields[12])


def wait_until_asleep() -> None:
    end = time.monotonic() + 30
    while any(stat(thread)[0] != "S" for thread in ours()):
        assert time.monotonic() < end, "a thread spins on without work"
        time.sleep(0.001)
