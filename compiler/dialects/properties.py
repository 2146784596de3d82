"""Attributes of operations from plain values, and the verifier's way to refuse."""

from collections.abc import Sequence

from xdsl.dialects.builtin import DenseArrayBase, FloatAttr, IntegerAttr, i64
from xdsl.ir import Operation, SSAValue
from xdsl.utils.exceptions import VerifyException

from compiler.dialects.dims import witnesses
from compiler.dialects.types import shape_of


def integer(value: int) -> IntegerAttr:
    """Return `value` as a 64-bit attribute."""
    return IntegerAttr(value, i64)


def real(value: float) -> FloatAttr:
    """Return `value` as a double-precision attribute (its text round-trips)."""
    return FloatAttr(float(value), 64)


def integers(values: Sequence[int]) -> DenseArrayBase:
    """Return `values` as an array of 64-bit integers."""
    return DenseArrayBase.from_list(i64, list(values))


def require(holds: bool, op: Operation, message: str) -> None:
    """Raise the verifier's exception unless `holds`."""
    if not holds:
        raise VerifyException(f"{op.name}: {message}")


def element_count(value: SSAValue, symbols: frozenset[str]) -> tuple[int, ...]:
    """Return the number of elements of `value` under each witness of `symbols`."""
    counts = []
    for binding in witnesses(symbols):
        count = 1
        for dim in shape_of(value):
            count *= dim.at(binding)
        counts.append(count)
    return tuple(counts)
