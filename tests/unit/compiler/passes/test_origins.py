"""Nodes of files through rewritings: patterns, dead code, copies, constants, messages."""

import ast
from pathlib import Path

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Operation, Region, SSAValue

import compiler.passes
from compiler.analysis.constants import ConstantTable
from compiler.dialects.dims import Dim
from compiler.dialects.movement import ReshapeOp, TransposeOp
from compiler.dialects.sp import BinaryOp, OnnxOp, UnaryOp
from compiler.dialects.types import tensor_type
from compiler.passes.functions import body
from compiler.passes.origins import UNREAD, Origins, provenance
from compiler.passes.rewriting import erase_dead, insert_before, redirect, replace, swap

KIND = tensor_type("float32", [Dim(4), Dim(4)])
PASSES = Path(compiler.passes.__file__).parent


class Toy:
    """A function over one matrix, every operation of which is a node of a file."""

    def __init__(self) -> None:
        self.origins = Origins()
        self.block = Block(arg_types=[KIND])

    def node(self, op: Operation) -> SSAValue:
        kind = op.op.data if isinstance(op, OnnxOp) else op.name.split(".")[-1].capitalize()
        number = self.origins.add_node("model", f"n{len(self.origins.nodes)}", kind)
        self.block.add_op(op)
        self.origins.give(op, [number])
        return op.results[0]

    def onnx(self, kind: str, *operands: SSAValue) -> SSAValue:
        return self.node(OnnxOp(kind, list(operands), {}, [KIND]))

    def module(self, *results: SSAValue) -> tuple[ModuleOp, FuncOp]:
        self.block.add_op(ReturnOp(*results))
        func = FuncOp("model", ([KIND], [value.type for value in results]), Region(self.block))
        return ModuleOp([func]), func

    @property
    def x(self) -> SSAValue:
        return self.block.args[0]


def numbers(origins: Origins, func: FuncOp) -> list[tuple[int, ...]]:
    return [origins.of(op) for op in body(func).ops if not isinstance(op, ReturnOp)]


def test_it_gives_a_whole_pattern_to_what_it_was_raised_to() -> None:
    toy = Toy()
    square = toy.onnx("Pow", toy.x)
    mean = toy.onnx("ReduceMean", square)
    result = toy.onnx("Mul", toy.x, mean)
    _, func = toy.module(result)
    swap(result.owner, UnaryOp(toy.x, kind="relu"), toy.origins)
    assert erase_dead(func, toy.origins) == 2
    assert numbers(toy.origins, func) == [(0, 1, 2)]


def test_it_charges_the_computation_and_not_the_movement_made_for_it() -> None:
    toy = Toy()
    result = toy.onnx("Conv", toy.x)
    module, func = toy.module(result)
    toy.origins.settle(module, "")
    turned = TransposeOp(toy.x, [1, 0])
    unary = UnaryOp(turned.result, kind="relu")
    back = TransposeOp(unary.result, [1, 0])
    insert_before(result.owner, turned, unary, back)
    replace(result.owner, [back.result], toy.origins)
    assert numbers(toy.origins, func) == [(), (0,), ()]


def test_it_leaves_shared_nodes_to_everything_that_replaced_their_readers() -> None:
    toy = Toy()
    shared = toy.onnx("Cos", toy.x)
    one, two = toy.onnx("Mul", shared), toy.onnx("Add", shared)
    _, func = toy.module(one, two)
    swap(one.owner, UnaryOp(toy.x, kind="relu"), toy.origins)
    swap(two.owner, UnaryOp(toy.x, kind="exp"), toy.origins)
    erase_dead(func, toy.origins)
    assert numbers(toy.origins, func) == [(0, 1), (0, 2)]


def test_it_keeps_a_node_where_it_is_still_computed() -> None:
    toy = Toy()
    product = toy.onnx("MatMul", toy.x)
    rope = toy.onnx("Rope", product)
    result = toy.onnx("Attention", rope, product)
    _, func = toy.module(result)
    swap(result.owner, BinaryOp(product, product, kind="add"), toy.origins)
    erase_dead(func, toy.origins)
    assert numbers(toy.origins, func) == [(0,), (1, 2)]


