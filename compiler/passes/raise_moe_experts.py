"""Raise experts that are written out: gathered matrices (O2) or all experts at once (O5).

Before (r = row * k + choice; the gathered form, as the dynamo exporter writes it):
    %h = MatMul(GatherND(%w_in, %i), %x repeated k times)                (T*k, 2F)
    %a = Mul(Mul(%g, Sigmoid(%g)), %u)                                   %g, %u = halves of %h
    %o = MatMul(GatherND(%w_out, %i), %a)                                (T*k, D)
    %y = ReduceSum(Mul(%o, %v) as (T, k, D), axis 1)
Before (the dense form: every expert on every row, the gate of those not chosen is zero):
    %h = MatMul(%x spread to (E, T, D), %w_in);  ...;  %o = MatMul(%a, %w_out)      (E, T, D)
    %d = ScatterElements(zeros (T, E), %i, %v, axis 1)
    %y = ReduceSum(Mul(%o, Transpose(%d) as (E, T, 1)), axis 0)
After:
    %y = "moe.experts"(%x, %i, %v, %w_in', %w_out') <{act = "swiglu"}>

Structure only proposes: which arrays are the stacks, which values are rows, choices and gates.
What it computes (which rows are gate and which up, the activation, the biases) is a short list of
hypotheses, and ONNX Runtime's run of the very operations that would be replaced decides. If none of
them agrees, nothing is raised and a note says so. Left out: gates on the way in (Llama 4), because
they do not commute with the activation.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array, ConstantTable
from compiler.analysis.moe_meaning import Experts, mix
from compiler.dialects.dims import Dim
from compiler.dialects.moe import ExpertsOp
from compiler.dialects.movement import MOVEMENT_OPS
from compiler.dialects.sp import OnnxOp
from compiler.dialects.types import shape_of, sizes_at
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.hypotheses import expert_candidates
from compiler.passes.judge import agrees, bind, sample_choices, sample_rows, source_of
from compiler.passes.match import attr, onnx
from compiler.passes.match_experts import (
    Reach,
    Stack,
    choice_matrix,
    leading,
    reach,
    root,
    stack_of,
)
from compiler.passes.rewriting import insert_before, replace, reshaped, sweep

SCALES: Final = (1.0, 6.0, 60.0)
"""Standard deviations of the rows a candidate is judged on; the last one drives clips to work."""
GATHERED_BYTES: Final = 1 << 26
MAX_RUNS: Final = 12


@dataclass(frozen=True)
class RaiseMoeExperts(Pass):
    """Recognise mixtures of experts from the sum that ends them."""

    name: ClassVar[str] = "raise-moe-experts"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Raise every sum over choices or experts that the judge confirms."""
        notes: list[str] = []
        changed = sweep(module, ctx, partial(_raise, notes=notes))
        return PassResult(changed, tuple(notes))


@dataclass(frozen=True, eq=False)
class _Mixture:
    """A proposed mixture: the values that would be its operands, and what is between them."""

    total: OnnxOp
    x: SSAValue
    index: SSAValue
    gate: SSAValue
    first: list[Array]
    last: Array
    biases: list[Array]
    b_out: Array | None
    hidden: Reach

    @property
    def experts(self) -> int:
        return len(self.last)

    @property
    def tokens(self) -> Dim | None:
        return leading(self.index)

    @property
    def k(self) -> int:
        return shape_of(self.index)[-1].constant


def _raise(op: Operation, ctx: PassContext, notes: list[str]) -> int:
    total = onnx(op.results[0], "ReduceSum") if op.results else None
    if total is None or total.parent is None or len(_axes(total)) != 1:
        return 0
    mixture = _mixture(total, ctx.constants)
    if mixture is None:
        return 0
    found = judged(mixture, ctx.constants)
    where = ctx.origins.near(total)
    if found is None:
        notes.append(f"{where}: looks like experts, but no reading of it agrees with ONNX Runtime")
        return 0
    _emit(mixture, found, ctx)
    notes.append(f"{where}: {mixture.experts} experts, {found.act}, judged by ONNX Runtime")
    return 1


def _axes(total: OnnxOp) -> list[int]:
    axes = attr(total, "axes")
    return axes if isinstance(axes, list) else []


def _mixture(total: OnnxOp, constants: ConstantTable) -> _Mixture | None:
    product = onnx(_under_movement(total.arguments[0]), "Mul")
    if product is None:
        return None
    for outputs, gates in (tuple(product.arguments), tuple(product.arguments)[::-1]):
        end = reach(outputs, constants)
        if end is None or len(end.products) != 1 or not end.kinds <= {"Add", "Cast"}:
            continue
        last = stack_of(end.products[0], constants)
        hidden = reach(last.vector, constants) if last is not None else None
        if last is None or hidden is None or not 1 <= len(hidden.products) <= 2:
            continue
        first = [stack_of(op, constants) for op in hidden.products]
        stacks = [stack for stack in first if stack is not None]
        if len(stacks) == len(first):
            return _operands(total, gates, last, stacks, (end, hidden))
    return None


