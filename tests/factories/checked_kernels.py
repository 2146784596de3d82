"""Run every operation in a process of its own, so that a crash is an exit code.

python -m tests.factories.checked_kernels guarded     weights and arena end at an unmapped page
python -m tests.factories.checked_kernels trapping    undefined behaviour raises SIGILL
python -m tests.factories.checked_kernels gcc         built by another compiler
python -m tests.factories.checked_kernels MODE FIRST LAST [LIMIT]
    random legal calls of these seeds for every operation, on at most LIMIT builds, best first
python -m tests.factories.checked_kernels planted FIRST LAST
    the same for one operation whose kernel reads beyond its rows, sanitised

MODE is one of the above, or `sanitised`: under the address and undefined behaviour sanitisers of
gcc, every byte of arena and weights poisoned that belongs to no operand; its child needs
the environment of `sanitisers`.
"""

import ctypes
import hashlib
import itertools
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from compiler.contract import native, native_weights
from compiler.contract.native import NativePlan
from compiler.contract.native_errors import NativeError
from compiler.contract.operations import Op
from compiler.contract.plan_format import ALIGNMENT, align
from compiler.emitters.backends import render_kernels
from compiler.emitters.c import PortableEmitter
from compiler.emitters.toolchain import FLAGS, compile_c
from compiler.hardware.targets import find_target
from tests.factories.kernels import CACHE, PORTABLE, Case, library, native_targets, raw
from tests.factories.legal_calls import draw
from tests.factories.modules import small_decoder
from tests.integration.test_native_ops import CASES, MAX_TOKENS

ROOT: Final = Path(__file__).resolve().parents[2]
MARCH: Final = {
    "x86-64-v1": ("-march=x86-64",),
    "x86-64-v2": ("-march=x86-64-v2",),
    "x86-64-v3": ("-march=x86-64-v3",),
    "x86-64-v4-vnni": ("-march=x86-64-v4", "-mavx512vnni"),
}
SANITISE: Final = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
PLANTED_OP: Final = Op.SOFTMAX
PLANTED: Final = ("if (n >= 8) return sf_load8(p);", "return sf_load8(p);")
PATH: Final = "/usr/bin:/bin"
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


class PoisonedMemory:
    """Like `native.Memory`, from the sanitiser's own allocator."""

    def __init__(self, size: int) -> None:
        used = align(max(size, 1))
        libc = ctypes.CDLL(None)
        libc.aligned_alloc.restype = ctypes.c_void_p
        libc.aligned_alloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        self.address = libc.aligned_alloc(ALIGNMENT, used)
        self.view = memoryview((ctypes.c_char * used).from_address(self.address)).cast("B")
        self.view[:] = bytes(used)

    def __del__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.free.argtypes = (ctypes.c_void_p,)
        libc.free(self.address)


def poison(plan: NativePlan) -> None:
    """Poison what lies between buffers and between weights."""
    starts: dict[int, int] = {}
    at = plan.weights.memory.address
    for number, section in enumerate(plan.plan.sections):
        starts[number] = at
        at += align(section.length)
    _poison_gaps(
        [(starts[w.section] + w.offset, w.length) for w in plan.plan.weights],
        plan.weights.memory.address,
        at,
    )
    arena = plan._memory.address + len(plan._memory.view) - align(plan.plan.arena_bytes)
    buffers = [(arena + b.offset, b.length) for b in plan.plan.buffers]
    _poison_gaps(buffers, arena, arena + align(plan.plan.arena_bytes))


def _poison_gaps(used: list[tuple[int, int]], start: int, end: int) -> None:
    mark = ctypes.CDLL(None).__asan_poison_memory_region
    mark.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    at = start
    for first, length in [*sorted(used), (end, 0)]:
        if first > at:
            mark(at, first - at)
        at = max(at, first + length)


