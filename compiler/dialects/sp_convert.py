"""Operations of `sp` on stored sparse tensors: packing, waiting, converting, multiplying.

A type says how a tensor is stored; its buffers exist at run time only, so they are operands:

    %t, %r = "sp.pack"(%values, %positions, %coordinates) : ... -> (tensor<8x16xf32, #sp.enc<...>>,
                                                                    tensor<1xi32>)
    %s = "sp.await"(%t, %r)                    // nothing may read %t before its metadata is there
    %y = "sp.matmul"(%s, %b)                   // A sparse (M, K), b dense (K, N), y dense (M, N)

Metadata may be written after the values, by whoever routes; `%r` is not zero once it is complete.
`sp.from_dense` and `sp.to_dense` are the only ways between stored forms: the verifiers refuse a
stored operand where a dense one is expected, and the other way round. Called by nobody in the
default pipeline yet; the upstream oracle (`compiler.dialects.upstream`) compiles `sp.matmul`.
"""

from typing import Final

from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import Pure

from compiler.dialects.encoding import EncodingAttr
from compiler.dialects.properties import require
from compiler.dialects.types import Tensor, dtype_of, encoding_of, shape_of, tensor_type

INDEX_TYPES: Final = ("int8", "uint8", "int32", "int64")
BUFFERS: Final = {"dense": 0, "compressed": 2, "singleton": 1, "blocked": 2}
"""Metadata buffers per level: positions and coordinates, or coordinates alone; n:m has one."""


def is_stored(value: SSAValue) -> bool:
    """Return whether a value's type names levels that are not all dense."""
    encoding = encoding_of(value)
    return encoding is not None and encoding.is_sparse


@irdl_op_definition
class PackOp(IRDLOperation):
    """Make a stored tensor of its values and metadata, and a token that tells when both are."""

    name = "sp.pack"
    values = operand_def(TensorType)
    meta = var_operand_def(TensorType)
    result = result_def(TensorType)
    ready = result_def(TensorType)

    def __init__(self, values: SSAValue, meta: list[SSAValue], result: Tensor) -> None:
        super().__init__(operands=[values, meta], result_types=[result, tensor_type("int32", (1,))])

    def verify_(self) -> None:
        """The result is stored, and there is one buffer for each thing its levels need."""
        require(is_stored(self.result), self, "the result has no stored levels")
        encoding = encoding_of(self.result)
        assert encoding is not None
        needed = sum(BUFFERS.get(level, 1) for level in encoding.level_names)
        require(len(self.meta) == needed, self, f"{len(self.meta)} buffers, levels need {needed}")
        require(dtype_of(self.values) == dtype_of(self.result), self, "values have another type")
        whole = all(dtype_of(buffer) in INDEX_TYPES for buffer in self.meta)
        require(whole, self, "metadata are not integers")
        require(dtype_of(self.ready) == "int32", self, "the token is not an integer")


@irdl_op_definition
class AwaitOp(IRDLOperation):
    """The same tensor, once `ready` says that its metadata are complete."""

    name = "sp.await"
    x = operand_def(TensorType)
    ready = operand_def(TensorType)
    result = result_def(TensorType)

    def __init__(self, x: SSAValue, ready: SSAValue) -> None:
        super().__init__(operands=[x, ready], result_types=[x.type])

    def verify_(self) -> None:
        """Only stored tensors are waited for, and they do not change."""
        require(is_stored(self.x), self, "a dense tensor has no metadata to wait for")
        require(self.x.type == self.result.type, self, "the type changes")


@irdl_op_definition
class FromDenseOp(IRDLOperation):
    """The elements of a dense tensor, stored as the result's encoding says."""

    name = "sp.from_dense"
    x = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue, encoding: EncodingAttr) -> None:
        result = tensor_type(dtype_of(x), shape_of(x), encoding)
        super().__init__(operands=[x], result_types=[result])

    def verify_(self) -> None:
        """A dense operand, a stored result, the same shape and element type."""
        require(not is_stored(self.x), self, "the operand is stored already")
        require(is_stored(self.result), self, "the result has no stored levels")
        require(shape_of(self.x) == shape_of(self.result), self, "the shape changes")
        require(dtype_of(self.x) == dtype_of(self.result), self, "the element type changes")


@irdl_op_definition
class ToDenseOp(IRDLOperation):
    """The elements of a stored tensor with its zeros written out."""

    name = "sp.to_dense"
    x = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, x: SSAValue) -> None:
        result = tensor_type(dtype_of(x), shape_of(x))
        super().__init__(operands=[x], result_types=[result])

    def verify_(self) -> None:
        """A stored operand, a dense result, the same shape and element type."""
        require(is_stored(self.x), self, "the operand is dense already")
        require(not is_stored(self.result), self, "the result is stored")
        require(shape_of(self.x) == shape_of(self.result), self, "the shape changes")
        require(dtype_of(self.x) == dtype_of(self.result), self, "the element type changes")


@irdl_op_definition
class MatmulOp(IRDLOperation):
    """`y = a @ b`: a stored (M, K), b dense (K, N), y dense (M, N)."""

    name = "sp.matmul"
    a = operand_def(TensorType)
    b = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(self, a: SSAValue, b: SSAValue) -> None:
        shape = (shape_of(a)[0], shape_of(b)[1])
        super().__init__(operands=[a, b], result_types=[tensor_type(dtype_of(a), shape)])

    def verify_(self) -> None:
        """Matrices that chain; what is stored and what is dense stands fixed."""
        a, b, y = shape_of(self.a), shape_of(self.b), shape_of(self.result)
        require(len(a) == len(b) == len(y) == 2, self, "operands are not matrices")
        require(a[1] == b[0] and y == (a[0], b[1]), self, "shapes do not chain")
        require(is_stored(self.a), self, "a is dense: convert it with sp.from_dense")
        for value in (self.b, self.result):
            require(not is_stored(value), self, "b and the result are dense: use sp.to_dense")


CONVERT_OPS: Final = (PackOp, AwaitOp, FromDenseOp, ToDenseOp, MatmulOp)
