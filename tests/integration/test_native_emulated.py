"""Targets that this machine is not: their code under an emulator gives the same bits."""

import shutil

import numpy as np
import pytest

from compiler.contract.native_errors import BadTokenError
from compiler.contract.operations import Op
from compiler.emitters.runner import ScriptRun, build_runner, play
from compiler.errors import ToolchainError
from compiler.hardware.targets import find_target
from tests.factories.kernels import CACHE, Case, ids, raw
from tests.factories.modules import small_decoder
from tests.integration.test_native_ops import CASES, OpCase

IMAGE = np.random.default_rng(5).integers(0, 256, 256, dtype=np.uint8).tobytes()
EMULATORS = {
    "x86-64-v1": (),
    "aarch64": ("qemu-aarch64",),
    "aarch64-dotprod": ("qemu-aarch64", "-cpu", "max"),
    "aarch64-i8mm": ("qemu-aarch64", "-cpu", "max"),
    "riscv64": ("qemu-riscv64",),
    "riscv64-v": ("qemu-riscv64", "-cpu", "rv64,v=true,vlen=128"),
}


def step(tokens: list[int], first: int, keep: int | None = None) -> ScriptRun:
    positions = ids(range(first, first + len(tokens)))
    values = {"token_ids": ids(tokens).tobytes(), "positions": positions.tobytes()}
    return ScriptRun("step", values, keep)


def command(target: str) -> tuple[str, ...]:
    found = EMULATORS[target]
    if found and shutil.which(found[0]) is None:
        pytest.skip(f"{found[0]} is not installed: apt-get install qemu-user")
    return found


@pytest.mark.parametrize("target", EMULATORS)
@pytest.mark.parametrize("swiglu", [False, True], ids=["relu", "swiglu"])
def test_it_gives_the_bits_of_the_simulator(target: str, swiglu: bool) -> None:
    emulator = command(target)
    case = Case.of(small_decoder(4, swiglu=swiglu))
    runs = [
        ScriptRun("see", {"image": IMAGE}),
        step([1, 2, 3, 4, 5], 20),
        step([6], 25),
        step([7, 8, 9], 22, keep=8),
    ]
    runner = build_runner(find_target(target), Op, CACHE)
    found = play(runner, emulator, case.emitted.plan_bytes, case.emitted.sections, runs)
    simulator = case.simulator()
    for run, results in zip(runs, found, strict=True):
        if run.keep is not None:
            simulator.kv_length = run.keep
        assert results == raw(simulator.run(run.program, run.inputs))


@pytest.mark.full
@pytest.mark.parametrize("target", [target for target, found in EMULATORS.items() if found])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_gives_the_bits_of_every_operation(case: OpCase, target: str) -> None:
    emulator = command(target)
    built = Case.of(case.module())
    values = [{k: v.tobytes() for k, v in case.values(n, n).items()} for n in (1, 5)]
    runs = [ScriptRun("run", inputs) for inputs in values]
    runner = build_runner(find_target(target), Op, CACHE)
    found = play(runner, emulator, built.emitted.plan_bytes, built.emitted.sections, runs)
    simulator = built.simulator()
    assert found == [raw(simulator.run("run", inputs)) for inputs in values]


def test_it_passes_statuses_on_as_typed_errors() -> None:
    case = Case.of(small_decoder(4, see=False))
    runner = build_runner(find_target("x86-64-v1"), Op, CACHE)
    with pytest.raises(BadTokenError):
        play(runner, (), case.emitted.plan_bytes, case.emitted.sections, [step([999], 0)])


def test_it_reports_a_program_that_cannot_run() -> None:
    case = Case.of(small_decoder(4, see=False))
    with pytest.raises(ToolchainError):
        play(b"not a program", (), case.emitted.plan_bytes, case.emitted.sections, [step([1], 0)])
