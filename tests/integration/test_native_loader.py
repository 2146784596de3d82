"""Loading: wrong kernels, wrong sections, leftovers, threads."""

import gc
import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.native import NativePlan
from compiler.contract.native_errors import NativeError, UnsupportedPlanError
from compiler.contract.native_library import KernelLibrary
from compiler.contract.native_memory import HUGE_PAGE_BYTES, Memory, huge_bytes_between
from compiler.contract.operations import ExpertEvent, Op
from compiler.contract.plan import PlanError
from compiler.emitters.backends import build_kernels
from compiler.emitters.toolchain import compile_shared
from compiler.errors import ToolchainError
from compiler.hardware.targets import find_target
from tests.factories.kernels import CACHE, Case, ids, library, native_targets, raw
from tests.factories.modules import small_decoder

STEP = {"token_ids": ids([1, 2]), "positions": ids([0, 1])}
HOST = "x86-64-v1"


@pytest.fixture(scope="module")
def case() -> Case:
    return Case.of(small_decoder(9, see=False))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_it_leaves_nothing_open(case: Case) -> None:
    before = open_files()
    for _ in range(3):
        with case.native(HOST) as plan:
            view = plan.run("step", STEP)["logits"]
        assert len(bytes(view)) == 200
    assert open_files() == before
    gc.collect()
    assert "sparsefleet-kernels" not in Path("/proc/self/maps").read_text()


def test_it_cleans_up_after_an_owner_that_forgot(case: Case) -> None:
    before = open_files()
    plan = case.native(HOST)
    assert open_files() == before + 1
    del plan
    gc.collect()
    assert open_files() == before


def test_it_refuses_to_run_when_closed(case: Case) -> None:
    plan = case.native(HOST)
    plan.close()
    plan.close()
    with pytest.raises(NativeError):
        plan.run("step", STEP)
    assert plan.kv_length == 0
    with pytest.raises(NativeError):
        plan.kv_length = 0


@pytest.mark.parametrize("is_another", [False, True], ids=["same thread", "another thread"])
def test_closed_within_a_run_it_ends_the_run_and_unloads(case: Case, is_another: bool) -> None:
    with case.native(HOST) as other:
        expected = raw(other.run("step", STEP))
    before = open_files()
    plan = case.native(HOST)

    def close(_event: ExpertEvent, _weight: int) -> bool:
        if is_another:
            thread = threading.Thread(target=plan.close)
            thread.start()
            thread.join()
        else:
            plan.close()
        assert open_files() == before + 1, "kernels that run stay"
        return True

    plan.set_pager(close)
    assert raw(plan.run("step", STEP)) == expected
    assert open_files() == before
    with pytest.raises(NativeError, match="closed"):
        plan.run("step", STEP)
    with pytest.raises(NativeError, match="closed"):
        plan.threads = 2


def test_it_loads_two_libraries_side_by_side(case: Case) -> None:
    plans = [case.native(target) for target in native_targets()]
    results = [raw(plan.run("step", STEP)) for plan in plans]
    assert all(result == results[0] for result in results)
    for plan in plans:
        plan.close()


def test_it_says_for_which_machine_kernels_are(case: Case) -> None:
    foreign = build_kernels(find_target("aarch64"), case.module.ops, CACHE)
    for kernels, message in ((foreign, "for aarch64, this machine is"), (b"__kernel", "no native")):
        with pytest.raises(NativeError, match=message) as caught:
            NativePlan(kernels, case.emitted.plan_bytes, case.emitted.sections)
        assert "simulator" in caught.value.hint


@pytest.mark.parametrize("kernels", [b"", b"\x7fELF", bytes(1000)], ids=["empty", "short", "zeros"])
def test_it_refuses_what_is_no_library(case: Case, kernels: bytes) -> None:
    before = open_files()
    with pytest.raises(NativeError):
        NativePlan(kernels, case.emitted.plan_bytes, case.emitted.sections)
    assert open_files() == before


def test_it_refuses_a_library_for_another_machine(case: Case) -> None:
    with pytest.raises(NativeError):
        NativePlan(library("aarch64"), case.emitted.plan_bytes, case.emitted.sections)


def test_it_refuses_a_library_without_our_functions() -> None:
    other = compile_shared(
        "int other(void);\nint other(void) { return 1; }\n", find_target(HOST), CACHE
    )
    with pytest.raises(NativeError, match="loaded"):
        KernelLibrary(other)


