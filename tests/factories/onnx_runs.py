"""Running submissions: ONNX Runtime on the files, the f64 interpreter on the lowered module."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from compiler.frontend import import_pipeline
from compiler.kernels.program import Module
from compiler.passes.pipeline import LOSSLESS, Loss, LoweredPipeline, lower_pipeline
from compiler.simulator import Simulator

Array = np.ndarray[Any, Any]


def lowered(directory: Path, *, fuse: bool = True, loss: Loss = LOSSLESS) -> LoweredPipeline:
    """Import and lower a submission, with the verifier after every pass."""
    return lower_pipeline(import_pipeline(directory), verify=True, fuse=fuse, loss=loss)


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def block_difference(directory: Path, tokens: int, seed: int = 0) -> float:
    """Return the greatest difference between a block's two runs over its greatest output."""
    return module_difference(directory, lowered(directory).module, tokens, seed)


def module_difference(directory: Path, module: Module, tokens: int, seed: int = 0) -> float:
    """Return the same for a block that is lowered already."""
    x = block_rows(directory, tokens, seed)
    wanted = reference_rows(directory, x)
    found = Simulator(module, mode="f64").run_arrays("forward", {"tensor": x})["tensor"]
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def block_rows(directory: Path, tokens: int, seed: int = 0) -> Array:
    """Return random rows for a block."""
    model = onnx.load(directory / "model.onnx")
    width = model.graph.input[0].type.tensor_type.shape.dim[2].dim_value
    return np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)


def reference_rows(directory: Path, x: Array) -> Array:
    """Return what ONNX Runtime makes of rows."""
    running = session(directory / "model.onnx")
    (wanted,) = running.run(None, {running.get_inputs()[0].name: x[None]})
    found: Array = wanted[0]
    return found
