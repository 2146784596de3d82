"""Built kernel libraries and loaded plans for tests; results are kept in `var/test-cache`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from compiler.contract.native import NativePlan
from compiler.contract.operations import Op
from compiler.emitters.backends import build_kernels
from compiler.emitters.c import PortableEmitter
from compiler.emitters.plan import EmittedPlan, emit_plan
from compiler.hardware.targets import TARGETS, Target, find_target
from compiler.kernels.program import Module
from compiler.quant.module import PackedModule, pack_module
from compiler.simulator import Simulator

CACHE = Path(__file__).resolve().parents[2] / "var" / "test-cache" / "kernels"
PORTABLE = "portable"
"""Not a target: the x86-64-v1 build with the plain C tile, which is the specification."""


def cpu_flags() -> frozenset[str]:
    """Return this machine's flags, or nothing where /proc/cpuinfo does not say."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return frozenset(next((line.split() for line in lines if line.startswith("flags")), ()))


def native_targets() -> tuple[str, ...]:
    """Return the targets that this machine can run, and the portable tile."""
    flags = cpu_flags()
    able = tuple(t.id for t in TARGETS if t.arch == "x86_64" and t.features <= flags)
    return (*able, PORTABLE) if able else ()


@cache
def library(target_id: str, ops: frozenset[Op] = frozenset(Op)) -> bytes:
    """Return a kernel library, built once per change of its source."""
    if target_id == PORTABLE:
        plain, target = PortableEmitter(), find_target("x86-64-v1")
        return plain.build(plain.emit(ops, target), target, CACHE)
    return build_kernels(find_target(target_id), ops, CACHE)


@dataclass(frozen=True)
class Case:
    """A module, packed and emitted."""

    module: Module
    packed: PackedModule
    emitted: EmittedPlan

    @classmethod
    def of(cls, module: Module, packed: PackedModule | None = None) -> "Case":
        packed = packed or pack_module(module)
        return cls(module, packed, emit_plan(module, weights_packed=packed.packed))

    def native(self, target_id: str) -> NativePlan:
        return NativePlan(library(target_id), self.emitted.plan_bytes, self.emitted.sections)

    def simulator(self) -> Simulator:
        return Simulator(self.module, self.packed.packed)

    def exact(self) -> Simulator:
        return Simulator(self.module, mode="f64")


def raw(results: Mapping[str, memoryview]) -> dict[str, bytes]:
    """Return results as bytes, so that they outlive the next run."""
    return {role: bytes(view) for role, view in results.items()}


def ids(values: Iterable[int]) -> np.ndarray:
    """Return a column of i32."""
    return np.asarray(list(values), np.int32)[:, None]


__all__ = [
    "CACHE",
    "PORTABLE",
    "Case",
    "Target",
    "cpu_flags",
    "ids",
    "library",
    "native_targets",
    "raw",
]
