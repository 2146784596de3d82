"""The same bits everywhere: `make bench-bits`.

The same programs - every operation, drawn at random, calls wide enough to be shared among threads,
and a whole small model - run in the simulator, in every build that this machine can run (by both
compilers) and in every other build under qemu-user, each on 1, 2 and 3 threads. A row is a build
and a number of threads; its note is the hash of all outputs, its ratio the share of programs whose
outputs are those of the simulator. Says nothing about speed.
"""

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.runner import Claim, main
from compiler.contract.native import NativePlan
from compiler.contract.native_errors import NativeError
from compiler.contract.operations import Op
from compiler.emitters.runner import ScriptRun, build_runner, play
from compiler.hardware.targets import find_target
from tests.factories.checked_kernels import gcc
from tests.factories.emulated import EMULATED, RUNS
from tests.factories.kernels import CACHE, Case, ids, library, native_targets, raw
from tests.factories.legal_calls import draw
from tests.factories.modules import small_decoder
from tests.factories.wide_calls import CASES, ROWS, inputs

DRAWS: Final = 2
THREADS: Final = (1, 2, 3)
Outputs = Sequence[Mapping[str, bytes]]
Player = Callable[["Item", int], Outputs]
"""Runs an item on a number of threads."""


@dataclass(frozen=True)
class Item:
    """Programs to run one after the other, and what the simulator answers."""

    name: str
    case: Case
    runs: tuple[ScriptRun, ...]
    expected: Outputs

    @classmethod
    def of(
        cls, name: str, case: Case, runs: Sequence[tuple[str, Mapping[str, np.ndarray]]]
    ) -> "Item":
        script = tuple(
            ScriptRun(program, {role: array.tobytes() for role, array in values.items()})
            for program, values in runs
        )
        simulator = case.simulator()
        return cls(name, case, script, [raw(simulator.run(r.program, r.inputs)) for r in script])


def items() -> Iterator[Item]:
    """Yield what every build runs."""
    for op in Op:
        found = seed = 0
        while found < DRAWS:
            drawn = draw(op, seed)
            tokens = sorted({1, drawn.module.max_tokens})
            seed += 1
            try:
                runs = [("run", drawn.values(count, seed)) for count in tokens]
                yield Item.of(f"{op.name}-{seed}", Case.of(drawn.module), runs)
            except NativeError:  # an index out of range, on purpose
                continue
            found += 1
    for name, case in CASES.items():
        yield Item.of(name, case, [("run", inputs(case, count)) for count in (1, ROWS)])
    image = np.random.default_rng(5).integers(0, 256, (1, 256), dtype=np.uint8)
    steps = [
        ("step", {"token_ids": ids(t), "positions": ids(p)})
        for t, p in (((1, 2, 3), (9, 10, 11)), ((4,), (12,)))
    ]
    yield Item.of("decoder", Case.of(small_decoder(4)), [("see", {"image": image}), *steps])


def native(kernels: bytes) -> Player:
    """Return a player of a library of this machine."""

    def run(item: Item, threads: int) -> Outputs:
        emitted = item.case.emitted
        with NativePlan(kernels, emitted.plan_bytes, emitted.sections, threads=threads) as plan:
            return [raw(plan.run(run.program, run.inputs)) for run in item.runs]

    return run


def emulated(name: str) -> Player:
    """Return a player of a target under its emulator."""
    target, command = RUNS[name]
    runner = build_runner(find_target(target), Op, CACHE)

    def run(item: Item, threads: int) -> Outputs:
        emitted = item.case.emitted
        return play(
            runner, command, emitted.plan_bytes, emitted.sections, item.runs, threads=threads
        )

    return run


def players() -> Iterator[tuple[str, str, Player]]:
    """Yield name, label and player of every build."""
    for target in native_targets():
        yield f"zig.{target}", "host", native(library(target))
        if shutil.which("gcc"):
            yield f"gcc.{target}", "host", native(gcc(target))
    for name in EMULATED:
        if shutil.which(RUNS[name][1][0]):
            yield f"zig.{name}", "qemu", emulated(name)


def claim(name: str, label: str, outputs: Sequence[Outputs], wanted: Sequence[Outputs]) -> Claim:
    """Return the row of one build on one number of threads."""
    equal = sum(one == other for one, other in zip(outputs, wanted, strict=True))
    flat = [run[role] for found in outputs for run in found for role in sorted(run)]
    digest = hashlib.sha256(b"".join(flat)).hexdigest()[:16]
    share = equal / len(wanted)
    return Claim(
        f"bits.{name}", equal, "programs", "simulator", "", len(wanted), share, 1.0, label, digest
    )


def measure() -> list[Claim]:
    """Run everything everywhere."""
    found = list(items())
    wanted = [item.expected for item in found]
    claims = [claim("simulator", "simulator", wanted, wanted)]
    for name, label, player in players():
        for threads in THREADS:
            outputs = [player(item, threads) for item in found]
            claims.append(claim(f"{name}.t{threads}", label, outputs, wanted))
    return claims


if __name__ == "__main__":
    sys.exit(main("bits", measure, sys.argv[1:]))