def _under_movement(value: SSAValue) -> SSAValue:
    while isinstance(value.owner, MOVEMENT_OPS) and len(value.owner.operands) == 1:
        value = value.owner.operands[0]
    return value


def _operands(
    total: OnnxOp,
    gates: SSAValue,
    last: Stack,
    first: list[Stack],
    reaches: tuple[Reach, Reach],
) -> _Mixture | None:
    x = root(first[0].vector)
    if any(root(stack.vector) is not x for stack in first) or not shape_of(x):
        return None
    choices = _choices(gates, last, first)
    if choices is None:
        return None
    index, gate = choices
    end, hidden = reaches
    weights = [stack.weight for stack in first]
    shapes = {len(weight) for weight in (*weights, last.weight)}
    widths = {weight.shape[2] for weight in weights} | {last.weight.shape[1]}
    inner = sum(weight.shape[1] for weight in weights)
    fits = inner in (last.weight.shape[2], 2 * last.weight.shape[2])
    if len(shapes) != 1 or widths != {shape_of(x)[-1].constant} or not fits:
        return None
    if not 1 <= shape_of(index)[-1].constant <= len(last.weight):
        return None
    if len(hidden.biases) not in (0, len(first)) or len(end.biases) > 1:
        return None
    if leading(x) is None or leading(x) != leading(index) or leading(gate) != leading(index):
        return None
    b_out = end.biases[0] if end.biases else None
    out = np.ascontiguousarray(last.weight)
    return _Mixture(total, x, index, gate, weights, out, hidden.biases, b_out, hidden)


def _choices(gates: SSAValue, last: Stack, first: list[Stack]) -> tuple[SSAValue, SSAValue] | None:
    """Return expert ids and gates, both (.., T, k)."""
    if last.index is None:
        if any(stack.index is not None for stack in first):
            return None
        scatter = onnx(root(gates), "ScatterElements")
        if scatter is None:
            return None
        return scatter.arguments[1], scatter.arguments[2]
    matrices = [choice_matrix(s.index) for s in (last, *first) if s.index is not None]
    index = matrices[0]
    if index is None or len(matrices) != 1 + len(first):
        return None
    if any(matrix is not index for matrix in matrices):
        return None
    gate = choice_matrix(gates, leading(index))
    return None if gate is None or shape_of(gate)[-1] != shape_of(index)[-1] else (index, gate)


def judged(mixture: _Mixture, constants: ConstantTable) -> Experts | None:
    """Return the first candidate that agrees with ONNX Runtime on every sample, or None."""
    left = list(
        expert_candidates(
            mixture.first, mixture.last, mixture.biases, mixture.b_out, mixture.hidden
        )
    )
    rows = _rows(mixture)
    runs = min(MAX_RUNS, len(SCALES) + mixture.experts // (rows * mixture.k))
    binding = bind(rows)
    inputs = (mixture.x, mixture.index, mixture.gate)
    source = source_of([mixture.total.outputs[0]], inputs, constants, binding)
    for run in range(runs if source is not None else 0):
        assert source is not None
        x = sample_rows(rows, mixture.last.shape[1], run, SCALES[run % len(SCALES)])
        index, gate = sample_choices(rows, mixture.k, mixture.experts, run)
        shaped = zip(inputs, (x, index, gate), strict=True)
        found = source.run([array.reshape(sizes_at(value, binding)) for value, array in shaped])
        if found is None or found[0].size != x.size:
            return None
        wanted = found[0].reshape(x.shape)
        left = [c for c in left if agrees(mix(c, x, index, gate), wanted)]
    return left[0] if left and source is not None else None


def _rows(mixture: _Mixture) -> int:
    """Return how many rows to run: all of a fixed number, else few enough for the gathers."""
    tokens = mixture.tokens
    assert tokens is not None
    if tokens.is_static:
        return tokens.constant
    gathered = mixture.k * sum(w[0].nbytes for w in (*mixture.first, mixture.last))
    return int(max(2, min(12, GATHERED_BYTES // max(gathered, 1))))


def _emit(mixture: _Mixture, found: Experts, ctx: PassContext) -> None:
    total, tokens = mixture.total, mixture.tokens
    assert tokens is not None
    arrays = (found.w_in, found.w_out, found.b_in, found.b_out)
    new = [None if array is None else ctx.constants.add(array) for array in arrays]
    insert_before(total, *(op for op in new if op is not None))
    w_in, w_out, b_in, b_out = (None if op is None else op.result for op in new)
    assert w_in is not None
    assert w_out is not None
    choices = (tokens, Dim(mixture.k))
    experts = ExpertsOp(
        reshaped(mixture.x, (tokens, Dim(mixture.last.shape[1])), total),
        reshaped(mixture.index, choices, total),
        reshaped(mixture.gate, choices, total),
        w_in,
        w_out,
        b_in,
        b_out,
        act=found.act,
        storage=ctx.spec.experts,
        **found.options,
    )
    insert_before(total, experts)
    replace(total, [reshaped(experts.result, shape_of(total.outputs[0]), total)], ctx.origins)
