"""The same products in OpenVINO: one model with a product per matrix, latency hint, one stream.

Weights of 4 bits are grouped u4 codes with f16 scales and a zero point of 8, which its processor
plugin keeps compressed; activations are quantised by group at run time. No routed layer: it has no
operation for one.
"""

from collections.abc import Callable
from importlib import import_module, metadata
from typing import Final

import numpy as np

NAME: Final = "openvino"
ZERO_POINT: Final = 8
Run = Callable[[], object]
Weight = Callable[[int], object]


def version() -> str:
    """Return the version of the package."""
    return metadata.version(NAME)


def u4_walk(n: int, k: int, count: int, block: int, rows: int, threads: int) -> Run:
    """Return a run of `count` products of u4 weights in groups: x (rows, k) -> (rows, n)."""
    ov, op = import_module("openvino"), import_module("openvino.opset13")
    random = np.random.default_rng(1)
    held: list[np.ndarray] = []  # a tensor of u4 points into its array and does not keep it

    def weight(_: int) -> object:
        codes = random.integers(0, 256, (n, k // 2), np.uint8)
        held.append(codes)
        tensor = ov.Tensor(codes, ov.Shape([n, k // block, block]), ov.Type.u4)
        stored = op.convert(ov.op.Constant(tensor), "f16")
        zero = op.convert(op.constant(np.full((1, 1, 1), ZERO_POINT, np.uint8)), "f16")
        scales = random.random((n, k // block, 1)).astype(np.float16)
        value = op.multiply(op.subtract(stored, zero), op.constant(scales))
        shape = op.constant(np.array([n, k], np.int64))
        return op.convert(op.reshape(value, shape, False), "f32")

    run = _runner(weight, k, count, rows, threads, block)
    return lambda: (run(), held)


def i8_walk(n: int, k: int, count: int, rows: int, threads: int) -> Run:
    """Return a run of `count` products of i8 weights with a scale per row."""
    op = import_module("openvino.opset13")
    random = np.random.default_rng(2)

    def weight(_: int) -> object:
        codes = op.constant(random.integers(-127, 128, (n, k), np.int8))
        scales = op.constant(random.random((n, 1)).astype(np.float32))
        return op.multiply(op.convert(codes, "f32"), scales)

    return _runner(weight, k, count, rows, threads, k)


def _runner(weight: Weight, k: int, count: int, rows: int, threads: int, block: int) -> Run:
    ov, op = import_module("openvino"), import_module("openvino.opset13")
    x = op.parameter([rows, k], np.float32, name="x")
    results = [op.result(op.matmul(x, weight(at), False, True)) for at in range(count)]
    compiled = ov.Core().compile_model(
        ov.Model(results, [x], "walk"),
        "CPU",
        {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": block,
            "INFERENCE_PRECISION_HINT": "f32",
        },
    )
    request = compiled.create_infer_request()
    given = np.random.default_rng(4).standard_normal((rows, k)).astype(np.float32)
    request.set_input_tensor(ov.Tensor(given))
    return lambda: request.infer()
