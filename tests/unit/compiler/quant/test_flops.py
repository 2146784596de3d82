"""FLOPs of a run, counted by hand; zeros of channels and heads."""

import numpy as np
import pytest

from compiler.contract.reference import layout_of, pack_geometry
from compiler.contract.session import step_inputs
from compiler.kernels.program import Act, ExpertAct, Module, Op, Program, RouteOrder
from compiler.quant.activity import input_activity
from compiler.quant.flops import RunSize, count_flops, pruned_from
from compiler.quant.record import Recorder
from compiler.simulator import Simulator
from tests.factories.modules import ModuleBuilder, small_decoder


def routed() -> Module:
    """Rows of 32 through one of 4 experts of 64 channels."""
    b = ModuleBuilder(max_tokens=8)
    x, index, gate, y = b.buffer(None, 32), b.buffer(None, 1, "i32"), b.buffer(None, 1), None
    router = b.weight(b.normal(4, 32))
    b.call(Op.ROUTE, [x], [index, gate], [router], k=1, order=RouteOrder.TOPK_SOFTMAX)
    experts = []
    for expert in range(4):
        section = f"expert.L0.E{expert}"
        experts += [b.w4(64, 32, section), b.w4(32, 64, section)]
    y = b.call(Op.EXPERTS, [x, index, gate], [b.buffer(None, 32)], experts, act=ExpertAct.RELU)
    b.program("run", {"x": x}, {"y": y})
    return b.module()


def test_it_counts_the_chosen_experts_and_for_dense_all() -> None:
    module = routed()
    found = count_flops(module, module.programs[0], RunSize(tokens=3, dense_tokens=3))
    route = 2 * 3 * 32 * 4 + 3 * 2
    expert = 2 * 3 * 32 * 64 * 2
    assert found.counted == route + expert + 3 * 32
    assert found.dense == route + 4 * expert + 3 * 32
    assert found.zero == 0


def test_it_counts_a_linear_call_with_its_bias() -> None:
    b = ModuleBuilder()
    x, y = b.buffer(5, 32), b.buffer(5, 16)
    b.call(Op.LINEAR, [x], [y], [b.w4(16, 32), b.vector(16)], act=Act.RELU)
    b.program("run", {"x": x}, {"y": y})
    module = b.module()
    assert count_flops(module, module.programs[0]).counted == 2 * 5 * 32 * 16 + 5 * 16


def test_it_counts_attention_over_the_rows_that_are_there() -> None:
    module = small_decoder()
    step = next(program for program in module.programs if program.name == "step")
    alone, after = (count_flops(module, step, RunSize(1, rows, 1, rows)) for rows in (0, 10))
    layers, width, heads = 2, 48, 3
    assert after.counted - alone.counted == layers * 10 * (4 * width + heads)


def test_it_lets_pruned_tokens_go_on_in_the_dense_count() -> None:
    module = small_decoder()
    see = next(program for program in module.programs if program.name == "see")
    assert pruned_from(module) == 16
    found = count_flops(module, see)
    rows = [call for call in see.calls if call.op is Op.EXPERTS]
    one = 2 * (40 * 48 * 2)
    sparse = len(rows) * 6 * 2 * one
    dense = len(rows) * 16 * 4 * one
    assert found.dense - found.counted > dense - sparse
    assert 0.5 < found.saved_ratio < 1


def test_it_takes_zero_activations_from_the_record() -> None:
    module = small_decoder()
    recorder = Recorder(module)
    simulator = Simulator(module, mode="f64", observer=recorder)
    for step in range(6):
        simulator.run("step", step_inputs([step, 49 - step], 2 * step))
    record = recorder.finish()
    program = next(program for program in module.programs if program.name == "step")
    found = count_flops(module, program, record=record)
    hidden = 2 * 2 * 2 * 40 * 48  # two layers, two experts each, the second matrix
    assert 0.2 * hidden < found.zero < 0.6 * hidden
    rows = input_activity(module, record)
    behind_relu = [row for row in rows if not row.heads]
    assert behind_relu
    for row in behind_relu:
        assert sum(row.histogram) == 40
        sample = record.sample(row.weight)
        assert sample is not None
        assert row.zero_ratio == float(sample.zero_ratio.mean())
        assert row.dead_channels == int(np.sum(sample.zero_ratio == 1))
    by_heads = [row for row in rows if row.heads]
    assert len(by_heads) == 2
    for row in by_heads:
        assert len(row.heads) == 3
        assert abs(sum(row.heads) - 1) < 1e-9


def reference_call(op: Op, fields: dict[str, int | list[int]], cells: int) -> Module:
    b = ModuleBuilder()
    geometry = b.weight(np.array([pack_geometry(op.name, fields)], np.int32), "i32")
    x, y = b.buffer(64, 1), b.buffer(cells, 1)
    b.call(op, [x], [y], [geometry, b.weight(b.normal(8, 8))])
    program = Program("run", tuple(b.calls), {"x": x}, {"y": y})
    return Module((program,), tuple(b.buffers), tuple(b.weights), None, 1)


@pytest.mark.parametrize(
    ("op", "fields", "expected"),
    [
        (Op.REF_CONTRACT, {"sizes": [3], "m": 2, "k": 5, "n": 7}, 2 * 3 * 2 * 5 * 7),
        (
            Op.REF_CONV,
            {"batch": 2, "channels": 6, "filters": 9, "groups": 3, "kh": 3, "kw": 2, "out_h": 4,
             "out_w": 5},
            2 * (2 * 9 * 4 * 5) * (6 // 3 * 3 * 2),
        ),
        (
            Op.REF_CONV_TRANSPOSE,
            {"batch": 1, "channels": 4, "filters": 6, "groups": 2, "kh": 2, "kw": 2, "height": 3,
             "width": 5, "out_h": 6, "out_w": 10},
            2 * (4 * 3 * 5) * (6 // 2 * 2 * 2),
        ),
        (Op.REF_REDUCE, {"sizes": [3, 4], "inner": [5]}, 3 * 4 * 5),
        (Op.REF_POOL, {"planes": 3, "out_h": 4, "out_w": 5, "kh": 2, "kw": 3}, 3 * 4 * 5 * 6),
        (Op.REF_MOVE, {"sizes": [3, 4]}, 0),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else "",
)  # fmt: skip
def test_it_counts_reference_operations_by_their_geometry(op, fields, expected) -> None:
    whole = {name: fields.get(name, [1] if count > 1 else 1) for name, count in layout_of(op.name)}
    module = reference_call(op, whole, 5)
    assert count_flops(module, module.programs[0]).counted == expected
