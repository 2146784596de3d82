"""Matrices that lie on a grid of eight bits per row, and modules of one product with one."""

import numpy as np

from compiler.kernels.program import Module, Op
from compiler.quant.w4 import Floats
from tests.factories.modules import ModuleBuilder


def on_grid(n: int, k: int, seed: int = 0) -> Floats:
    """Return random codes -128..127 times a step per row; every third row has codes 0..255 less a
    zero of its own, every seventh is zero."""
    random = np.random.default_rng(seed)
    steps = random.uniform(0.5, 2.0, (n, 1)).astype(np.float32) / np.float32(128 * k**0.5)
    codes = random.integers(-128, 128, (n, k))
    codes[::3] = random.integers(0, 256, (len(codes[::3]), k)) - random.integers(0, 256)
    codes[6::7] = 0
    return codes.astype(np.float32) * steps


def product(n: int, k: int, rows: int | None, most: int = 8, **params: float) -> Module:
    """Return x (rows, k) -> y (rows, n), rows up to `most` if None."""
    b = ModuleBuilder(4, most)
    weight, bias = b.weight(on_grid(n, k), "w8"), b.vector(n)
    x, y = b.buffer(rows, k), b.buffer(rows, n)
    b.call(Op.LINEAR_W8, [x], [y], [weight, bias], **params)
    b.program("run", {"x": x}, {"y": y})
    return b.module()
