"""Chains of movement are judged by where elements go, not by how they are spelled."""

import numpy as np
import pytest
from xdsl.ir import Block, Operation, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.analysis.movement import trace, traces, view_source
from compiler.dialects.dims import Dim, symbol_dim
from compiler.dialects.movement import ConcatOp, ExpandOp, ReshapeOp, SliceOp, TransposeOp
from compiler.dialects.sp import OnnxOp
from compiler.dialects.types import shape_of, tensor_type
from compiler.errors import UnsupportedOperatorError

T = symbol_dim("T")


class Chain:
    """Appends operations to a block and returns their values."""

    def __init__(self, *shape: Dim | int) -> None:
        self.block = Block(arg_types=[tensor_type("float32", shape)])
        self.x: SSAValue = self.block.args[0]

    def add(self, op: Operation) -> SSAValue:
        self.block.add_op(op)
        return op.results[0]


def test_it_sees_that_reshapes_are_a_view() -> None:
    c = Chain(1, T, 8)
    y = c.add(ReshapeOp(c.add(ReshapeOp(c.x, [T, Dim(2), Dim(4)])), [T, Dim(8)]))
    assert view_source(y) is c.x


def test_it_sees_that_two_transposes_cancel() -> None:
    c = Chain(2, T, 8)
    y = c.add(TransposeOp(c.add(TransposeOp(c.x, [1, 0, 2])), [1, 0, 2]))
    assert view_source(y) is c.x


def test_it_sees_that_a_transpose_moves() -> None:
    c = Chain(T, 3)
    assert view_source(c.add(TransposeOp(c.x, [1, 0]))) is None


def test_it_takes_a_transpose_over_an_axis_of_one_for_a_view() -> None:
    c = Chain(1, T, 8)
    assert view_source(c.add(TransposeOp(c.x, [1, 0, 2]))) is c.x


def test_it_sees_through_a_cut_that_is_joined_again() -> None:
    c = Chain(T, 8)
    left = c.add(SliceOp(c.x, 1, Dim(0), Dim(4)))
    right = c.add(SliceOp(c.x, 1, Dim(4), Dim(4)))
    assert view_source(c.add(ConcatOp([left, right], 1))) is c.x
    assert view_source(c.add(ConcatOp([right, left], 1))) is None


def test_it_sees_an_expansion() -> None:
    c = Chain(1, 4)
    y = c.add(ExpandOp(c.x, [T, Dim(4)]))
    assert view_source(y) is None
    assert all((found.index == np.arange(4)).all() for found in traces(y))


def test_it_slices_with_steps_and_backwards() -> None:
    c = Chain(6)
    odd = c.add(SliceOp(c.x, 0, Dim(1), Dim(3), 2))
    back = c.add(SliceOp(c.x, 0, Dim(5), Dim(6), -1))
    assert trace(odd, {}).index.tolist() == [1, 3, 5]
    assert trace(back, {}).index.tolist() == [5, 4, 3, 2, 1, 0]


def test_it_carries_scalar_factors_along() -> None:
    table = ConstantTable()
    c = Chain(T, 4)
    half = table.add(np.array([0.5], np.float32))
    c.add(half)
    scaled = OnnxOp("Mul", [half.result, c.x], {}, [tensor_type("float32", shape_of(c.x))])
    c.add(scaled)
    divided = OnnxOp("Div", [scaled.results[0], half.result], {}, [scaled.results[0].type])
    c.add(divided)
    y = c.add(TransposeOp(divided.results[0], [1, 0]))
    found = trace(y, {"T": 3}, table)
    assert [leaf.value for leaf in found.leaves] == [c.x]
    assert found.uniform_factor() == 1.0
    partly = c.add(ConcatOp([c.x, scaled.results[0]], 0))
    assert trace(partly, {"T": 3}, table).uniform_factor() is None


def test_it_refuses_to_analyse_huge_tensors() -> None:
    c = Chain(1 << 13, 1 << 13)
    with pytest.raises(UnsupportedOperatorError, match="at most"):
        view_source(c.add(TransposeOp(c.x, [1, 0])))
