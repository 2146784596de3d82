"""What a pass is, and what it may use."""

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

from compiler.analysis.constants import ConstantTable
from compiler.passes.pipeline_spec import PipelineSpec


@dataclass(slots=True)
class NodeNames:
    """Names of ONNX nodes, for error messages only: no decision may depend on them."""

    names: dict[Operation, str] = field(default_factory=dict)

    def of(self, op: Operation) -> str:
        """Return the name of the node that became `op`, or a placeholder."""
        return self.names.get(op, "<unnamed>")

    def near(self, op: Operation) -> str:
        """Return the name of the node `op` came from, or of the first one behind it."""
        seen, queue = {op}, deque([op])
        while queue:
            current = queue.popleft()
            if current in self.names:
                return self.names[current]
            users = [use.operation for result in current.results for use in result.uses]
            queue.extend(user for user in users if user not in seen)
            seen.update(users)
        return "<unnamed>"

    def inherit(self, new: Operation, old: Operation) -> None:
        """Let errors about `new` name the node that `old` came from."""
        if old in self.names:
            self.names[new] = self.names[old]


@dataclass(frozen=True, slots=True)
class PassContext:
    """Everything a pass may use besides the module."""

    spec: PipelineSpec
    constants: ConstantTable
    names: NodeNames


@dataclass(frozen=True, slots=True)
class PassResult:
    """How many rewrites happened, and what a reader of the build log should know."""

    changed: int
    notes: tuple[str, ...] = ()


class Pass(Protocol):
    """A rewrite of a whole module; a frozen dataclass whose fields are its options."""

    name: ClassVar[str]

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite `module` in place."""
        ...


@dataclass(frozen=True, slots=True)
class ImportedPipeline:
    """A submission as IR: one function per component, arguments and results marked by role."""

    spec: PipelineSpec
    module: ModuleOp
    constants: ConstantTable
    names: NodeNames
    notes: tuple[str, ...] = ()

    def context(self) -> PassContext:
        """Return the context that passes run in."""
        return PassContext(self.spec, self.constants, self.names)
