"""Render and build a kernel library: the part of the kernel stage that loads tools."""

from collections.abc import Iterable
from pathlib import Path

from compiler.contract.operations import Op
from compiler.emitters.c import render_kernels
from compiler.emitters.toolchain import compile_shared
from compiler.hardware.targets import Target


def render_and_build(target: Target, ops: Iterable[Op], cache_dir: Path) -> tuple[str, bytes]:
    """Return C source and shared library.

    Raises:
        ToolchainError: The C compiler failed.
    """
    source = render_kernels(target, ops)
    return source, compile_shared(source, target, cache_dir)
