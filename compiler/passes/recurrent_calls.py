"""LSTM, GRU and RNN with constant weights as two calls per direction.

    gates (T*B, G*H) = LINEAR x, W, bias          all steps at once
    Y, Y_h, Y_c      = RECURRENT gates, h0, c0, R, bias of the state

Matrices are stored as linear layers of their size are; that of the state in four bits or as f32.
What stays with the state is the bias of a GRU, whose reset gate may stand between; other kinds add
both biases first. Called by `reference_recurrent`, which unrolls what has no such weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from xdsl.ir import SSAValue

from compiler.analysis.constants import Array
from compiler.contract.moe_rules import MAX_LINEAR_K
from compiler.dialects.sp import OnnxOp
from compiler.kernels.program import Op, RecurrentKind
from compiler.passes.pipeline_spec import QUANTISE_NONE, QUANTISE_W4, QUANTISE_W8
from compiler.passes.raise_linear import RaiseLinear
from compiler.passes.reference_calls import ReferenceCalls, View, steps_of
from compiler.passes.reference_rows import integer

KINDS: Final[Mapping[str, RecurrentKind]] = MappingProxyType(
    {"LSTM": RecurrentKind.LSTM, "GRU": RecurrentKind.GRU_RESET_BEFORE, "RNN": RecurrentKind.RNN}
)
_LINEAR: Final[Mapping[str, Op]] = MappingProxyType(
    {QUANTISE_W4: Op.LINEAR, QUANTISE_W8: Op.LINEAR_W8, QUANTISE_NONE: Op.LINEAR_F32}
)
_GRUS: Final = frozenset({RecurrentKind.GRU, RecurrentKind.GRU_RESET_BEFORE})


@dataclass(frozen=True, slots=True)
class Weights:
    """Constants of one direction: W (G*H, I), R (G*H, H) and the biases of both."""

    kind: RecurrentKind
    w: Array
    r: Array
    w_bias: Array | None
    r_bias: Array | None


def weights_of(op: OnnxOp, r: ReferenceCalls, at: int) -> Weights | None:
    """Return the weights of direction `at`; None if they are no constants or too large."""
    w, rec = (r.sel.array(op.arguments[n]) for n in (1, 2))
    given = op.operand_at(3)
    bias = r.sel.array(given)
    if w is None or rec is None or (given is not None and bias is None):
        return None
    if max(w.shape[-1], rec.shape[-1]) > MAX_LINEAR_K:
        return None
    kind = KINDS[op.op.data]
    if kind is RecurrentKind.GRU_RESET_BEFORE and integer(op, "linear_before_reset"):
        kind = RecurrentKind.GRU
    w_bias = r_bias = None
    if bias is not None:
        w_bias, r_bias = np.split(bias[at].astype(np.float32), 2)
        if kind not in _GRUS:
            w_bias, r_bias = w_bias + r_bias, None
    return Weights(kind, _plain(w[at]), _plain(rec[at]), w_bias, r_bias)


def _plain(array: Array) -> Array:
    return np.ascontiguousarray(array, np.float32)


def recurrent(
    r: ReferenceCalls,
    x: View,
    weights: Weights,
    start: tuple[View | None, View | None],
    *,
    backward: bool,
) -> tuple[View, View, View]:
    """Append the calls of one direction.

    Args:
        r: Appends the calls.
        x: (T, B, I).
        weights: What `weights_of` found.
        start: First state and cell (B, H); None for zeros.
        backward: From the last step to the first.

    Returns:
        The state after every step (T, B, H), in time order, the last state and the last cell (B,
        H); the state again where the kind has no cell.
    """
    steps, batch, width = x.shape
    hidden = weights.r.shape[1]
    gates = _linear(r, r.reshaped(x, (steps * batch, width)), weights)
    states: list[SSAValue | None] = [None if v is None else r.matrix(v) for v in start]
    four_bits = weights.kind is not RecurrentKind.GRU_RESET_BEFORE
    four_bits = four_bits and _storage(r, weights.r) == QUANTISE_W4
    shapes = [(steps * batch, hidden), (batch, hidden), (batch, hidden)]
    is_lstm = weights.kind is RecurrentKind.LSTM
    made = r.sel.call(
        Op.RECURRENT if four_bits else Op.RECURRENT_F32,
        [gates, states[0], states[1] if is_lstm else None],
        [r.sel.weight(weights.r), r.sel.weight(weights.r_bias)],
        {"kind": int(weights.kind), "batch": batch, "reverse": int(backward)},
        [r.result_type(shape, "f") for shape in shapes[: 3 if is_lstm else 2]],
    )
    y, *ends = (View(s, "f", m, None, 0, steps_of(s)) for s, m in zip(shapes, made, strict=False))
    return r.reshaped(y, (steps, batch, hidden)), ends[0], ends[-1]


def _linear(r: ReferenceCalls, x: View, weights: Weights) -> SSAValue:
    op = _LINEAR[_storage(r, weights.w)]
    constants = [r.sel.weight(weights.w), r.sel.weight(weights.w_bias)]
    kind = r.result_type((x.shape[0], len(weights.w)), "f")
    return r.sel.call(op, [r.matrix(x)], constants, {}, [kind])[0]


def _storage(r: ReferenceCalls, matrix: Array) -> str:
    """Return how a linear layer with this matrix would store it."""
    return r.sel.ctx.spec.quantise if RaiseLinear().fits(matrix.shape) else QUANTISE_NONE
