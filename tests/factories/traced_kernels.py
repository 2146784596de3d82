"""Kernels that write down where they went: a hash over branches taken and addresses touched.

The C compiler calls back at every edge of the control flow, and before every load and store of up
to 16 bytes, of the code as it is optimised. Two runs with one trace executed the same instructions
at the same addresses; wider vectors go unseen, but they are addressed by what is seen.
"""

import ctypes
from functools import cache
from typing import Final

from compiler.contract.native import NativePlan
from compiler.contract.operations import Op
from compiler.emitters.backends import render_kernels
from compiler.emitters.toolchain import FLAGS, compile_c
from compiler.hardware.targets import find_target
from tests.factories.kernels import CACHE

TRACE: Final = ("-fsanitize-coverage=trace-pc,trace-loads,trace-stores",)
_SIZES: Final = (1, 2, 4, 8, 16)


def _hooks() -> str:
    mark = '__attribute__((no_sanitize("coverage"), visibility("default")))'
    note = "sf_traced = (sf_traced ^ at) * 0x9e3779b97f4a7c15ull + ++sf_trace_steps;"
    names = [f"__sanitizer_cov_{kind}{size}" for kind in ("load", "store") for size in _SIZES]
    lines = [
        "#include <stdint.h>",
        "static uint64_t sf_traced, sf_trace_steps;",
        f"{mark} void __sanitizer_cov_trace_pc(void);",
        f"{mark} void __sanitizer_cov_trace_pc(void) {{",
        "  const uint64_t at = (uint64_t)(uintptr_t)__builtin_return_address(0);",
        f"  {note}",
        "}",
    ]
    for name in names:
        lines += [
            f"{mark} void {name}(void *p);",
            f"{mark} void {name}(void *p) {{ const uint64_t at = (uint64_t)(uintptr_t)p; {note} }}",
        ]
    lines += [
        f"{mark} uint64_t sf_take_trace(void);",
        f"{mark} uint64_t sf_take_trace(void) {{",
        "  const uint64_t found = sf_traced;",
        "  sf_traced = sf_trace_steps = 0;",
        "  return found;",
        "}",
    ]
    return "\n".join(lines) + "\n"


@cache
def traced(target_id: str, ops: frozenset[Op]) -> bytes:
    """Return a kernel library that notes its way."""
    target = find_target(target_id)
    source = _hooks() + render_kernels(target, ops)
    return compile_c(source, target, CACHE, flags=(*FLAGS, *TRACE), suffix=".so")


def take_trace(plan: NativePlan) -> int:
    """Return the trace since the last call, and start another."""
    assert plan._library is not None
    take = plan._library._lib.sf_take_trace
    take.restype, take.argtypes = ctypes.c_uint64, ()
    return int(take())
