"""Tensors as matrices: every run-time value of a program is (rows, cols), row-major."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from compiler.analysis.constants import Array
from compiler.dialects.dims import Dim
from compiler.dialects.encoding import EncodingAttr, coordinate_bits
from compiler.dialects.types import Tensor, tensor_type

HELD_AS: Final = {"int64": "int32", "bool": "int32", "int8": "int32", "float64": "float32"}
"""Element types that kernels hold in another one; values that do not fit are refused at import."""


def rows_of(shape: Sequence[Dim]) -> Dim | None:
    """Return the number of rows of a tensor: the product of all axes but the last.

    None if it is not linear in the run-time lengths.
    """
    rows = Dim(1)
    for dim in shape[:-1]:
        if dim.is_static:
            rows = rows.times(dim.constant)
        elif rows.is_static:
            rows = dim.times(rows.constant)
        else:
            return None
    return rows


def matrix_type(dtype: str, rows: Dim, cols: int, encoding: EncodingAttr | None = None) -> Tensor:
    """Return the type of a matrix; 64-bit integers become 32-bit ones, as kernels have them."""
    if encoding is not None and encoding.is_sparse:
        masks = [mask.data for mask in encoding.masks.data]
        block = [size.data for size in encoding.block.data][-2:]
        encoding = EncodingAttr.make(
            levels=["dense", encoding.level_names[-1]],
            block=block if len(block) == 2 else (),
            masks=masks,
            crd=coordinate_bits([rows, Dim(cols)]),
            dynamic=bool(encoding.dynamic.data),
        )
    return tensor_type(HELD_AS.get(dtype, dtype), [rows, Dim(cols)], encoding)


def broadcast_matrix(shape: Sequence[Dim], against: Sequence[Dim]) -> tuple[bool, bool] | None:
    """Return how an operand broadcasts against a tensor: (one row, one column), or None.

    Leading axes must be all present or all one; the last axis present or one.
    """
    padded = [*[Dim(1)] * (len(against) - len(shape)), *shape]
    if len(padded) != len(against) or not padded:
        return None
    one_row = all(dim == Dim(1) for dim in padded[:-1])
    if not one_row and list(padded[:-1]) != list(against[:-1]):
        return None
    if padded[-1] not in (Dim(1), against[-1]):
        return None
    return one_row, padded[-1] == Dim(1)


def as_matrix(array: Array) -> Array:
    """Return a constant with its leading axes merged; a vector is one row."""
    cols = array.shape[-1] if array.ndim else 1
    return np.ascontiguousarray(array.reshape(-1, cols))
