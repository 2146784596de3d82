"""Raise `com.microsoft::MoE` and `QMoE` (O1), the form of the ORT-GenAI model builder.

Before:
    %y = "sp.onnx"(%x, %logits, %w1, _, %w2) <{op = "com.microsoft::MoE", attrs = {k = 2, ...}}>
After:
    %v, %i = TopK(Softmax(%logits));  %g = %v / sum(%v)                  (as the attributes say)
    %y = "moe.experts"(%x, %i, %g, %w1', %w2') <{act = "swiglu"}>

The routing inside is written out as the operations it stands for; `raise-moe-router` then reads it
together with whatever made the logits, `MoEGroupRouter` included. QMoE's operand 14 gives gates of
their own: chosen by operand 1, mixed by operand 14. Quantised weights become f32 and take the way
of all weights; codes of eight bits stay eight bits where the submission asks for no other rounding.

ONNX Runtime judges: its run of the operation on random rows and logits must agree. Its CPU kernels
refuse swiglu that is not interleaved, so there the same weights are judged in that order. Two of
their ways are kept and noted: QMoE normalises whatever `normalize_routing_weights` says (unless
operand 14 is there), and `use_sparse_mixer` is ignored by them, so a sparse mixer has no judge.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from xdsl.dialects.builtin import ArrayAttr, ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array, ConstantTable
from compiler.analysis.moe_meaning import Experts, mix
from compiler.dialects.dims import Dim
from compiler.dialects.moe import GATED_ACTS, ExpertsOp, RouteOp
from compiler.dialects.properties import integer
from compiler.dialects.sp import LinearOp, OnnxOp
from compiler.dialects.types import shape_of, sizes_at, tensor_type
from compiler.errors import UnsupportedOperatorError
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.contrib_weights import CONTRIB_OPS, INTERLEAVED, holds_bytes, read_experts
from compiler.passes.judge import bind, run_model, run_source, sample_rows
from compiler.passes.match import attr
from compiler.passes.match_experts import leading, root
from compiler.passes.pipeline_spec import QUANTISE_NONE, QUANTISE_W8
from compiler.passes.rewriting import insert_before, replace, reshaped, sweep
from compiler.passes.slices import CONTRIB, OPSET

JITTER: Final = 0.02
"""Twice the sparse mixer's jitter_eps, which the operator fixes at 0.01."""
GATES: Final = 14
"""QMoE's operand that gates are taken from."""
ROWS: Final = 12
FINE, COARSE = 1e-4, 5e-2
"""Accepted differences, relative to the greatest result: CPU kernels of blocked 2 and 8 bit weights
and of accuracy level 4 multiply with int8 activations."""


