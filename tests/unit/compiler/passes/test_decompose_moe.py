"""Whole layers and their pieces: the same bits, text that reads back, and a schedule that holds."""

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.utils.exceptions import VerifyException

from compiler.analysis.constants import ConstantTable
from compiler.contract.canonical import canonical_bytes
from compiler.contract.errors import ContractError
from compiler.contract.schedule import Schedule, Step, parse_schedule
from compiler.dialects.dims import symbol_dim
from compiler.dialects.moe import ExpertsOp, RouteOp
from compiler.dialects.moe_schedule import FusedLayerOp, LayerOp, ScheduleOp, StepAttr
from compiler.dialects.text import parse_module, print_module
from compiler.dialects.types import tensor_type
from compiler.emitters.schedule import schedule_of, schedule_ops
from compiler.kernels.program import Weight
from compiler.passes.base import PassContext
from compiler.passes.decompose_moe import DecomposeMoe
from compiler.passes.functions import body, functions
from compiler.passes.origins import Origins
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.quant.w4 import pack_w4, quantise_w4
from compiler.simulator.layers import run_layers
from compiler.simulator.numerics import Bits
from tests.factories.modules import small_decoder

EXPERTS, WIDTH, HIDDEN, ROWS = 4, 40, 24, 9
CTX = PassContext(PipelineSpec("graph", (), 1, 1), ConstantTable(), Origins())
NAMES = ("x", "gamma", "beta", "router", "bias", "w_in", "w_out")


def layer(
    *, fused: bool, act: str = "relu", order: str = "topk_softmax", residual: bool = True
) -> ModuleOp:
    """A function of one layer whose operands are all arguments."""
    wide = HIDDEN * (2 if act == "swiglu" else 1)
    shapes = (
        (symbol_dim("T"), WIDTH), (WIDTH,), (WIDTH,), (EXPERTS, WIDTH), (EXPERTS,),
        (EXPERTS, wide, WIDTH), (EXPERTS, WIDTH, HIDDEN),
    )  # fmt: skip
    block = Block(arg_types=[tensor_type("float32", shape) for shape in shapes])
    x, gamma, beta, router, bias, w_in, w_out = block.args
    op: Operation
    if fused:
        op = FusedLayerOp(
            x, (gamma, beta), (router, bias), (w_in, w_out),
            kind="layer", eps=1e-5, residual=residual, k=2, order=order, act=act,
        )  # fmt: skip
    else:
        op = LayerOp(x, (router, bias), (w_in, w_out), k=2, order=order, act=act)
    block.add_ops([op, ReturnOp(*op.results)])
    types = [result.type for result in op.results]
    module = ModuleOp([FuncOp("f", (list(block.arg_types), types), Region(block))])
    module.verify()
    return module


def names_of(module: ModuleOp) -> list[str]:
    return [op.name for op in body(functions(module)[0]).ops]


def run(module: ModuleOp, act: str) -> list[bytes]:
    """Run the function in the arithmetic of the kernels; return its results' bytes."""
    random = np.random.default_rng(5)
    wide = HIDDEN * (2 if act == "swiglu" else 1)
    matrices = []
    for _ in range(EXPERTS):
        for shape in ((wide, WIDTH), (WIDTH, HIDDEN)):
            array = (random.standard_normal(shape) * 0.2).astype(np.float32)
            matrices.append(Weight(len(matrices), "w4", array, "weights.shared"))
    packed = {w.id: pack_w4(quantise_w4(w.array)) for w in matrices}
    numerics = Bits(tuple(matrices), packed)
    func = functions(module)[0]
    values: dict[SSAValue, object] = {}
    for name, argument in zip(NAMES, body(func).args, strict=True):
        shape = {"x": (ROWS, WIDTH), "router": (EXPERTS, WIDTH), "bias": (1, EXPERTS)}
        if name in ("w_in", "w_out"):
            values[argument] = list(range(name == "w_out", 2 * EXPERTS, 2))
        else:
            values[argument] = random.standard_normal(shape.get(name, (1, WIDTH))).astype(
                np.float32
            )
    ops = [op for op in body(func).ops if not isinstance(op, ReturnOp)]
    run_layers(ops, values, numerics)
    returned = body(func).last_op
    assert isinstance(returned, ReturnOp)
    return [np.ascontiguousarray(values[value]).tobytes() for value in returned.arguments]


@pytest.mark.parametrize("act", ["relu", "swiglu"])
@pytest.mark.parametrize("order", ["topk_softmax", "softmax_topk", "softmax_topk_renorm"])
@pytest.mark.parametrize("fused", [True, False])
def test_pieces_give_the_bits_of_the_layer(act: str, order: str, fused: bool) -> None:
    whole = layer(fused=fused, act=act, order=order)
    pieces = whole.clone()
    DecomposeMoe().run(pieces, CTX)
    pieces.verify()
    names = names_of(pieces)
    assert names.count("moe.expert_load") == 2 * EXPERTS
    assert names.count("moe.gemm") == EXPERTS
    assert not {"moe.layer", "moe.fused_layer"} & set(names)
    expected = run(whole, act)
    assert run(pieces, act) == expected
    assert any(np.frombuffer(expected[0], "<f4"))


