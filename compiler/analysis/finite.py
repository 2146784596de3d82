"""Which values are certainly finite: the condition under which a product keeps a factor's zeros.

0 * inf is NaN, so "a is zero, hence a * b is" needs a finite b. Three proofs are known, and a value
without one stays an assumption of the claim that needs it:

- *bound*: interval arithmetic on magnitudes from finite constants, pixels and embedded tokens;
- *checked*: the value enters a four-bit product, which refuses the step (`NOT_FINITE`) if an
  element is infinite or NaN (`compiler/kernels/templates/w4.c.in`), so no completed step has one.

Bounds are upper bounds of |x| in real arithmetic, widened by `SLACK` per operation for rounding.
Called by `compiler.analysis.propagation` once per module.
"""

import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array, ConstantTable
from compiler.dialects.invariant import zero_rule
from compiler.dialects.moe import ExpertsOp
from compiler.dialects.movement import ReshapeOp
from compiler.dialects.sp import QUANTISED, ConstantOp, LinearOp
from compiler.dialects.types import dtype_of, shape_of

UNBOUNDED: Final = math.inf
LARGEST: Final = float(np.finfo(np.float32).max) / 4
SQUARES_FIT: Final = 1e15
"""Below this magnitude sums of squares of any axis we compile stay far from overflow."""
SLACK: Final = 1.01
W4_SLACK: Final = 2.0
"""Four-bit weights are rounded; their absolute sums stay below twice the original's."""
STATE_ROUNDS: Final = 8
EXPONENT_FITS: Final = 80.0
SHARES: Final = ("topk_softmax", "softmax_topk", "softmax_topk_renorm", "sigmoid_topk")


@dataclass(slots=True)
class _Bounds:
    constants: ConstantTable
    state: MutableMapping[tuple[int, int], float]
    known: dict[SSAValue, float] = field(default_factory=dict)

    def of(self, value: SSAValue | None) -> float:
        """Return the bound of a value; absent operands add nothing."""
        return 0.0 if value is None else self.known.get(value, UNBOUNDED)

    def row_sum(self, weight: SSAValue) -> float:
        """Return the greatest sum of absolute weights of one output."""
        owner = weight.owner
        if not isinstance(owner, ConstantOp):
            return UNBOUNDED
        return W4_SLACK * self.constants.learn(owner, greatest_row_sum)


def greatest_row_sum(array: Array) -> float:
    """Return the greatest sum of magnitudes along the last axis, infinity if it has none."""
    if not np.isfinite(array).all() or not array.size:
        return UNBOUNDED
    return float(np.abs(array.astype(np.float64)).sum(axis=-1).max())


def greatest_magnitude(array: Array) -> float:
    """Return the greatest magnitude of finite numbers, infinity if there is none."""
    if array.dtype.kind not in "fiub" or not array.size:
        return UNBOUNDED
    bound = float(np.abs(array.astype(np.float64)).max())
    return bound if math.isfinite(bound) else UNBOUNDED


_Rule = Callable[[Any, _Bounds], float]


def _constant(op: Any, b: _Bounds) -> float:
    return b.constants.learn(op, greatest_magnitude)


def _first(op: Any, b: _Bounds) -> float:
    return b.of(op.operands[0])


def _one_if_finite(op: Any, b: _Bounds) -> float:
    return 1.0 if b.of(op.operands[0]) < LARGEST else UNBOUNDED


def _sum(op: Any, b: _Bounds) -> float:
    return SLACK * sum(b.of(operand) for operand in op.operands)


def _largest(op: Any, b: _Bounds) -> float:
    return max(b.of(operand) for operand in op.operands)


def _product(op: Any, b: _Bounds) -> float:
    return SLACK * _times(b.of(op.operands[0]), b.of(op.operands[1]))


def _quotient(op: Any, b: _Bounds) -> float:
    divisor = b.constants.get(op.operands[1])
    if divisor is None or not np.isfinite(divisor).all() or not (divisor != 0).all():
        return UNBOUNDED
    return SLACK * b.of(op.operands[0]) / float(np.abs(divisor.astype(np.float64)).min())


def _linear(op: Any, b: _Bounds) -> float:
    inner = _times(b.of(op.x), b.row_sum(op.weight))
    residual = b.of(getattr(op, "residual", None))
    return SLACK * (inner + b.of(op.bias) + residual)


def _norm(op: Any, b: _Bounds) -> float:
    if b.of(op.x) > SQUARES_FIT or not shape_of(op.x)[-1].is_static:
        return UNBOUNDED
    width = math.sqrt(shape_of(op.x)[-1].constant)
    return SLACK * (_times(width, b.of(op.gamma)) + b.of(op.beta))


def _route(op: Any, b: _Bounds) -> float:
    """Gates are shares of one; a scale multiplies them. Other orders are not bounded here."""
    logits = _times(b.of(op.x), b.row_sum(op.weight)) + b.of(op.bias)
    if op.order.data not in SHARES or logits >= LARGEST:
        return UNBOUNDED
    return max(1.0, abs(float(op.options().get("scale", 1.0))))


def _experts(op: Any, b: _Bounds) -> float:
    if op.act.data not in ("relu", "silu", "swiglu", "reglu", "identity"):
        return UNBOUNDED
    inner = SLACK * (_times(b.of(op.x), b.row_sum(op.w_in)) + b.of(op.b_in))
    hidden = _times(inner, inner) if op.act.data in ("swiglu", "reglu") else inner
    outer = _times(hidden, b.row_sum(op.w_out)) + b.of(op.b_out)
    return SLACK * _times(outer, shape_of(op.gate)[-1].constant * b.of(op.gate))


