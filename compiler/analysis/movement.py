"""What a chain of movement operations does, decided by running it on arrays of indices.

Every element of a leaf (a value no movement operation makes) gets a number; the chain is evaluated
on those numbers with numpy, for enough bindings of the run-time lengths to pin down any linear size
(`dims.witnesses`). Comparing the outcome with the permutation a matcher expects needs no knowledge
of how an exporter spells it: two chains are the same if they move the same elements.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.dialects.dims import Binding, witnesses
from compiler.dialects.movement import (
    MOVEMENT_OPS,
    ConcatOp,
    ExpandOp,
    ReshapeOp,
    SliceOp,
    TransposeOp,
)
from compiler.dialects.sp import OnnxOp
from compiler.dialects.types import shape_of, sizes_at, symbols_of
from compiler.errors import UnsupportedOperatorError

MAX_ELEMENTS: Final = 1 << 25

Index = NDArray[np.int64]
Factors = NDArray[np.float64]


@dataclass(slots=True)
class Leaf:
    """A value that a chain reads: its elements are numbered from `base` in flat order."""

    value: SSAValue
    base: int
    sizes: tuple[int, ...]

    def numbers(self) -> Index:
        """Return the numbers of all elements in the leaf's own shape."""
        count = int(np.prod(self.sizes, dtype=np.int64))
        return np.arange(self.base, self.base + count, dtype=np.int64).reshape(self.sizes)


@dataclass(slots=True)
class Trace:
    """A chain evaluated under one binding.

    Attributes:
        binding: The run-time lengths it was evaluated for.
        leaves: What it reads, in the order of discovery.
        index: For each element of the value, the number of the leaf element it is.
        factor: The product of the scalar factors on the way, same shape as `index`.
    """

    binding: Binding
    leaves: list[Leaf]
    index: Index
    factor: Factors

    def reads(self, value: SSAValue) -> Leaf | None:
        """Return the leaf that is `value`, if the chain reads it."""
        return next((leaf for leaf in self.leaves if leaf.value is value), None)

    def uniform_factor(self) -> float | None:
        """Return the factor if it is the same everywhere."""
        low, high = self.factor.min(initial=np.inf), self.factor.max(initial=-np.inf)
        return float(low) if low == high else None


@dataclass(slots=True)
class _Evaluator:
    binding: Binding
    constants: ConstantTable | None
    leaves: list[Leaf] = field(default_factory=list)
    memo: dict[SSAValue, tuple[Index, Factors]] = field(default_factory=dict)
    next_base: int = 0

    def leaf(self, value: SSAValue) -> tuple[Index, Factors]:
        leaf = Leaf(value, self.next_base, sizes_at(value, self.binding))
        _need_small(leaf.sizes)
        numbers = leaf.numbers()
        self.next_base += numbers.size
        self.leaves.append(leaf)
        return numbers, np.broadcast_to(np.float64(1.0), numbers.shape)

    def run(self, value: SSAValue) -> tuple[Index, Factors]:
        for current in _dependencies_first(value, self.operands):
            if current in self.memo:
                continue
            operands = self.operands(current)
            if not operands:
                self.memo[current] = self.leaf(current)
                continue
            parts = [self.memo[operand] for operand in operands]
            assert isinstance(current.owner, Operation)
            index = self.move(current, [part[0] for part in parts])
            factor = self.move(current, [part[1] for part in parts])
            self.memo[current] = (index, self.scale(current.owner) * factor)
        return self.memo[value]

    def operands(self, value: SSAValue) -> list[SSAValue]:
        """Return what `value` is moved from; nothing for a leaf."""
        owner = value.owner
        if isinstance(owner, MOVEMENT_OPS):
            return list(owner.operands)
        if self.constants is not None and isinstance(owner, OnnxOp):
            scaled = scalar_multiple(owner, self.constants)
            return [scaled[0]] if scaled is not None else []
        return []

    def scale(self, owner: Operation) -> float:
        if self.constants is None or not isinstance(owner, OnnxOp):
            return 1.0
        scaled = scalar_multiple(owner, self.constants)
        assert scaled is not None
        return scaled[1]

    def move(self, value: SSAValue, parts: list[NDArray[Any]]) -> NDArray[Any]:
        owner, sizes = value.owner, sizes_at(value, self.binding)
        _need_small(sizes)
        match owner:
            case ReshapeOp():
                return parts[0].reshape(sizes)
            case ExpandOp():
                return np.broadcast_to(parts[0], sizes)
            case TransposeOp():
                return parts[0].transpose([int(p) for p in owner.perm.get_values()])
            case SliceOp():
                return parts[0][_slices(owner, sizes, self.binding)]
            case ConcatOp():
                return np.concatenate(parts, axis=owner.axis.value.data)
            case _:
                return parts[0]


