"""Rows of LSTM, GRU and RNN: the recurrent kernel, or every time step as reference calls.

    X (T, B, I), W (D, G*H, I), R (D, G*H, H), [B (D, 2*G*H)]  ->  Y (T, D, B, H), Y_h (D, B, H)

Constant weights go to `recurrent_calls`. Others are unrolled into products and functions: the
input's product is one call for all steps of a direction; each step then adds the product of the
state. Left out: clipping, peepholes, activations other than the default ones, run-time lengths.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from compiler.contract.reference import MapKind
from compiler.dialects.sp import OnnxOp
from compiler.passes.match import attr
from compiler.passes.recurrent_calls import recurrent, weights_of
from compiler.passes.reference_calls import ReferenceCalls, View
from compiler.passes.reference_rows import Row, fixed, integer, operand

_K: Final = MapKind
MAX_STEPS: Final = 512
_GATES: Final = {"LSTM": 4, "GRU": 3, "RNN": 1}
_DEFAULTS: Final = {
    "LSTM": ["sigmoid", "tanh", "tanh"],
    "GRU": ["sigmoid", "tanh"],
    "RNN": ["tanh"],
}


@dataclass(frozen=True, slots=True)
class _Cell:
    """One direction of one operator: weights transposed for x @ W, bias of input and state."""

    kind: str
    hidden: int
    w: View
    r: View
    w_bias: View | None
    r_bias: View | None
    after_reset: bool


def _row(op: OnnxOp, r: ReferenceCalls) -> list[View]:
    kind = op.op.data
    _check(op, r, kind)
    x, initial, cell = operand(op, r, 0), operand(op, r, 5), operand(op, r, 6)
    assert x is not None
    if integer(op, "layout"):
        r.sel.refuse("its layout puts the batch first")
    directions = r.view(op.arguments[1]).shape[0]
    made = [_direction(op, r, x, at, (initial, cell)) for at in range(directions)]
    hidden, (steps, batch, _) = made[0][1].shape[-1], x.shape
    if directions == 1 and len(made[0][0]) == 1:
        results = [r.reshaped(made[0][0][0], (steps, 1, batch, hidden))]
    else:
        pieces = [
            (r.reshaped(view, (view.shape[0], 1, batch, hidden)), (step, at, 0, 0))
            for at, (outputs, _, _) in enumerate(made)
            for step, view in enumerate(outputs)
        ]
        results = [r.moved((steps, directions, batch, hidden), pieces)]
    for which in (1, 2)[: len(op.outputs) - 1]:
        ends = [(m[1], m[2])[which - 1] for m in made]
        if directions == 1:
            results.append(r.reshaped(ends[0], (1, batch, hidden)))
            continue
        corners = [(r.reshaped(v, (1, batch, hidden)), (at, 0, 0)) for at, v in enumerate(ends)]
        results.append(r.moved((directions, batch, hidden), corners))
    return results[: len(op.outputs)]


def _check(op: OnnxOp, r: ReferenceCalls, kind: str) -> None:
    given = attr(op, "activations")
    names = [str(name).lower() for name in given] if isinstance(given, list) else []
    wanted = _DEFAULTS[kind]
    if any(name != wanted[at % len(wanted)] for at, name in enumerate(names)):
        r.sel.refuse(f"its activations are {given}; computed are the default ones")
    if op.operand_at(7) is not None or attr(op, "clip") is not None or integer(op, "input_forget"):
        r.sel.refuse("peepholes, clipping and coupled gates are not computed")
    lengths = fixed(op, r, 4)
    steps = r.shape(op.arguments[0])[0]
    if lengths is not None and (lengths != steps).any():
        r.sel.refuse("sequences of different lengths are not computed")


def _direction(
    op: OnnxOp, r: ReferenceCalls, x: View, at: int, start: tuple[View | None, View | None]
) -> tuple[list[View], View, View]:
    """Return the states (steps, B, H) in time order, whole or in parts, the last state and cell."""
    backward = attr(op, "direction") == "reverse" or at == 1
    fast = weights_of(op, r, at)
    if fast is not None:
        given = tuple(None if v is None else _initial(r, v, at, *v.shape[1:]) for v in start)
        y, state, memory = recurrent(r, x, fast, (given[0], given[1]), backward=backward)
        return [y], state, memory
    return _unrolled(op, r, x, at, start, backward=backward)


def _unrolled(
    op: OnnxOp,
    r: ReferenceCalls,
    x: View,
    at: int,
    start: tuple[View | None, View | None],
    *,
    backward: bool,
) -> tuple[list[View], View, View]:
    kind, (steps, batch, width) = op.op.data, x.shape
    if steps > MAX_STEPS:
        r.sel.refuse(f"it has {steps} steps, unrolled are at most {MAX_STEPS}")
    w, rec, bias = (operand(op, r, n) for n in (1, 2, 3))
    assert w is not None
    assert rec is not None
    hidden, gates = rec.shape[-1], _GATES[kind]
    biases: tuple[View | None, View | None] = (None, None)
    if bias is not None:
        row = bias.sliced(0, at, 1)
        halves = (row.sliced(1, n * gates * hidden, gates * hidden) for n in (0, 1))
        biases = tuple(r.reshaped(h, (gates * hidden,)) for h in halves)  # type: ignore[assignment]
    cell = _Cell(
        kind,
        hidden,
        _matrix(w, at),
        _matrix(rec, at),
        *biases,
        after_reset=bool(integer(op, "linear_before_reset")),
    )
    flat = r.reshaped(x, (steps * batch, width))
    inputs = r.contract(flat, cell.w)
    inputs = inputs if cell.w_bias is None else r.map(_K.ADD, inputs, cell.w_bias)
    state, memory = (_initial(r, given, at, batch, hidden) for given in start)
    outputs: list[View] = []
    for step in reversed(range(steps)) if backward else range(steps):
        now = inputs.sliced(0, step * batch, batch)
        state, memory = _STEPS[kind](r, cell, now, state, memory)
        outputs.append(r.reshaped(state, (1, batch, hidden)))
    return outputs[::-1] if backward else outputs, state, memory


def _matrix(stack: View, at: int) -> View:
    """Return matrix `at` of a stack, transposed."""
    one = stack.sliced(0, at, 1)
    return View(one.shape[1:], one.kind, one.matrix, one.array, one.at, one.steps[1:]).permuted(
        (1, 0)
    )


def _initial(r: ReferenceCalls, given: View | None, at: int, batch: int, hidden: int) -> View:
    if given is None:
        return r.constant(np.zeros((batch, hidden), np.float32))
    return r.reshaped(given.sliced(0, at, 1), (batch, hidden))


def _state_product(r: ReferenceCalls, cell: _Cell, state: View, gates: slice) -> View:
    columns = slice(gates.start * cell.hidden, gates.stop * cell.hidden)
    count = columns.stop - columns.start
    made = r.contract(state, cell.r.sliced(1, columns.start, count))
    if cell.r_bias is None:
        return made
    return r.map(_K.ADD, made, cell.r_bias.sliced(0, columns.start, count))


def _gate(cell: _Cell, gates: View, at: int) -> View:
    return gates.sliced(1, at * cell.hidden, cell.hidden)


def _lstm(
    r: ReferenceCalls, cell: _Cell, now: View, state: View, memory: View
) -> tuple[View, View]:
    """Gates stand in the order input, output, forget, candidate."""
    gates = r.map(_K.ADD, now, _state_product(r, cell, state, slice(0, 4)))
    i, o, f = (r.map(_K.SIGMOID, _gate(cell, gates, at)) for at in range(3))
    candidate = r.map(_K.TANH, _gate(cell, gates, 3))
    memory = r.map(_K.ADD, r.map(_K.MUL, f, memory), r.map(_K.MUL, i, candidate))
    return r.map(_K.MUL, o, r.map(_K.TANH, memory)), memory


def _gru(r: ReferenceCalls, cell: _Cell, now: View, state: View, memory: View) -> tuple[View, View]:
    """Gates stand in the order update, reset, hidden."""
    both = r.map(
        _K.ADD,
        now.sliced(1, 0, 2 * cell.hidden),
        _state_product(r, cell, state, slice(0, 2)),
    )
    both = r.map(_K.SIGMOID, both)
    update, reset = _gate(cell, both, 0), _gate(cell, both, 1)
    if cell.after_reset:
        carried = r.map(_K.MUL, reset, _state_product(r, cell, state, slice(2, 3)))
    else:
        carried = _state_product(r, cell, r.map(_K.MUL, reset, state), slice(2, 3))
    fresh = r.map(_K.TANH, r.map(_K.ADD, _gate(cell, now, 2), carried))
    kept = r.map(_K.MUL, r.map(_K.SUB, r.scalar(1.0), update), fresh)
    return r.map(_K.ADD, kept, r.map(_K.MUL, update, state)), memory


def _rnn(r: ReferenceCalls, cell: _Cell, now: View, state: View, memory: View) -> tuple[View, View]:
    total = r.map(_K.ADD, now, _state_product(r, cell, state, slice(0, 1)))
    return r.map(_K.TANH, total), memory


_STEPS: Final = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}
RECURRENT: Final[Mapping[str, Row]] = MappingProxyType(dict.fromkeys(_GATES, _row))