def sanitisers() -> dict[str, str]:
    """Return the environment of a child that loads sanitised kernels."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = ["gcc", f"-print-file-name={name}"]
        found.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"LD_PRELOAD": " ".join(found).replace("\n", ""), "ASAN_OPTIONS": "detect_leaks=0"}


def trapping(target_id: str) -> bytes:
    target = find_target(target_id)
    source = render_kernels(target, Op)
    return compile_c(source, target, CACHE, flags=(*FLAGS, *TRAPS), suffix=".so")


def gcc(
    target_id: str,
    more: tuple[str, ...] = (),
    ops: Iterable[Op] = Op,
    edit: tuple[str, str] = ("", ""),
) -> bytes:
    """Return the library as gcc makes it, kept like that of the other compiler.

    Args:
        target_id: As for `library`.
        more: Further flags.
        ops: Operations to offer.
        edit: A text in the source, and what stands there instead.
    """
    plain = target_id == PORTABLE
    target = find_target("x86-64-v1" if plain else target_id)
    source = PortableEmitter().emit(ops, target) if plain else render_kernels(target, ops)
    assert edit[0] in source
    source = source.replace(*edit) if edit[0] else source
    command = ["gcc", *MARCH[target.id], *GCC_FLAGS, *more, "k.c", "-o", "k.so"]
    if more:
        command = [flag for flag in command if flag != "-Wl,-z,defs"]
    kept = CACHE / "gcc" / hashlib.sha256("\0".join([*command, source]).encode()).hexdigest()
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".build-") as folder:
            (Path(folder) / "k.c").write_text(source)
            subprocess.run(command, cwd=folder, check=True)
            (Path(folder) / "k.so").replace(kept)
    return kept.read_bytes()


def best_first() -> tuple[str, ...]:
    """Return the targets that run here, the most capable first, the portable tile second."""
    portable, *others = native_targets()[::-1]
    return (*others[:1], portable, *others[1:])


def builds(mode: str) -> Iterator[bytes]:
    """Yield the libraries that a mode runs."""
    if mode == "trapping":
        yield trapping("x86-64-v1")
    elif mode == "guarded":
        yield from (library(target) for target in best_first())
    elif mode == "gcc":
        yield from (gcc(target) for target in best_first())
    elif mode == "sanitised":
        yield from (gcc(target, SANITISE) for target in best_first())
    elif mode == "planted":
        yield gcc("x86-64-v1", SANITISE, [PLANTED_OP], PLANTED)


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


def fuzz(kernels: bytes, seeds: range, ops: Iterable[Op] = Op, *, poisoned: bool = False) -> int:
    """Compare random legal calls with the simulator; return how many runs there were."""
    count = 0
    for op, seed in itertools.product(ops, seeds):
        drawn = draw(op, seed)
        built = Case.of(drawn.module)
        simulator = built.simulator()
        with NativePlan(kernels, built.emitted.plan_bytes, built.emitted.sections) as plan:
            if poisoned:
                poison(plan)
            for tokens in sorted({1, drawn.module.max_tokens}):
                values = drawn.values(tokens, seed)
                expected = outcome(simulator.run, "run", values)
                found = outcome(plan.run, "run", values)
                assert found == expected, f"{op.name}, seed {seed}, {tokens} tokens"
                count += 1
    return count


def outcome(run: Callable[..., Mapping[str, Any]], *arguments: object) -> object:
    """Return the outputs of a run, or the kind of error that ended it."""
    try:
        return raw(run(*arguments))
    except NativeError as error:
        return type(error)


def compared(mode: str, *arguments: object) -> int:
    """Run a mode in a child; return how many comparisons there were.

    Raises:
        AssertionError: The child failed or crashed; the message ends with what it wrote.
    """
    sanitised = mode in ("sanitised", "planted")
    return compared_in("tests.factories.checked_kernels", mode, *arguments, sanitised=sanitised)


def compared_in(module: str, *arguments: object, sanitised: bool | None = None) -> int:
    """Run a module in a child; return the number that it prints last.

    Args:
        module: What to run.
        arguments: Of its command line.
        sanitised: Whether the child loads sanitised kernels; None = if an argument says so.

    Raises:
        AssertionError: The child failed or crashed; the message ends with what it wrote.
    """
    if sanitised is None:
        sanitised = "sanitised" in arguments
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": PATH, **(sanitisers() if sanitised else {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        shown = [line for line in done.stderr.splitlines() if "ERROR:" in line]
        raise AssertionError(f"exit {done.returncode}: {shown[:1]} {done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def main(mode: str, first: int | None = None, last: int = 0, limit: int = 100) -> None:
    """Run one mode on at most `limit` builds, best first; print the number of comparisons."""
    memory = {"guarded": GuardedMemory, "sanitised": PoisonedMemory, "planted": PoisonedMemory}.get(
        mode
    )
    if memory is not None:
        native.Memory = memory  # type: ignore[assignment,misc]
        native_weights.Memory = memory  # type: ignore[assignment,misc]
    count = 0
    for kernels in itertools.islice(builds(mode), limit):
        if first is None:
            count += check(kernels)
        else:
            ops = [PLANTED_OP] if mode == "planted" else Op
            poisoned = mode in ("sanitised", "planted")
            count += fuzz(kernels, range(first, last), ops, poisoned=poisoned)
    print("compared", count)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
