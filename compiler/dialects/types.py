"""Tensor types with named run-time axes: building them and reading them back."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    Float16Type,
    Float32Type,
    Float64Type,
    IntegerType,
    Signedness,
    TensorType,
)
from xdsl.ir import Attribute, SSAValue

from compiler.dialects.dims import Binding, Dim, parse_dim, static
from compiler.dialects.encoding import EncodingAttr

Tensor = TensorType[Any]

TYPES_KEPT: Final = 4096
"""Types, which never change, that are remembered with what was asked about them."""

_ELEMENTS: Final[dict[str, Attribute]] = {
    "float32": Float32Type(),
    "float64": Float64Type(),
    "float16": Float16Type(),
    "int64": IntegerType(64),
    "int32": IntegerType(32),
    "int8": IntegerType(8),
    "uint8": IntegerType(8, Signedness.UNSIGNED),
    "bool": IntegerType(1),
}
_NUMPY_NAMES: Final[dict[Attribute, str]] = {element: name for name, element in _ELEMENTS.items()}


def is_supported_dtype(dtype: str) -> bool:
    """Return whether the IR has an element type for a numpy type name."""
    return dtype in _ELEMENTS


def tensor_type(
    dtype: str, shape: Sequence[Dim | int], encoding: EncodingAttr | None = None
) -> Tensor:
    """Build a tensor type.

    Args:
        dtype: numpy name of the element type, e.g. `float32`.
        shape: Sizes; run-time ones become `?` and are written into the encoding.
        encoding: Sparsity to keep; its `dims` are replaced.

    Raises:
        VerifyException: The encoding does not fit the shape.
    """
    dims = tuple(d if isinstance(d, Dim) else static(d) for d in shape)
    if encoding is None or not encoding.is_sparse:
        return _plain_type(dtype, dims)
    encoding = encoding.with_dims([str(d) for d in dims if not d.is_static])
    encoding.verify_shape(dims)
    return TensorType(_ELEMENTS[dtype], _sizes(dims), encoding)


@lru_cache(maxsize=TYPES_KEPT)
def _plain_type(dtype: str, dims: tuple[Dim, ...]) -> Tensor:
    names = [str(d) for d in dims if not d.is_static]
    if not names:
        return TensorType(_ELEMENTS[dtype], _sizes(dims))
    return TensorType(_ELEMENTS[dtype], _sizes(dims), EncodingAttr.make(names))


def _sizes(dims: tuple[Dim, ...]) -> list[int]:
    return [d.constant if d.is_static else DYNAMIC_INDEX for d in dims]


def type_of(value: SSAValue) -> Tensor:
    """Return the tensor type of `value`; everything in our functions is a tensor."""
    assert isinstance(value.type, TensorType)
    return value.type


def encoding_of(value: SSAValue) -> EncodingAttr | None:
    """Return the `#sp.enc` of `value`, if it has one."""
    encoding = type_of(value).encoding
    return encoding if isinstance(encoding, EncodingAttr) else None


def shape_of(value: SSAValue) -> tuple[Dim, ...]:
    """Return the sizes of `value`, run-time ones as expressions."""
    return type_shape(type_of(value))


@lru_cache(maxsize=TYPES_KEPT)
def type_shape(tensor: Tensor) -> tuple[Dim, ...]:
    """Return the sizes of a tensor type, run-time ones as expressions."""
    encoding = tensor.encoding
    names = iter(encoding.dims.data if isinstance(encoding, EncodingAttr) else ())
    return tuple(
        parse_dim(next(names).data) if size == DYNAMIC_INDEX else static(size)
        for size in tensor.get_shape()
    )


def dtype_of(value: SSAValue) -> str:
    """Return the numpy name of the element type of `value`."""
    return _NUMPY_NAMES[type_of(value).element_type]


def sizes_at(value: SSAValue, binding: Binding) -> tuple[int, ...]:
    """Return the sizes of `value` when the run-time lengths are `binding`."""
    return tuple(d.at(binding) for d in shape_of(value))


def symbols_of(value: SSAValue) -> frozenset[str]:
    """Return the run-time lengths that the type of `value` mentions."""
    return frozenset(symbol for dim in shape_of(value) for symbol, _ in dim.terms)