def test_it_refuses_a_library_of_another_abi(case: Case) -> None:
    functions = "sf_sizes sf_init sf_run sf_kv_length sf_set_kv_length"
    export = '__attribute__((visibility("default"))) int'
    source = "\n".join(
        f"{export} {name}(void);\n{export} {name}(void) {{ return 99; }}"
        for name in ("sf_abi_version", *functions.split())
    )
    with pytest.raises(UnsupportedPlanError):
        KernelLibrary(compile_shared(source, find_target(HOST), CACHE))


def test_it_refuses_a_plan_with_an_operation_that_was_pruned(case: Case) -> None:
    kernels = build_kernels(find_target(HOST), set(Op) - {Op.EXPERTS, Op.MOE_LAYER}, CACHE)
    with pytest.raises(UnsupportedPlanError):
        NativePlan(kernels, case.emitted.plan_bytes, case.emitted.sections)


def test_it_loads_kernels_from_a_file(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_bytes(library(HOST))
    with NativePlan(path, case.emitted.plan_bytes, case.emitted.sections) as plan:
        assert plan.run("step", STEP)["token"]
    with pytest.raises(NativeError):
        NativePlan(tmp_path / "missing.so", case.emitted.plan_bytes, case.emitted.sections)


def test_it_refuses_sections_that_are_missing_or_cut(case: Case) -> None:
    sections = dict(case.emitted.sections)
    del sections["expert.L0.E1"]
    with pytest.raises(NativeError, match=r"expert\.L0\.E1"):
        NativePlan(library(HOST), case.emitted.plan_bytes, sections)
    sections["expert.L0.E1"] = case.emitted.sections["expert.L0.E1"][:-1]
    with pytest.raises(NativeError, match=r"expert\.L0\.E1"):
        NativePlan(library(HOST), case.emitted.plan_bytes, sections)


def test_it_refuses_a_damaged_plan(case: Case) -> None:
    with pytest.raises(PlanError):
        NativePlan(library(HOST), case.emitted.plan_bytes[:-4], case.emitted.sections)


def test_it_takes_any_buffer_as_section_and_input(case: Case) -> None:
    sections = {name: memoryview(data) for name, data in case.emitted.sections.items()}
    with NativePlan(library(HOST), case.emitted.plan_bytes, sections) as plan:
        expected = raw(plan.run("step", STEP))
        plan.kv_length = 0
        assert (
            raw(plan.run("step", {k: bytearray(v.tobytes()) for k, v in STEP.items()})) == expected
        )


def test_it_lets_one_thread_in_at_a_time(case: Case) -> None:
    refused: list[NativeError] = []
    with case.native(HOST) as plan:

        def work() -> None:
            for _ in range(150):
                try:
                    plan.run("step", {"token_ids": ids(range(16)), "positions": ids(range(16))})
                    plan.kv_length = 0
                except NativeError as error:
                    refused.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all("thread" in str(e) or "full" in str(e) or "cache" in str(e) for e in refused)


def test_it_frees_memory_with_the_last_view(case: Case) -> None:
    plan = case.native(HOST)
    view = plan.run("step", STEP)["logits"]
    expected = bytes(view)
    plan.close()
    del plan
    gc.collect()
    assert bytes(view) == expected


def test_it_aligns_weights_to_huge_pages() -> None:
    memory = Memory(10_000)
    assert memory.address % HUGE_PAGE_BYTES == 0
    assert len(memory.view) == 10_000
    memory.view[:4] = b"abcd"
    assert not any(memory.view[4:])
    with pytest.raises(NativeError):
        Memory(1 << 62)


def test_it_reports_what_the_c_compiler_said() -> None:
    with pytest.raises(ToolchainError, match="unknown_thing"):
        compile_shared("int x(void) { return unknown_thing; }", find_target(HOST), CACHE)


def test_it_builds_the_same_bytes_in_another_folder(tmp_path: Path) -> None:
    ops = {Op.ADD, Op.EMBED}
    first = build_kernels(find_target(HOST), ops, tmp_path / "one")
    second = build_kernels(find_target(HOST), ops, tmp_path / "two")
    assert first == second
    kept = [path for path in (tmp_path / "one").rglob("*.so") if "zig" not in path.parts]
    assert [path.read_bytes() for path in kept] == [first + hashlib.sha256(first).digest()]
    assert build_kernels(find_target(HOST), ops, tmp_path / "one") == first


def test_it_builds_again_what_is_torn_in_its_folder(tmp_path: Path) -> None:
    first = build_kernels(find_target(HOST), {Op.ADD}, tmp_path)
    (kept,) = (path for path in tmp_path.rglob("*.so") if "zig" not in path.parts)
    whole = kept.read_bytes()
    for torn in (b"", whole[:31], whole[:100], whole[:-1], whole + b"x", bytes(len(whole))):
        kept.write_bytes(torn)
        assert build_kernels(find_target(HOST), {Op.ADD}, tmp_path) == first
        assert kept.read_bytes() == whole


def test_it_drops_kernels_that_are_not_used() -> None:
    assert len(library(HOST, frozenset({Op.ADD}))) < len(library(HOST)) / 2


def test_it_reads_random_bytes_as_inputs_without_harm(case: Case) -> None:
    random = np.random.default_rng(0)
    with case.native(HOST) as plan:
        for _ in range(50):
            tokens = random.integers(-(2**31), 2**31 - 1, (2, 1)).astype(np.int32)
            with pytest.raises(NativeError):
                plan.run("step", {"token_ids": tokens, "positions": tokens})


def test_it_runs_calls_one_by_one_like_the_whole_program(case: Case) -> None:
    with case.native(HOST) as plan:
        whole = {role: bytes(data) for role, data in plan.run("step", STEP).items()}
        plan.kv_length = 0
        calls = next(len(p.calls) for p in plan.plan.programs if p.name == "step")
        for _ in range(2):  # the cache keeps its length, so all of it can be run again
            tokens = plan.run_calls("step", STEP, 0, 1, 0)
            for at in range(1, calls):
                plan.run_calls("step", None, at, 1, tokens)
            assert plan.kv_length == 0
        assert plan.run_calls("step", None, calls, 99, tokens) == tokens  # none is left to run
        plan.run_calls("step", STEP, 0, calls, 0)
        views = plan._programs["step"].results(tokens)
        assert {role: bytes(data) for role, data in views.items()} == whole


def test_it_refuses_calls_that_are_not_there(case: Case) -> None:
    with case.native(HOST) as plan:
        for first, count in ((10_000, 1), (2**32 - 1, 2**32 - 1)):
            with pytest.raises(NativeError):
                plan.run_calls("step", None, first, count, 1)
        for program, first, count in (("leap", 0, 1), ("step", -1, 1), ("step", 0, -1)):
            with pytest.raises(NativeError):
                plan.run_calls(program, None, first, count, 1)
        with pytest.raises(NativeError):
            plan.run_calls("step", None, 0, 1, 0)
        assert plan.run("step", STEP)["token"]


def test_its_memory_is_anonymous_so_that_it_can_have_huge_pages() -> None:
    memory = Memory(4 * HUGE_PAGE_BYTES)
    memory.view[:] = bytes(len(memory.view))
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= memory.address < high:
            assert line.split()[1] == "rw-p"
            assert len(line.split()) == 5  # no file behind it
            return
    raise AssertionError("the mapping is not there")


def test_it_says_how_much_of_its_memory_lies_on_huge_pages() -> None:
    memory = Memory(4 * HUGE_PAGE_BYTES)
    assert memory.huge_bytes() in (0, None)
    memory.view[:] = bytes(len(memory.view))
    found = memory.huge_bytes()
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if enabled.exists() and "[never]" not in enabled.read_text():
        assert found is not None
        assert found % HUGE_PAGE_BYTES == 0
        assert found <= len(memory.view)


def test_it_adds_up_the_huge_pages_of_its_own_mappings() -> None:
    lines = [
        "7f0000000000-7f0000400000 rw-p 00000000 00:00 0 ",
        "AnonHugePages:      4096 kB",
        "VmFlags: rd wr mr mw me ac hg",
        "7f0000400000-7f0000800000 rw-p 00000000 00:00 0 ",
        "AnonHugePages:      2048 kB",
        "7f0000800000-7f0000c00000 rw-p 00000000 00:00 0 ",
        "AnonHugePages:      4096 kB",
    ]
    start = 0x7F0000000000
    assert huge_bytes_between(lines, start, start + 0x800000) == 6 * 2**20
    assert huge_bytes_between(lines, start, start + 0x200000) == 2 * 2**20
    assert huge_bytes_between(lines, start + 0x10000000, start + 0x20000000) is None
