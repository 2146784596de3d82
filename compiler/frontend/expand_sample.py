"""GridSample and RoiAlign: pictures and volumes read at places that the model computes.

    GridSample: x (N, C, spatial...), grid (N, out..., axes) in [-1, 1], the last spatial axis first
    RoiAlign:   x (N, C, H, W), regions (R, 4), picture of each (R) -> means (R, C, out...)

Every output of GridSample is a sum of taps, elements of x times weights: one (nearest), 2 per axis
(linear), 4 per axis (cubic, pictures only). A tap outside is a zero, the edge, or a reflection.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import TensorProto

from compiler.frontend.writer import Writer

MODES: Final = {"bilinear": "linear", "bicubic": "cubic"}
CUBIC: Final = -0.75
HALF_PIXEL: Final = 16
"""From this operator set on regions are shifted by half a pixel unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Tap:
    """One neighbour along one axis.

    Attributes:
        index: Which element, i64 (N, K), inside the axis.
        weight: Its factor f32 (N, K), or "" for 1.
        inside: Whether it lies inside, bool (N, K), or "" if it always counts.
    """

    index: str
    weight: str
    inside: str


def expand_grid_sample(w: Writer) -> None:
    """Write `GridSample` out."""
    x, grid = w.inputs[:2]
    given = w.attrs(align_corners=0, padding_mode="zeros", mode="linear")
    mode = MODES.get(given["mode"], given["mode"])
    shape, places = w.shape(x), w.shape(grid)
    batch, channels, *spatial = shape
    axes = len(spatial)
    w.need(axes == 2 or (axes == 3 and mode != "cubic"), f"mode {mode} over {axes} axes")
    count = math.prod(places[1:-1])
    taps = []
    for axis, size in enumerate(spatial):
        part = w.slice(w.reshape(grid, batch, count, axes), 2, axes - 1 - axis, axes - axis)
        line = _Line(w, size, bool(given["align_corners"]), str(given["padding_mode"]))
        taps.append(line.taps(w.reshape(part, batch, count), mode))
    flat = w.reshape(x, batch, channels, math.prod(spatial))
    total = ""
    for chosen in itertools.product(*taps):
        term = _term(w, flat, chosen, spatial)
        total = w.op("Add", total, term) if total else term
    w.reshape(total, batch, channels, *places[1:-1], out=w.outputs[0])


def _term(w: Writer, flat: str, taps: tuple[Tap, ...], spatial: list[int]) -> str:
    """Write the elements (N, C, K) under one tap per axis, times its weight."""
    place, weight = "", ""
    for tap, size in zip(taps, spatial, strict=True):
        place = w.op("Add", w.op("Mul", place, w.scalar(size)), tap.index) if place else tap.index
        for factor in (tap.weight, w.floats(tap.inside) if tap.inside else ""):
            if factor:
                weight = w.op("Mul", weight, factor) if weight else factor
    batch, channels, _ = w.shape(flat)
    count = w.shape(place)[1]
    spread = w.op("Expand", w.reshape(place, batch, 1, count), w.ints(batch, channels, count))
    found = w.op("GatherElements", flat, spread, axis=2)
    return w.op("Mul", found, w.reshape(weight, batch, 1, count)) if weight else found


class _Line:
    """One spatial axis of `size` elements."""

    def __init__(self, w: Writer, size: int, aligned: bool, padding: str) -> None:
        self.w, self.size, self.aligned, self.padding = w, size, aligned, padding

    def taps(self, place: str, mode: str) -> list[Tap]:
        """Write the taps of places in [-1, 1]."""
        w, number = self.w, self.w.number
        at = w.op("Add", place, number(1.0))
        if self.aligned:
            at = w.op("Mul", w.op("Mul", at, number(0.5)), number(self.size - 1))
        else:
            at = w.op("Sub", w.op("Mul", at, number(self.size)), number(1.0))
            at = w.op("Mul", at, number(0.5))
        if mode == "nearest":
            return [self._tap(w.op("Round", at), 0, "")]
        low = w.op("Floor", at)
        rest = w.op("Sub", at, low)
        if mode == "linear":
            near = w.op("Sub", number(1.0), rest)
            return [self._tap(low, 0, near), self._tap(low, 1, rest)]
        return [self._tap(low, step, self._cubic(rest, step)) for step in range(-1, 3)]

    def _cubic(self, rest: str, step: int) -> str:
        """Write the cubic weight of the element `step` away from the one below the place."""
        w, a = self.w, CUBIC
        away = w.op("Abs", w.op("Sub", rest, w.number(float(step))))
        powers = (a + 2, -(a + 3), 0.0, 1.0) if step in (0, 1) else (a, -5 * a, 8 * a, -4 * a)
        y = w.number(powers[0])
        for coefficient in powers[1:]:
            y = w.op("Add", w.op("Mul", y, away), w.number(coefficient))
        return y

    def _tap(self, whole: str, step: int, weight: str) -> Tap:
        w, size = self.w, self.size
        index = w.op("Cast", whole, to=TensorProto.INT64)
        index = w.op("Add", index, w.scalar(step)) if step else index
        first, last = w.scalar(0), w.scalar(size - 1)
        inside = ""
        if self.padding == "zeros":
            above = w.op("GreaterOrEqual", index, first)
            inside = w.op("And", above, w.op("LessOrEqual", index, last))
        elif self.padding == "reflection":
            index = self._reflected(index)
        return Tap(w.op("Clip", index, first, last), weight, inside)

    def _reflected(self, index: str) -> str:
        """Write indices mirrored at the first and last element, or at their outer edges."""
        w, size = self.w, self.size
        period = max(2 * size - 2, 1) if self.aligned else 2 * size
        folded = w.op("Mod", index, w.scalar(period))
        mirrored = w.op("Sub", w.scalar(period if self.aligned else period - 1), folded)
        return w.op("Where", w.op("Less", folded, w.scalar(size)), folded, mirrored)


