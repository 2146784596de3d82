"""Single f32 layers in ONNX Runtime: an LSTM and convolutions, one node per session."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

NAME: Final = "onnxruntime"
OPSET: Final = 18
IR_VERSION: Final = 10
Array = np.ndarray
Run = Callable[[], object]


def lstm_weights(width: int) -> tuple[Array, Array, Array]:
    """Return W and R, both (4 * width, width), and the sum of both biases (4 * width)."""
    random = np.random.default_rng(4)
    w, r = ((random.standard_normal((4 * width, width)) * width**-0.5) for _ in range(2))
    return w.astype(np.float32), r.astype(np.float32), np.full(4 * width, 0.1, np.float32)


def lstm(steps: int, width: int, weights: tuple[Array, Array, Array], threads: int = 1) -> Run:
    """Return a run of an LSTM over `steps` rows of `width`, batch 1."""
    w, r, bias = weights
    constants = {"w": w[None], "r": r[None], "b": np.concatenate([bias, 0 * bias])[None]}
    node = helper.make_node("LSTM", ["x", *constants], ["y", "h", "c"], hidden_size=width)
    x = np.random.default_rng(5).standard_normal((steps, 1, width)).astype(np.float32)
    return session_run(node, constants, x, ("y", "h", "c"), threads)


def conv(
    x: Array, weight: Array, bias: Array, *, stride: int, pad: int, group: int, threads: int = 1
) -> Run:
    """Return a run of a convolution of x (1, C, H, W) by weight (M, C/group, kh, kw)."""
    node = helper.make_node(
        "Conv", ["x", "w", "b"], ["y"], strides=[stride] * 2, pads=[pad] * 4, group=group
    )
    return session_run(node, {"w": weight, "b": bias}, x, ("y",), threads)


def session_run(
    node: onnx.NodeProto,
    constants: Mapping[str, Array],
    x: Array,
    outputs: Sequence[str],
    threads: int,
) -> Run:
    """Return a run of a session of one node, input and outputs bound once."""
    shape = list(x.shape)
    graph = helper.make_graph(
        [node],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = IR_VERSION
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    running = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = running.io_binding()
    binding.bind_cpu_input("x", x)
    for name in outputs:
        binding.bind_output(name)
    return lambda: running.run_with_iobinding(binding)
