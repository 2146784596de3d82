"""Constants by content: the IR names an array by its digest, so names in files cannot matter."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from xdsl.ir import SSAValue

from compiler.dialects.sp import ConstantOp
from compiler.dialects.types import tensor_type

Array = NDArray[Any]
Fact = TypeVar("Fact")

DIGEST_DIGITS = 32
PREVIEW_ELEMENTS = 8


@dataclass(frozen=True, slots=True)
class ConstantTable:
    """Arrays by digest of element type, shape and bytes; arrays are read-only and never removed."""

    arrays: dict[str, Array] = field(default_factory=dict)
    _learned: dict[tuple[str, Callable[[Array], Any]], Any] = field(
        default_factory=dict, repr=False, compare=False
    )

    def add(self, array: Array) -> ConstantOp:
        """Store `array` and return a new operation that yields it."""
        data = np.ascontiguousarray(array).reshape(array.shape)
        digest = hashlib.sha256(f"{data.dtype.name}{data.shape}".encode())
        digest.update(data.reshape(-1).view(np.uint8).data if data.size else b"")
        key = digest.hexdigest()[:DIGEST_DIGITS]
        if key not in self.arrays:
            data = data.copy() if data.flags.writeable else data
            data.flags.writeable = False
            self.arrays[key] = data
        return ConstantOp(key, preview(data), tensor_type(data.dtype.name, data.shape))

    def of(self, op: ConstantOp) -> Array:
        """Return the array behind a constant operation."""
        return self.arrays[op.sha256.data]

    def get(self, value: SSAValue | None) -> Array | None:
        """Return the array behind `value`, or None if it is not a constant."""
        if value is None or not isinstance(value.owner, ConstantOp):
            return None
        return self.of(value.owner)

    def learn(self, op: ConstantOp, fact: Callable[[Array], Fact]) -> Fact:
        """Return `fact(array)` of a constant, computed once per content: arrays never change.

        Args:
            op: The constant.
            fact: A pure function of the array that stands in a module; its result is shared and
                must not be written to.
        """
        key = (op.sha256.data, fact)
        if key not in self._learned:
            self._learned[key] = fact(self.of(op))
        found: Fact = self._learned[key]
        return found

    def scalar(self, value: SSAValue | None) -> float | None:
        """Return the number behind `value` if it is a constant with one element."""
        array = self.get(value)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def preview(array: Array) -> str:
    """Return a short, exact text of a small array; larger ones say only how large they are."""
    if array.size > PREVIEW_ELEMENTS:
        return f"{array.size} elements"
    return ", ".join(repr(item) for item in array.reshape(-1).tolist())
