"""The native plan in this process, as a back end: kernels called through ctypes."""

from collections.abc import Mapping
from typing import ClassVar

from compiler.contract.backend import Backend, BackendError
from compiler.contract.native import NativePlan
from compiler.contract.native_weights import LoadedWeights
from compiler.contract.pipeline import ProgramSpec
from compiler.contract.plan import parse_plan
from compiler.contract.runner_frames import frames_of
from compiler.contract.session import Buffer


class NativeBackend(Backend):
    """Runs a bundle's own kernels here; a crash of theirs is a crash of this process."""

    name: ClassVar[str] = "native"

    def __init__(
        self,
        sections: Mapping[str, Buffer],
        weights: LoadedWeights | None = None,
        *,
        threads: int = 1,
    ) -> None:
        """Load nothing yet.

        Args:
            sections: `plan`, `kernels` and weights, verified.
            weights: Those of another back end, to be shared.
            threads: Threads of a run.
        """
        super().__init__()
        self._sections, self._weights, self._threads = sections, weights, threads
        self._plan: NativePlan | None = None

    @property
    def plan(self) -> NativePlan:
        """The plan behind it, for a trace or a policy.

        Raises:
            BackendError: It is not initialised.
        """
        if self._plan is None:
            raise BackendError(f"the {self.name} back end is not initialised", hint="call init")
        return self._plan

    @property
    def kv_length(self) -> int:
        """Rows in the key/value cache."""
        return 0 if self._plan is None else self._plan.kv_length

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        self.plan.kv_length = length

    def _load(self) -> Mapping[str, ProgramSpec]:
        plan_bytes = bytes(self._sections["plan"])
        self._plan = NativePlan(
            bytes(self._sections["kernels"]),
            plan_bytes,
            self._sections if self._weights is None else self._weights,
            threads=self._threads,
        )
        return {name: each.spec for name, each in frames_of(parse_plan(plan_bytes)).items()}

    def _execute(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        return self.plan.run(program, inputs)

    def _unload(self) -> None:
        if self._plan is not None:
            self._plan.close()
        self._plan = None
