"""Convolutions of f32 images against ONNX Runtime f32; rows of `benchmarks.kernels` that inform.

Sizes are those of PP-OCRv4 and of MobileNet. Ours takes rows of channels (HWC) and sums every
output in one order, without contraction, on every machine; theirs takes planes (CHW) and contracts.
Theirs also reorders to blocks of channels and back, which a whole model does once, not per layer.
A run of ours is a plan of several equal calls, because a plan's inputs and outputs are copied and
theirs are bound. Rows of `sparse_claims` compare a weight of dead blocks with itself, all taps
stored.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np

from benchmarks import peers_f32
from benchmarks.kernels_ops import versus
from benchmarks.runner import Claim
from benchmarks.synthetic import load
from compiler.analysis.conv_runs import find_runs
from compiler.contract.tiles import PANEL
from compiler.emitters.plan import emit_plan
from compiler.kernels.program import Act, Buffer, Call, Module, Op, Program, Weight

CALLS: Final = 8


Measure = Callable[[Mapping[str, peers_f32.Run]], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Layer:
    """A convolution of one image; depthwise if it has as many groups as channels.

    Attributes:
        height: Of the image, as `width`.
        channels: Of the image, as `filters` of the result.
        kernel: Side of the window; padding keeps the size at stride 1.
    """

    height: int
    width: int
    channels: int
    filters: int
    kernel: int
    stride: int = 1
    depthwise: bool = False

    @property
    def name(self) -> str:
        """What it is and its size."""
        kind = "depthwise" if self.depthwise else "direct"
        side = f"{self.kernel}x{self.kernel}s{self.stride}"
        return f"{kind}.{side}.{self.height}x{self.width}x{self.channels}-{self.filters}"

    @property
    def window(self) -> dict[str, int]:
        """Parameters of its call but the activation."""
        sides = {"kh": self.kernel, "kw": self.kernel, "H": self.height, "W": self.width}
        return {**sides, "stride": self.stride, "pad": self.kernel // 2}


LAYERS: Final = (
    Layer(112, 112, 64, 64, 3, depthwise=True),
    Layer(56, 56, 128, 128, 3, 2, depthwise=True),
    Layer(12, 160, 240, 240, 5, depthwise=True),
    Layer(14, 14, 512, 512, 3, depthwise=True),
    Layer(56, 56, 64, 128, 1),
    Layer(14, 14, 512, 512, 1),
    Layer(12, 160, 240, 240, 1),
    Layer(56, 56, 24, 96, 3),
    Layer(224, 224, 3, 32, 3, 2),
)
SPARSE: Final = Layer(28, 28, 96, 96, 3)
"""The layer whose weight has dead blocks."""


def _operands(layer: Layer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x (1, C, H, W), w (M, C/groups, k, k) and the bias, f32."""
    random = np.random.default_rng(3)
    depth = 1 if layer.depthwise else layer.channels
    shapes = (
        (1, layer.channels, layer.height, layer.width),
        (layer.filters, depth, layer.kernel, layer.kernel),
        (layer.filters,),
    )
    x, w, bias = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, w, bias


def _run(
    target: str,
    op: Op,
    ports: Sequence[tuple[int, int]],
    weights: Sequence[np.ndarray],
    params: Mapping[str, int],
    x: np.ndarray,
    threads: int,
) -> peers_f32.Run:
    """Return a run of `CALLS` calls that read x (rows, cols); ports are the sizes of x and y."""
    sizes = (ports[0], *[ports[1]] * CALLS)
    buffers = tuple(Buffer(at, rows, False, cols, "f32") for at, (rows, cols) in enumerate(sizes))
    held = tuple(
        Weight(at, "i32" if a.dtype == np.int32 else "f32", a, "weights.shared")
        for at, a in enumerate(weights)
    )
    slots, given = tuple(range(len(held))), {"act": Act.NONE, **params}
    calls = tuple(Call(op, (0,), (at,), slots, given) for at in range(1, CALLS + 1))
    module = Module((Program("run", calls, {"x": 0}, {"y": CALLS}),), buffers, held, None, 1)
    plan = load(target, emit_plan(module, weights_packed={}), (op,), threads)
    return lambda: plan.run("run", {"x": x.data})