@dataclass(frozen=True)
class RaiseMoeContrib(Pass):
    """Split contrib mixtures into routing and experts."""

    name: ClassVar[str] = "raise-moe-contrib"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite every MoE and QMoE.

        Raises:
            UnsupportedOperatorError: Weights cannot be read, or ONNX Runtime disagrees; the
                message names the node and the reason.
        """
        notes: list[str] = []
        changed = sweep(module, ctx, partial(_raise, notes=notes))
        return PassResult(changed, tuple(notes))


def _raise(op: Operation, ctx: PassContext, notes: list[str]) -> int:
    if not isinstance(op, OnnxOp) or op.op.data not in CONTRIB_OPS:
        return 0
    where = f"{ctx.origins.near(op)} ({op.op.data})"
    experts = read_experts(op, ctx.constants)
    if isinstance(experts, str):
        raise _refusal(op, ctx, experts)
    unfit = _unfit(op, experts)
    if unfit:
        raise _refusal(op, ctx, unfit)
    verdict = _verdict(op, experts, ctx.constants)
    if verdict is False:
        raise _refusal(op, ctx, "our reading disagrees with ONNX Runtime")
    routed = _routed(op)
    if routed is None:
        raise _refusal(op, ctx, "no linear layer makes its sparse mixer's logits")
    judge = "judged by ONNX Runtime" if verdict else "by its definition, no CPU kernel runs it"
    notes.append(f"{where}: {len(experts.w_in)} experts, {experts.act}, {judge}")
    is_mixer = bool(attr(op, "use_sparse_mixer"))
    if _always_normalises(op) and not is_mixer and not attr(op, "normalize_routing_weights"):
        notes.append(f"{where}: gates are normalised, as ONNX Runtime does for every QMoE")
    _emit(op, experts, *routed, ctx)
    return 1


def _refusal(op: OnnxOp, ctx: PassContext, reason: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"operator {op.op.data} (node {ctx.origins.near(op)}): {reason}",
        hint="export its weights as float32, fp8, or integers of 2, 3, 4 or 8 bits that no kernel"
        " has packed (weights_prepacked = 0)",
    )


def _unfit(op: OnnxOp, experts: Experts) -> str:
    """Return which shapes contradict each other."""
    x, logits = shape_of(op.arguments[0]), shape_of(op.arguments[1])
    count, wide, width = experts.w_in.shape
    factor = 2 if experts.act in GATED_ACTS else 1
    if len(logits) != 2 or logits[1] != Dim(count) or leading(op.arguments[0]) != logits[0]:
        return f"{count} experts, router_probs of another shape"
    if x[-1] != Dim(width) or (count, width, wide) != (
        *experts.w_out.shape[:2],
        factor * experts.w_out.shape[2],
    ):
        return "its weights do not chain"
    fits = experts.b_in is None or experts.b_in.shape == (count, wide)
    fits = fits and (experts.b_out is None or experts.b_out.shape == (count, width))
    return "" if fits and 1 <= _k(op) <= count else "biases or k do not fit"


def _always_normalises(op: OnnxOp) -> bool:
    return op.op.data.endswith("QMoE") and op.operand_at(GATES) is None


def _normalises(op: OnnxOp) -> bool:
    return _always_normalises(op) or bool(attr(op, "normalize_routing_weights"))


def _k(op: OnnxOp) -> int:
    k = attr(op, "k")
    assert isinstance(k, int)
    return k


# --- routing, written out ------------------------------------------------------------------------


def _routed(op: OnnxOp) -> tuple[SSAValue, SSAValue] | None:
    """Insert the routing that the attributes stand for; return index and gate (T, k)."""
    logits = op.arguments[1]
    if attr(op, "use_sparse_mixer"):
        return _sparse_mixer(op, logits)
    gates = op.operand_at(GATES)
    scores = logits if gates is not None else _onnx(op, "Softmax", [logits], [logits], axis=1)[0]
    shape = (*shape_of(logits)[:-1], Dim(_k(op)))
    top = OnnxOp(
        "TopK",
        [scores],
        {"axis": integer(1), "k": integer(_k(op)), "largest": integer(1), "sorted": integer(1)},
        [tensor_type("float32", shape), tensor_type("int64", shape)],
    )
    insert_before(op, top)
    values: SSAValue = top.outputs[0]
    index = top.outputs[1]
    if gates is not None:
        values = _onnx(op, "GatherElements", [gates, index], [values], axis=1)[0]
    if _normalises(op):
        total = OnnxOp(
            "ReduceSum",
            [values],
            {"axes": ArrayAttr([integer(1)]), "keepdims": integer(1)},
            [tensor_type("float32", (*shape[:-1], Dim(1)))],
        )
        insert_before(op, total)
        values = _onnx(op, "Div", [values, total.outputs[0]], [values])[0]
    return index, values


def _onnx(
    anchor: OnnxOp, kind: str, inputs: list[SSAValue], like: list[SSAValue], **attrs: int
) -> list[SSAValue]:
    types = [tensor_type("float32", shape_of(value)) for value in like]
    new = OnnxOp(kind, inputs, {key: integer(value) for key, value in attrs.items()}, types)
    insert_before(anchor, new)
    return list(new.outputs)


def _sparse_mixer(op: OnnxOp, logits: SSAValue) -> tuple[SSAValue, SSAValue] | None:
    linear, rows = root(logits).owner, leading(logits)
    plain = isinstance(linear, LinearOp) and linear.act.data == "none" and linear.residual is None
    if not isinstance(linear, LinearOp) or not plain or rows is None:
        return None
    x = reshaped(linear.x, (rows, shape_of(linear.x)[-1]), op)
    route = RouteOp(x, linear.weight, linear.bias, k=_k(op), order="sparsemixer", jitter=JITTER)
    insert_before(op, route)
    return route.index, route.gate


def _emit(op: OnnxOp, found: Experts, index: SSAValue, gate: SSAValue, ctx: PassContext) -> None:
    rows = shape_of(index)[0]
    arrays = (found.w_in, found.w_out, found.b_in, found.b_out)
    new = [None if array is None else ctx.constants.add(array) for array in arrays]
    insert_before(op, *(constant for constant in new if constant is not None))
    w_in, w_out, b_in, b_out = (None if constant is None else constant.result for constant in new)
    assert w_in is not None
    assert w_out is not None
    x = reshaped(op.arguments[0], (rows, Dim(found.w_out.shape[1])), op)
    keeps = holds_bytes(op) and ctx.spec.quantise == QUANTISE_NONE
    experts = ExpertsOp(
        x,
        index,
        gate,
        w_in,
        w_out,
        b_in,
        b_out,
        act=found.act,
        storage=QUANTISE_W8 if keeps else ctx.spec.experts,
        **found.options,
    )
    insert_before(op, experts)
    replace(op, [reshaped(experts.result, shape_of(op.outputs[0]), op)], ctx.origins)


# --- judge ---------------------------------------------------------------------------------------


def _verdict(op: OnnxOp, experts: Experts, constants: ConstantTable) -> bool | None:
    """Return whether ONNX Runtime agrees, or None if it cannot run the operation."""
    if attr(op, "use_sparse_mixer"):
        return None
    count, width = len(experts.w_in), experts.w_out.shape[1]
    rows = shape_of(op.arguments[1])[0]
    tokens = rows.constant if rows.is_static else max(ROWS, -(-2 * count // _k(op)))
    x = sample_rows(tokens, width, 1, 1.0)
    logits = sample_rows(tokens, count, 2, 1.0)
    gates = np.abs(sample_rows(tokens, count, 3, 1.0)) + np.float32(0.1)
    index, gate = _meaning(op, logits, gates)
    wanted = mix(experts, x, index, gate)
    found, fine = _run(op, constants, x, logits, gates), FINE
    if found is None and experts.act in GATED_ACTS and op.operand_at(GATES) is None:
        found = _run_interleaved(op, experts, x, logits)
    elif _coarse(op):
        fine = COARSE
    if found is None:
        return None
    difference = float(np.abs(found.reshape(wanted.shape) - wanted).max())
    return difference <= fine * float(np.abs(wanted).max())


def _coarse(op: OnnxOp) -> bool:
    bits = attr(op, "expert_weight_bits")
    return attr(op, "accuracy_level") == 4 or bool(attr(op, "block_size") and bits in (2, 8))


def _meaning(op: OnnxOp, logits: Array, gates: Array) -> tuple[Array, Array]:
    index = np.argsort(-logits, axis=1, kind="stable")[:, : _k(op)]
    terms = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    scores = terms / terms.sum(axis=1, keepdims=True)
    if op.operand_at(GATES) is not None:
        scores = gates.astype(np.float64)
    gate = np.take_along_axis(scores, index, axis=1)
    return index, gate / gate.sum(axis=1, keepdims=True) if _normalises(op) else gate


def _run(
    op: OnnxOp, constants: ConstantTable, x: Array, logits: Array, gates: Array
) -> Array | None:
    binding = bind(len(x))
    feeds = {op.arguments[0]: x.reshape(sizes_at(op.arguments[0], binding))}
    feeds[op.arguments[1]] = logits.reshape(sizes_at(op.arguments[1], binding))
    own = op.operand_at(GATES)
    if own is not None:
        feeds[own] = gates.reshape(sizes_at(own, binding))
    found = run_source([op.outputs[0]], feeds, constants, binding)
    return None if found is None else found[0]


def _run_interleaved(op: OnnxOp, experts: Experts, x: Array, logits: Array) -> Array | None:
    """Run the same experts as a float MoE with interleaved gate and up rows."""
    half = experts.w_in.shape[1] // 2
    order = np.arange(2 * half).reshape(2, half).T.reshape(-1)
    arrays = {"w1": experts.w_in[:, order], "w2": experts.w_out}
    if experts.b_in is not None and experts.b_out is not None:
        arrays |= {"b1": experts.b_in[:, order], "b2": experts.b_out}
    names = ["x", "r", "w1", "b1" if "b1" in arrays else "", "w2", "b2" if "b2" in arrays else ""]
    attrs: dict[str, object] = {"activation_alpha": 1.0}
    if experts.options:
        attrs["activation_alpha"] = experts.options["alpha"]
        attrs["activation_beta"] = experts.options["shift"]
        attrs |= {"swiglu_limit": limit} if (limit := experts.options["limit"]) else {}
    node = helper.make_node(
        "MoE", names, ["y"], domain=CONTRIB, k=_k(op), activation_type="swiglu",
        swiglu_fusion=INTERLEAVED, normalize_routing_weights=int(_normalises(op)), **attrs,  # type: ignore[arg-type]
    )  # fmt: skip
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", "r", "y")]
    stored = [numpy_helper.from_array(np.ascontiguousarray(a), n) for n, a in arrays.items()]
    graph = helper.make_graph([node], "moe", ports[:2], ports[2:], stored)
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    found = run_model(model, {"x": x, "r": logits})
    return None if found is None else found[0]
