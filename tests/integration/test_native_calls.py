"""Native runs call no heap, and ask the system for no memory: counted from outside, loads included.

The kernels import no symbol, so that none of malloc, calloc, realloc and free can be called; what
they ask of the system themselves is counted by ptrace.
"""

import sys
from pathlib import Path

import pytest

from benchmarks.system_calls import HEAP, PAGES, TraceRefusedError, counted, imports_of
from tests.factories.kernels import library, native_targets
from tests.simulators.called_pool import RUNS

ROOT = Path(__file__).parents[2]
KNOWN = {"pread64", "futex", "clock_gettime", *PAGES}
"""What a load of an expert takes: read it, move its pages, tell the other thread."""


def child(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.simulators.called_pool", *arguments]


@pytest.mark.parametrize("target", native_targets())
def test_kernels_import_nothing_that_a_heap_is_called_by(target: str) -> None:
    assert imports_of(library(target)) == ()


@pytest.mark.parametrize(("share", "threads"), [(0.25, 1), (0.5, 2)])
def test_a_token_asks_the_system_for_no_memory_while_experts_come_and_go(
    share: float, threads: int
) -> None:
    try:
        found = counted(child(native_targets()[-1], str(share), str(threads)), ROOT)
    except TraceRefusedError as error:
        pytest.skip(str(error))
    assert found.runs == RUNS
    assert found.per_run(*HEAP) == 0
    assert found.inside["pread64"] > 0, "no expert was loaded: nothing is shown"
    assert set(found.inside) <= KNOWN


def test_with_all_experts_in_memory_one_thread_asks_for_nothing() -> None:
    try:
        found = counted(child(native_targets()[-1], "1.0", "1"), ROOT)
    except TraceRefusedError as error:
        pytest.skip(str(error))
    assert (found.runs, found.per_run("pread64", *HEAP, *PAGES)) == (RUNS, 0)
