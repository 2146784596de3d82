"""Matrices that lie on a grid of eight bits per row, and modules of one product or one
routed layer with some."""

import numpy as np

from compiler.contract.operations import GATED
from compiler.kernels.program import ABSENT, Call, ExpertAct, Module, Op, RouteOrder
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


def routed(
    kinds: tuple[str, str], act: ExpertAct, *, whole: bool, width: int = 70, hidden: int = 45
) -> Module:
    """Return x (T, width) -> y: four experts of which two are chosen, by one call if `whole`.

    `kinds` are those of both matrices of every expert.
    """
    b = ModuleBuilder(5, 16)
    sizes = ((hidden * (2 if act in GATED else 1), width), (width, hidden))
    router, gamma = b.weight(b.normal(4, width)), b.vector(width, offset=1.0)
    matrices = [
        b.weight(on_grid(*size, seed=expert), kind, f"expert.L0.E{expert}")
        for expert in range(4)
        for size, kind in zip(sizes, kinds, strict=True)
    ]
    x, y = b.buffer(None, width), b.buffer(None, width)
    index, gate = b.buffer(None, 2, "i32"), b.buffer(None, 2)
    routing = {"k": 2, "order": RouteOrder.TOPK_SOFTMAX}
    if whole:
        weights = [gamma, ABSENT, router, ABSENT, *matrices]
        b.call(Op.MOE_LAYER, [x], [y, index, gate], weights, **routing, act=act, kind=0, eps=1e-5)
    else:
        b.call(Op.ROUTE, [x], [index, gate], [router], **routing)
        b.calls.append(Call(Op.EXPERT_LOAD, (), (), tuple(matrices), {}))
        b.call(Op.EXPERTS, [x, index, gate], [y], matrices, act=act)
    b.program("run", {"x": x}, {"y": y})
    return b.module()
