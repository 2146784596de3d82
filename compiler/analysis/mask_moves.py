"""How a mask moves when the elements of its tensor move: steps on boolean arrays.

A step is symbolic: its sizes are `Dim`s, so one path of steps stands for every run-time length.
Places that the step invents (padding) are False: an element that is not there is not non-zero.
Called by `compiler.analysis.masks`; run-time gathers read their index array from the environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.dialects.dims import Binding, Dim

Bits = NDArray[np.bool_]
Shape = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Environment:
    """What an evaluation knows about one execution.

    Attributes:
        binding: Run-time lengths.
        patterns: For each source number, where its pattern tensor is non-zero.
        indices: For each gather number, its index array (integers).
    """

    binding: Binding = field(default_factory=dict)
    patterns: Mapping[int, Bits] = field(default_factory=dict)
    indices: Mapping[int, NDArray[Any]] = field(default_factory=dict)

    def sizes(self, shape: Shape) -> tuple[int, ...]:
        """Return the sizes of a shape in this execution."""
        return tuple(dim.at(self.binding) for dim in shape)


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same flat order under another shape."""

    shape: Shape

    def apply(self, bits: Bits, env: Environment) -> Bits:
        """Return the moved array."""
        return bits.reshape(env.sizes(self.shape))

    @property
    def dims(self) -> Shape:
        """Sizes that the step depends on."""
        return self.shape


@dataclass(frozen=True, slots=True)
class Expand:
    """Repetition along axes of size one."""

    shape: Shape

    def apply(self, bits: Bits, env: Environment) -> Bits:
        """Return the moved array."""
        return np.broadcast_to(bits, env.sizes(self.shape))

    @property
    def dims(self) -> Shape:
        """Sizes that the step depends on."""
        return self.shape


@dataclass(frozen=True, slots=True)
class Permute:
    """Result axis i is operand axis `perm[i]`."""

    perm: tuple[int, ...]

    def apply(self, bits: Bits, env: Environment) -> Bits:  # noqa: ARG002 - one signature
        """Return the moved array."""
        return bits.transpose(self.perm)

    @property
    def dims(self) -> Shape:
        """Sizes that the step depends on."""
        return ()


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements `start, start + stride, ...` (`count` of them) of one axis."""

    axis: int
    start: Dim
    count: Dim
    stride: int

    def apply(self, bits: Bits, env: Environment) -> Bits:
        """Return the moved array."""
        first, count = self.start.at(env.binding), self.count.at(env.binding)
        places = first + self.stride * np.arange(count)
        return bits.take(places, axis=self.axis)

    @property
    def dims(self) -> Shape:
        """Sizes that the step depends on."""
        return (self.start, self.count)


@dataclass(frozen=True, slots=True)
class Pad:
    """The operand stands at `before, before + stride, ...` of an axis of `total`, else False."""

    axis: int
    before: Dim
    total: Dim
    stride: int = 1

    def apply(self, bits: Bits, env: Environment) -> Bits:
        """Return the moved array."""
        sizes = list(bits.shape)
        sizes[self.axis] = self.total.at(env.binding)
        moved = np.zeros(sizes, np.bool_)
        first = self.before.at(env.binding)
        places = first + self.stride * np.arange(bits.shape[self.axis])
        moved[(slice(None),) * self.axis + (places,)] = bits
        return moved

    @property
    def dims(self) -> Shape:
        """Sizes that the step depends on."""
        return (self.before, self.total)


@dataclass(frozen=True, slots=True)
class Gather:
    """Slices of one axis by a run-time index; negative indices count from the end."""

    axis: int
    index: int

    def apply(self, bits: Bits, env: Environment) -> Bits:
        """Return the moved array; the index's axes replace `axis`."""
        return bits.take(env.indices[self.index].astype(np.int64), axis=self.axis, mode="wrap")

    @property
    def dims(self) -> Shape:
        """Sizes that the step depends on."""
        return ()


@dataclass(frozen=True, slots=True)
class Put:
    """The way back of `Gather`: `rank` axes of gathered slices return to `total` places of one.

    A place that was gathered more than once holds what any of its slices holds.
    """

    axis: int
    rank: int
    index: int
    total: Dim

    def apply(self, bits: Bits, env: Environment) -> Bits:
        """Return the moved array; negative indices count from the end."""
        total, axis = self.total.at(env.binding), self.axis
        head, tail = bits.shape[:axis], bits.shape[axis + self.rank :]
        slices = np.moveaxis(bits.reshape(*head, -1, *tail), axis, 0)
        moved = np.zeros((total, *head, *tail), np.bool_)
        places = env.indices[self.index].astype(np.int64).reshape(-1) % max(total, 1)
        np.logical_or.at(moved, places, slices)
        return np.moveaxis(moved, 0, axis)

    @property
    def dims(self) -> Shape:
        """Sizes that the step depends on."""
        return (self.total,)


@dataclass(frozen=True, slots=True)
class Spread:
    """Whether anything holds along an axis, which keeps size one."""

    axis: int

    def apply(self, bits: Bits, env: Environment) -> Bits:  # noqa: ARG002 - one signature
        """Return the moved array."""
        return np.asarray(bits.any(axis=self.axis, keepdims=True))

    @property
    def dims(self) -> Shape:
        """Sizes that the step depends on."""
        return ()


Step = Reshape | Expand | Permute | Cut | Pad | Gather | Put | Spread
Path = tuple[Step, ...]
INDEXED: Final = (Gather, Put)
"""Steps that read an index array of the execution."""


def is_static(path: Path) -> bool:
    """Return whether a path can be walked at compile time."""
    return all(
        not isinstance(step, INDEXED) and all(dim.is_static for dim in step.dims) for step in path
    )


def shortened(path: Path) -> Path:
    """Return an equal, shorter path: neighbours of one kind are merged, identities dropped."""
    short: list[Step] = []
    for step in path:
        last = short[-1] if short else None
        match step, last:
            case (Reshape(), Reshape()) | (Expand(), Expand()):
                short[-1] = step
            case Permute(), Permute():
                short[-1] = Permute(tuple(last.perm[p] for p in step.perm))
            case _:
                short.append(step)
        if isinstance(short[-1], Permute) and short[-1].perm == tuple(range(len(short[-1].perm))):
            short.pop()
    return tuple(short)


def keeps_density(path: Path) -> bool:
    """Return whether a path neither drops nor adds elements unevenly."""
    return all(isinstance(step, Reshape | Expand | Permute) for step in path)
