"""What reading a submission may cost: named limits, and the budget of one component.

    importer -> onnx_file, model_size (bytes, nodes, nesting) -> evaluate (elements, folded bytes)
    driver   -> vet (seconds, memory: a child process, because C++ and numpy cannot be stopped)

Everything here is counted, never timed, so the same file is refused on every machine. Seconds and
memory are bounded by `compiler.driver.vet`, which runs the import in a process of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from compiler.errors import LimitError

_MIB = 1 << 20
_GIB = 1 << 30
MAX_COUNT = (1 << 63) - 1
"""What the system takes as a size of memory."""
MAX_SECONDS = 1e8
"""Three years; the system's alarm clock takes no infinity."""


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """Limits of one import.

    Attributes:
        max_file_bytes: Bytes of one ONNX file together with its external data.
        max_nodes: Nodes of one file, subgraphs and inlined function calls included.
        max_nesting: Depth of subgraphs, and of functions that call functions.
        max_tensor_elements: Elements of any tensor that is not an initializer.
        max_folded_bytes: Bytes of constants that one component makes while it is folded.
        max_seconds: Wall time of the import and the passes, when run by `compiler.driver.vet`.
        max_memory_bytes: Address space of that process.
    """

    max_file_bytes: int = 16 * _GIB
    max_nodes: int = 200_000
    max_nesting: int = 32
    max_tensor_elements: int = 1 << 28
    max_folded_bytes: int = _GIB
    max_seconds: float = 600.0
    max_memory_bytes: int = 32 * _GIB

    def __post_init__(self) -> None:
        for item in fields(self):
            most = MAX_SECONDS if item.name == "max_seconds" else MAX_COUNT
            if not 0 < getattr(self, item.name) <= most:  # NaN is neither
                raise LimitError(
                    f"limit {item.name} must be positive and at most {most}",
                    hint=hint_for(item.name),
                )


DEFAULT_LIMITS = ImportLimits()
"""Wide enough for a few billion parameters; a server that reads strangers' files sets less."""


def hint_for(name: str) -> str:
    """Return how to raise a limit: the command line's option and the field's name."""
    return f"option --{name.replace('_', '-')} (ImportLimits.{name}) raises the limit"


def exceeded(name: str, what: str, limits: ImportLimits) -> LimitError:
    """Return the error that says which limit `what` breaks."""
    return LimitError(f"{what}; the limit {name} is {getattr(limits, name)}", hint=hint_for(name))


@dataclass(slots=True)
class FoldBudget:
    """Bytes of constants made so far by folding one component.

    Attributes:
        limits: What is allowed.
        spent_bytes: Sum over all results that are not views of their operands.
    """

    limits: ImportLimits = DEFAULT_LIMITS
    spent_bytes: int = field(default=0)

    def elements(self, shape: Sequence[int], where: str) -> None:
        """Check the number of elements of a tensor before anything is allocated for it.

        Raises:
            LimitError: Too many.
        """
        count = math.prod(shape)
        if count > self.limits.max_tensor_elements:
            sizes = "x".join(map(str, shape))
            raise exceeded("max_tensor_elements", f"{where} has {sizes} elements", self.limits)

    def spend(self, count_bytes: int, where: str) -> None:
        """Count bytes that folding is about to make.

        Raises:
            LimitError: The sum is too large.
        """
        self.spent_bytes += count_bytes
        if self.spent_bytes > self.limits.max_folded_bytes:
            raise exceeded(
                "max_folded_bytes",
                f"{where} brings the constants made by folding to {self.spent_bytes} bytes",
                self.limits,
            )
