"""Calls wide enough that threads share them, and inputs for each."""

import numpy as np

from compiler.analysis.conv_runs import find_runs
from compiler.kernels.program import Act, ExpertAct, KvCache, Op
from tests.factories.kernels import Case
from tests.factories.modules import single_call

RANDOM = np.random.default_rng(23)
ROWS = 9


def f32(*shape: int) -> tuple[str, np.ndarray]:
    return ("f32", RANDOM.standard_normal(shape).astype(np.float32))


def w4(n: int, k: int) -> tuple[str, np.ndarray]:
    return ("w4", (k**-0.5 * RANDOM.standard_normal((n, k))).astype(np.float32))


def linear(op: Op) -> Case:
    n, k = 1000, 1056
    weight = w4(n, k) if op is Op.LINEAR else f32(n, k)
    ports = [(None, k, "f32"), (None, n, "f32")]
    module = single_call(
        op, ports, [(None, n, "f32")], [weight, f32(n)], {"act": Act.SILU}, max_tokens=ROWS
    )
    return Case.of(module)


def experts() -> Case:
    width, hidden, count = 512, 544, 4
    weights = [w for _ in range(count) for w in (w4(2 * hidden, width), w4(width, hidden))]
    module = single_call(
        Op.EXPERTS,
        [(None, width, "f32"), (None, 2, "i32"), (None, 2, "f32")],
        [(None, width, "f32")],
        weights,
        {"act": ExpertAct.SWIGLU},
        max_tokens=ROWS,
    )
    return Case.of(module)


def many_experts() -> Case:
    """More entries than a ticket can count: 1,100 tokens of 60 experts each."""
    width, hidden, count, rows = 32, 32, 64, 1_100
    weights = [w for _ in range(count) for w in (w4(2 * hidden, width), w4(width, hidden))]
    module = single_call(
        Op.EXPERTS,
        [(None, width, "f32"), (None, 60, "i32"), (None, 60, "f32")],
        [(None, width, "f32")],
        weights,
        {"act": ExpertAct.SWIGLU},
        max_tokens=rows,
    )
    return Case.of(module)


def attention() -> Case:
    width, heads = 1024, 16
    ports = [(None, width, "f32")] * 3
    params = {"heads": heads, "scale": 0.125, "kv_layer": 0}
    cache = KvCache(1, heads, width // heads, 256)
    module = single_call(
        Op.ATTENTION, ports, [(None, width, "f32")], [], params, kv=cache, max_tokens=ROWS
    )
    return Case.of(module)


def conv() -> Case:
    side, depth, channels = 24, 32, 96
    module = single_call(
        Op.CONV2D,
        [(side * side, depth, "f32")],
        [(side * side, channels, "f32")],
        [f32(channels, 9 * depth), f32(channels)],
        {"kh": 3, "kw": 3, "stride": 1, "pad": 1, "act": Act.RELU, "H": side, "W": side},
        max_tokens=ROWS,
    )
    return Case.of(module)


def depthwise() -> Case:
    side, channels = 24, 100
    module = single_call(
        Op.CONV_DEPTHWISE,
        [(side * side, channels, "f32")],
        [(side * side, channels, "f32")],
        [f32(25, channels), f32(channels)],
        {"kh": 5, "kw": 5, "stride": 1, "pad": 2, "act": Act.SILU, "H": side, "W": side},
        max_tokens=ROWS,
    )
    return Case.of(module)


def sparse_conv() -> Case:
    side, depth, channels = 24, 32, 96
    live = np.random.default_rng(4).random((channels // 16, 9 * depth // 16)) < 0.5
    weight = f32(channels, 9 * depth)[1] * np.kron(live, np.ones((16, 16), np.float32))
    found = find_runs(weight, 3 * depth)
    module = single_call(
        Op.SPARSE_CONV,
        [(side * side, depth, "f32")],
        [(side * side, channels, "f32")],
        [("f32", found.taps), ("i32", found.first), ("i32", found.runs), f32(channels)],
        {"kh": 3, "kw": 3, "stride": 1, "pad": 1, "act": Act.RELU, "H": side, "W": side},
        max_tokens=ROWS,
    )
    return Case.of(module)


CASES = {
    "linear": linear(Op.LINEAR),
    "linear_f32": linear(Op.LINEAR_F32),
    "experts": experts(),
    "attention": attention(),
    "conv2d": conv(),
    "conv_depthwise": depthwise(),
    "sparse_conv": sparse_conv(),
}


def inputs(case: Case, rows: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(rows)
    found: dict[str, np.ndarray] = {}
    for role, at in case.module.programs[0].inputs.items():
        buffer = case.module.buffers[at]
        shape = (rows if buffer.dynamic else buffer.rows, buffer.cols)
        if buffer.dtype == "i32":
            found[role] = np.stack([random.permutation(4)[:2] for _ in range(rows)]).astype("i4")
        else:
            found[role] = random.standard_normal(shape).astype(np.float32)
    return found
