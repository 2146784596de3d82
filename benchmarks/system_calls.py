"""Count the system calls of native runs in another process, from outside, by ptrace.

    parent                                  child
    counted(command) -> starts it           loads, warms up, `wait_for_go()`
                     -> attaches            `marked(plan)`: a call that does nothing else marks
                     -> counts until it     where each native run begins and ends
                        ends

Of the thread that runs, what lies between two marks counts; of other threads (helpers, the one that
reads experts, which stay in native code) all between the first mark and the last. Code that imports
nothing can call no heap: `imports_of` says what a library imports.
"""

import ctypes
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from compiler.contract.native import NativePlan

MARK: Final = "getppid"
_X86: Final = {
    "read": 0,
    "mmap": 9,
    "mprotect": 10,
    "munmap": 11,
    "brk": 12,
    "pread64": 17,
    "mremap": 25,
    "madvise": 28,
    MARK: 110,
    "futex": 202,
    "clock_gettime": 228,
}
_GENERIC: Final = {
    "read": 63,
    "pread64": 67,
    "futex": 98,
    "clock_gettime": 113,
    MARK: 173,
    "brk": 214,
    "munmap": 215,
    "mremap": 216,
    "mmap": 222,
    "mprotect": 226,
    "madvise": 233,
}
NUMBERS: Final = _X86 if platform.machine() == "x86_64" else _GENERIC
_NAMES: Final = {number: name for name, number in NUMBERS.items()}
HEAP: Final = ("brk", "mmap", "munmap")
"""What a heap asks the system with; a run makes none of them."""
PAGES: Final = ("mremap", "mprotect", "madvise")
"""How page runs change their place and their owner: by design, with loads only."""
_SEIZE, _INTERRUPT, _SYSCALL, _SYSCALL_INFO = 0x4206, 0x4207, 24, 0x420E
_OPTIONS: Final = 0x1 | 0x8 | 0x100000
"""Tell system calls from signals, follow threads, end the child with the parent."""
_WALL: Final = 0x40000000
_ENTRY: Final = 1
_TRAP: Final = 5 | 0x80
_INFO_BYTES: Final = 88
_READY: Final = "ready"


class TraceRefusedError(RuntimeError):
    """The system lets nobody be traced here."""


@dataclass
class Called:
    """What was called, by name or number.

    Attributes:
        runs: Native runs that were seen.
        inside: Calls within them, and by other threads meanwhile.
    """

    runs: int = 0
    inside: Counter[str] = field(default_factory=Counter)

    def per_run(self, *names: str) -> float:
        """Return how many of these calls a run makes."""
        return sum(self.inside[name] for name in names) / max(1, self.runs)


def counted(command: Sequence[str], cwd: Path) -> Called:
    """Start a child, count until it ends.

    Args:
        command: Prints `ready`, and goes on when a line comes; see `wait_for_go`.
        cwd: Where it is started.

    Raises:
        TraceRefusedError: The system refuses.
        RuntimeError: The child failed.
    """
    child = subprocess.Popen(
        command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        if child.stdout.readline().strip() != _READY:
            raise RuntimeError(f"the child did not get ready: {' '.join(command)}")
        for thread in Path(f"/proc/{child.pid}/task").iterdir():
            _attach(int(thread.name))
        child.stdin.write("go\n")
        child.stdin.flush()
        found, child.returncode = _follow(child.pid)
    finally:
        child.stdin.close()
        child.stdout.close()
        child.kill()
        child.wait()
    if child.returncode:
        raise RuntimeError(f"the child ended with status {child.returncode}")
    return found


def _ptrace(request: int, pid: int, address: int, data: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    return int(libc.ptrace(request, pid, address, data))


def _attach(thread: int) -> None:
    if _ptrace(_SEIZE, thread, 0, _OPTIONS) or _ptrace(_INTERRUPT, thread, 0, 0):
        raise TraceRefusedError(f"ptrace: {os.strerror(ctypes.get_errno())}")


def _follow(main: int) -> tuple[Called, int]:
    """Resume threads from stop to stop until the child ends; return the counts and its status."""
    found, info = Called(), ctypes.create_string_buffer(_INFO_BYTES)
    others: Counter[str] = Counter()
    """Calls of other threads since the last mark; those behind the last one of all do not count."""
    is_marked = False
    while True:
        thread, status = os.waitpid(-1, _WALL)
        if not os.WIFSTOPPED(status):
            if thread == main:
                return found, os.waitstatus_to_exitcode(status)
            continue
        signal = os.WSTOPSIG(status)
        if signal == _TRAP:
            _ptrace(_SYSCALL_INFO, thread, _INFO_BYTES, ctypes.addressof(info))
            if info.raw[0] == _ENTRY:
                number = int.from_bytes(info.raw[24:32], sys.byteorder)
                name = _NAMES.get(number, f"call {number}")
                if name == MARK and thread == main:
                    is_marked = not is_marked
                    found.runs += is_marked
                    found.inside += others if found.runs > 1 or not is_marked else Counter()
                    others.clear()
                elif thread != main:
                    others[name] += 1
                elif is_marked:
                    found.inside[name] += 1
            signal = 0
        elif status >> 16:  # a stop of ptrace's own: attached, or a thread that began
            signal = 0
        _ptrace(_SYSCALL, thread, 0, signal)


def wait_for_go() -> None:
    """In the child: say that what follows is to be counted, and wait until it is."""
    print(_READY, flush=True)
    sys.stdin.readline()


def marked(plan: NativePlan) -> None:
    """In the child: have every native run of a plan lie between two marks."""
    library: Any = plan._library
    run: Callable[..., int] = library.run

    def between(*arguments: object) -> int:
        os.getppid()
        status = run(*arguments)
        os.getppid()
        return status

    library.run = between


def imports_of(library: bytes) -> tuple[str, ...]:
    """Return the symbols that a 64-bit ELF library needs from others, malloc if it calls it.

    Raises:
        ValueError: It is none.
    """
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF library")
    at, size, count = _integers(library, (0x28, 8), (0x3A, 2), (0x3C, 2))
    sections = [library[at + size * n : at + size * (n + 1)] for n in range(count)]
    found = []
    for section in sections:
        kind, offset, length, link = _integers(section, (4, 4), (0x18, 8), (0x20, 8), (0x28, 4))
        if kind != 11:  # the table of dynamic symbols
            continue
        (names,) = _integers(sections[link], (0x18, 8))
        for entry in range(offset + 24, offset + length, 24):  # the first one is empty
            name, index = _integers(library[entry : entry + 24], (0, 4), (6, 2))
            if index == 0:
                end = library.index(b"\0", names + name)
                found.append(library[names + name : end].decode())
    return tuple(found)


def _integers(data: bytes, *places: tuple[int, int]) -> tuple[int, ...]:
    return tuple(int.from_bytes(data[at : at + size], "little") for at, size in places)
