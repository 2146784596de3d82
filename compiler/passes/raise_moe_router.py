"""Raise routers: what stands between logits and the experts' indices and gates.

Before (one of many; also softmax behind top-k, renormalised gates, sigmoid scores with correction
and groups, sparse mixer):
    %l = "sp.linear"(%x, %w)
    %p = Softmax(%l);  %v, %i = TopK(%p)
    %y = "moe.experts"(%x, %i, %v, ...)
After:
    %i, %v = "moe.route"(%x, %w) <{k = 2, order = "softmax_topk"}>

The kinds of operations and their constants propose what the router may be; ONNX Runtime's run of
these operations on random rows decides. Without agreement nothing is raised and a note says so.
Rows whose choice hangs on less than `MARGIN` are not compared: there f32 and f64 may differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array, ConstantTable
from compiler.analysis.moe_meaning import Router, route
from compiler.dialects.dims import Dim
from compiler.dialects.moe import ExpertsOp, RouteOp
from compiler.dialects.sp import ConstantOp, LinearOp, OnnxOp
from compiler.dialects.types import shape_of, sizes_at
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.expert_count import need_chosen_experts
from compiler.passes.judge import agrees, bind, run_source, sample_rows
from compiler.passes.match import attr
from compiler.passes.match_experts import leading, root
from compiler.passes.rewriting import insert_before, redirect, reshaped, sweep
from compiler.passes.slices import backward, run_time_leaves

MARGIN: Final = 1e-5
SCALES: Final = (1.0, 0.3, 3.0)
ROWS: Final = 64
GROUP_ROUTER: Final = "com.microsoft::MoEGroupRouter"
_COMPARISONS: Final = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual"})


@dataclass(frozen=True)
class RaiseMoeRouter(Pass):
    """Recognise the routers of raised experts."""

    name: ClassVar[str] = "raise-moe-router"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Raise the router of every `moe.experts`.

        Raises:
            MissingExpertsError: A router, raised here or before, can choose experts that its
                stacks do not hold.
        """
        notes: list[str] = []
        changed = sweep(module, ctx, partial(_raise, notes=notes))
        need_chosen_experts(module, ctx)
        return PassResult(changed, tuple(notes))


@dataclass(frozen=True, eq=False)
class _Slice:
    """Everything between logits and the experts' operands."""

    linear: LinearOp
    index: SSAValue
    gate: SSAValue
    operations: list[Operation]

    @property
    def k(self) -> int:
        return shape_of(self.index)[-1].constant


def _raise(op: Operation, ctx: PassContext, notes: list[str]) -> int:
    found = _slice(op) if isinstance(op, ExpertsOp) else None
    if found is None:
        return 0
    where = ctx.origins.near(found.linear)
    router = _judged(found, ctx.constants)
    if router is None:
        notes.append(f"{where}: no reading of this router agrees with ONNX Runtime")
        return 0
    _emit(found, router, ctx)
    notes.append(f"{where}: router {router.order}, judged by ONNX Runtime")
    return 1


def _slice(experts: ExpertsOp) -> _Slice | None:
    """Return the router of `experts` if logits are all it depends on."""
    index, gate = _behind_reshape(experts.index), _behind_reshape(experts.gate)
    if isinstance(index.owner, RouteOp):
        return None
    leaves = run_time_leaves([index, gate], [])
    if len(leaves) != 1:
        return None
    (logits,) = leaves
    linear = logits.owner
    if not isinstance(linear, LinearOp) or linear.act.data != "none" or linear.residual is not None:
        return None
    between = backward([index, gate], [logits])
    return None if between is None else _Slice(linear, index, gate, between)


def _behind_reshape(value: SSAValue) -> SSAValue:
    """Return the (.., T, k) value itself where a reshape only merges its leading axes."""
    source = root(value)
    same = shape_of(source)[-1:] == shape_of(value)[-1:] and leading(source) == leading(value)
    return source if same else value


# --- hypotheses ----------------------------------------------------------------------------------


def _candidates(found: _Slice, constants: ConstantTable) -> Iterator[Router]:
    """Yield what the router may be, as its operations and constants suggest."""
    weight = constants.get(found.linear.weight)
    if weight is None:
        return
    bias = constants.get(found.linear.bias)
    imported = [op for op in found.operations if isinstance(op, OnnxOp)]
    kinds = [op.op.data for op in imported]
    for options in _options(imported, constants):
        for order in _orders(kinds):
            for correction in _corrections(found, kinds, len(weight), constants):
                yield Router(weight, bias, found.k, order, options, correction)


def _orders(kinds: list[str]) -> tuple[str, ...]:
    """Return what the router may be; `kinds` are its operations, operands first."""
    if GROUP_ROUTER in kinds:
        return ("sigmoid_topk_renorm", "sigmoid_topk")
    if "TopK" not in kinds:
        return ("sparsemixer",) if "ArgMax" in kinds else ()
    if "Sigmoid" in kinds:
        return ("sigmoid_topk_renorm", "sigmoid_topk")
    if "Softmax" not in kinds:
        return ()
    if kinds.index("Softmax") < kinds.index("TopK"):
        return ("softmax_topk_renorm", "softmax_topk")
    return ("topk_softmax",)


