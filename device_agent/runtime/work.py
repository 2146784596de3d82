"""A runner that adds up what its runs had to read and compute, for estimates of energy."""

from collections.abc import Mapping

from compiler.contract.ladder import ProgramWork
from compiler.contract.pipeline import Pipeline
from compiler.contract.session import Buffer, PlanRunner, RunnerBefore


class WorkRunner(RunnerBefore):
    """Counts runs by the plan's own figures; `take` between two answers."""

    def __init__(
        self, runner: PlanRunner, pipeline: Pipeline, work: Mapping[str, ProgramWork]
    ) -> None:
        """Begin with nothing; programs that `work` does not name count nothing."""
        super().__init__(runner)
        self._work = work
        self._ports = {
            name: next(((r, p.row_bytes) for r, p in spec.inputs.items() if p.dynamic), None)
            for name, spec in pipeline.programs.items()
        }
        self._bytes = self._operations = 0

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run one program; see `PlanRunner.run`."""
        outputs = self._runner.run(program, inputs)
        work = self._work.get(program)
        if work is not None:
            port = self._ports.get(program) or self._ports.get(program.partition(".")[0])
            tokens = 1 if port is None else len(inputs[port[0]]) // port[1]
            self._bytes += work.weight_bytes
            self._operations += tokens * work.operations
        return outputs

    def take(self) -> tuple[int, int]:
        """Return bytes of weights and operations since the last time."""
        found = self._bytes, self._operations
        self._bytes = self._operations = 0
        return found
