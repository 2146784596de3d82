"""The judge of a raise: run the source in ONNX Runtime, compare with what the raised op means.

A pass that replaces a group of imported operations asks here first. Inputs are random, every
expert is among them, and the greatest difference may not exceed `TOLERANCE` of the greatest
result. A source that ONNX Runtime refuses to run has no judge, and is not raised.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from xdsl.ir import SSAValue

from compiler.analysis.constants import Array, ConstantTable
from compiler.dialects.dims import Binding
from compiler.dialects.types import dtype_of, sizes_at
from compiler.passes.slices import SliceModel, backward

TOLERANCE: Final = 1e-4
"""Greatest accepted difference relative to the greatest absolute result."""
PAST_ROWS: Final = 3
"""P, where a slice's sizes mention it."""


Run = Callable[[Mapping[str, Array]], list[Array] | None]
"""Runs a model that is ready; None if ONNX Runtime refuses."""


def ready(model: onnx.ModelProto) -> Run | None:
    """Load a model in ONNX Runtime, in this process, on one thread; None if it refuses to."""
    import onnxruntime  # costs 0.1 s, and most models need no judge

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception:  # noqa: BLE001 - the runtime's errors have no common root of their own
        return None

    def run(feeds: Mapping[str, Array]) -> list[Array] | None:
        try:
            found: list[Array] = session.run(None, dict(feeds))
        except Exception:  # noqa: BLE001 - as above
            return None
        return found

    return run


def run_model(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array] | None:
    """Load and run a model once."""
    run = ready(model)
    return None if run is None else run(feeds)


@dataclass(frozen=True, slots=True)
class Source:
    """Imported operations, ready to run for inputs of one size."""

    run_feeds: Run
    inputs: tuple[SSAValue, ...]
    constants: Mapping[str, Array]

    def run(self, arrays: Sequence[Array]) -> list[Array] | None:
        """Return one array per output for arrays in the order of the inputs."""
        feeds = {f"in{at}": array for at, array in enumerate(arrays)}
        return self.run_feeds({**feeds, **self.constants})


def source_of(
    outputs: Sequence[SSAValue],
    inputs: Sequence[SSAValue],
    constants: ConstantTable,
    binding: Binding,
) -> Source | None:
    """Return the operations between `inputs` and `outputs`, ready to run; None if none can."""
    operations = backward(outputs, list(inputs))
    if operations is None:
        return None
    examples = {v: np.zeros(sizes_at(v, binding), dtype_of(v)) for v in inputs}
    model, feeds = SliceModel(constants, binding).build(operations, examples, outputs)
    run = ready(model)
    if run is None:
        return None
    kept = {name: array for name, array in feeds.items() if int(name[2:]) >= len(inputs)}
    return Source(run, tuple(inputs), kept)


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
    source = source_of(outputs, list(inputs), constants, binding)
    return None if source is None else source.run(list(inputs.values()))


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
