"""The judge of a raise: run the source in ONNX Runtime, compare with what the raised op means.

A pass that replaces a group of imported operations asks here first. Inputs are random, every
expert is among them, and the greatest difference may not exceed `TOLERANCE` of the greatest
result. A source that ONNX Runtime refuses to run has no judge, and is not raised.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx
from xdsl.ir import SSAValue

from compiler.analysis.constants import Array, ConstantTable
from compiler.dialects.dims import Binding
from compiler.passes.slices import SliceModel, backward

TOLERANCE: Final = 1e-4
"""Greatest accepted difference relative to the greatest absolute result."""
PAST_ROWS: Final = 3
"""P, where a slice's sizes mention it."""


def run_model(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array] | None:
    """Run a model in ONNX Runtime, in this process, on one thread; None if it refuses to."""
    import onnxruntime  # costs 0.1 s, and most models need no judge

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        found: list[Array] = session.run(None, dict(feeds))
    except Exception:  # noqa: BLE001 - the runtime's errors have no common root of their own
        return None
    return found


def run_source(
    outputs: Sequence[SSAValue],
    inputs: Mapping[SSAValue, Array],
    constants: ConstantTable,
    binding: Binding,
) -> list[Array] | None:
    """Return what imported operations make of `inputs`, by ONNX Runtime.

    Args:
        outputs: Values to compute.
        inputs: Everything they depend on that is no constant, sizes as under `binding`.
        constants: Where their constants are.
        binding: The run-time lengths.

    Returns:
        One array per output, or None if there is no way to run them.
    """
    operations = backward(outputs, list(inputs))
    if operations is None:
        return None
    model, feeds = SliceModel(constants, binding).build(operations, inputs, outputs)
    return run_model(model, feeds)


def agrees(found: Array, wanted: Array) -> bool:
    """Return whether two results are the same within `TOLERANCE`."""
    if found.shape != wanted.shape or not np.isfinite(found).all():
        return False
    size = float(np.abs(wanted).max(initial=0.0))
    return float(np.abs(found - wanted).max(initial=0.0)) <= TOLERANCE * max(size, 1e-30)


def sample_rows(rows: int, width: int, seed: int, scale: float) -> Array:
    """Return random rows (rows, width) f32 of standard deviation `scale`."""
    random = np.random.default_rng(seed)
    return (random.standard_normal((rows, width)) * scale).astype(np.float32)


def sample_choices(rows: int, k: int, experts: int, seed: int) -> tuple[Array, Array]:
    """Return k different experts per row (rows, k) int64, taking turns, and gates (rows, k) f32.

    Raises:
        ValueError: There are fewer than k experts.
    """
    if not 1 <= k <= experts:
        raise ValueError(f"{k} of {experts} experts")
    random = np.random.default_rng(seed)
    turns = np.concatenate([random.permutation(experts) for _ in range(rows * k // experts + 2)])
    index = np.empty((rows, k), np.int64)
    at = 0
    for row in range(rows):
        chosen: dict[int, None] = {}
        while len(chosen) < k:
            chosen[int(turns[at % len(turns)])] = None
            at += 1
        index[row] = list(chosen)
    gate = random.uniform(0.1, 1.0, (rows, k)).astype(np.float32)
    return index, gate


def bind(tokens: int) -> dict[str, Any]:
    """Return the run-time lengths of a check with `tokens` rows."""
    return {"T": tokens, "P": PAST_ROWS}