def test_it_follows_what_took_the_place_of_an_heir() -> None:
    toy = Toy()
    inner = toy.onnx("Pow", toy.x)
    result = toy.onnx("Mul", inner)
    _, func = toy.module(result)
    first = UnaryOp(toy.x, kind="relu")
    insert_before(result.owner, first)
    redirect(result, first.results[0], toy.origins)
    swap(first, UnaryOp(toy.x, kind="exp"), toy.origins)
    erase_dead(func, toy.origins)
    assert numbers(toy.origins, func) == [(0, 1)]


def test_it_gives_a_view_that_goes_to_what_reads_it_or_makes_it() -> None:
    toy = Toy()
    view = toy.node(ReshapeOp(toy.x, [Dim(4), Dim(4)]))
    made = toy.onnx("Relu", view)
    result = toy.node(ReshapeOp(made, [Dim(4), Dim(4)]))
    _, func = toy.module(result)
    replace(view.owner, [toy.x], toy.origins)
    replace(result.owner, [made], toy.origins)
    assert numbers(toy.origins, func) == [(0, 1, 2)]


def test_it_tells_folded_from_dead() -> None:
    toy = Toy()
    constant = toy.onnx("Cast", toy.x)
    unread = toy.onnx("Relu", toy.x)
    result = toy.onnx("Add", toy.x, constant)
    module, func = toy.module(result)
    toy.origins.settle(module, "import")
    folded = ConstantTable()
    new = folded.add(np.zeros((4, 4), np.float32))
    insert_before(constant.owner, new)
    replace(constant.owner, [new.result], toy.origins)
    erase_dead(func, toy.origins)
    toy.origins.settle(module, f"{UNREAD}, a pass found")
    found = provenance(toy.origins, {"forward": [result.owner]})
    assert (found.folded, found.calls["forward"]) == ((0,), ((2,),))
    assert dict(found.dead) == {1: f"{UNREAD}, a pass found"}
    assert isinstance(unread.owner, OnnxOp)


def test_it_does_not_touch_the_table_of_the_original() -> None:
    toy = Toy()
    result = toy.onnx("Relu", toy.x)
    module, _ = toy.module(result)
    copy = module.clone()
    twin = toy.origins.twin(module, copy)
    func = next(op for op in copy.body.block.ops if isinstance(op, FuncOp))
    old = next(iter(body(func).ops))
    swap(old, UnaryOp(old.operands[0], kind="exp"), twin)
    twin.settle(copy, "")
    assert numbers(twin, func) == [(0,)]
    assert toy.origins.of(result.owner) == (0,)


def test_it_names_node_and_operator_in_messages() -> None:
    toy = Toy()
    first = toy.onnx("MatMul", toy.x)
    _, _ = toy.module(first)
    new = UnaryOp(toy.x, kind="relu")
    assert toy.origins.where(first.owner, "Linear") == "operator MatMul (node n0)"
    insert_before(first.owner, new)
    assert toy.origins.where(new, "Relu") == "operator Relu (node <unnamed>)"
    for number, kind in enumerate(("Add", "Relu", "Cast"), start=1):
        toy.origins.add_node("model", f"n{number}", kind)
    toy.origins.give(new, [0, 1, 2, 3])
    assert toy.origins.where(new, "") == (
        "operator MatMul (node n0) with Add (node n1) with Relu (node n2) and 1 more"
    )


@pytest.mark.parametrize("path", sorted(PASSES.glob("*.py")), ids=lambda path: path.stem)
def test_passes_edit_through_rewriting_alone(path: Path) -> None:
    """Erasing or redirecting in another way would lose nodes without anybody noticing."""
    whole = {"select_kernels", "compose", "functions"}  # take whole functions, or a terminator
    calls = [
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    allowed = {"erase_op"} if path.stem in whole else set()
    if path.stem != "rewriting":
        assert set(calls) & {"erase_op", "replace_all_uses_with", "detach"} <= allowed
