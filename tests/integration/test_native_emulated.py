"""Targets that this machine is not: their code under an emulator gives the same bits."""

import shutil

import numpy as np
import pytest

from compiler.contract.native_errors import BadTokenError
from compiler.contract.operations import Op
from compiler.emitters.runner import ScriptRun, build_runner, play
from compiler.errors import ToolchainError
from compiler.hardware.targets import find_target
from tests.factories.emulated import EMULATED, RUNS
from tests.factories.kernels import CACHE, Case, ids, raw
from tests.factories.modules import small_decoder
from tests.factories.wide_calls import CASES as WIDE
from tests.factories.wide_calls import ROWS, inputs
from tests.integration.test_native_ops import CASES, OpCase

IMAGE = np.random.default_rng(5).integers(0, 256, 256, dtype=np.uint8).tobytes()


def step(tokens: list[int], first: int, keep: int | None = None) -> ScriptRun:
    positions = ids(range(first, first + len(tokens)))
    values = {"token_ids": ids(tokens).tobytes(), "positions": positions.tobytes()}
    return ScriptRun("step", values, keep)


def runner(name: str) -> tuple[bytes, tuple[str, ...]]:
    target, found = RUNS[name]
    if found and shutil.which(found[0]) is None:
        pytest.skip(f"{found[0]} is not installed: apt-get install qemu-user")
    return build_runner(find_target(target), Op, CACHE), found


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("swiglu", [False, True], ids=["relu", "swiglu"])
def test_it_gives_the_bits_of_the_simulator(name: str, swiglu: bool) -> None:
    case = Case.of(small_decoder(4, swiglu=swiglu))
    runs = [
        ScriptRun("see", {"image": IMAGE}),
        step([1, 2, 3, 4, 5], 20),
        step([6], 25),
        step([7, 8, 9], 22, keep=8),
    ]
    found = play(*runner(name), case.emitted.plan_bytes, case.emitted.sections, runs)
    simulator = case.simulator()
    for run, results in zip(runs, found, strict=True):
        if run.keep is not None:
            simulator.kv_length = run.keep
        assert results == raw(simulator.run(run.program, run.inputs))


@pytest.mark.full
@pytest.mark.parametrize("name", EMULATED)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_gives_the_bits_of_every_operation(case: OpCase, name: str) -> None:
    built = Case.of(case.module())
    values = [{k: v.tobytes() for k, v in case.values(n, n).items()} for n in (1, 5)]
    runs = [ScriptRun("run", inputs) for inputs in values]
    found = play(*runner(name), built.emitted.plan_bytes, built.emitted.sections, runs)
    simulator = built.simulator()
    assert found == [raw(simulator.run("run", inputs)) for inputs in values]


@pytest.mark.parametrize("call", ["experts", "attention"])
@pytest.mark.parametrize("name", RUNS)
def test_it_gives_the_same_bits_with_several_threads(name: str, call: str) -> None:
    case, found = WIDE[call], runner(name)
    values = {role: array.tobytes() for role, array in inputs(case, ROWS).items()}
    runs = [ScriptRun("run", values)] * 2
    once, *others = (
        play(*found, case.emitted.plan_bytes, case.emitted.sections, runs, threads=count)
        for count in (1, 2, 3)
    )
    assert others == [once, once]


def test_it_passes_statuses_on_as_typed_errors() -> None:
    case = Case.of(small_decoder(4, see=False))
    with pytest.raises(BadTokenError):
        play(*runner("x86-64-v1"), case.emitted.plan_bytes, case.emitted.sections, [step([999], 0)])


def test_it_reports_a_program_that_cannot_run() -> None:
    case = Case.of(small_decoder(4, see=False))
    with pytest.raises(ToolchainError):
        play(b"not a program", (), case.emitted.plan_bytes, case.emitted.sections, [step([1], 0)])
