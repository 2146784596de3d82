"""RECURRENT and RECURRENT_F32 over numpy arrays; rows of `operations.OPERATIONS` name them.

Reductions and rounding follow the C template; see there for the equations.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.contract.operations import RECURRENT_GATES, RecurrentKind
from compiler.simulator.numerics import tanh
from compiler.simulator.step import Results, Step

Array = NDArray[Any]
Product = Callable[[Array, slice], Array]
"""Takes states (B, H) and the gates that are wanted; returns weight @ state + bias."""


def recurrent(s: Step) -> Results:
    """Run the steps with a four-bit weight."""

    def product(h: Array, gates: slice) -> Array:
        x, scale = s.numerics.quantise(h)
        return _biased(s, s.numerics.linear(x, scale, s.weight_ids[0]), slice(None))[:, gates]

    return _steps(s, product)


def recurrent_f32(s: Step) -> Results:
    """Run the steps with an f32 weight."""

    def product(h: Array, gates: slice) -> Array:
        return _biased(s, s.numerics.dot_rows(h, s.constant(0)[gates]), gates)

    return _steps(s, product)


def _biased(s: Step, y: Array, gates: slice) -> Array:
    bias = s.maybe_constant(1)
    return y if bias is None else y + bias[:, gates]


def _steps(s: Step, product: Product) -> Results:
    kind, batch = RecurrentKind(s.number("kind")), s.number("batch")
    x = s.source(0)
    hidden = x.shape[1] // RECURRENT_GATES[kind]
    steps = x.reshape(-1, batch, x.shape[1])
    zeros = np.zeros((batch, hidden), s.numerics.dtype)
    given = (s.maybe_source(at) for at in (1, 2))
    state, cell = (zeros if part is None else part for part in given)
    y = np.zeros((len(steps), batch, hidden), s.numerics.dtype)
    for at in range(len(steps))[:: -1 if s.number("reverse") else 1]:
        state, cell = _step(s, kind, steps[at], state, cell, product)
        y[at] = state
    results = (y.reshape(-1, hidden), state, cell)
    return results if kind is RecurrentKind.LSTM else results[:2]


def _step(
    s: Step, kind: RecurrentKind, x: Array, h: Array, c: Array, product: Product
) -> tuple[Array, Array]:
    n = h.shape[1]
    if kind is RecurrentKind.RNN:
        return tanh(s.numerics, x + product(h, slice(n))), c
    if kind is RecurrentKind.LSTM:
        i, o, f, fresh = np.split(x + product(h, slice(4 * n)), 4, axis=1)
        c = _sigmoid(s, f) * c + _sigmoid(s, i) * tanh(s.numerics, fresh)
        return _sigmoid(s, o) * tanh(s.numerics, c), c
    before = kind is RecurrentKind.GRU_RESET_BEFORE
    p = product(h, slice(2 * n if before else 3 * n))
    z, r = (_sigmoid(s, x[:, at : at + n] + p[:, at : at + n]) for at in (0, n))
    carried = product(r * h, slice(2 * n, 3 * n)) if before else r * p[:, 2 * n :]
    fresh = tanh(s.numerics, x[:, 2 * n :] + carried)
    return (s.numerics.dtype(1) - z) * fresh + z * h, c


def _sigmoid(s: Step, x: Array) -> Array:
    return np.asarray(1 / (1 + s.numerics.exp(-x)))
