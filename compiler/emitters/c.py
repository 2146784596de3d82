"""Render the C of one kernel library: runtime, tile layer and exactly the kernels that are used."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Final

import jinja2

from compiler.contract import plan_format, policy
from compiler.contract.moe_rules import MAX_LINEAR_K
from compiler.contract.native_abi import C_STRUCTS
from compiler.contract.operations import (
    MAX_DIM,
    Act,
    ExpertAct,
    ExpertEvent,
    NormKind,
    Op,
    RouteOrder,
    UnaryKind,
)
from compiler.contract.plan_format import ABI_VERSION, RECORDS, Kind, Status
from compiler.contract.policy_calls import OP_KINDS
from compiler.contract.reference import MapKind, PoolKind, ReduceKind, ScatterKind
from compiler.hardware.targets import Target
from compiler.kernels import constants, naming, reference, registry
from compiler.kernels.select import TileSpec, select_tile

_ROOT: Final = Path(registry.__file__).parent
_C_TYPES: Final = {"s": "char", "H": "uint16_t", "I": "uint32_t", "Q": "uint64_t"}
_ENUMS: Final[tuple[type[IntEnum], ...]] = (
    Status,
    Kind,
    Op,
    Act,
    NormKind,
    UnaryKind,
    RouteOrder,
    ExpertAct,
    ExpertEvent,
    MapKind,
    ReduceKind,
    PoolKind,
    ScatterKind,
    policy.Variant,
    policy.CallKind,
)
_RUNTIME: Final = ("prelude", "vector", "math", "rows", "system", "policy", "pool")
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


def render_kernels(target: Target, ops: Iterable[Op], *, tile: TileSpec | None = None) -> str:
    """Return the C source of a library for `target` that offers `ops`.

    The text depends on nothing but the arguments and the templates.

    Args:
        target: What to render for.
        ops: Operations to offer, in any order.
        tile: Tile layer to use instead of the best one; tests compare them.
    """
    chosen = tile or select_tile(target.isa)
    offered = sorted({used for op in ops for used in (op, *registry.KERNELS[op].uses)})
    context = _context(target, offered, chosen)
    environment = _environment()
    parts = []
    for template in _templates(offered, chosen):
        text = environment.get_template(template).render(context)
        parts.append(f"/* ======== {template} ======== */\n{text.strip()}\n")
    names = "\n".join(f" *   {name}" for name in naming.kernel_names(offered, chosen))
    return f"/* Kernels for {target.id}:\n{names}\n */\n" + "\n".join(parts)


def render_runner(target: Target, ops: Iterable[Op]) -> str:
    """Return the C source of the emulator program: the library and a main that plays a script."""
    runner = _environment().get_template("runtime/runner.c.in").render({"arch": target.arch})
    return f"{render_kernels(target, ops)}\n{runner}"


def _templates(ops: list[Op], tile: TileSpec) -> list[str]:
    specs = [registry.KERNELS[op] for op in ops]
    found = [f"runtime/{name}.c.in" for name in _RUNTIME]
    if any(spec.tiled for spec in specs):
        found += [tile.template, registry.W4_TEMPLATE]
    if Op.LINEAR in ops:
        found.append(registry.STORED_TEMPLATE)
    if any(spec.is_reference for spec in specs):
        found += registry.REFERENCE_TEMPLATES
    if registry.GELU_USERS.intersection(ops):
        found.append(registry.GELU_TEMPLATE)
    found += dict.fromkeys(spec.template for spec in specs)
    return [*found, "runtime/stored_load.c.in", "runtime/vm.c.in"]


def _context(target: Target, ops: list[Op], tile: TileSpec) -> dict[str, object]:
    rows = []
    for op in ops:
        spec = registry.KERNELS[op]
        scratch = f"{spec.function}_scratch" if spec.scratch else "NULL"
        rows.append(OpRow(op.name, spec.function, scratch, *spec.fewest))
    return {
        "abi_version": ABI_VERSION,
        "alignment": plan_format.ALIGNMENT,
        "arch": target.arch,
        "binary": registry.BINARY_SIGNS,
        "c_types": _C_TYPES,
        "call_kinds": {op.name: kind.name for op, kind in OP_KINDS.items()},
        "conv_pixels": tile.conv_pixels,
        "enums": {e.__name__: {m.name: int(m) for m in e} for e in _ENUMS},
        "exp": constants.EXP,
        "gelu": constants.GELU,
        "isa": tile.isa,
        "log": constants.LOG,
        "magic": ", ".join(f"'{chr(byte)}'" for byte in plan_format.MAGIC),
        "max_context_bytes": plan_format.MAX_CONTEXT_BYTES,
        "max_dim": MAX_DIM,
        "max_k": MAX_LINEAR_K,
        "max_kv_bytes": plan_format.MAX_KV_BYTES,
        "max_plan_bytes": plan_format.MAX_PLAN_BYTES,
        "max_tokens": plan_format.MAX_TOKENS,
        "min_piece_bytes": constants.MIN_PIECE_BYTES,
        "ops": [op.name for op in ops],
        "policy": _POLICY,
        "records": RECORDS,
        "maps": reference.MAPS,
        "layouts": reference.LAYOUT_OFFSETS,
        "double": constants.DOUBLE,
        "smallest_amax": constants.SMALLEST_AMAX,
        "structs": C_STRUCTS,
        "table": rows,
        "tables": _TABLES,
    }


@cache
def _environment() -> jinja2.Environment:
    """The template dialect: `$ ` statements, `$#` comments, `${...}` holes."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ROOT),
        line_statement_prefix="$ ",
        line_comment_prefix="$#",
        variable_start_string="${",
        variable_end_string="}",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - the output is C, not HTML
    )