def expand_roi_align(w: Writer) -> None:
    """Write `RoiAlign` out: the mean of a fixed grid of linear samples per cell of a region."""
    x, regions, pictures = w.inputs[:3]
    new = "half_pixel" if w.opset >= HALF_PIXEL else "output_half_pixel"
    given = w.attrs(
        mode="avg",
        sampling_ratio=0,
        output_height=1,
        output_width=1,
        spatial_scale=1.0,
        coordinate_transformation_mode=new,
    )
    each = int(given["sampling_ratio"])
    hint = "export with a sampling ratio above 0 and averages, or read regions with GridSample"
    w.need(given["mode"] == "avg" and each > 0, "greatest samples, or as many as fit", hint)
    batch, channels, height, width = w.shape(x)
    count = w.shape(regions)[0]
    out = int(given["output_height"]), int(given["output_width"])
    shifted = given["coordinate_transformation_mode"] == "half_pixel"
    scaled = w.op("Mul", regions, w.number(float(given["spatial_scale"])))
    scaled = w.op("Sub", scaled, w.number(0.5)) if shifted else scaled
    rows, cols = (
        _region_taps(w, scaled, axis, size, cells * each, whole=shifted)
        for axis, size, cells in ((1, height, out[0]), (0, width, out[1]))
    )
    planes = w.op("Transpose", w.reshape(x, batch, channels, height * width), perm=[1, 0, 2])
    flat = w.reshape(planes, channels, batch * height * width)
    base = w.op("Mul", w.reshape(pictures, count, 1, 1), w.scalar(height * width))
    total = ""
    for row, col in itertools.product(rows, cols):
        down = w.op("Mul", w.reshape(row.index, count, -1, 1), w.scalar(width))
        place = w.op("Add", w.op("Add", base, down), w.reshape(col.index, count, 1, -1))
        weight = w.op(
            "Mul", w.reshape(row.weight, count, -1, 1), w.reshape(col.weight, count, 1, -1)
        )
        term = w.op("Mul", w.op("Gather", flat, place, axis=1), weight)
        total = w.op("Add", total, term) if total else term
    cells = w.reshape(total, channels, count, out[0], each, out[1], each)
    mean = w.op("ReduceMean", cells, axes=[3, 5], keepdims=0)
    w.op("Transpose", mean, out=w.outputs[0], perm=[1, 0, 2, 3])


def _region_taps(
    w: Writer, regions: str, axis: int, size: int, samples: int, *, whole: bool
) -> list[Tap]:
    """Write the two taps of every sample (R, samples) along one axis of the regions."""
    first, last = (w.slice(regions, 1, at, at + 1) for at in (axis, axis + 2))
    length = w.op("Sub", last, first)
    length = length if whole else w.op("Max", length, w.number(1.0))
    parts = ((np.arange(samples) + 0.5) / samples).astype(np.float32)
    at = w.op("Add", first, w.op("Mul", length, w.store(parts)))
    above = w.op("GreaterOrEqual", at, w.number(-1.0))
    inside = w.floats(w.op("And", above, w.op("LessOrEqual", at, w.number(float(size)))))
    at = w.op("Clip", at, w.number(0.0), w.number(float(size - 1)))
    low = w.op("Floor", at)
    rest = w.op("Sub", at, low)
    index = w.op("Cast", low, to=TensorProto.INT64)
    after = w.op("Min", w.op("Add", index, w.scalar(1)), w.scalar(size - 1))
    near = w.op("Sub", w.number(1.0), rest)
    return [
        Tap(index, w.op("Mul", near, inside), ""),
        Tap(after, w.op("Mul", rest, inside), ""),
    ]
