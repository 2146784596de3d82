"""All ten kinds of sources are found, structure is exact or within budget, masks are applied."""

import numpy as np
import pytest
from xdsl.dialects.builtin import IntegerAttr, ModuleOp, StringAttr, i64
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Operation, Region, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.analysis.propagation import function_facts
from compiler.analysis.savings import savings, tensor_zeros
from compiler.analysis.sources import SOURCE_KINDS
from compiler.dialects.dims import Dim
from compiler.dialects.encoding import EncodingAttr
from compiler.dialects.mm import AttentionOp, PruneOp
from compiler.dialects.moe import RouteOp
from compiler.dialects.movement import SliceOp
from compiler.dialects.properties import real
from compiler.dialects.sp import BinaryOp, ConstantOp, LinearOp, OnnxOp, SoftmaxOp, UnaryOp
from compiler.dialects.types import encoding_of, tensor_type
from compiler.errors import MalformedModelError
from compiler.passes.base import PassContext
from compiler.passes.derive_structure import (
    DeriveStructure,
    live_tiles,
    relative_loss,
    two_of_four,
)
from compiler.passes.detect_sources import SOURCE, DetectSources
from compiler.passes.inject_masks import InjectMasks, decode_masks, encode_masks
from compiler.passes.origins import Origins
from compiler.passes.pipeline_spec import PipelineSpec

SPEC = PipelineSpec("graph", (), 8, 4)


class Program:
    """One function with arguments x, y (4, 4) f32 and m (4, 4) bool."""

    def __init__(self) -> None:
        self.table = ConstantTable()
        kinds = [tensor_type(kind, (4, 4)) for kind in ("float32", "float32", "bool")]
        self.block = Block(arg_types=kinds)
        self.x, self.y, self.m = self.block.args

    def add(self, op: Operation) -> SSAValue:
        self.block.add_op(op)
        return op.results[0]

    def constant(self, array: np.ndarray) -> SSAValue:
        return self.add(self.table.add(np.asarray(array)))

    def onnx(self, op: str, *operands: SSAValue | None, **attrs) -> SSAValue:
        return self.add(OnnxOp(op, operands, attrs, [self.x.type]))

    def finish(self, result: SSAValue) -> tuple[ModuleOp, PassContext]:
        self.block.add_op(ReturnOp(result))
        func = FuncOp("f", (list(self.block.arg_types), [result.type]), Region(self.block))
        return ModuleOp([func]), PassContext(SPEC, self.table, Origins())


def zero() -> np.ndarray:
    return np.zeros((1, 1), np.float32)


def masked_scores(p: Program) -> SSAValue:
    low = np.array([[0, -np.inf, 0, 0]], np.float32)
    return p.add(SoftmaxOp(p.add(BinaryOp(p.x, p.constant(low), kind="add"))))


def pruned(p: Program) -> SSAValue:
    score = p.add(SliceOp(p.y, 1, Dim(0), Dim(1)))
    return p.add(PruneOp(p.x, score, k=2, score_offset=0))


def attended(p: Program) -> SSAValue:
    return p.add(AttentionOp(p.x, p.y, p.y, heads=2, kv_heads=2, scale=1.0, mask="causal"))


def routed(p: Program) -> SSAValue:
    weight = p.constant(np.ones((5, 4), np.float32))
    return p.add(RouteOp(p.x, weight, None, k=2, order="topk_softmax"))


PATTERNS = {
    "relu": [
        lambda p: p.add(UnaryOp(p.x, kind="relu")),
        lambda p: p.add(BinaryOp(p.x, p.y, kind="add", act="relu")),
        lambda p: p.onnx("Relu", p.x),
    ],
    "clip": [lambda p: p.onnx("Clip", p.x, p.constant(np.float32(0)))],
    "threshold": [lambda p: p.onnx("ThresholdedRelu", p.x, alpha=real(0.5))],
    "mask": [
        lambda p: p.onnx("Mul", p.x, p.onnx("Cast", p.m, to=IntegerAttr(1, i64))),
        lambda p: p.onnx("Mul", p.x, p.constant(np.array([0, 1, 1, 0], np.float32))),
    ],
    "where": [lambda p: p.onnx("Where", p.m, p.x, p.constant(zero()))],
    "band": [attended, lambda p: p.onnx("Trilu", p.x, upper=IntegerAttr(0, i64))],
    "softmax": [masked_scores],
    "route": [routed],
    "prune": [pruned],
    "product": [lambda p: p.onnx("Mul", p.y, p.add(UnaryOp(p.x, kind="relu")))],
}


