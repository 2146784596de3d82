"""Faults that leave a process damaged for good, so that they get one of their own.

    python -m tests.simulators.broken_process FAULT FOLDER

FOLDER holds an EdgeCard as `tests.factories.guarded.installed` left it. Prints what the guard did.
"""

import ctypes
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from device_agent.runtime.evaluation import load_evaluation
from tests.factories.guarded import Guarded, installed

CONTEXT_MAGIC = (0x315844465053).to_bytes(8, "little")
TGKILL = 234
"""Number of the system call on x86-64."""


def kill_thread(subject: Guarded) -> None:
    """End one lent thread in native code, as a fault of its own would."""
    thread = subject.plan._workers._threads[0]  # type: ignore[union-attr]
    libc = ctypes.CDLL(None, use_errno=True)
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code[:9] = bytes.fromhex("b83c00000031ff0f05")  # mov eax, 60; xor edi, edi; syscall
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGUSR2, ctypes.addressof(ctypes.c_char.from_buffer(code)))
    assert libc.syscall(TGKILL, os.getpid(), thread.native_id, int(signal.SIGUSR2)) == 0
    wait_for(lambda: subject.plan.lost_threads == 1)


def damage_context(subject: Guarded) -> None:
    """Overwrite the mark by which the runtime knows its context: every call is refused."""
    memory = subject.plan._memory.view
    at = bytes(memory[:4096]).index(CONTEXT_MAGIC)
    memory[at : at + 8] = bytes(8)


FAULTS = {"thread": kill_thread, "context": damage_context}


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait until something holds.

    Raises:
        AssertionError: It does not.
    """
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def main(fault: str, folder: Path) -> dict[str, Any]:
    """Ask, break, ask twice; return answers, faults and threads."""
    subject = Guarded(installed(folder), threads=3)
    asked = load_evaluation(folder / "v1" / "evaluation.json").cards[0]
    told = []
    before = subject.plan
    for at in range(3):
        if at == 1:
            FAULTS[fault](subject)
        record, bits = subject.ask(asked[at])
        told.append([list(record.words), bits, [kind.value for kind in record.faults]])
    plan = subject.plan
    facts = {"threads": plan.threads, "lost": plan.lost_threads, "is_new": plan is not before}
    subject.guard.close()
    return {"told": told, **facts}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
    sys.stdout.flush()
    os._exit(0)  # what is damaged must not be taken down in order
