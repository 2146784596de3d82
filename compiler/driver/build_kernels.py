"""Render and build a kernel library: the part of the kernel stage that loads tools."""

from collections.abc import Iterable
from pathlib import Path

from compiler.contract.operations import Op
from compiler.emitters.backends import emitter_for
from compiler.hardware.targets import Target


def render_and_build(target: Target, ops: Iterable[Op], cache_dir: Path) -> tuple[str, bytes]:
    """Return the source and what is built of it: for a C back end the shared library.

    Raises:
        UnsupportedOperatorError: The target's back end lacks an operation.
        ToolchainError: The C compiler failed.
    """
    emitter = emitter_for(target)
    source = emitter.emit(ops, target)
    return source, emitter.build(source, target, cache_dir)