def test_there_are_patterns_for_all_ten_kinds() -> None:
    assert set(PATTERNS) == set(SOURCE_KINDS)
    assert len(SOURCE_KINDS) == 10


@pytest.mark.parametrize(
    ("kind", "make"), [(kind, make) for kind, makers in PATTERNS.items() for make in makers]
)
def test_it_finds_every_kind_of_source(kind: str, make) -> None:
    program = Program()
    value = make(program)
    module, ctx = program.finish(value)
    DetectSources().run(module, ctx)
    assert value.owner.attributes[SOURCE] == StringAttr(kind)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: p.add(UnaryOp(p.x, kind="silu")),
        lambda p: p.onnx("Clip", p.x, p.constant(np.float32(-1)), p.constant(np.float32(-0.5))),
        lambda p: p.onnx("Where", p.m, p.x, p.y),
        lambda p: p.add(BinaryOp(p.x, p.y, kind="mul")),
        lambda p: p.add(SoftmaxOp(p.x)),
        lambda p: p.add(AttentionOp(p.x, p.y, p.y, heads=2, kv_heads=2, scale=1.0, mask="none")),
    ],
    ids=("silu", "clip without zero", "where", "product", "softmax", "attention"),
)
def test_it_takes_nothing_else_for_a_source(make) -> None:
    program = Program()
    value = make(program)
    module, ctx = program.finish(value)
    DetectSources().run(module, ctx)
    assert SOURCE not in value.owner.attributes


def weighted(weight: np.ndarray) -> tuple[ModuleOp, PassContext, LinearOp]:
    table, (rows, columns) = ConstantTable(), weight.shape
    block = Block(arg_types=[tensor_type("float32", (2, columns))])
    constant = table.add(weight.astype(np.float32))
    block.add_op(constant)
    linear = LinearOp(block.args[0], constant.result)
    block.add_ops([linear, ReturnOp(linear.result)])
    kinds = (list(block.arg_types), [tensor_type("float32", (2, rows))])
    module = ModuleOp([FuncOp("f", kinds, Region(block))])
    return module, PassContext(SPEC, table, Origins()), linear


def random_weight(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32)


def test_it_rounds_dead_tiles_up_and_changes_no_number() -> None:
    weight = random_weight()
    weight[:32, 32:] = 0
    weight[40, 3] = 0
    module, ctx, linear = weighted(weight)
    result = DeriveStructure().run(module, ctx)
    encoding = encoding_of(linear.weight)
    assert isinstance(encoding, EncodingAttr)
    assert encoding.level_names == ("dense", "blocked")
    assert [size.data for size in encoding.block.data] == [32, 32]
    assert np.array_equal(ctx.constants.get(linear.weight), weight)
    assert "density 0.750, loss 0" in result.notes[0]
    live = live_tiles(weight, (32, 32))
    assert not (weight[~np.kron(live, np.ones((32, 32))).astype(bool)]).any()
    module.verify()


def test_it_takes_finer_tiles_when_coarse_ones_are_alive() -> None:
    weight = random_weight()
    weight[16:32, :32] = 0
    _, _, linear = prepared = weighted(weight)
    DeriveStructure().run(prepared[0], prepared[1])
    assert [size.data for size in encoding_of(linear.weight).block.data] == [16, 32]


def test_it_rounds_a_pattern_down_where_that_keeps_less() -> None:
    """Of eight tiles one is dead and three hold a thousandth: superset 7, subset 4 of 8."""
    weight = random_weight()[:, :32]
    weight = np.concatenate([weight, weight])
    weight[np.random.default_rng(3).random(weight.shape) < 0.5] = 0
    weight[:16] = 0
    weight[16:64] *= 1e-3
    module, ctx, linear = weighted(weight)
    rule = DeriveStructure(budget=0.01, lossy=("16x32",), least_zeros=0.25)
    (note,) = rule.run(module, ctx).notes
    assert "density 0.500" in note
    assert "without loss 0.875" in note
    after = ctx.constants.get(linear.weight)
    assert not after[:64].any()
    assert np.array_equal(after[64:], weight[64:].astype(np.float32))


