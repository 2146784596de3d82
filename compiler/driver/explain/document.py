"""The explain document: per program, per call, what was found, done and chosen, and its price.

A pure function of plan, target and, where the code could run, measured times. It is part of the
compile report, and what `explain`, the picture and the build's page show.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from compiler.contract.canonical import Json
from compiler.contract.expert_pages import PAGE_OPS, experts_of
from compiler.contract.operations import LINEARS, PARAMS, Act, ExpertAct, NormKind, Op, UnaryKind
from compiler.contract.plan import Plan, PlanCall, PlanProgram
from compiler.contract.plan_format import DTYPE_BYTES, GROUP, Direction, Kind
from compiler.contract.selftest import SelfTest
from compiler.driver.explain.costs import CallCost, Situation, costs, expected_cycles
from compiler.driver.explain.repeats import Segment, segments
from compiler.driver.explain.sources import call_nodes, fates
from compiler.driver.native_check import Measured
from compiler.driver.profile import representatives
from compiler.hardware.targets import Target
from compiler.kernels.naming import kernel_name
from compiler.kernels.registry import KERNELS
from compiler.kernels.select import TileSpec, select_tile

MEASURED: Final = "measured"
EXPECTED: Final = "cost model"
_LAYOUTS: Final[Mapping[Kind, str]] = {
    Kind.W4: "panels of 16 rows, 4-bit codes, groups of 32",
    Kind.F32: "row-major f32",
    Kind.I32: "row-major i32",
    Kind.F32_TAPS: "taps of 16 channels, f32",
    Kind.W4_TILES: "live tiles of 16 rows and 32 columns, 4-bit codes",
    Kind.I8_ROWS: "rows of 8-bit codes, a step per row",
    Kind.I16_ROWS: "rows of 16-bit codes, a step per row",
    Kind.W4_CSR: "CSR, elements of 4 bytes",
    Kind.W4_COO: "COO, elements of 6 bytes",
    Kind.W4_ELL: "blocked ELL of 32 x 4, 4-bit codes",
    Kind.W4_UP_ROWS: "gate rows in panels, up rows one by one, 4-bit codes",
    Kind.W4_COLUMNS: "columns one by one, 4-bit codes",
    Kind.W8: "panels of 16 rows, 8-bit codes, a step and a zero per row",
    Kind.W4_NM: "panels of 16 rows, 8 of every 16 columns, 4-bit codes, groups of 32",
}


def situations(plan: Plan, selftest: SelfTest) -> dict[str, Situation]:
    """Return at which sizes each program is looked at: those of a run of the self-test."""
    ratios = [costs(plan, program, Situation()).appended_ratio for program in plan.programs]
    found: dict[str, Situation] = {}
    for program, (vector, number) in representatives(selftest).items():
        run = selftest.vectors[vector].runs[number]
        tokens = max((_tokens(plan, program, run.inputs), 1))
        found[program] = Situation(tokens, run.kv_length, max(ratios))
    return found


def _tokens(plan: Plan, name: str, inputs: Mapping[str, bytes]) -> int:
    """Return T of a run, 0 for a program without dynamic inputs."""
    program = next(item for item in plan.programs if item.name == name)
    rows = [0]
    for port in program.ports:
        buffer = plan.buffers[port.buffer]
        if buffer.dynamic and port.role in inputs and port.direction is Direction.INPUT:
            rows.append(len(inputs[port.role]) // (buffer.cols * DTYPE_BYTES[buffer.dtype]))
    return max(rows)


def explain_document(
    plan: Plan,
    target: Target,
    selftest: SelfTest,
    measured: Measured | None = None,
    origins: Json = None,
) -> dict[str, Json]:
    """Return the document.

    Args:
        plan: The verified plan.
        target: What the kernels were built for.
        selftest: Says at which sizes programs run.
        measured: Median seconds per call and what checks did; without, shares are the cost model's.
        origins: What `origin_facts` says of the model; without it no call names its nodes.
    """
    tile = select_tile(target.isa)
    looked_at = situations(plan, selftest)
    known = origins if isinstance(origins, Mapping) else {}
    programs: dict[str, Json] = {
        program.name: _program(
            plan,
            program,
            looked_at.get(program.name, Situation()),
            tile,
            target,
            measured,
            call_nodes(known, program.name, program.calls),
        )
        for program in plan.programs
    }
    return {
        "shares": MEASURED if measured else EXPECTED,
        "target": target.id,
        "programs": programs,
        "nodes": known.get("nodes", []),
        "fates": fates(known),
    }


def _program(
    plan: Plan,
    program: PlanProgram,
    situation: Situation,
    tile: TileSpec,
    target: Target,
    known: Measured | None,
    nodes: Sequence[Mapping[str, Json]],
) -> dict[str, Json]:
    found = costs(plan, program, situation).costs
    expected = _shares(
        [
            expected_cycles(call.op, cost, tile)
            for call, cost in zip(program.calls, found, strict=True)
        ]
    )
    seconds = known.seconds.get(program.name) if known else None
    checks = known.checks.get(program.name, {}) if known else {}
    measured = _shares(seconds) if seconds else None
    parts = segments(plan, program.calls)
    rows: list[Json] = [
        {
            "call": at,
            **call_facts(plan, program.calls[at], found[at], tile, target),
            **nodes[at],
            "check": _check(plan, program.calls[at], checks.get(str(at))),
            "expected_ratio": round(expected[at], 5),
            "measured_ratio": round(measured[at], 5) if measured else None,
            "measured_us": round(1e6 * seconds[at], 3) if seconds else None,
        }
        for at in range(len(program.calls))
    ]
    return {
        "tokens": situation.tokens,
        "past_rows": situation.past,
        "flops": sum(cost.flops for cost in found),
        "dense_flops": sum(cost.dense_flops for cost in found),
        "moved_bytes": sum(cost.size_bytes for cost in found),
        "dense_bytes": sum(cost.dense_bytes for cost in found),
        "measured_us": round(1e6 * sum(seconds), 3) if seconds else None,
        "segments": [[part.first, part.length, part.repeats] for part in parts],
        "edges": _edges(program),
        "inputs": _ports(program, Direction.INPUT),
        "outputs": _ports(program, Direction.OUTPUT),
        "calls": rows,
    }


def call_facts(
    plan: Plan, call: PlanCall, cost: CallCost, tile: TileSpec, target: Target
) -> dict[str, Json]:
    """Return what is known about one call without running it."""
    buffers = [plan.buffers[at] for at in (*call.outputs, *call.inputs)[:1]]
    sparsity = cost.sparsity
    kinds = sorted({plan.weights[at].kind for at in call.weights if at >= 0})
    tiled = KERNELS[call.op].tiled
    return {
        "operation": call.op.name,
        "title": title_of(call),
        "shape": next((f"{'T' if b.dynamic else b.rows}x{b.cols}" for b in buffers), "-"),
        "fused": fused_parts(call),
        "sparsity": {
            "kind": sparsity.kind,
            "kept": sparsity.kept,
            "of": sparsity.of,
            "proof": sparsity.proof,
        }
        if sparsity
        else None,
        "flops": cost.flops,
        "dense_flops": cost.dense_flops,
        "moved_bytes": cost.size_bytes,
        "dense_bytes": cost.dense_bytes,
        "layout": "; ".join(_LAYOUTS[kind] for kind in kinds) or "activations only",
        "kernel": kernel_name(call.op, tile, kinds),
        "is_tiled": tiled,
        "is_reference": KERNELS[call.op].is_reference,
        "why": f"{tile.isa}: the best tile that {target.id} has"
        if tiled
        else f"portable C, vectorised for {target.id}",
    }


def _check(plan: Plan, call: PlanCall, counts: Sequence[int] | None) -> Json:
    """Return what a call looks for at run time, and how often it was there in the self-test."""
    most = int(call.params.get("check", 0))
    if not most:
        return None
    held, broken = counts or (None, None)
    groups = -(-plan.buffers[call.inputs[0]].cols // GROUP)
    return {"most_live_groups": most, "groups": groups, "held": held, "broken": broken}


def title_of(call: PlanCall) -> str:
    """Return the name of an operation for people, its kind included."""
    if call.op is Op.NORM:
        return f"{NormKind(int(call.params['kind'])).name.lower()} norm"
    if call.op is Op.UNARY:
        return UnaryKind(int(call.params["kind"])).name.lower()
    if call.op is Op.ATTENTION and call.params.get("append_only"):
        return "cache append"
    return call.op.name.lower().replace("_", " ")


def fused_parts(call: PlanCall) -> list[Json]:
    """Return what a call does besides its own operation: what once were operations of their own."""
    parts: list[Json] = []
    if call.params.get("norm"):
        parts.append(f"{NormKind(int(call.params['norm']) - 1).name.lower()} norm before")
    if call.op in (*LINEARS, Op.CONV2D, Op.CONV_DEPTHWISE, Op.SPARSE_CONV):
        bias = 3 if call.op is Op.SPARSE_CONV else 1
        if len(call.weights) > bias and call.weights[bias] >= 0:
            parts.append("bias")
        if len(call.inputs) > 1 and call.inputs[1] >= 0:
            parts.append("residual")
    if any(param.name == "act" for param in PARAMS[call.op]):
        parts += _activation(call)
    if call.op is Op.ATTENTION:
        parts += _attention_parts(call)
    return _with_routed_parts(call, parts)


def _with_routed_parts(call: PlanCall, parts: list[Json]) -> list[Json]:
    if call.op in PAGE_OPS:
        return [f"{len(experts_of(call))} experts"]
    if call.op in (Op.ROUTE, Op.MOE_LAYER):
        parts += ["router matrix", "softmax", "top-k"]
    if call.op in (Op.EXPERTS, Op.MOE_LAYER):
        parts += ["dispatch", "both matrices of every chosen expert", "weighted merge"]
    if call.op is Op.MOE_LAYER:
        parts = ["norm before", *parts, *(["residual"] if call.params.get("residual") else [])]
    return parts


def _attention_parts(call: PlanCall) -> list[Json]:
    parts: list[Json] = []
    if len(call.inputs) > 3 and call.inputs[3] >= 0:
        parts.append("rope")
    if not call.params.get("append_only"):
        parts += ["scale", "softmax"]
    parts += ["causal mask"] if call.params["causal"] else []
    parts += ["cache append"] if call.params["kv_layer"] >= 0 else []
    return parts


def _activation(call: PlanCall) -> list[Json]:
    number = int(call.params["act"])
    if call.op in (Op.EXPERTS, Op.MOE_LAYER):
        return [ExpertAct(number).name.lower()]
    return [Act(number).name.lower()] if number != Act.NONE else []


def _edges(program: PlanProgram) -> list[Json]:
    """Return [from, to] pairs of calls; -1 is an input of the program."""
    made = {port.buffer: -1 for port in program.ports if port.direction is Direction.INPUT}
    edges: dict[tuple[int, int], None] = {}
    for at, call in enumerate(program.calls):
        for buffer in call.inputs:
            if buffer >= 0:
                edges[made[buffer], at] = None
        made |= dict.fromkeys(call.outputs, at)
    return [[source, target] for source, target in edges]


def _ports(program: PlanProgram, direction: Direction) -> list[Json]:
    return [*sorted(port.role for port in program.ports if port.direction is direction)]


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values) or 1.0
    return [value / total for value in values]


def segments_of(program: Mapping[str, Any]) -> list[Segment]:
    """Return the segments that a program of the document lists."""
    return [Segment(*part) for part in program["segments"]]
