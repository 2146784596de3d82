"""The one interface of code generators: what every back end supplies.

    ops, target -> emit -> source -> build -> artefact of section `kernels`

A product over sparse W4 weights is the same walk everywhere: find the tile, load its codes,
multiply and add, store. A back end says how each of the four is done on its machine; everything
above them (which tiles are live, order of sums, routing, merging) is shared or follows the same
equations, so all back ends give the simulator's bits. Back ends are listed in
`compiler.emitters.backends`, what they build for in `compiler.hardware.targets`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from compiler.contract.operations import Op
from compiler.errors import CompilerError, UnsupportedOperatorError
from compiler.hardware.targets import Target
from compiler.kernels.select import TileSpec, select_tile


class EmitterError(CompilerError):
    """A back end lacks something that the interface asks of it: a fault of ours."""

    code: ClassVar[str] = "build.app.emitter"


class Part(StrEnum):
    """What a back end supplies of a sparse product."""

    INDEX = "index"
    LOAD = "load"
    MMA = "mma"
    STORE = "store"


class SparseKernelEmitter(ABC):
    """One back end.

    Attributes:
        name: Permanent name.
        parts: By part, the functions of the rendered source that do it.
    """

    name: ClassVar[str]
    parts: ClassVar[Mapping[Part, tuple[str, ...]]]

    def serves(self, target: Target) -> bool:
        """Return whether this back end builds for `target`."""
        return target.backend == self.name

    def tile(self, target: Target) -> TileSpec:
        """Return the tile layer that a target gets."""
        return select_tile(target.isa)

    @abstractmethod
    def capabilities(self) -> frozenset[Op]:
        """Return the operations that this back end can emit."""

    @abstractmethod
    def emit(self, ops: Iterable[Op], target: Target) -> str:
        """Return the source that offers `ops`; the text depends on nothing but the arguments.

        Raises:
            UnsupportedOperatorError: An operation has no kernel in this back end.
        """

    @abstractmethod
    def build(self, source: str, target: Target, cache_dir: Path) -> bytes:
        """Return what a bundle carries: the artefact made of an emitted source.

        Args:
            source: What `emit` returned.
            target: What to build for.
            cache_dir: Folder of results and of the tools' own caches; made if missing.

        Raises:
            ToolchainError: A tool is missing, crashed, took too long or refused the source.
        """

    def emit_index_calc(self, target: Target) -> str:
        """Return the text that finds the tiles of a product: stored, listed, or all."""
        return self._part(Part.INDEX, target)

    def emit_sparse_load(self, target: Target) -> str:
        """Return the text that loads the codes of one cell of a stored tile."""
        return self._part(Part.LOAD, target)

    def emit_mma(self, target: Target) -> str:
        """Return the text that multiplies a cell with activations, adds, and applies scales."""
        return self._part(Part.MMA, target)

    def emit_sparse_store(self, target: Target) -> str:
        """Return the text that turns exact sums into f32 and puts them where they belong."""
        return self._part(Part.STORE, target)

    def require(self, ops: Iterable[Op]) -> None:
        """Refuse operations that this back end lacks.

        Raises:
            UnsupportedOperatorError: Names them; the hint says what there is.
        """
        missing = sorted(op.name for op in set(ops) - self.capabilities())
        if missing:
            offered = ", ".join(sorted(op.name for op in self.capabilities()))
            raise UnsupportedOperatorError(
                f"the {self.name} back end has no kernel for {', '.join(missing)}",
                hint=f"compile for a target of another back end; {self.name} has {offered}",
            )

    def _part(self, part: Part, target: Target) -> str:
        source = self.emit((Op.LINEAR,), target)
        return "\n".join(self._function(source, name) for name in self.parts[part])

    def _function(self, source: str, name: str) -> str:
        found = re.search(rf"^\w[\w ]*[ *]{name}\(", source, re.MULTILINE)
        if found is None:
            raise EmitterError(f"the {self.name} back end does not define {name}")
        text = source[found.start() :]
        line = text[: text.index("\n")]
        return line if line.endswith("}") else text[: text.index("\n}") + 2]
