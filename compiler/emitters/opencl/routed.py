"""Launches of ROUTE, EXPERTS and MOE_LAYER.

EXPERTS reads the chosen experts back, lists the live tiles of those that any row chose, and merges
in a second pass whose terms stand in the order of the experts; no sum depends on who came first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.native_errors import raise_status
from compiler.contract.operations import GATED, ExpertAct
from compiler.contract.plan import PlanCall
from compiler.contract.plan_format import Status
from compiler.emitters.opencl.device import Operand
from compiler.emitters.opencl.frame import Frame, View
from compiler.emitters.opencl.lists import work_list
from compiler.emitters.opencl.products import add_bias, norm_rows, product, quantise, upload_list

_FLOAT: Final = 4
_ROUTE_BYTES: Final = 16
_TERM: Final = np.dtype([("entry", "<u4"), ("is_bias", "<u4"), ("bias", "<u8")])
Params = Mapping[str, int | float]
Weights = Sequence[int]


@dataclass(frozen=True, slots=True)
class Entries:
    """Pairs of token and expert, by expert, then token, then slot.

    Attributes:
        first: (experts + 1) first entry of each expert, then their number.
        token: Row of each entry.
        expert: Expert of each entry.
        gate: Its gate, f32.
    """

    first: NDArray[np.int64]
    token: NDArray[np.int64]
    expert: NDArray[np.int64]
    gate: NDArray[np.float32]


def route(f: Frame, call: PlanCall) -> None:
    """Launch ROUTE."""
    outputs = [f.output(call, at) for at in range(len(call.outputs))]
    _route(f, f.required(call, 0), outputs, [f.weight(call, at) for at in range(3)], call.params)


def _route(
    f: Frame, x: View, outputs: Sequence[View], weights: Sequence[int | None], params: Params
) -> None:
    matrix, bias, correction = weights
    assert matrix is not None
    shape = f.plan.weights[matrix]
    scratch = f.device.space("route", x.rows * shape.rows * _ROUTE_BYTES)
    f.device.launch(
        "run_route",
        (x.rows,),
        x.at,
        f.constant(matrix),
        f.steps(matrix),
        f.constant(bias),
        f.constant(correction),
        outputs[0].at,
        outputs[1].at,
        outputs[2].at if len(outputs) > 2 else f.none,
        scratch,
        f.status,
        x.cols,
        shape.rows,
        int(shape.kind),
        bias is not None,
        correction is not None,
        len(outputs) > 2,
        *(int(params.get(name, 0)) for name in ("k", "order", "groups", "top_groups")),
        int(params.get("group_take", 0)),
        *(float(params.get(name, 0.0)) for name in ("scale", "jitter")),
    )


def experts(f: Frame, call: PlanCall) -> None:
    """Launch EXPERTS."""
    x, index, gate = (f.required(call, at) for at in range(3))
    _experts(f, (x, index, gate), f.output(call), call.weights, call.params)


def _experts(
    f: Frame, inputs: tuple[View, View, View], y: View, weights: Weights, params: Params
) -> None:
    x, index, gate = inputs
    stride = 4 if params.get("biases") else 2
    entries = _entries(f, index, gate, len(weights) // stride)
    act, n = ExpertAct(int(params["act"])), len(entries.token)
    wide, hidden = (f.tiles(at) for at in weights[:2])
    h = f.device.space("wide", n * wide.n * _FLOAT)
    _products(f, (x, "x"), weights[::stride], entries, entries.token, h)
    narrow = f.device.space("hidden", n * hidden.k * _FLOAT)
    biases = weights[2::stride] if stride == 4 else ()
    assert act not in GATED or wide.n == 2 * hidden.k
    f.device.launch(
        "run_hidden",
        (-(-hidden.k // 8), n),
        h,
        f.weights.buffer,
        f.device.upload(_bias_of(f, biases, entries)),
        narrow,
        wide.n,
        hidden.k,
        int(act),
        bool(biases),
        *(float(params.get(name, 0.0)) for name in ("alpha", "limit", "shift")),
    )
    out = f.device.space("products", n * y.cols * _FLOAT)
    rows = View(narrow, n, hidden.k)
    _products(f, (rows, "hidden"), weights[1::stride], entries, np.arange(n), out)
    _merge(f, entries, out, weights[3::stride] if stride == 4 else (), y)


def _entries(f: Frame, index: View, gate: View, experts: int) -> Entries:
    """Read the choices back and group them by expert."""
    status = int.from_bytes(f.device.read(f.status, 4), "little")
    if status:
        raise_status(status, "an operation before the experts")
    count = index.rows * index.cols
    chosen = np.frombuffer(f.device.read(index.at, 4 * count), "<i4").astype(np.int64)
    gates = np.frombuffer(f.device.read(gate.at, 4 * count), "<f4")
    if chosen.min() < 0 or chosen.max() >= experts:
        raise_status(Status.BAD_INDEX, "the experts")
    order = np.argsort(chosen, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(chosen, minlength=experts))])
    return Entries(first, order // index.cols, chosen[order], gates[order])


def _products(
    f: Frame,
    rows: tuple[View, str],
    weights: Weights,
    entries: Entries,
    pick: NDArray[np.int64],
    y: Operand,
) -> None:
    """Multiply the entries of each expert by its weight: one list, live tiles only."""
    x, name = rows
    first = entries.first
    sizes = work_list(
        (f.tiles(weight), int(first[e]), int(first[e + 1] - first[e]))
        for e, weight in enumerate(weights)
    )
    listed = upload_list(f, sizes, pick.astype(np.uint32))
    product(f, quantise(f, x, name), listed, y, f.tiles(weights[0]).n)


def _bias_of(f: Frame, biases: Weights, entries: Entries) -> NDArray[np.uint64]:
    """Return where the bias of each entry's expert lies, in floats; zeros if there are none."""
    if not biases:
        return np.zeros(len(entries.token), np.uint64)
    places = np.asarray([f.weights.offsets[at] // _FLOAT for at in biases], np.uint64)
    return places[entries.expert]


def _merge(f: Frame, entries: Entries, products: Operand, biases: Weights, y: View) -> None:
    """Add the terms of every token: experts ascending, an expert's products before its bias."""
    n = len(entries.token)
    terms = np.zeros(2 * n if biases else n, _TERM)
    terms["entry"] = np.tile(np.arange(n), 2 if biases else 1)
    terms["is_bias"][n:] = 1
    terms["bias"][n:] = _bias_of(f, biases, entries)[: len(terms) - n]
    at = terms["entry"]
    order = np.lexsort((at, terms["is_bias"], entries.expert[at], entries.token[at]))
    counts = np.bincount(entries.token[at], minlength=y.rows)
    f.device.launch(
        "run_merge",
        (-(-y.cols // 8), y.rows),
        products,
        f.weights.buffer,
        f.device.upload(entries.gate),
        f.device.upload(np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)),
        f.device.upload(terms[order].view(np.uint8)),
        y.at,
        y.cols,
    )


def moe_layer(f: Frame, call: PlanCall) -> None:
    """Launch MOE_LAYER: norm, route, experts and, where it is asked for, the residual."""
    x, params = f.required(call, 0), call.params
    outputs = [f.output(call, at) for at in range(len(call.outputs))]
    h = View(f.device.space("normed", x.rows * x.cols * _FLOAT), x.rows, x.cols)
    norm = f.weight(call, 0), f.weight(call, 1)
    norm_rows(f, x, h.at, norm, int(params["kind"]), float(params["eps"]))
    routing = {"k": params["k"], "order": params["order"]}
    _route(f, h, outputs[1:], [f.weight(call, 2), f.weight(call, 3), None], routing)
    y = outputs[0]
    _experts(f, (h, outputs[1], outputs[2]), y, call.weights[4:], {"act": params["act"]})
    if params["residual"]:
        add_bias(f, y, None, residual=x)
