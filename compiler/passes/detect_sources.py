"""Mark operations that make zeros with the kind of source they are.

Before:
    %1 = "sp.linear"(%0, %w) <{act = "relu"}> : ...
    %2 = "sp.binary"(%1, %u) <{kind = "mul"}> : ...
After:
    %1 = "sp.linear"(%0, %w) <{act = "relu"}> {sp.source = "relu"} : ...
    %2 = "sp.binary"(%1, %u) <{kind = "mul"}> {sp.source = "product"} : ...

The ten kinds are those of `compiler.analysis.sources`. A mark says where zeros begin, for readers
of the text and of the build's notes; what is proved stands in the types (`propagate-masks`).
"""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Final

from xdsl.dialects.builtin import ModuleOp, StringAttr

from compiler.analysis.sources import detected_sources
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import functions

SOURCE: Final = "sp.source"


@dataclass(frozen=True)
class DetectSources(Pass):
    """Write `sp.source` on every operation that makes zeros."""

    name: ClassVar[str] = "detect-sources"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Mark every function."""
        kinds: Counter[str] = Counter()
        known = ctx.facts.of(module, ctx.constants)
        for func in functions(module):
            for op, kind in detected_sources(func, known[func.sym_name.data], ctx.constants):
                op.attributes[SOURCE] = StringAttr(kind)
                kinds[kind] += 1
        note = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        return PassResult(kinds.total(), (note,) if note else ())