def _candidates(target: str, layer: Layer, threads: int) -> Mapping[str, peers_f32.Run]:
    """Return our ways by the name of their operation, and `peer`."""
    x, w, bias = _operands(layer)
    pad, rows = layer.kernel // 2, layer.height * layer.width
    out = ((layer.height - 1) // layer.stride + 1) * ((layer.width - 1) // layer.stride + 1)
    taps = w.transpose(0, 2, 3, 1).reshape(layer.filters, -1)
    ways = {Op.CONV2D: (taps, layer.window)}
    if layer.depthwise:
        ways = {Op.CONV_DEPTHWISE: (np.ascontiguousarray(taps.T), layer.window)}
    elif layer.kernel == layer.stride == 1:
        ways[Op.LINEAR_F32] = (taps, {})
    pixels = np.ascontiguousarray(x[0].transpose(1, 2, 0).reshape(rows, -1))
    found: dict[str, peers_f32.Run] = {}
    for op, (weight, params) in ways.items():
        ports = [(rows, layer.channels), (out, layer.filters)]
        found[op.name] = _run(target, op, ports, (weight, bias), params, pixels, threads)
    group = layer.channels if layer.depthwise else 1
    found["peer"] = peers_f32.conv(
        x, w, bias, stride=layer.stride, pad=pad, group=group, threads=threads
    )
    return found


def _dead_candidates(
    target: str, size: int, dead: float, threads: int
) -> Mapping[str, peers_f32.Run]:
    """Return runs of all taps and of the live ones: of blocks of 16 filters by `size` taps."""
    layer, random = SPARSE, np.random.default_rng(size)
    x, w, bias = _operands(layer)
    taps = w.transpose(0, 2, 3, 1).reshape(layer.filters, -1)
    live = random.random((layer.filters // PANEL, taps.shape[1] // size)) >= dead
    taps = taps * np.kron(live, np.ones((PANEL, size), np.float32))
    found = find_runs(taps, layer.kernel * layer.channels)
    rows = layer.height * layer.width
    ports = [(rows, layer.channels), (rows, layer.filters)]
    pixels = np.ascontiguousarray(x[0].transpose(1, 2, 0).reshape(rows, -1))
    stored = (found.taps, found.first, found.runs, bias)
    ways = {Op.CONV2D: (taps, bias), Op.SPARSE_CONV: stored}
    return {
        op.name: _run(target, op, ports, weights, layer.window, pixels, threads)
        for op, weights in ways.items()
    }


def sparse_claims(target: str, measured: Measure) -> list[Claim]:
    """Return how much faster live taps are than all of our own, on one thread and on two."""
    rows = []
    for size, dead in product((16, 32), (0.5, 0.7, 0.9)):
        for threads in (1, 2):
            runs = measured(_dead_candidates(target, size, dead, threads))
            dense, ours = (statistics.median(runs[op]) for op in ("CONV2D", "SPARSE_CONV"))
            note = f"f32, {threads} threads, {target}"
            name = f"kernels.conv.{SPARSE.name}.{PANEL}x{size}.{dead:.0%}-dead.{threads}t"
            rows.append(versus(name, ours / CALLS, "all taps", dense / CALLS, None, note))
    return rows


def claims(target: str, measured: Measure) -> list[Claim]:
    """Return every layer, on one thread and on two, against ONNX Runtime with as many.

    Args:
        target: Whose kernels run.
        measured: Takes seconds of candidates in turn, with pauses in which their threads rest.
    """
    rows = []
    for layer in LAYERS:
        for threads in (1, 2):
            runs = measured(_candidates(target, layer, threads))
            found = {name: statistics.median(times) for name, times in runs.items()}
            theirs = found.pop("peer")
            for way, ours in found.items():
                note = f"f32, {threads} threads, {target}"
                name = f"kernels.conv.{layer.name}.{way.lower()}.{threads}t"
                rows.append(versus(name, ours / CALLS, peers_f32.NAME, theirs, None, note))
    return rows + sparse_claims(target, measured)
