"""Kernels are built beside the rest of a compilation, once, and only if they are not kept."""

import threading

import pytest

from compiler.contract.operations import Op
from compiler.driver import kernel_stage
from compiler.driver.cache import StageCache
from compiler.driver.kernel_stage import KernelBuild, find_kernels
from compiler.errors import ToolchainError
from compiler.hardware.targets import find_target

TARGET = find_target("x86-64-v1")
OPS = frozenset({Op.LINEAR, Op.NORM})


class Tools:
    """Stands for the C compiler: waits until it may go on, notes who asked for what."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.built: list[frozenset[Op]] = []
        self.threads: list[threading.Thread] = []
        self.error: ToolchainError | None = None

    def build(self, _target, ops, _folder) -> tuple[str, bytes]:
        self.threads.append(threading.current_thread())
        assert self.may_end.wait(10)
        if self.error is not None:
            raise self.error
        self.built.append(frozenset(ops))
        return "source", ",".join(sorted(op.name for op in ops)).encode()


@pytest.fixture
def tools(monkeypatch) -> Tools:
    found = Tools()
    monkeypatch.setattr("compiler.driver.build_kernels.render_and_build", found.build)
    return found


def test_it_builds_beside_the_caller_and_only_once(tools, tmp_path) -> None:
    cache = StageCache(tmp_path)
    with KernelBuild(TARGET, cache) as building:
        building.begin(OPS)
        assert building.is_begun
        tools.may_end.set()  # the build could not have ended before
        assert building.finish(OPS) == ("source", b"LINEAR,NORM")
    assert tools.built == [OPS]
    assert tools.threads != [threading.current_thread()]
    assert find_kernels(TARGET, OPS, cache) == ("source", b"LINEAR,NORM")


def test_it_builds_nothing_that_is_kept(tools, tmp_path) -> None:
    tools.may_end.set()
    cache = StageCache(tmp_path)
    kernel_stage.make_kernels(TARGET, OPS, cache)
    with KernelBuild(TARGET, cache) as building:
        building.begin(OPS)
        assert not building.is_begun
    assert tools.built == [OPS]


def test_it_builds_what_is_asked_for_in_the_end(tools, tmp_path) -> None:
    tools.may_end.set()
    other = OPS | {Op.ADD}
    with KernelBuild(TARGET, StageCache(tmp_path)) as building:
        building.begin(OPS)
        assert building.finish(other)[1] == b"ADD,LINEAR,NORM"
    assert sorted(tools.built, key=len) == [OPS, other]


def test_it_leaves_no_build_behind(tools, tmp_path) -> None:
    def fail(building: KernelBuild) -> None:
        with building:
            building.begin(OPS)
            tools.may_end.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail(KernelBuild(TARGET, StageCache(tmp_path)))
    assert tools.built == [OPS]
    assert not any(thread.is_alive() for thread in tools.threads)


def test_its_error_is_that_of_the_build(tools, tmp_path) -> None:
    tools.error = ToolchainError("no compiler")
    tools.may_end.set()
    with KernelBuild(TARGET, StageCache(tmp_path)) as building:
        building.begin(OPS)
        with pytest.raises(ToolchainError, match="no compiler"):
            building.finish(OPS)