def test_apart_and_together_is_the_same_text() -> None:
    whole = layer(fused=False)
    text = print_module(whole)
    assert DecomposeMoe().run(whole, CTX).changed == 1
    apart = print_module(whole)
    assert print_module(parse_module(apart)) == apart
    assert DecomposeMoe(together=True).run(whole, CTX).changed == 1
    assert print_module(whole) == text


def test_the_text_of_every_form_reads_back() -> None:
    for module in (layer(fused=True), layer(fused=True, residual=False), layer(fused=False)):
        text = print_module(module)
        assert print_module(parse_module(text)) == text


def test_a_router_and_its_experts_become_a_layer() -> None:
    module = layer(fused=False, act="swiglu")
    whole = next(iter(body(functions(module)[0]).ops))
    assert isinstance(whole, LayerOp)
    route = RouteOp(whole.x, whole.weight, whole.bias, k=2, order="topk_softmax")
    experts = ExpertsOp(whole.x, route.index, route.gate, whole.w_in, whole.w_out, act="swiglu")
    block = body(functions(module)[0])
    expected = run(module, "swiglu")
    block.insert_ops_before([route, experts], whole)
    for old, new in zip(whole.results, [experts.result, *route.results], strict=True):
        old.replace_all_uses_with(new)
    block.erase_op(whole)
    assert run(module, "swiglu") == expected
    assert DecomposeMoe(together=True).run(module, CTX).changed == 1
    assert names_of(module) == ["moe.layer", "func.return"]
    assert run(module, "swiglu") == expected


def test_a_missing_or_swapped_piece_is_not_put_together() -> None:
    for damage in ("swap", "drop"):
        module = layer(fused=False)
        DecomposeMoe().run(module, CTX)
        merge = next(op for op in body(functions(module)[0]).ops if op.name == "moe.merge")
        shares = list(merge.operands)
        merge.operands = shares[:-1] if damage == "drop" else [shares[1], shares[0], *shares[2:]]
        assert DecomposeMoe(together=True).run(module, CTX).changed == 0
        assert "moe.layer" not in names_of(module)


def test_wrong_layers_are_refused() -> None:
    module = layer(fused=False)
    whole = next(iter(body(functions(module)[0]).ops))
    assert isinstance(whole, LayerOp)
    router, experts = (whole.weight, None), (whole.w_in, whole.w_out)
    good = {"k": 2, "order": "topk_softmax", "act": "relu"}
    for wrong in (
        LayerOp(whole.x, router, (whole.w_out, whole.w_in), **good),
        LayerOp(whole.x, router, experts, **{**good, "k": 9}),
        LayerOp(whole.x, router, experts, **{**good, "order": "sparsemixer"}),
        LayerOp(whole.x, router, experts, **{**good, "act": "cube"}),
    ):
        with pytest.raises(VerifyException):
            wrong.verify()


def test_a_schedule_loads_the_next_layers_experts() -> None:
    ops = schedule_ops(small_decoder(), defer=1)
    assert [op.program.data for op in ops] == ["see", "step"]
    assert ops[1].entries() == [(0, "prefetch", 1), (0, "defer", 1)]
    module = ModuleOp(ops)
    module.verify()
    text = print_module(module)
    assert "#moe.step<layer 0, prefetch 1>" in text
    assert print_module(parse_module(text)) == text
    schedule = schedule_of(ops)
    assert parse_schedule(schedule.to_bytes()) == schedule
    assert schedule.beside("step", 0) == (Step(0, "prefetch", 1), Step(0, "defer", 1))
    assert schedule.beside("step", 1) == ()


def test_wrong_schedules_are_refused() -> None:
    with pytest.raises(VerifyException):
        StepAttr.make(0, "guess", 1)
    with pytest.raises(VerifyException):
        StepAttr.make(0, "prefetch", 0)
    with pytest.raises(VerifyException):
        ScheduleOp("step", [(1, "prefetch", 1), (0, "prefetch", 1)]).verify()
    with pytest.raises(VerifyException):
        ScheduleOp("step", [(0, "prefetch", 1), (0, "prefetch", 2)]).verify()
    good = Schedule({"step": (Step(0, "prefetch", 1),)}).to_bytes()
    assert parse_schedule(good).programs["step"] == (Step(0, "prefetch", 1),)
    schema = "sparsefleet.schedule/1"
    for document in (
        {"schema": "sparsefleet.schedule/2", "programs": {}},
        {"schema": schema, "programs": {"step": [[0, "guess", 1]]}},
        {"schema": schema, "programs": {"step": [[0, "prefetch", 0]]}},
        {"schema": schema, "programs": {"step": [[0, "prefetch"]]}},
        {"schema": schema, "programs": {"step": [[-1, "prefetch", 1]]}},
        {"schema": schema, "programs": {"step": [[1, "prefetch", 1], [0, "prefetch", 1]]}},
        {"schema": schema, "programs": {"step": [[0, "prefetch", 1], [0, "prefetch", 1]]}},
        {"schema": schema, "programs": {}, "more": 1},
        {"schema": schema},
    ):
        with pytest.raises(ContractError):
            parse_schedule(canonical_bytes(document))
    with pytest.raises(ContractError):
        parse_schedule(good + b" ")
