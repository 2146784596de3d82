"""What the importer knows about an ONNX value under one binding of the run-time lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """The value itself: a constant, or shape arithmetic."""

    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        return self.array.shape

    @property
    def dtype(self) -> str:
        """Return the numpy name of the element type."""
        return self.array.dtype.name


@dataclass(frozen=True, slots=True)
class Runtime:
    """Only shape and element type (numpy name); the elements exist when the model runs."""

    shape: tuple[int, ...]
    dtype: str


Value = Known | Runtime
Values = Sequence[Value | None]


@dataclass(frozen=True, slots=True)
class Node:
    """An ONNX node with complete attributes (defaults filled in).

    Attributes:
        given: The attributes that stand in the file.
        opset: Version of the default operator set it was written for.
        sources: Numbers of the nodes of the file that it stands for.
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 0
    sources: tuple[int, ...] = ()


def operand(values: Values, at: int) -> Value:
    """Return operand `at`; a node without it breaks its schema, which the checker has refused."""
    value = values[at]
    if value is None:
        raise ValueError(f"operand {at} is missing")
    return value


def known(values: Values, at: int) -> Array | None:
    """Return the elements of operand `at` if they are known."""
    value = values[at] if at < len(values) else None
    return value.array if isinstance(value, Known) else None


def required(values: Values, at: int) -> Array:
    """Return the elements of operand `at`, which must be known.

    Raises:
        ValueError: They depend on what the model computes.
    """
    array = known(values, at)
    if array is None:
        raise ValueError(f"operand {at} must be a constant or follow from shapes")
    return array


def integers(values: Values, at: int) -> list[int]:
    """Return the integers of operand `at`, which must be known."""
    return [int(item) for item in required(values, at).reshape(-1)]


def stand_in(value: Value) -> Array:
    """Return an array of the right shape and type that takes no memory."""
    if isinstance(value, Known):
        return value.array
    return np.broadcast_to(np.ones((), dtype=value.dtype), value.shape)


def axis_of(axis: int, rank: int) -> int:
    """Return `axis` counted from the front.

    Raises:
        ValueError: There is no such axis.
    """
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of {rank} axes")
    return axis % rank