def test_it_rounds_nothing_that_has_no_pattern() -> None:
    weight = random_weight()
    weight[:16, :32] *= 1e-3
    module, ctx, linear = weighted(weight)
    rule = DeriveStructure(budget=0.1, lossy=("16x32",), least_zeros=0.25)
    assert rule.run(module, ctx).changed == 0
    assert np.array_equal(ctx.constants.get(linear.weight), weight)


def test_it_prunes_nothing_without_a_budget() -> None:
    module, ctx, linear = weighted(random_weight())
    assert DeriveStructure().run(module, ctx).changed == 0
    assert encoding_of(linear.weight) is None


@pytest.mark.parametrize("lossy", ["2:4", "16x32"])
def test_it_prunes_within_the_budget_and_measures_the_loss(lossy: str) -> None:
    weight = random_weight()
    weight[:16, :32] *= 0.01
    if lossy == "2:4":
        weight *= np.where(np.arange(64) % 4 < 2, 1.0, 0.05).astype(np.float32)
    module, ctx, linear = weighted(weight)
    rule = DeriveStructure(budget=0.1, lossy=(lossy,))
    assert rule.changes_values
    (note,) = rule.run(module, ctx).notes
    after = ctx.constants.get(linear.weight)
    loss = relative_loss(weight, after)
    assert 0 < loss <= 0.1
    assert f"loss {loss:.3g} of 0.1" in note
    assert (after[after != 0] == weight[after != 0]).all()


def test_it_leaves_a_weight_whose_loss_is_too_great() -> None:
    module, ctx, linear = weighted(random_weight())
    assert DeriveStructure(budget=0.01).run(module, ctx).changed == 0
    assert encoding_of(linear.weight) is None


def test_two_of_four_keeps_the_greater_half() -> None:
    pruned = two_of_four(random_weight())
    assert ((pruned.reshape(-1, 4) != 0).sum(axis=1) == 2).all()


def test_it_applies_masks_to_the_constants_they_name() -> None:
    module, ctx, linear = weighted(random_weight())
    constant = linear.weight.owner
    assert isinstance(constant, ConstantOp)
    bits = np.random.default_rng(1).random((64, 64)) < 0.5
    section = encode_masks({constant.sha256.data: bits})
    assert np.array_equal(decode_masks(section)[constant.sha256.data], bits)
    result = InjectMasks(section).run(module, ctx)
    assert np.array_equal(ctx.constants.get(linear.weight), random_weight() * bits)
    assert result.changed == 1
    facts = function_facts(module.body.block.first_op, ctx.constants)
    (row,) = [r for r in tensor_zeros(module.body.block.first_op, facts) if "constant" in r.value]
    assert (row.level, row.zeros) == ("static", int((~bits).sum()))
    (saved,) = savings(module.body.block.first_op, facts, ctx.constants)
    assert saved.most == int(np.ceil(saved.dense * bits.mean()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: b"", None),
        (lambda s: s[:-1], "cut off"),
        (lambda s: s + b"x", "too many"),
        (lambda s: b"X" + s[1:], "does not start"),
        (lambda s: s[:8] + b"\xff" * 4 + s[12:], "at most"),
        (lambda s: s[:12] + bytes(16) + s[28:], "no constant of the model"),
        (lambda s: encode_masks({s[12:28].hex(): np.ones((3,), bool)}), "has shape"),
    ],
)
def test_it_refuses_sections_that_do_not_fit(damage, message: str | None) -> None:
    module, ctx, linear = weighted(random_weight())
    digest = linear.weight.owner.sha256.data
    section = damage(encode_masks({digest: np.ones((64, 64), bool)}))
    if message is None:
        assert InjectMasks(section).run(module, ctx).changed == 0
        return
    with pytest.raises(MalformedModelError, match=message):
        InjectMasks(section).run(module, ctx)
