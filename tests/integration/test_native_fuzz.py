"""Random legal calls of every operation: sanitised, guarded, by another compiler, emulated."""

import shutil
from collections.abc import Callable

import pytest

from compiler.contract.operations import Op
from compiler.emitters.runner import ScriptRun, build_runner, play
from compiler.hardware.targets import find_target
from compiler.kernels.registry import KERNELS
from tests.factories.checked_kernels import PATH, compared, gcc, outcome
from tests.factories.emulated import EMULATED, RUNS
from tests.factories.kernels import CACHE, PORTABLE, Case, native_targets
from tests.factories.legal_calls import GENERATORS, draw

FEW, MANY = 5, 60
EMULATED_SEEDS = 8


def test_every_operation_is_drawn() -> None:
    assert set(GENERATORS) == set(KERNELS) == set(Op)
    for op in Op:
        for seed in range(3):
            calls = draw(op, seed).module.programs[0].calls
            assert op in {call.op for call in calls}


def needs_gcc() -> None:
    if shutil.which("gcc", path=PATH) is None:
        pytest.skip("gcc is not installed: apt-get install gcc")


def test_another_compiler_links_it_without_a_library() -> None:
    needs_gcc()
    assert gcc(PORTABLE)


def test_the_best_build_and_the_portable_one_are_clean_under_sanitisers() -> None:
    needs_gcc()
    assert compared("sanitised", 0, FEW, 2) > 2 * FEW * len(Op)


def test_the_sanitised_run_sees_a_read_beyond_an_operand() -> None:
    needs_gcc()
    with pytest.raises(AssertionError, match="ERROR: AddressSanitizer"):
        compared("planted", 0, FEW)


def test_no_build_touches_anything_behind_weights_and_arena() -> None:
    assert compared("guarded", FEW, FEW + 2) > 2 * len(Op) * len(native_targets())


@pytest.mark.full
@pytest.mark.parametrize("mode", ["guarded", "trapping", "gcc", "sanitised"])
def test_a_long_campaign_finds_nothing(
    mode: str, record_property: Callable[[str, object], None]
) -> None:
    if mode in ("gcc", "sanitised"):
        needs_gcc()
    count = compared(mode, 1_000, 1_000 + MANY)
    assert count > MANY * len(Op)
    record_property("runs compared", count)


@pytest.mark.full
@pytest.mark.parametrize("name", EMULATED)
def test_a_long_campaign_finds_nothing_under_emulators(name: str) -> None:
    target, command = RUNS[name]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed: apt-get install qemu-user")
    runner = build_runner(find_target(target), Op, CACHE)

    def played(case: Case, run: ScriptRun) -> dict[str, bytes]:
        emitted = case.emitted
        return play(runner, command, emitted.plan_bytes, emitted.sections, [run])[0]

    for op in Op:
        for seed in range(2_000, 2_000 + EMULATED_SEEDS):
            drawn = draw(op, seed)
            case = Case.of(drawn.module)
            values = drawn.values(drawn.module.max_tokens, seed)
            run = ScriptRun("run", {role: array.tobytes() for role, array in values.items()})
            expected = outcome(case.simulator().run, "run", values)
            assert outcome(played, case, run) == expected, (op, seed)
