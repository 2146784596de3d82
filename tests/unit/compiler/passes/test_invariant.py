"""The pass manager refuses passes that claim zeros which the program does not have."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Operation, Region, SSAValue

from compiler.analysis import known_facts
from compiler.analysis.constants import ConstantTable
from compiler.analysis.module_state import rebuilt, state_of
from compiler.analysis.propagation import module_facts
from compiler.dialects.dims import Dim
from compiler.dialects.movement import ConcatOp, SliceOp
from compiler.dialects.sp import BinaryOp, ConstantOp, LinearOp, OnnxOp, UnaryOp
from compiler.dialects.types import tensor_type
from compiler.errors import SparsityInvariantError
from compiler.passes import invariant
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import body, functions, role_attributes
from compiler.passes.invariant import SparsityGuard
from compiler.passes.origins import Origins
from compiler.passes.pipeline import run_passes
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.passes.propagate_masks import PropagateMasks
from compiler.passes.rewriting import swap
from tests.factories.onnx_models import write_tiny
from tests.factories.onnx_runs import lowered

SHAPE = (2, 4)
SPEC = PipelineSpec("graph", (), 8, 2)


def program() -> tuple[ModuleOp, PassContext]:
    """A small function in which most rules prove something."""
    table = ConstantTable()
    block = Block(arg_types=[tensor_type("float32", SHAPE)] * 2 + [tensor_type("bool", SHAPE)])
    x, y, m = block.args

    def constant(array: np.ndarray) -> SSAValue:
        op = table.add(array.astype(np.float32))
        block.add_op(op)
        return op.result

    def add(op: Operation) -> SSAValue:
        block.add_op(op)
        return op.results[0]

    weight = np.ones((4, 4))
    weight[1] = 0
    dead_columns = constant(np.array([0.0, 1, 0, 2]))
    zeros = constant(np.zeros((1, 1)))
    sparse = add(UnaryOp(x, kind="relu"))
    negated = add(UnaryOp(sparse, kind="neg"))
    scaled = add(BinaryOp(x, dead_columns, kind="mul"))
    checked = add(LinearOp(scaled, constant(np.ones((4, 4)))))
    summed = add(BinaryOp(negated, y, kind="add"))
    projected = add(LinearOp(summed, constant(weight)))
    chosen = add(OnnxOp("Where", [m, y, zeros], {}, [y.type]))
    halves = [add(SliceOp(v, 1, Dim(0), Dim(2))) for v in (sparse, y)]
    joined = add(ConcatOp(halves, 1))
    outputs = [negated, scaled, summed, projected, chosen, joined, checked]
    block.add_op(ReturnOp(*outputs))
    kinds = (list(block.arg_types), [v.type for v in outputs])
    func = FuncOp("f", kinds, Region(block))
    func.properties["arg_attrs"] = role_attributes(["tensor"] * 3)
    func.properties["res_attrs"] = role_attributes(["tensor"] * len(outputs))
    return ModuleOp([func]), PassContext(SPEC, table, Origins())


@dataclass(frozen=True)
class Evil(Pass):
    """A pass that replaces the first operation that `change` has something for."""

    change: Callable[[Operation, PassContext], Operation | None]
    name: ClassVar[str] = "evil"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        for func in functions(module):
            for op in list(body(func).ops):
                new = self.change(op, ctx)
                if new is not None:
                    swap(op, new, ctx.origins)
                    return PassResult(1)
        raise AssertionError("nothing to change")


def sum_to_product(op: Operation, ctx: PassContext) -> Operation | None:
    if isinstance(op, BinaryOp) and op.kind.data == "add":
        return BinaryOp(op.a, op.b, kind="mul")
    return None


def relu_of_another_value(op: Operation, ctx: PassContext) -> Operation | None:
    if isinstance(op, UnaryOp) and op.kind.data == "neg":
        return UnaryOp(op.parent.args[1], kind="relu")
    return None


def weight_loses_rows(op: Operation, ctx: PassContext) -> Operation | None:
    if isinstance(op, ConstantOp) and ctx.constants.of(op).shape == (4, 4):
        array = ctx.constants.of(op).copy()
        array[2:] = 0
        return ctx.constants.add(array)
    return None


def other_columns_die(op: Operation, ctx: PassContext) -> Operation | None:
    if isinstance(op, ConstantOp) and ctx.constants.of(op).shape == (4,):
        return ctx.constants.add(ctx.constants.of(op)[::-1].copy())
    return None


def branches_swapped(op: Operation, ctx: PassContext) -> Operation | None:
    if isinstance(op, OnnxOp) and op.op.data == "Where":
        m, _, zeros = op.arguments
        return OnnxOp("Where", [m, zeros, zeros], {}, [op.outputs[0].type])
    return None


def parts_swapped(op: Operation, ctx: PassContext) -> Operation | None:
    return ConcatOp(list(op.parts)[::-1], 1) if isinstance(op, ConcatOp) else None


def added_relu(op: Operation, ctx: PassContext) -> Operation | None:
    if isinstance(op, BinaryOp) and op.kind.data == "add" and op.act.data == "none":
        return BinaryOp(op.a, op.b, kind="add", act="relu")
    return None


EVIL = (
    sum_to_product,
    relu_of_another_value,
    weight_loses_rows,
    other_columns_die,
    branches_swapped,
    parts_swapped,
    added_relu,
)


@pytest.mark.parametrize("change", EVIL, ids=lambda f: f.__name__)
def test_it_refuses_a_pass_that_makes_zeros_up(change) -> None:
    module, ctx = program()
    with pytest.raises(SparsityInvariantError, match="claims zeros"):
        run_passes(module, ctx, [Evil(change)])


def identity(op: Operation, ctx: PassContext) -> Operation | None:
    return op.clone() if isinstance(op, BinaryOp) else None


def relu_to_silu(op: Operation, ctx: PassContext) -> Operation | None:
    if not (isinstance(op, UnaryOp) and op.kind.data == "relu"):
        return None
    new = op.clone()
    new.properties["kind"] = StringAttr("sigmoid")
    return new


def act_dropped(op: Operation, ctx: PassContext) -> Operation | None:
    if not (isinstance(op, UnaryOp) and op.kind.data == "neg"):
        return None
    new = op.clone()
    new.properties["kind"] = StringAttr("exp")
    return new


STALE = (relu_to_silu, act_dropped)


@pytest.mark.parametrize("change", STALE, ids=lambda f: f.__name__)
def test_it_refuses_a_pass_that_leaves_stale_encodings(change) -> None:
    module, ctx = program()
    with pytest.raises(SparsityInvariantError, match="declares zeros"):
        run_passes(module, ctx, [PropagateMasks(), Evil(change)])


def test_it_accepts_a_pass_that_changes_nothing_that_is_claimed() -> None:
    module, ctx = program()
    notes = run_passes(module, ctx, [Evil(identity), PropagateMasks(), Evil(identity)])
    assert not [note for note in notes if "rest on the zero rules" in note]


@pytest.mark.parametrize(
    ("missing", "change", "before"),
    [
        ("executed", sum_to_product, ()),
        ("declared", relu_to_silu, (PropagateMasks(),)),
    ],
)
def test_each_question_is_needed(missing: str, change, before, monkeypatch) -> None:
    module, ctx = program()
    asked = tuple(check for check in ("declared", "executed") if check != missing)
    run_passes(module, ctx, before)
    guard = SparsityGuard(checks=asked)
    old = guard.before(module, ctx)
    Evil(change).run(module, ctx)
    guard.after(module, ctx, old, "evil")
    guard = SparsityGuard()
    with pytest.raises(SparsityInvariantError):
        guard.after(module, ctx, old, "evil")


def test_comparing_must_not_take_any_mask_for_the_old_one(monkeypatch) -> None:
    module, ctx = program()
    monkeypatch.setattr(invariant.Mask, "implies", lambda self, other: True)
    run_passes(module, ctx, [Evil(sum_to_product)])


@dataclass(frozen=True)
class Liar(Evil):
    """A pass that changes the module and says that it did not."""

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        Evil.run(self, module, ctx)
        return PassResult(0)


@dataclass(frozen=True)
class Idle(Pass):
    """A pass that changes nothing."""

    name: ClassVar[str] = "idle"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        return PassResult(0)


def test_it_looks_for_itself_whether_a_pass_changed_something() -> None:
    module, ctx = program()
    with pytest.raises(SparsityInvariantError, match="claims zeros"):
        run_passes(module, ctx, [Idle(), Liar(sum_to_product)])


def test_a_guard_that_stays_sees_what_happens_between_two_runs() -> None:
    module, ctx = program()
    guard = SparsityGuard()
    run_passes(module, ctx, [PropagateMasks()], guard=guard)
    Evil(relu_to_silu).run(module, ctx)
    with pytest.raises(SparsityInvariantError, match="declares zeros"):
        run_passes(module, ctx, [Idle()], guard=guard)


def test_an_unchanged_module_is_analysed_once(monkeypatch) -> None:
    analysed = []

    def facts(*arguments):
        analysed.append(arguments)
        return module_facts(*arguments)

    monkeypatch.setattr(known_facts, "module_facts", facts)
    module, ctx = program()
    run_passes(module, ctx, [Idle(), Idle(), Idle()])
    assert len(analysed) == 1
    run_passes(module, ctx, [Evil(identity), Idle()])
    assert len(analysed) == 2


def test_a_state_brings_back_what_a_function_was() -> None:
    module, ctx = program()
    before = str(module)
    (state,) = state_of(module)
    Evil(sum_to_product).run(module, ctx)
    PropagateMasks().run(module, ctx)
    assert state_of(module) != (state,)
    func, twins = rebuilt(state)
    assert str(ModuleOp([func])) == before
    assert set(twins) == set(state.values())


def test_claims_without_evidence_are_counted(monkeypatch) -> None:
    module, ctx = program()
    monkeypatch.setattr(invariant, "MAX_ELEMENTS", 1)
    (note, last) = run_passes(module, ctx, [Evil(added_relu)])
    assert note == "evil: 1"
    assert last == "sparsity-invariant: 1 claims rest on the zero rules alone"


def test_every_pass_of_the_pipeline_keeps_it(tmp_path: Path) -> None:
    lowered(write_tiny(tmp_path))