def trace(value: SSAValue, binding: Binding, constants: ConstantTable | None = None) -> Trace:
    """Evaluate the movement chain that ends in `value`.

    Args:
        value: End of the chain.
        binding: Run-time lengths, all symbols of the chain bound.
        constants: If given, multiplying by a scalar constant is passed through and recorded.
    """
    evaluator = _Evaluator(binding, constants)
    index, factor = evaluator.run(value)
    return Trace(binding, evaluator.leaves, index, factor)


def traces(value: SSAValue, constants: ConstantTable | None = None) -> Iterator[Trace]:
    """Evaluate the chain that ends in `value` under every witness of its symbols."""
    for binding in witnesses(chain_symbols(value, constants)):
        yield trace(value, binding, constants)


def chain_symbols(value: SSAValue, constants: ConstantTable | None = None) -> frozenset[str]:
    """Return the run-time lengths of all values of a chain."""
    evaluator = _Evaluator({}, constants)
    found: frozenset[str] = frozenset()
    for current in _dependencies_first(value, evaluator.operands):
        found |= symbols_of(current)
    return found


def view_source(value: SSAValue) -> SSAValue | None:
    """Return the leaf whose elements `value` holds in the same flat order, or None.

    A leaf is a view of itself.
    """
    source: SSAValue | None = None
    for result in traces(value):
        if len(result.leaves) != 1:
            return None
        source = result.leaves[0].value
        flat = result.index.reshape(-1)
        if not np.array_equal(flat, result.leaves[0].numbers().reshape(-1)):
            return None
    return source


def only_leaf(found: Trace) -> Leaf | None:
    """Return the one leaf of a chain if there is exactly one and it has axes."""
    return found.leaves[0] if len(found.leaves) == 1 and found.leaves[0].sizes else None


def spread(array: NDArray[Any], sizes: tuple[int, ...]) -> NDArray[Any] | None:
    """Return `array` broadcast to `sizes`, or None if it does not broadcast to them."""
    try:
        return np.broadcast_to(array, sizes)
    except ValueError:
        return None


def scalar_multiple(op: OnnxOp, constants: ConstantTable) -> tuple[SSAValue, float] | None:
    """Return (x, factor) if `op` is `x * factor` or `x / divisor` with a scalar constant."""
    if op.op.data not in ("Mul", "Div"):
        return None
    a, b = op.arguments[0], op.arguments[1]
    number = constants.scalar(b)
    if op.op.data == "Mul" and number is None:
        a, b, number = b, a, constants.scalar(a)
    if number is None or shape_of(a) != shape_of(op.outputs[0]) or number == 0.0:
        return None
    return a, (number if op.op.data == "Mul" else 1.0 / number)


def _need_small(sizes: tuple[int, ...]) -> None:
    """Refuse tensors whose index arrays would not fit; constants are checked on import."""
    count = math.prod(sizes)
    if count > MAX_ELEMENTS:
        raise UnsupportedOperatorError(
            f"a tensor of {count} elements is moved around, at most {MAX_ELEMENTS} are analysed",
            hint="reduce the size of the image or of intermediate results",
        )


def _slices(op: SliceOp, sizes: tuple[int, ...], binding: Binding) -> tuple[slice, ...]:
    axis, step, first = op.axis.value.data, op.step.value.data, op.offset.at(binding)
    stop: int | None = first + sizes[axis] * step
    if stop is not None and stop < 0:
        stop = None
    return (*[slice(None)] * axis, slice(first, stop, step))


def _dependencies_first(
    value: SSAValue, operands: Callable[[SSAValue], list[SSAValue]]
) -> Iterator[SSAValue]:
    """Yield every value of the chain after its operands, left to right, each once."""
    done: set[SSAValue] = set()
    stack: list[tuple[SSAValue, bool]] = [(value, False)]
    while stack:
        current, expanded = stack.pop()
        if current in done:
            continue
        if expanded:
            done.add(current)
            yield current
            continue
        stack.append((current, True))
        stack.extend((operand, False) for operand in reversed(operands(current)))
