"""What a group of operations may mean: a short list of candidates, for the judge to choose from.

Operations say which activation it can be, constants say its parameters, shapes say how gate and up
rows can lie in the first matrix. Candidates differ in what cannot be read off without running it.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from compiler.analysis.constants import Array
from compiler.analysis.moe_meaning import Experts
from compiler.dialects.sp import OnnxOp
from compiler.passes.match import attr, onnx
from compiler.passes.match_experts import Reach

Arrangement = tuple[str, Array]


def expert_candidates(
    first: Sequence[Array], last: Array, biases: Sequence[Array], b_out: Array | None, hidden: Reach
) -> Iterator[Experts]:
    """Yield what the experts may be.

    Args:
        first: One stack (E, N, D), or two (E, F, D) of gate and up in unknown order.
        last: (E, D, F).
        biases: One (E, N) per stack of `first`, or none.
        b_out: (E, D) or None.
        hidden: The operations between the stacks.
    """
    gated = len(first) == 2 or first[0].shape[1] == 2 * last.shape[2]
    acts = _gated_acts(hidden) if gated else _plain_acts(hidden)
    for rows in _arrangements([len(w[0]) for w in first], gated=gated):
        w_in = np.ascontiguousarray(np.concatenate(first, axis=1)[:, rows])
        for bias in _bias_orders(biases):
            b_in = None if bias is None else np.concatenate(bias, axis=1)[:, rows]
            out = b_out
            if b_in is not None and out is None:
                out = np.zeros(last.shape[:2], np.float32)
            if b_in is None and out is not None:
                b_in = np.zeros(w_in.shape[:2], np.float32)
            for act, options in acts:
                yield Experts(w_in, last, b_in, out, act, options)


def _arrangements(counts: Sequence[int], *, gated: bool) -> list[Array]:
    """Return orders of the first matrices' rows that put gate rows first, likely ones first."""
    rows = np.arange(sum(counts))
    half = len(rows) // 2
    if not gated:
        return [rows]
    swapped = np.concatenate([rows[half:], rows[:half]])
    if len(counts) == 2:
        return [rows, swapped]
    alternating = np.concatenate([rows[0::2], rows[1::2]])
    return [rows, alternating, swapped, np.concatenate([rows[1::2], rows[0::2]])]


def _bias_orders(biases: Sequence[Array]) -> list[list[Array] | None]:
    if not biases:
        return [None]
    return [list(biases), list(biases)[::-1]] if len(biases) == 2 else [list(biases)]


Acts = list[tuple[str, dict[str, float]]]
_JOINS: Final = {"Add", "Cast", "Identity"}


def _plain_acts(hidden: Reach) -> Acts:
    kinds = hidden.kinds
    if kinds <= _JOINS:
        return [("identity", {})]
    signs = (
        ("relu", {"Relu"}),
        ("silu", {"Sigmoid", "Swish"}),
        ("gelu", {"Erf", "Gelu"}),
        ("gelu_tanh", {"Tanh", "Gelu"}),
    )
    return [(act, {}) for act, sign in signs if kinds & sign]


def _gated_acts(hidden: Reach) -> Acts:
    if not hidden.kinds & {"Sigmoid", "Swish"}:
        return [("reglu", {})] if "Relu" in hidden.kinds else []
    options = _clipped_options(hidden)
    plain: Acts = [("swiglu", {})]
    return plain if options == {"alpha": 1.0} else [("swiglu_clipped", options)]


def _clipped_options(hidden: Reach) -> dict[str, float]:
    """Return alpha, limit and shift as the constants between the stacks say."""
    found = {"alpha": 1.0}
    limits = {abs(number) for op, number in hidden.scalars if op.op.data in _CLIPS}
    shifts = {number for op, number in hidden.scalars if op.op.data == "Add"}
    for op in hidden.operations:
        if op.op.data == "Sigmoid":
            scaled = onnx(op.arguments[0], "Mul")
            numbers = [number for reader, number in hidden.scalars if reader is scaled]
            found["alpha"] = numbers[0] if numbers else found["alpha"]
        if op.op.data == "Swish" and attr(op, "alpha") is not None:
            alpha = attr(op, "alpha")
            assert isinstance(alpha, float)
            found["alpha"] = alpha
    if limits:
        found["limit"] = max(limits)
    if shifts:
        found["shift"] = max(shifts)
    return found


_CLIPS: Final = {"Clip", "Min", "Max"}


def scalar_of(op: OnnxOp, reach: Reach) -> float | None:
    """Return the constant operand of `op`."""
    return next((number for reader, number in reach.scalars if reader is op), None)
