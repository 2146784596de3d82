"""The C back ends: runtime, tile layer and exactly the kernels that are used, as one library.

`x86-64`, `aarch64` and `riscv64` take the best tile layer of their target; `portable` takes the
plain C one, which is the specification of the format, on whatever the compiler targets.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from compiler.contract import plan_format, policy, runner_frames, steering
from compiler.contract.moe_rules import MAX_LINEAR_K, MOST_FORESEEN_ROWS
from compiler.contract.native_abi import C_STRUCTS
from compiler.contract.operand_rules import MASK_BITS
from compiler.contract.operations import MAX_DIM, Op
from compiler.contract.plan_format import ABI_VERSION, RECORDS
from compiler.contract.policy_calls import OP_KINDS
from compiler.contract.pool_abi import PREDICT, TAG_BLOCK, TAG_KEY_BYTES, TAG_WORDS
from compiler.emitters.interface import Part, SparseKernelEmitter
from compiler.emitters.templates import SHARED, render
from compiler.emitters.toolchain import PROGRAM_FLAGS, compile_c, compile_shared
from compiler.hardware.targets import Target
from compiler.kernels import constants, naming, registry
from compiler.kernels.select import PORTABLE, TileSpec, select_tile, w8_part

_C_TYPES: Final = {"s": "char", "H": "uint16_t", "I": "uint32_t", "Q": "uint64_t"}
_HEADERS: Final = {"x86_64": "immintrin.h", "aarch64": "arm_neon.h"}
_RUNTIME: Final = (
    *("prelude", "vector", "math", "rows", "system", "swap"),
    *("policy", "steering", "trace", "pool"),
)
_POOL: Final = ("tag", "runs", "residency", "predict", "expert_pool", "pool_state", "buddy")
_POLICY: Final = {
    "bounds": {
        "size": policy.SIZE_BYTES,
        "rows": policy.ROW_BOUNDS,
        "density": policy.DENSITY_BOUNDS,
    },
    "sizes": policy.SIZES,
    "rows": policy.ROWS,
    "densities": policy.DENSITIES,
    "cells": policy.CELLS,
    "full": policy.FULL,
    "look_again": policy.LOOK_AGAIN,
}
_SHARED_PARTS: Final = (
    (registry.GELU_USERS, registry.GELU_TEMPLATE),
    (registry.PRUNE_USERS, registry.PRUNE_TEMPLATE),
    (registry.RECURRENT_USERS, registry.RECURRENT_TEMPLATE),
    (registry.WINDOW_USERS, registry.WINDOW_TEMPLATE),
)
_TAG: Final = {"block": TAG_BLOCK, "words": TAG_WORDS, "key_bytes": TAG_KEY_BYTES}
_STEERING: Final = {
    "carriers": [op.name for op in steering.CARRIERS],
    "max_k": steering.MAX_K,
    "max_pull": steering.MAX_PULL,
    "rate": steering.SPREAD_RATE,
}
_TABLES: Final = ("sections", "weights", "buffers", "programs", "ports", "calls", "operands")


@dataclass(frozen=True, slots=True)
class OpRow:
    """One row of the rendered operation table."""

    name: str
    function: str
    scratch: str
    inputs: int
    outputs: int
    weights: int


class CEmitter(SparseKernelEmitter):
    """C for one machine."""

    parts = MappingProxyType(
        {
            Part.INDEX: ("sf_w4_block", "sf_w4_panels"),
            Part.LOAD: ("sf_cell_load",),
            Part.MMA: ("sf_group_init", "sf_group_mac", "sf_acc_scale"),
            Part.STORE: ("sf_acc_floats", "sf_sink_put"),
        }
    )

    def capabilities(self) -> frozenset[Op]:
        """Return every operation."""
        return frozenset(registry.KERNELS)

    def emit(self, ops: Iterable[Op], target: Target) -> str:
        """Return the C source of a library for `target` that offers `ops`."""
        chosen = self.tile(target)
        offered = sorted({used for op in ops for used in (op, *registry.KERNELS[op].uses)})
        context = self._context(target, offered, chosen)
        parts = [render(template, context) for template in _templates(offered, chosen)]
        names = "\n".join(f" *   {name}" for name in naming.kernel_names(offered, chosen))
        return f"/* Kernels for {target.id}:\n{names}\n */\n" + "\n".join(parts)

    def build(self, source: str, target: Target, cache_dir: Path) -> bytes:
        """Return the shared library."""
        return compile_shared(source, target, cache_dir)

    def emit_program(self, ops: Iterable[Op], target: Target) -> str:
        """Return the C source of the emulator program: the library and a main."""
        context = {
            "arch": target.arch,
            "runner_magic": hex(runner_frames.MAGIC),
            "request_magic": hex(runner_frames.REQUEST_MAGIC),
            "max_copies": runner_frames.MAX_COPIES,
        }
        return f"{self.emit(ops, target)}\n" + render("runtime/runner.c.in", context)

    def build_program(self, ops: Iterable[Op], target: Target, cache_dir: Path) -> bytes:
        """Return the emulator program.

        Raises:
            ToolchainError: The compiler failed.
        """
        source = self.emit_program(ops, target)
        return compile_c(source, target, cache_dir, flags=PROGRAM_FLAGS, suffix=".run")

    def _context(self, target: Target, ops: list[Op], tile: TileSpec) -> dict[str, object]:
        rows = []
        for op in ops:
            spec = registry.KERNELS[op]
            scratch = f"{spec.function}_scratch" if spec.scratch else "NULL"
            rows.append(OpRow(op.name, spec.function, scratch, *spec.fewest))
        return {
            **SHARED,
            "abi_version": ABI_VERSION,
            "alignment": plan_format.ALIGNMENT,
            "arch": target.arch,
            "c_types": _C_TYPES,
            "call_kinds": {op.name: kind.name for op, kind in OP_KINDS.items()},
            "conv_pixels": tile.conv_pixels,
            "foreseen_rows": MOST_FORESEEN_ROWS,
            "header": _HEADERS.get(target.arch, ""),
            "isa": tile.isa,
            "language": "c",
            "magic": ", ".join(f"'{chr(byte)}'" for byte in plan_format.MAGIC),
            "mask_bits": MASK_BITS,
            "max_context_bytes": plan_format.MAX_CONTEXT_BYTES,
            "max_dim": MAX_DIM,
            "max_k": MAX_LINEAR_K,
            "max_kv_bytes": plan_format.MAX_KV_BYTES,
            "max_plan_bytes": plan_format.MAX_PLAN_BYTES,
            "max_tokens": plan_format.MAX_TOKENS,
            "min_piece_bytes": constants.MIN_PIECE_BYTES,
            "ops": [op.name for op in ops],
            "policy": _POLICY,
            "predict": PREDICT,
            "records": RECORDS,
            "steering": _STEERING,
            "structs": C_STRUCTS,
            "table": rows,
            "tables": _TABLES,
            "tag": _TAG,
        }


class X86Emitter(CEmitter):
    """C with the instructions of x86-64."""

    name = "x86-64"


class ArmEmitter(CEmitter):
    """C with the instructions of AArch64."""

    name = "aarch64"


class RiscvEmitter(CEmitter):
    """C for RISC-V; the compiler makes its vector instructions."""

    name = "riscv64"


class PortableEmitter(CEmitter):
    """Plain C for the machine of any target: the specification of the W4 tile."""

    name = "portable"

    def serves(self, target: Target) -> bool:
        """Return whether there is a C compiler for the target."""
        return bool(target.triple)

    def tile(self, target: Target) -> TileSpec:  # noqa: ARG002 - the same for all
        """Return the plain C tile."""
        return select_tile(frozenset((PORTABLE,)))


def _templates(ops: list[Op], tile: TileSpec) -> list[str]:
    specs = [registry.KERNELS[op] for op in ops]
    found = [f"runtime/{name}.c.in" for name in _RUNTIME]
    if any(spec.tiled for spec in specs):
        found += [tile.template, registry.W4_TEMPLATE]
    if Op.ROUTE in ops:
        found += [registry.ROUTE_TEMPLATE, registry.STEER_TEMPLATE]
    if registry.W8_USERS.intersection(ops):
        found += [w8_part(tile).template, registry.W8_TEMPLATE]
    if Op.LINEAR in ops:
        found += [registry.STORED_TEMPLATE, registry.NM_TEMPLATE]
    if registry.SKIP_USERS.intersection(ops):
        found.append(registry.SKIP_TEMPLATE)
    if any(spec.is_reference for spec in specs):
        found += registry.REFERENCE_TEMPLATES
    if Op.ATTENTION in ops:
        found.append(registry.KV_TEMPLATE)
    for users, template in _SHARED_PARTS:
        found += [template] if users.intersection(ops) else []
    found += dict.fromkeys(spec.template for spec in specs)
    pool = [f"runtime/{name}.c.in" for name in _POOL]
    return [*found, *pool, "runtime/stored_load.c.in", "runtime/vm.c.in"]
