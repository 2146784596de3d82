"""Launches of products: LINEAR, LINEAR_F32, LINEAR_W8, and what EXPERTS and RECURRENT share.

A product quantises rows, multiplies the live tiles, and adds each panel's sums in order:

    rows -> run_quantise -> q -> run_tiles over a list -> partial sums -> run_sums -> y
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.operations import Act
from compiler.contract.plan import PlanCall
from compiler.emitters.opencl.device import Local, Operand
from compiler.emitters.opencl.frame import Frame, Listed, View, groups_of
from compiler.emitters.opencl.lists import LANES, WorkList, work_list

_MOST_LANES: Final = 64
_FLOAT: Final = 4


@dataclass(frozen=True, slots=True)
class Quantised:
    """Rows of activations as int8, with what their products need."""

    q: Operand
    minus8: Operand
    scale: Operand
    cols: int


def quantise(
    f: Frame, x: View, name: str, stride: int | None = None, step: float = 0.0
) -> Quantised:
    """Return the rows of `x` as int8, by a step if one is given; `name` keeps two sets apart."""
    groups = groups_of(x.cols)
    found = Quantised(
        f.device.space(f"{name}.q", x.rows * groups * 32),
        f.device.space(f"{name}.minus8", x.rows * groups * 4),
        f.device.space(f"{name}.scale", x.rows * 4),
        x.cols,
    )
    lanes = 1 << min(groups, _MOST_LANES).bit_length() - 1
    f.device.launch(
        "run_quantise",
        (lanes, x.rows),
        x.at,
        found.q,
        found.minus8,
        found.scale,
        f.status,
        stride or x.cols,
        x.cols,
        step,
        Local(lanes * 4),
        group=(lanes, 1),
    )
    return found


def product(f: Frame, rows: Quantised, listed: Listed, y: Operand, stride: int) -> None:
    """Write the products that a list names into rows of `y`."""
    sizes = listed.sizes
    partial = f.device.space("partial", sizes.partial_bytes)
    f.device.launch(
        "run_tiles",
        (LANES, len(sizes.work)),
        f.weights.buffer,
        listed.work,
        listed.pick,
        rows.q,
        rows.minus8,
        partial,
        groups_of(rows.cols),
        sizes.block,
        Local(sizes.local_bytes),
        group=(LANES, 1),
    )
    f.device.launch(
        "run_sums",
        (LANES, len(sizes.runs), sizes.block),
        f.weights.buffer,
        listed.runs,
        listed.pick,
        rows.scale,
        partial,
        y,
        sizes.block,
        stride,
        group=(LANES, 1, 1),
    )


def upload_list(f: Frame, sizes: WorkList, pick: NDArray[np.uint32]) -> Listed:
    """Return a list on the device."""
    upload = f.device.upload
    return Listed(sizes, upload(sizes.work), upload(sizes.runs), upload(pick))


def whole_list(f: Frame, weight: int, rows: int) -> Listed:
    """Return the list of all tiles of a weight, kept per number of rows."""
    key = (weight, rows)
    if key not in f.lists:
        sizes = work_list([(f.tiles(weight), 0, rows)])
        f.lists[key] = upload_list(f, sizes, np.arange(rows, dtype=np.uint32))
    return f.lists[key]


def normed(f: Frame, call: PlanCall, x: View) -> View:
    """Return `x`, or its norm where the call has one."""
    if not call.params["norm"]:
        return x
    to = f.device.space("normed", x.rows * x.cols * _FLOAT)
    kind = int(call.params["norm"]) - 1
    norm_rows(f, x, to, (f.weight(call, 2), f.weight(call, 3)), kind, float(call.params["eps"]))
    return View(to, x.rows, x.cols)


def norm_rows(
    f: Frame, x: View, to: Operand, weights: tuple[int | None, int | None], kind: int, eps: float
) -> None:
    """Write the normalised rows of `x`; weights are gamma and beta."""
    gamma, beta = weights
    f.device.launch(
        "run_norm",
        (x.rows,),
        x.at,
        to,
        f.constant(gamma),
        f.constant(beta),
        x.cols,
        kind,
        eps,
        beta is not None,
    )


def finish(f: Frame, call: PlanCall, y: View) -> None:
    """Add bias and residual of a linear call and apply its activation, in place."""
    add_bias(f, y, f.weight(call, 1), Act(int(call.params["act"])), f.input(call, 1))


def add_bias(
    f: Frame, y: View, bias: int | None, act: Act = Act.NONE, residual: View | None = None
) -> None:
    """Let y = residual + act(y + bias), in place; nothing is launched if nothing is asked for."""
    if bias is None and residual is None and act is Act.NONE:
        return
    f.device.launch(
        "run_finish",
        (-(-y.cols // 8), y.rows),
        y.at,
        f.constant(bias),
        residual.at if residual else f.none,
        y.cols,
        int(act),
        bias is not None,
        residual is not None,
    )


def linear(f: Frame, call: PlanCall) -> None:
    """Launch LINEAR."""
    x, y = normed(f, call, f.required(call, 0)), f.output(call)
    listed = whole_list(f, call.weights[0], x.rows)
    product(f, quantise(f, x, "x"), listed, y.at, y.cols)
    finish(f, call, y)


def linear_f32(f: Frame, call: PlanCall) -> None:
    """Launch LINEAR_F32."""
    x, y = normed(f, call, f.required(call, 0)), f.output(call)
    w = f.constant(call.weights[0])
    f.device.launch("run_dots", (y.cols, y.rows), x.at, w, y.at, y.cols, x.cols)
    finish(f, call, y)


def linear_w8(f: Frame, call: PlanCall) -> None:
    """Launch LINEAR_W8."""
    x, y, weight = normed(f, call, f.required(call, 0)), f.output(call), call.weights[0]
    rows = quantise(f, x, "x", step=float(call.params["x_step"]))
    f.device.launch(
        "run_w8",
        (y.cols, y.rows),
        *(f.part(weight, at) for at in range(3)),
        *(rows.q, rows.minus8, rows.scale, y.at),
        *(y.cols, groups_of(x.cols)),
    )
    finish(f, call, y)
