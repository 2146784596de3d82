"""Bare ONNX files, pinned and compiled: ONNX Runtime, native code and simulator side by side."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compiler.frontend.describe import write_submission
from compiler.frontend.importer import import_pipeline
from compiler.passes.pipeline import LoweredPipeline, lower_pipeline
from compiler.passes.pipeline_spec import PipelineSpec
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.onnx_runs import session

Array = np.ndarray[Any, Any]
FORWARD = "forward"
_HELD = {"f32": np.dtype("<f4"), "i32": np.dtype("<i4")}


@dataclass(frozen=True)
class GraphCase:
    """One ONNX file with every size fixed.

    Attributes:
        source: The file that ONNX Runtime reads.
    """

    source: Path
    spec: PipelineSpec
    pipeline: LoweredPipeline
    case: Case

    @classmethod
    def of(
        cls,
        source: Path,
        out: Path,
        dims: Mapping[str, int] | None = None,
        constants: Mapping[str, float] | None = None,
        *,
        leave_out: Collection[str] = (),
    ) -> "GraphCase":
        spec = write_submission(source, out, dims or {}, constants or {})
        pipeline = lower_pipeline(import_pipeline(out), leave_out=leave_out)
        return cls(source, spec, pipeline, Case.of(pipeline.module))

    @property
    def operations(self) -> set[str]:
        return {call.op.name for call in self.pipeline.module.programs[0].calls}

    def feeds(self, arrays: Mapping[str, Array]) -> dict[str, bytes]:
        """Return inputs by role, as a device feeds them, from arrays by ONNX name."""
        module = self.pipeline.module
        fed = {}
        for port in self.spec.components[0].inputs:
            if port.role in module.programs[0].inputs:
                buffer = module.buffers[module.programs[0].inputs[port.role]]
                fed[port.role] = arrays[port.name].astype(_HELD[buffer.dtype]).tobytes()
        return fed

    def wanted(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return ONNX Runtime's outputs by role."""
        runtime = session(self.source)
        kinds = {info.name: info.type for info in runtime.get_inputs()}
        numbers = {
            port.name: np.array(port.value, np.int64 if "int" in kinds[port.name] else np.float32)
            for port in self.spec.components[0].inputs
            if port.role == "constant"
        }
        ports = self.spec.components[0].outputs
        made = runtime.run([port.name for port in ports], {**arrays, **numbers})
        return {port.role: value for port, value in zip(ports, made, strict=True)}

    def native(self, feeds: Mapping[str, bytes], target: str | None = None) -> dict[str, bytes]:
        """Return the outputs of native code, the best this machine can run unless told."""
        best = [name for name in native_targets() if name != "portable"][-1]
        return raw(self.case.native(target or best).run(FORWARD, feeds))

    def simulated(self, feeds: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the outputs of the bit-exact simulator."""
        return raw(self.case.simulator().run(FORWARD, feeds))

    def array(self, role: str, data: bytes, like: Array) -> Array:
        """Return an output's bytes in the shape of ONNX Runtime's."""
        module = self.pipeline.module
        buffer = module.buffers[module.programs[0].outputs[role]]
        return np.frombuffer(data, _HELD[buffer.dtype]).reshape(like.shape)


def relative_error(found: Array, wanted: Array) -> float:
    """Return the greatest difference over the greatest wanted magnitude."""
    wide = wanted.astype(np.float64)
    scale = float(np.abs(wide).max()) or 1.0
    return float(np.abs(found.astype(np.float64) - wide).max()) / scale
