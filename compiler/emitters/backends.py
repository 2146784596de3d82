"""Every back end in one table, and how a target finds its own."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from compiler.contract.operations import Op
from compiler.emitters.c import ArmEmitter, PortableEmitter, RiscvEmitter, X86Emitter
from compiler.emitters.interface import EmitterError, SparseKernelEmitter
from compiler.emitters.opencl.emitter import OpenClEmitter
from compiler.hardware.targets import Target

BACKENDS: Final[tuple[SparseKernelEmitter, ...]] = (
    X86Emitter(),
    ArmEmitter(),
    RiscvEmitter(),
    PortableEmitter(),
    OpenClEmitter(),
)


def emitter_for(target: Target) -> SparseKernelEmitter:
    """Return the back end of a target: the first that serves it.

    Raises:
        EmitterError: None does.
    """
    found = next((backend for backend in BACKENDS if backend.serves(target)), None)
    if found is None:
        raise EmitterError(f"no back end builds for {target.id}")
    return found


def render_kernels(target: Target, ops: Iterable[Op]) -> str:
    """Return the source that offers `ops` on `target`; see `SparseKernelEmitter.emit`."""
    return emitter_for(target).emit(ops, target)


def build_kernels(target: Target, ops: Iterable[Op], cache_dir: Path) -> bytes:
    """Return the artefact that offers exactly `ops` on `target`; see `SparseKernelEmitter`."""
    emitter = emitter_for(target)
    return emitter.build(emitter.emit(ops, target), target, cache_dir)
