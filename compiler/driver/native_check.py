"""Run the shipped native code against the self-test, in a process that may crash.

    driver -(files)-> child process -(loads kernels, runs vectors)-> report, or a signal

The child is the code that a device runs (`compiler.contract.selftest_process`). Where this machine
cannot run the target, the result says so instead of pretending: `assembled`.
"""

import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compiler.contract import selftest_process
from compiler.contract.canonical import Json
from compiler.emitters.processes import Finished, TookTooLongError, run_module
from compiler.errors import SelfTestError
from compiler.hardware.targets import Target, best_target

CPU_INFO: Final = Path("/proc/cpuinfo")
HOST: Final = "host"
PROFILER: Final = "compiler.driver.profile"
QEMU: Final = "qemu"
ASSEMBLED: Final = "assembled"
STRUCTURAL: Final = "structural"
OPENCL_PROCESS: Final = "compiler.driver.opencl_process"
OPENCL_ABSENT: Final = 3
EMULATORS: Final[Mapping[str, tuple[str, ...]]] = {
    "aarch64": ("qemu-aarch64",),
    "aarch64-dotprod": ("qemu-aarch64", "-cpu", "max"),
    "aarch64-i8mm": ("qemu-aarch64", "-cpu", "max"),
    "aarch64-sve2": ("qemu-aarch64", "-cpu", "max,sve-max-vq=1"),
    "riscv64": ("qemu-riscv64",),
    "riscv64-v": ("qemu-riscv64", "-cpu", "rv64,v=true,vlen=128"),
}
_MAX_SHOWN: Final = 400


@dataclass(frozen=True, slots=True)
class NativeCheck:
    """How the native code was checked.

    Attributes:
        verified_on: `host` if the shipped library ran here, `qemu` if its kernels ran under an
            emulator, `assembled` if it could only be built, `structural` if only written. OpenCL
            kernels that ran here, on whatever device, are `host` too.
        detail: The self-test's report, or why it did not run.
    """

    verified_on: str
    detail: Mapping[str, Json]


def host_features() -> frozenset[str]:
    """Return the feature names in /proc/cpuinfo of this machine; nothing where there is none."""
    try:
        text = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(value.split())
    return frozenset()


@dataclass(frozen=True, slots=True)
class Measured:
    """What `compiler.driver.profile` prints.

    Attributes:
        seconds: Seconds per call of each program.
        checks: By program and call, how often its run-time check held and did not in the self-test.
    """

    seconds: Mapping[str, Sequence[float]]
    checks: Mapping[str, Mapping[str, Sequence[int]]]

    @classmethod
    def from_json(cls, data: str | bytes) -> "Measured":
        """Return what `to_json` or the profiler wrote."""
        found = json.loads(data)
        return cls(found["seconds"], found["checks"])

    def to_json(self) -> str:
        """Return the figures as JSON."""
        return json.dumps({"seconds": dict(self.seconds), "checks": dict(self.checks)})


def runs_here(target: Target) -> bool:
    """Return whether this machine can run code for `target`."""
    return platform.machine() == target.arch and target.features <= host_features()


def host_target() -> Target | None:
    """Return the best target that this machine can run, or None."""
    return best_target(platform.machine(), host_features())


def emulator_of(target: Target) -> tuple[str, ...] | None:
    """Return the command that runs code of `target` here, or None if there is none."""
    command = EMULATORS.get(target.id)
    return command if command is not None and shutil.which(command[0]) else None


def check_assembled(target: Target) -> NativeCheck:
    """Say that code for `target` was built and could not be run here."""
    missing = ", ".join(sorted(target.features - host_features()))
    reason = f"this {platform.machine()} lacks {missing or target.arch}, and there is no emulator"
    return NativeCheck(ASSEMBLED, {"reason": reason})


def check_native(directory: Path, sections: Mapping[str, bytes], timeout_s: float) -> NativeCheck:
    """Run the self-test of a bundle natively; this machine must be able to run the target.

    Args:
        directory: An empty directory of our own; the sections are written into it.
        sections: Every section of the bundle by component.
        timeout_s: Seconds after which the child is killed.

    Raises:
        SelfTestError: An output differs from the simulator's, the plan does not load, the native
            code crashed, or it took too long.
    """
    write_sections(directory, sections)
    return judge(run_child(selftest_process.__name__, [directory], timeout_s))


def check_opencl(directory: Path, sections: Mapping[str, bytes], timeout_s: float) -> NativeCheck:
    """Run the self-test with OpenCL kernels where a device gives our bits: PoCL, for one.

    Args:
        directory: As `check_native`.
        sections: As `check_native`; `kernels` is OpenCL C.
        timeout_s: Seconds after which the child is killed.

    Raises:
        SelfTestError: As `check_native`.
    """
    write_sections(directory, sections)
    done = run_child(OPENCL_PROCESS, [directory], timeout_s)
    if done.status == OPENCL_ABSENT:
        return NativeCheck(STRUCTURAL, {"reason": done.error_text(_MAX_SHOWN)})
    return judge(done)


def judge(done: Finished) -> NativeCheck:
    """Return what a self-test's process said.

    Raises:
        SelfTestError: It did not run, or an output differs from the simulator's.
    """
    if done.status not in (selftest_process.PASSED, selftest_process.FAILED):
        raise SelfTestError(f"the native self-test did not run: {done.error_text(_MAX_SHOWN)}")
    report: dict[str, Json] = json.loads(done.output)
    if done.status == selftest_process.FAILED:
        shown = json.dumps(report["mismatches"])[:_MAX_SHOWN]
        raise SelfTestError(
            f"native code and simulator differ in {report['failed_vectors']} vectors: {shown}"
        )
    return NativeCheck(HOST, report)


def take_times(directory: Path, sections: Mapping[str, bytes], timeout_s: float) -> Measured | None:
    """Return what running the bundle's calls one by one shows, or None if they cannot be run.

    Figures for people: a bundle whose self-test passed is not refused for them.
    """
    write_sections(directory, sections)
    try:
        done = run_child(PROFILER, [directory], timeout_s)
    except SelfTestError:
        return None
    return Measured.from_json(done.output) if done.status == 0 else None


def write_sections(directory: Path, sections: Mapping[str, bytes]) -> None:
    """Write one file per section, named by component."""
    for name, data in sections.items():
        (directory / name).write_bytes(data)


def run_child(module: str, paths: Sequence[Path], timeout_s: float) -> Finished:
    """Run one of our modules that loads native code, on absolute paths, and wait for it.

    Raises:
        SelfTestError: It took too long, or a signal ended it.
    """
    arguments = [str(path.resolve()) for path in paths]
    try:
        done = run_module(module, arguments, timeout_s=timeout_s)
    except TookTooLongError as error:
        raise SelfTestError(f"the native self-test took more than {timeout_s:g} s") from error
    if done.signal_name:
        raise SelfTestError(f"the native code ended by {done.signal_name} in the self-test")
    return done
