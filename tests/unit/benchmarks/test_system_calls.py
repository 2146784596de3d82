import platform
import sys
from pathlib import Path

import pytest

from benchmarks.system_calls import HEAP, TraceRefusedError, counted, imports_of

PGID = "call 121" if platform.machine() == "x86_64" else "call 155"
CHILD = """
import mmap, os, threading
from benchmarks.system_calls import wait_for_go
go, done, end = threading.Event(), threading.Event(), threading.Event()
def other():
    go.wait()
    os.getpgid(0)
    done.set()
    end.wait()
    os.getsid(0)
threading.Thread(target=other).start()
wait_for_go()
mmap.mmap(-1, 1 << 22).close()
for at in range(3):
    os.getppid()
    for _ in range(at):
        mmap.mmap(-1, 1 << 22).close()
    os.getppid()
    mmap.mmap(-1, 1 << 22).close()
    go.set()
    done.wait()
end.set()
"""


def test_what_lies_between_marks_is_counted_and_what_other_threads_do_after_the_first() -> None:
    root = Path(__file__).parents[3]
    try:
        found = counted([sys.executable, "-c", CHILD], root)
    except TraceRefusedError as error:
        pytest.skip(str(error))
    assert found.runs == 3
    assert (found.inside["mmap"], found.inside["munmap"]) == (3, 3)
    assert found.per_run(*HEAP) == 2.0
    others = set(found.inside) - {"mmap", "munmap", "futex"}
    assert others == {PGID}, "what a thread did before the last mark, and not what it did after"


def test_a_child_that_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match="did not get ready"):
        counted([sys.executable, "-c", "pass"], Path.cwd())


def test_a_library_says_what_it_imports() -> None:
    with pytest.raises(ValueError, match="no 64-bit ELF"):
        imports_of(b"#!/bin/sh")
    imported = {name for path in loaded() for name in imports_of(path.read_bytes())}
    assert {"malloc", "free"} <= imported


def loaded() -> list[Path]:
    """Return the files of code that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = {Path(line.split()[-1]) for line in lines if "r-xp" in line and "/" in line}
    return sorted(path for path in found if path.is_file())