def _attended(op: Any, b: _Bounds) -> float:
    return 1.0 if _bounded(op, b) else UNBOUNDED


def _state(op: Any, b: _Bounds) -> float:
    layer = op.layer.value.data
    for at in range(2):
        grown = max(b.state.get((layer, at), 0.0), b.of(op.operands[at]))
        b.state[layer, at] = grown
        b.known[op.results[at]] = grown
    return b.state[layer, 0]


def _exp(op: Any, b: _Bounds) -> float:
    bound = b.of(op.operands[0])
    return math.exp(bound) * SLACK if bound < EXPONENT_FITS else UNBOUNDED


_BOUNDS: Final[Mapping[str, _Rule]] = {
    "sp.constant": _constant,
    **dict.fromkeys(("sp.reshape", "sp.expand", "sp.transpose", "sp.slice", "mm.splice"), _first),
    **dict.fromkeys(("sp.unary:relu", "sp.unary:silu", "sp.unary:neg", "mm.prune"), _first),
    **dict.fromkeys(("sp.unary:gelu", "sp.unary:gelu_tanh"), _first),
    **dict.fromkeys(("sp.onnx:Relu", "sp.onnx:Abs", "sp.onnx:Neg", "sp.onnx:Swish"), _first),
    **dict.fromkeys(("sp.unary:tanh", "sp.unary:sigmoid", "sp.softmax"), _one_if_finite),
    **dict.fromkeys(("sp.onnx:Tanh", "sp.onnx:Sigmoid", "sp.onnx:Softmax"), _one_if_finite),
    **dict.fromkeys(("mm.attention_row", "mm.attention_score"), _attended),
    "sp.unary:exp": _exp,
    "sp.onnx:Exp": _exp,
    "sp.unary:sqrt": lambda op, b: max(1.0, b.of(op.x)) if _non_negative(op.x) else UNBOUNDED,
    **dict.fromkeys(("sp.binary:add", "sp.binary:sub", "sp.onnx:Add", "sp.onnx:Sub"), _sum),
    **dict.fromkeys(("sp.concat", "sp.onnx:Max", "sp.onnx:Min", "sp.onnx:Where"), _largest),
    **dict.fromkeys(("sp.binary:mul", "sp.onnx:Mul"), _product),
    **dict.fromkeys(("sp.binary:div", "sp.onnx:Div"), _quotient),
    **dict.fromkeys(("sp.linear", "sp.conv2d"), _linear),
    **dict.fromkeys(("sp.norm:rms", "sp.norm:layer"), _norm),
    "sp.embed": lambda op, b: b.of(op.table),
    "sp.image": lambda op, b: 255.0 / abs(op.divide.value.data) + abs(op.subtract.value.data),  # noqa: ARG005
    "moe.route": _route,
    "moe.experts": _experts,
    "mm.rope": lambda op, b: 2.0 * SLACK * b.of(op.x),
    "mm.attention": lambda op, b: SLACK * _times(b.of(op.v), _attended(op, b)),
    "mm.kv_append": _state,
}


def value_bounds(funcs: list[FuncOp], constants: ConstantTable) -> dict[SSAValue, float]:
    """Return an upper bound of |x| for every floating-point value that has one.

    The cache is carried from call to call, so functions are walked until its bounds rest; after
    `STATE_ROUNDS` rounds a bound that still grows is given up.
    """
    state: dict[tuple[int, int], float] = {}
    for _ in range(STATE_ROUNDS):
        before = dict(state)
        known = _walk(funcs, constants, state)
        if state == before:
            return known
    return _walk(funcs, constants, dict.fromkeys(state, UNBOUNDED))


def checked_values(funcs: list[FuncOp]) -> frozenset[SSAValue]:
    """Return the values that a product of few bits refuses unless they are finite."""
    found: set[SSAValue] = set()
    for func in funcs:
        for op in func.body.block.ops:
            is_checked = isinstance(op, LinearOp) and op.storage.data in QUANTISED
            if is_checked or isinstance(op, ExpertsOp):
                value = op.operands[0]
                found.add(value)
                while isinstance(value.owner, ReshapeOp):
                    value = value.owner.x
                    found.add(value)
    return frozenset(found)


def _walk(
    funcs: list[FuncOp], constants: ConstantTable, state: MutableMapping[tuple[int, int], float]
) -> dict[SSAValue, float]:
    bounds = _Bounds(constants, state)
    for func in funcs:
        for op in func.body.block.ops:
            rule = _BOUNDS.get(zero_rule(op) or "")
            if rule is None:
                continue
            bound = rule(op, bounds)
            for result in op.results:
                if dtype_of(result).startswith("float") and result not in bounds.known:
                    bounds.known[result] = bound if bound < LARGEST else UNBOUNDED
    return {value: bound for value, bound in bounds.known.items() if bound < LARGEST}


def _times(a: float, b: float) -> float:
    """Return a * b; nothing bounds a product with an unbounded factor, not even a zero (NaN)."""
    return a * b if math.isfinite(a) and math.isfinite(b) else UNBOUNDED


def _bounded(op: Operation, b: _Bounds) -> bool:
    """Return whether scores cannot overflow: queries and keys are far from the largest float."""
    return all(b.of(operand) < SQUARES_FIT for operand in op.operands[:2])


def _non_negative(value: SSAValue) -> bool:
    return (
        zero_rule(value.owner) == "sp.unary:relu" if isinstance(value.owner, Operation) else False
    )