def _options(imported: list[OnnxOp], constants: ConstantTable) -> list[dict[str, float]]:
    """Return sets of parameters: groups from the shapes of top-k, numbers from constants."""
    fixed: dict[str, float] = {}
    scales = []
    for op in imported:
        numbers = [n for a in op.arguments if (n := constants.scalar(a)) is not None]
        if op.op.data in _COMPARISONS and numbers:
            fixed["jitter"] = numbers[0]
        elif op.op.data in ("Mul", "Div") and numbers and numbers[0]:
            scales.append(numbers[0] if op.op.data == "Mul" else 1 / numbers[0])
        elif op.op.data == "TopK":
            fixed |= _grouping(op)
        elif op.op.data == GROUP_ROUTER:
            fixed |= _group_router(op)
    if "groups" in fixed:
        fixed.setdefault("top_groups", 1)
    return [{**fixed, "scale": scale} for scale in scales] + [fixed]


def _grouping(top: OnnxOp) -> dict[str, float]:
    """Return what a top-k over (T, groups, size) or over (T, groups) says of the groups."""
    shape, k = shape_of(top.arguments[0]), attr(top, "k")
    assert isinstance(k, int)
    if len(shape) == 3 and shape[0] != Dim(1) and shape[1].is_static:
        return {"groups": shape[1].constant, "group_take": k}
    if any(
        use.operation.name == "sp.onnx" and _scatters(use.operation) for use in top.outputs[1].uses
    ):
        return {"top_groups": k}
    return {}


def _group_router(op: OnnxOp) -> dict[str, float]:
    names = {"groups": "n_group", "top_groups": "topk_group", "group_take": "group_topk"}
    found = {name: attr(op, source) for name, source in names.items()}
    numbers = {name: value for name, value in found.items() if isinstance(value, int)}
    return dict(numbers) if numbers["groups"] > 1 else {}


def _scatters(op: Operation) -> bool:
    return isinstance(op, OnnxOp) and op.op.data == "ScatterElements"


def _corrections(
    found: _Slice, kinds: list[str], experts: int, constants: ConstantTable
) -> list[Array | None]:
    if "Sigmoid" not in kinds and GROUP_ROUTER not in kinds:
        return [None]
    vectors = [
        constants.of(op).reshape(-1)
        for op in found.operations
        if isinstance(op, ConstantOp) and constants.of(op).size == experts > 1
    ]
    return [*(v for v in vectors if v.dtype == np.float32), None]


# --- judge ---------------------------------------------------------------------------------------


def _judged(found: _Slice, constants: ConstantTable) -> Router | None:
    left = list(_candidates(found, constants))
    rows = leading(found.index)
    if rows is None or rows != leading(found.linear.x):
        return None
    count = rows.constant if rows.is_static else ROWS
    binding = bind(count)
    for run, scale in enumerate(SCALES):
        if not left:
            return None
        x = sample_rows(count, left[0].weight.shape[1], run, scale)
        logits = x @ left[0].weight.T + (0 if left[0].bias is None else left[0].bias)
        shaped = logits.astype(np.float32).reshape(sizes_at(found.linear.result, binding))
        feeds: dict[SSAValue, Array] = {found.linear.result: shaped}
        source = run_source([found.index, found.gate], feeds, constants, binding)
        if source is None:
            return None
        index, gate = (array.reshape(count, found.k) for array in source)
        left = [router for router in left if _same_choice(router, x, index, gate)]
    return left[0] if left else None


def _same_choice(router: Router, x: Array, index: Array, gate: Array) -> bool:
    try:
        wanted_index, wanted_gate, margin = route(router, x)
    except (ValueError, KeyError):
        return False
    clear = margin > MARGIN
    if not clear.any():
        return False
    # A top-k that need not be sorted may return its choices in any order.
    mine, theirs = np.argsort(wanted_index[clear]), np.argsort(index[clear])
    ids = [np.take_along_axis(a[clear], b, 1) for a, b in ((wanted_index, mine), (index, theirs))]
    gates = [np.take_along_axis(a[clear], b, 1) for a, b in ((wanted_gate, mine), (gate, theirs))]
    return bool(np.array_equal(ids[0], ids[1])) and agrees(gates[0], gates[1])


def _emit(found: _Slice, router: Router, ctx: PassContext) -> None:
    linear, anchor = found.linear, found.linear.next_op
    rows = leading(found.index)
    assert anchor is not None
    assert rows is not None
    x = reshaped(linear.x, (rows, Dim(router.weight.shape[1])), anchor)
    correction = None
    if router.correction is not None and router.correction.any():
        constant = ctx.constants.add(router.correction)
        insert_before(anchor, constant)
        correction = constant.result
    new = RouteOp(
        x, linear.weight, linear.bias, correction, k=router.k, order=router.order, **router.options
    )
    insert_before(anchor, new)
    ctx.origins.stands(linear, [new])
    for old, value in ((found.index, new.index), (found.gate, new.gate)):
        redirect(old, reshaped(value, shape_of(old), anchor), ctx.origins)
