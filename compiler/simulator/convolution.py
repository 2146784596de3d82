"""What the convolutions compute; taps are added one by one in (ky, kx, ci) order.

Rows of `compiler.simulator.operations`.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.native_errors import NativeError
from compiler.contract.windows import Window
from compiler.simulator.numerics import act
from compiler.simulator.step import Results, Step

Array = NDArray[Any]

WINDOW_ELEMENTS: Final = 1 << 20
"""Elements of a convolution's windows that are laid out at a time, a row of windows at least."""


def conv2d(s: Step) -> Results:
    """Return CONV2D: all taps of every window."""
    taps = np.ascontiguousarray(s.constant(0).T)
    parts = [s.numerics.running_sum(seen, taps) for seen in _windows_of(s)]
    return _finish(s, np.concatenate(parts))


def sparse_conv(s: Step) -> Results:
    """Return SPARSE_CONV: of each panel the stored taps alone."""
    taps, first, runs = s.constant(0), s.constant(1), s.constant(2)
    _need_order(s, len(taps), first.astype(np.int64), runs.astype(np.int64))
    places = [_places(runs[low:high]) for low, high in pairwise(first[0].tolist())]
    panels = list(zip(places, pairwise(first[1].tolist()), strict=True))
    parts = []
    for seen in _windows_of(s):
        sums = [s.numerics.running_sum(seen[:, at], taps[low:high]) for at, (low, high) in panels]
        parts.append(np.concatenate(sums, axis=1))
    total = np.concatenate(parts)
    return _finish(s, total[:, : s.sizes[0] // len(total)], bias=3)


def _need_order(s: Step, taps: int, first: Array, runs: Array) -> None:
    """Refuse runs that are not within a row of the window, one after the other in each panel.

    Raises:
        NativeError: They are not, or they are not all taps.
    """
    m = Window.of(s.params)
    row = m.kw * s.source(0).shape[1]
    at, count = runs.T
    starts, (first, tap) = np.zeros(len(runs) + 1, bool), first
    in_order = first[0] == 0 and first[-1] == len(runs) and (np.diff(first) >= 0).all()
    if in_order:
        starts[first] = True
        wanted = np.concatenate([[0], np.cumsum(count)])[first]
        after = starts[1:-1] | (at[1:] >= at[:-1] + count[:-1])
        inside = (at >= 0) & (at < m.kh * row) & (count >= 1) & (count <= row - at % row)
        in_order = inside.all() and after.all() and count.sum() == taps
        in_order = in_order and np.array_equal(tap, wanted)
    if not in_order:
        raise NativeError("the runs of a sparse convolution are not in order")


def _places(runs: Array) -> Array:
    """Return the places of all taps of a panel's runs."""
    return np.concatenate([np.arange(0), *(np.arange(at, at + n) for at, n in runs.tolist())])


def _windows_of(s: Step) -> Iterator[Array]:
    """Yield what windows see, (windows, kh*kw*Ci) in (ky, kx, ci) order, some rows at a time."""
    x, m = s.source(0), Window.of(s.params)
    depth, images = x.shape[1], len(x) // (m.height * m.width)
    frame = np.zeros((images, *m.framed, depth), s.numerics.dtype)
    inside = frame[:, m.top : m.top + m.height, m.left : m.left + m.width]
    inside[:] = x.reshape(inside.shape)
    windows = np.lib.stride_tricks.sliding_window_view(frame, (m.kh, m.kw), axis=(1, 2))
    windows = windows[:, :: m.down, :: m.across].transpose(0, 1, 2, 4, 5, 3)
    taps = m.kh * m.kw * depth
    at_once = max(1, WINDOW_ELEMENTS // max(1, m.out[1] * taps))
    for image in windows:
        for at in range(0, m.out[0], at_once):
            yield image[at : at + at_once].reshape(-1, taps)


def _finish(s: Step, total: Array, bias: int = 1) -> Results:
    shift = s.maybe_constant(bias)
    return (act(s.numerics, s.number("act"), total if shift is None else total + shift),)


def depthwise(s: Step) -> Results:
    """Return CONV_DEPTHWISE: every channel by itself."""
    x, weight, m = s.source(0), s.constant(0), Window.of(s.params)
    images = x.reshape(-1, m.height, m.width, x.shape[1])
    out_h, out_w = m.out
    total = np.zeros((len(images), out_h, out_w, x.shape[1]), s.numerics.dtype)
    for tap, taps in enumerate(weight):
        rows, seen_rows = _tap_within(tap // m.kw - m.top, m.down, out_h, m.height)
        columns, seen_columns = _tap_within(tap % m.kw - m.left, m.across, out_w, m.width)
        total[:, rows, columns] += images[:, seen_rows, seen_columns] * taps
    return _finish(s, total.reshape(-1, x.shape[1]))


def _tap_within(at: int, stride: int, count: int, size: int) -> tuple[slice, slice]:
    """Return which of `count` windows see a tap inside the image, and what they see.

    Window i sees place `at + i * stride` of an axis of `size`.
    """
    first = max(0, -(at // stride))
    end = max(first, min(count, -((at - size) // stride)))
    start = at + first * stride
    return slice(first, end), slice(start, start + (end - first) * stride, stride)
