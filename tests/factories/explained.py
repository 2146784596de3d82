"""What a compile report says about a plan, of a small decoder that is never built."""

from functools import cache
from typing import Any

from compiler.contract.plan import parse_plan
from compiler.contract.selftest import SelfTest
from compiler.driver.explain.document import explain_document
from compiler.driver.explain.picture import picture
from compiler.driver.native_check import Measured
from compiler.emitters.plan import emit_plan
from compiler.hardware.targets import find_target
from compiler.quant.module import pack_module
from tests.factories.modules import small_decoder


@cache
def explained_report() -> dict[str, Any]:
    """Return the parts `explained`, `picture` and `sparsity` of a report."""
    module = small_decoder(9)
    emitted = emit_plan(module, weights_packed=pack_module(module).packed)
    plan = parse_plan(emitted.plan_bytes)
    times = {
        program.name: [1e-6 * (at + 1) for at in range(len(program.calls))]
        for program in plan.programs
    }
    nodes = [
        ["decoder", f"/layers.{at}/<{program.name}>/MatMul", "MatMul", "call", ""]
        for program in plan.programs
        for at in range(len(program.calls))
    ]
    numbers = iter(range(len(nodes)))
    calls = {program.name: [[next(numbers)] for _ in program.calls] for program in plan.programs}
    nodes.append(["decoder", "/Constant", "Constant", "folded", "known"])
    origins = {"nodes": nodes, "calls": calls}
    document = explain_document(
        plan, find_target("x86-64-v3"), SelfTest((), {}), Measured(times, {}), origins
    )
    sparsity = {
        "step": {
            "sources": [{"number": 0, "kind": "route", "granularity": "block"}],
            "tensors": [],
            "operations": [
                {
                    "operation": "24:moe.experts",
                    "multiply_adds_dense": 524_288,
                    "multiply_adds_least": 65_536,
                    "multiply_adds_most": 65_536,
                    "why": "2 of 16 experts",
                }
            ],
        }
    }
    return {"explained": document, "picture": picture(document), "sparsity": sparsity}
