"""Pools on processors that this machine is not: the system calls of each architecture, for real."""

import subprocess
import tempfile
from pathlib import Path

import pytest

from compiler.contract.operations import Op
from compiler.emitters.backends import render_kernels
from compiler.emitters.toolchain import PROGRAM_FLAGS, compile_c
from compiler.hardware.targets import find_target
from tests.factories.emulated import RUNS
from tests.factories.kernels import CACHE

CHECK = Path(__file__).resolve().parents[1] / "factories" / "pool_check.c"
START = {
    "x86_64": r"_start: xor %ebp, %ebp\n and $-16, %rsp\n call sf_check_main\n",
    "aarch64": r"_start: mov x29, #0\n bl sf_check_main\n",
    "riscv64": r"_start: li fp, 0\n .option push\n .option norelax\n"
    r" la gp, __global_pointer$\n .option pop\n call sf_check_main\n",
}
CALLS = {"x86_64": (319, 18), "aarch64": (279, 68), "riscv64": (279, 68)}
"""memfd_create and pwrite64."""
TARGETS = ("x86-64-v1", "aarch64", "riscv64")
RIGHT, RIGHT_WITHOUT_MOVES = 0, 1


def program(target_id: str) -> bytes:
    target = find_target(target_id)
    memfd, pwrite = CALLS[target.arch]
    source = "\n".join(
        (
            render_kernels(target, [Op.ADD]),
            f'__asm__(".globl _start\\n{START[target.arch]}");',
            f"#define SF_CHECK_MEMFD {memfd}\n#define SF_CHECK_PWRITE {pwrite}",
            CHECK.read_text(),
        )
    )
    return compile_c(source, target, CACHE, flags=PROGRAM_FLAGS, suffix=".run")


@pytest.mark.parametrize("target_id", TARGETS)
def test_a_pool_works_where_it_runs(target_id: str) -> None:
    """An emulator may not keep the place that a run left: then none is moved, nothing else."""
    _, command = RUNS[target_id]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "check"
        path.write_bytes(program(target_id))
        path.chmod(0o700)
        done = subprocess.run([*command, str(path)], capture_output=True, timeout=120, check=False)
    allowed = {RIGHT, RIGHT_WITHOUT_MOVES} if command else {RIGHT}
    assert done.returncode in allowed, done.returncode
