"""A runner that looks at what comes out of a plan: numbers that are none end the answer.

Kernels refuse infinite and NaN activations where they quantise; what a kernel only passes on, a
router's entropy or the rows of a picture, is looked at here. Costs one pass over small outputs.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from compiler.contract.native_errors import BadTokenError, NotFiniteError
from compiler.contract.pipeline import COUNT, Pipeline
from compiler.contract.session import STEP, Buffer, PlanRunner, RunnerBefore

CHOSEN: Final = "token"
F32: Final = "f32"


class SentinelRunner(RunnerBefore):
    """Checks outputs after each run."""

    def __init__(self, runner: PlanRunner, pipeline: Pipeline) -> None:
        """Watch the programs that the pipeline describes; variants of them have their outputs."""
        super().__init__(runner)
        self._words = 0 if pipeline.tokens is None else len(pipeline.tokens.vocabulary)
        self._floats = {
            name: {
                role: port.row_bytes for role, port in program.outputs.items() if port.dtype == F32
            }
            for name, program in pipeline.programs.items()
        }

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run one program; see `PlanRunner.run`.

        Raises:
            NotFiniteError: A number of an output is infinite or NaN.
            BadTokenError: A token is outside the vocabulary.
        """
        outputs = self._runner.run(program, inputs)
        base = program.partition(".")[0]
        for role, row_bytes in self._floats.get(base, {}).items():
            if role in outputs and not _are_finite(outputs[role][: _limit(outputs, row_bytes)]):
                raise NotFiniteError(f"output {role!r} of program {program!r} is infinite or NaN")
        if base == STEP and CHOSEN in outputs:
            token = int.from_bytes(outputs[CHOSEN][:4], "little", signed=True)
            if not 0 <= token < self._words:
                raise BadTokenError(f"program {program!r} chose token {token} of {self._words}")
        return outputs


def _limit(outputs: Mapping[str, memoryview], row_bytes: int) -> int | None:
    """Return how many bytes of an output mean something: the rows that the program counted."""
    if COUNT not in outputs:
        return None
    return int.from_bytes(outputs[COUNT][:4], "little", signed=True) * row_bytes


def _are_finite(values: memoryview) -> bool:
    return bool(np.isfinite(np.frombuffer(values, "<f4")).all())
