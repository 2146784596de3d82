"""Run every operation in a process of its own, so that a crash is an exit code.

python -m tests.factories.checked_kernels guarded     weights and arena end at an unmapped page
python -m tests.factories.checked_kernels trapping    undefined behaviour raises SIGILL
python -m tests.factories.checked_kernels gcc         built by another compiler
"""

import ctypes
import mmap
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from compiler.contract import native
from compiler.contract.native import NativePlan
from compiler.contract.operations import Op
from compiler.contract.plan_format import align
from compiler.emitters.backends import render_kernels
from compiler.emitters.toolchain import FLAGS, compile_c
from compiler.hardware.targets import find_target
from tests.factories.kernels import CACHE, Case, library, native_targets, raw
from tests.factories.modules import small_decoder
from tests.integration.test_native_ops import CASES, MAX_TOKENS

TRAPS: Final = ("-fsanitize=undefined", "-fsanitize-trap=undefined")
GCC_FLAGS: Final = (
    *("-std=c11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-ffreestanding", "-nostdlib"),
    *("-shared", "-fPIC", "-fvisibility=hidden", "-fno-tree-loop-distribute-patterns"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wl,-z,defs", "-Wl,-z,noexecstack"),
)


class GuardedMemory:
    """Like `native.Memory`, but its last byte is followed by a page without access."""

    def __init__(self, size: int) -> None:
        used = align(max(size, 1))
        pages = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, pages + mmap.PAGESIZE)
        anchor = ctypes.c_char.from_buffer(self._map)
        base = ctypes.addressof(anchor)
        del anchor
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + pages), mmap.PAGESIZE, 0):
            raise OSError("mprotect failed")
        self.address = base + pages - used
        self.view = memoryview(self._map)[pages - used : pages]


def trapping(target_id: str) -> bytes:
    target = find_target(target_id)
    source = render_kernels(target, Op)
    return compile_c(source, target, CACHE, flags=(*FLAGS, *TRAPS), suffix=".so")


def gcc(march: str, target_id: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "k.c").write_text(render_kernels(find_target(target_id), Op))
        command = ["gcc", f"-march={march}", *GCC_FLAGS, "k.c", "-o", "k.so"]
        subprocess.run(command, cwd=folder, check=True)
        return (path / "k.so").read_bytes()


def check(kernels: bytes) -> int:
    """Compare every case with the simulator; return how many there were."""
    count = 0
    for case in CASES:
        built = Case.of(case.module())
        simulator = built.simulator()
        with NativePlan(kernels, built.emitted.plan_bytes, built.emitted.sections) as plan:
            for run, tokens in enumerate((1, 5, MAX_TOKENS)):
                values = case.values(tokens, run)
                assert raw(plan.run("run", values)) == raw(simulator.run("run", values)), case.name
                count += 1
    built = Case.of(small_decoder(3))
    with NativePlan(kernels, built.emitted.plan_bytes, built.emitted.sections) as plan:
        image = {"image": bytes(range(256))}
        assert raw(plan.run("see", image)) == raw(built.simulator().run("see", image))
    return count


def main(mode: str) -> None:
    """Run one mode and print the number of comparisons."""
    count = 0
    if mode == "guarded":
        native.Memory = GuardedMemory  # type: ignore[assignment,misc]
        count = sum(check(library(target)) for target in native_targets())
    elif mode == "trapping":
        count = check(trapping("x86-64-v1"))
    elif mode == "gcc" and shutil.which("gcc"):
        count = check(gcc("x86-64", "x86-64-v1"))
        if "x86-64-v3" in native_targets():
            count += check(gcc("x86-64-v3", "x86-64-v3"))
    print("compared", count)


if __name__ == "__main__":
    main(sys.argv[1])
