"""Launches of RECURRENT and RECURRENT_F32: step by step, a product and the gates of each row."""

from dataclasses import dataclass
from typing import Final

from compiler.contract.operations import Op, RecurrentKind
from compiler.contract.plan import PlanCall
from compiler.emitters.opencl.device import Operand
from compiler.emitters.opencl.frame import Frame, View
from compiler.emitters.opencl.moves import move
from compiler.emitters.opencl.products import add_bias, product, quantise, whole_list

_FLOAT: Final = 4


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """What the steps of a call share: `p` holds a step's products, `cell` only LSTM has."""

    kind: RecurrentKind
    weight: int
    bias: int | None
    state: View
    cell: Operand | None
    p: View

    @property
    def gates(self) -> int:
        return self.p.cols // self.state.cols


def recurrent(f: Frame, call: PlanCall) -> None:
    """Launch RECURRENT or RECURRENT_F32."""
    batch, weight = int(call.params["batch"]), call.weights[0]
    state, cell = _started(f, call, 0), _started(f, call, 1)
    width = f.plan.weights[weight].rows
    p = View(f.device.space("gates", batch * width * _FLOAT), batch, width)
    kind = RecurrentKind(int(call.params["kind"]))
    assert state is not None
    k = _Recurrence(kind, weight, f.weight(call, 1), state, cell.at if cell else None, p)
    x, y = f.required(call, 0), f.output(call)
    steps = range(x.rows // batch)
    for step in reversed(steps) if call.params["reverse"] else steps:
        at = x.at.after(step * batch * x.cols * _FLOAT)
        (_multiply if call.op is Op.RECURRENT else _multiply_f32)(f, k, at)
        _advance(f, k, at, y.at.after(step * batch * y.cols * _FLOAT))


def _started(f: Frame, call: PlanCall, which: int) -> View | None:
    """Return the last state (0) or cell (1), which holds the first one: as given, or zeros."""
    if len(call.outputs) < which + 2:
        return None
    to, given = f.output(call, 1 + which), f.input(call, 1 + which)
    if given is None:
        f.device.write(to.at, bytes(to.rows * to.cols * _FLOAT))
    else:
        move(f, given, to)
    return to


def _multiply(f: Frame, k: _Recurrence, _x: Operand) -> None:
    """Let p = W4 weight @ state + bias."""
    rows = quantise(f, k.state, "state")
    product(f, rows, whole_list(f, k.weight, k.state.rows), k.p.at, k.p.cols)
    add_bias(f, k.p, k.bias)


def _multiply_f32(f: Frame, k: _Recurrence, x: Operand) -> None:
    """Let p = f32 weight @ state + bias; the candidate of GRU_RESET_BEFORE with the reset state."""
    n = k.state.cols
    if k.kind is not RecurrentKind.GRU_RESET_BEFORE:
        _gates(f, k, k.state.at, 0, k.p.cols)
        return
    _gates(f, k, k.state.at, 0, 2 * n)
    reset = f.device.space("reset", k.state.rows * n * _FLOAT)
    f.device.launch("run_reset", (k.state.rows,), x, k.p.at, k.state.at, reset, n)
    _gates(f, k, reset, 2 * n, n)


def _gates(f: Frame, k: _Recurrence, h: Operand, first: int, count: int) -> None:
    n = k.state.cols
    f.device.launch(
        "run_gates",
        (count, k.state.rows),
        h,
        f.constant(k.weight).after(first * n * _FLOAT),
        f.constant(k.bias).after(first * _FLOAT),
        k.p.at.after(first * _FLOAT),
        *(k.p.cols, n, k.bias is not None),
    )


def _advance(f: Frame, k: _Recurrence, x: Operand, y: Operand) -> None:
    f.device.launch(
        "run_recurrence",
        (k.state.rows,),
        *(x, k.p.at, k.state.at, k.cell or f.none, y),
        *(k.state.cols, k.gates, int(k.kind), k.cell is not None),
    )
