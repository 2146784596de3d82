"""The same products in ONNX Runtime: one session with a node per matrix, each matrix of its own.

ONNX Runtime merges equal initialisers, so every node gets different bytes; a session per matrix
would measure thread wake-ups. Outputs are bound once.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

NAME: Final = "onnxruntime"
VERSION: Final = onnxruntime.__version__
ACCURACY_LEVEL: Final = 4
"""Activations as int8, as ours."""
IR_VERSION: Final = 10
OPSET: Final = 21


def nbits_walk(
    n: int, k: int, count: int, block: int, rows: int, threads: int
) -> Callable[[], object]:
    """Return a run of `count` MatMulNBits of 4 bits: x (rows, k) -> (rows, n) each."""
    random = np.random.default_rng(1)
    nodes, constants, results = [], [], []
    for at in range(count):
        codes = random.integers(0, 256, (n, k // block, block // 2), np.uint8)
        scales = np.full(n * k // block, 2.0**-8, np.float32)
        scales[at % scales.size] = 2.0**-7
        constants += [_constant(codes, f"b{at}"), _constant(scales, f"s{at}")]
        nodes.append(
            helper.make_node(
                "MatMulNBits",
                ["x", f"b{at}", f"s{at}"],
                [f"y{at}"],
                domain="com.microsoft",
                K=k,
                N=n,
                bits=4,
                block_size=block,
                accuracy_level=ACCURACY_LEVEL,
            )
        )
        results.append((f"y{at}", (rows, n)))
    return _runner(nodes, constants, (rows, k), results, threads)


def int8_walk(n: int, k: int, count: int, rows: int, threads: int) -> Callable[[], object]:
    """Return a run of `count` MatMulInteger of 8 bits over one dynamically quantised x."""
    random = np.random.default_rng(2)
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"])]
    constants, results = [], []
    for at in range(count):
        weight = random.integers(-128, 128, (k, n), np.int8)
        constants += [
            _constant(weight, f"b{at}"),
            _constant(np.array([0.01], np.float32), f"s{at}"),
            _constant(np.array(0, np.int8), f"z{at}"),
        ]
        nodes += [
            helper.make_node("MatMulInteger", ["xq", f"b{at}", "xz", f"z{at}"], [f"i{at}"]),
            helper.make_node("Cast", [f"i{at}"], [f"f{at}"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["xs", f"s{at}"], [f"q{at}"]),
            helper.make_node("Mul", [f"f{at}", f"q{at}"], [f"y{at}"]),
        ]
        results.append((f"y{at}", (rows, n)))
    return _runner(nodes, constants, (rows, k), results, threads)


def qmoe_walk(
    layers: int, width: int, hidden: int, experts: int, block: int, threads: int
) -> Callable[[], object]:
    """Return a run of `layers` routers and QMoE nodes of 4 bits, top 2, SwiGLU, over one token."""
    random = np.random.default_rng(3)
    nodes, constants, results = [], [], []
    for at in range(layers):
        wide = random.integers(0, 256, (experts, 2 * hidden, width // 2), np.uint8)
        narrow = random.integers(0, 256, (experts, width, hidden // 2), np.uint8)
        constants += [
            _constant(random.standard_normal((width, experts)).astype(np.float32), f"r{at}"),
            _constant(wide, f"w{at}"),
            _constant(_scales(experts, 2 * hidden, width // block, at), f"ws{at}"),
            _constant(narrow, f"n{at}"),
            _constant(_scales(experts, width, hidden // block, at), f"ns{at}"),
        ]
        operands = ["x", f"l{at}", f"w{at}", f"ws{at}", "", f"n{at}", f"ns{at}"]
        nodes += [
            helper.make_node("MatMul", ["x", f"r{at}"], [f"l{at}"]),
            helper.make_node(
                "QMoE",
                operands,
                [f"y{at}"],
                domain="com.microsoft",
                k=2,
                expert_weight_bits=4,
                block_size=block,
                activation_type="swiglu",
                swiglu_fusion=1,
                normalize_routing_weights=1,
                activation_alpha=1.0,
                activation_beta=0.0,
                accuracy_level=ACCURACY_LEVEL,
            ),
        ]
        results.append((f"y{at}", (1, width)))
    return _runner(nodes, constants, (1, width), results, threads)


def _scales(experts: int, rows: int, blocks: int, at: int) -> np.ndarray:
    return np.full((experts, rows, blocks), 2.0**-8 * (1 + at), np.float32)


def _constant(array: np.ndarray, name: str) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def _runner(
    nodes: Sequence[onnx.NodeProto],
    constants: Sequence[onnx.TensorProto],
    shape: tuple[int, int],
    results: Sequence[tuple[str, tuple[int, int]]],
    threads: int,
) -> Callable[[], object]:
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "walk",
        [tensor("x", TensorProto.FLOAT, shape)],
        [tensor(name, TensorProto.FLOAT, size) for name, size in results],
        constants,
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = IR_VERSION
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    x = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    binding.bind_cpu_input("x", x)
    for name, _ in results:
        binding.bind_output(name)

    def run() -> object:
        return session.run_with_iobinding(binding)

    return run
