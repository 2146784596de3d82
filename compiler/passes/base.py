"""What a pass is, and what it may use."""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from xdsl.dialects.builtin import ModuleOp

from compiler.analysis.constants import ConstantTable
from compiler.analysis.known_facts import KnownFacts
from compiler.kernels.merged import Merged
from compiler.passes.origins import Origins
from compiler.passes.pipeline_spec import PipelineSpec


@dataclass(frozen=True, slots=True)
class PassContext:
    """Everything a pass may use besides the module."""

    spec: PipelineSpec
    constants: ConstantTable
    origins: Origins
    facts: KnownFacts = field(default_factory=KnownFacts)
    merges: dict[str, Merged] = field(default_factory=dict)
    """Weights that adapters were merged into, by the digest of what they are now."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """How many rewrites happened, and what a reader of the build log should know."""

    changed: int
    notes: tuple[str, ...] = ()


class Pass(Protocol):
    """A rewrite of a whole module; a frozen dataclass whose fields are its options."""

    name: ClassVar[str]

    @property
    def changes_values(self) -> bool:
        """Whether the program computes something else afterwards, as its options demand.

        The zeros that it claims are then proved of the new program alone (`passes.invariant`).
        """
        return False

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite `module` in place."""
        ...


@dataclass(frozen=True, slots=True)
class ImportedPipeline:
    """A submission as IR: one function per component, arguments and results marked by role."""

    spec: PipelineSpec
    module: ModuleOp
    constants: ConstantTable
    origins: Origins
    notes: tuple[str, ...] = ()

    def context(self) -> PassContext:
        """Return the context that passes run in."""
        return PassContext(self.spec, self.constants, self.origins)
