"""Launches of operations that only move rows and columns."""

from typing import Final

from compiler.contract.plan import PlanCall
from compiler.contract.plan_format import Status
from compiler.emitters.opencl.frame import Frame, View

_FLOAT: Final = 4
_NO_LIMIT: Final = 0x7FFFFFFF


def move(f: Frame, x: View, y: View, **how: int) -> None:
    """Copy a block of four-byte elements; `how` names what is not 0."""
    rows, width = how.get("rows", y.rows), how.get("width", y.cols)
    places = (x.cols, y.cols, how.get("x_first", 0), how.get("y_first", 0), width)
    size = (width, rows)
    f.device.launch("run_rows", size, x.at, f.none, y.at, f.status, *places, 0, _NO_LIMIT, 0)


def gather(f: Frame, x: View, index: View, y: View, fault: Status) -> None:
    """Copy the rows of `x` that `index` names; one that is not there is a `fault`."""
    places = (x.cols, y.cols, 0, 0, y.cols, 1, x.rows, int(fault))
    f.device.launch("run_rows", (y.cols, index.rows), x.at, index.at, y.at, f.status, *places)


def embed(f: Frame, call: PlanCall) -> None:
    """Launch EMBED."""
    number = call.weights[0]
    table = View(f.constant(number), f.plan.weights[number].rows, f.plan.weights[number].cols)
    gather(f, table, f.required(call, 0), f.output(call), Status.BAD_TOKEN)


def gather_rows(f: Frame, call: PlanCall) -> None:
    """Launch GATHER_ROWS."""
    x, index = f.required(call, 0), f.required(call, 1)
    gather(f, x, index, f.output(call), Status.BAD_INDEX)


def rows_concat(f: Frame, call: PlanCall) -> None:
    """Launch ROWS_CONCAT: two parts below each other, either of them perhaps a constant."""
    y, weight, done = f.output(call), f.weight(call, 0), 0
    for at in range(2):
        part = f.input(call, at)
        if part is None:
            assert weight is not None
            rows = f.plan.weights[weight].rows
            part = View(f.constant(weight), rows, y.cols)
        below = View(y.at.after(done * y.cols * _FLOAT), part.rows, y.cols)
        move(f, part, below)
        done += part.rows


def rows_slice(f: Frame, call: PlanCall) -> None:
    """Launch ROWS_SLICE."""
    x, y, start = f.required(call, 0), f.output(call), int(call.params["start"])
    first = x.rows - 1 if start < 0 else start
    move(f, View(x.at.after(first * x.cols * _FLOAT), y.rows, x.cols), y)


def cols_concat(f: Frame, call: PlanCall) -> None:
    """Launch COLS_CONCAT."""
    y, done = f.output(call), 0
    for at in range(len(call.inputs)):
        part = f.required(call, at)
        move(f, part, y, width=part.cols, y_first=done)
        done += part.cols


def cols_slice(f: Frame, call: PlanCall) -> None:
    """Launch COLS_SLICE."""
    move(f, f.required(call, 0), f.output(call), x_first=int(call.params["start"]))
