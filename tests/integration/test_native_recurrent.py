"""The recurrent kernel from ONNX: four-bit weights, and what the rules of its operands refuse."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from compiler.frontend.describe import write_submission
from compiler.frontend.importer import import_pipeline
from compiler.kernels.program import Module, Op, ProgramError, RecurrentKind, validate_module
from compiler.passes.pipeline import lower_pipeline
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import single_call
from tests.factories.onnx_runs import session

STEPS, WIDTH, HIDDEN = 20, 48, 64


def lstm(path: Path) -> None:
    random = np.random.default_rng(3)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        values = random.standard_normal(shape) * shape[-1] ** -0.5
        return numpy_helper.from_array(values.astype(np.float32), name)

    constants = [weight("w", 1, 4 * HIDDEN, WIDTH), weight("r", 1, 4 * HIDDEN, HIDDEN)]
    constants.append(weight("b", 1, 8 * HIDDEN))
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["y"], hidden_size=HIDDEN)
    ports = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", [STEPS, 1, WIDTH]), ("y", [STEPS, 1, 1, HIDDEN]))
    ]
    graph = helper.make_graph([node], "lstm", ports[:1], ports[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)


def test_four_bit_weights_give_the_simulators_bits_near_onnx_runtime(tmp_path: Path) -> None:
    lstm(tmp_path / "lstm.onnx")
    write_submission(tmp_path / "lstm.onnx", tmp_path / "out", {}, {}, quantise="w4")
    module = lower_pipeline(import_pipeline(tmp_path / "out"), verify=True).module
    assert [call.op for call in module.programs[0].calls] == [Op.LINEAR, Op.RECURRENT]
    case = Case.of(module)
    x = np.random.default_rng(1).standard_normal((STEPS, WIDTH)).astype(np.float32)
    feeds = {role: x.tobytes() for role in module.programs[0].inputs}
    with case.native(native_targets()[0]) as plan:
        found = raw(plan.run("forward", feeds))
    assert found == raw(case.simulator().run("forward", feeds))
    wanted = session(tmp_path / "lstm.onnx").run(None, {"x": x[:, None]})[0]
    (y,) = found.values()
    assert np.corrcoef(np.frombuffer(y, "<f4"), wanted.reshape(-1))[0, 1] > 0.98


def cells(kind: RecurrentKind = RecurrentKind.LSTM, op: Op = Op.RECURRENT, **params: int) -> Module:
    gates = {RecurrentKind.LSTM: 4, RecurrentKind.RNN: 1}.get(kind, 3)
    weight = np.ones((gates * 8, 8), np.float32)
    count = 2 if kind is RecurrentKind.LSTM else 1
    return single_call(
        op,
        [(6, gates * 8, "f32"), (2, 8, "f32"), (2, 8 if count == 2 else 0, "f32")],
        [(6, 8, "f32"), *[(2, 8, "f32")] * count],
        [("w4" if op is Op.RECURRENT else "f32", weight)],
        {"kind": kind, "batch": 2} | params,
    )


def changed(module: Module, buffer: int, **shape: int) -> Module:
    buffers = list(module.buffers)
    buffers[buffer] = replace(buffers[buffer], **shape)
    return replace(module, buffers=tuple(buffers))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (cells(batch=4), "no steps of 4"),
        (cells(batch=3), "state"),
        (changed(cells(), 0, cols=24), "gates"),
        (changed(cells(), 1, cols=7), "state"),
        (changed(cells(), 2, rows=1), "state"),
        (changed(cells(), 4, cols=9), "state"),
        (changed(cells(), 3, rows=5), "a state for every row"),
        (cells(RecurrentKind.GRU_RESET_BEFORE), "resets before the product"),
        (changed(cells(), 0, dynamic=1, rows=8), "a state for every row"),
    ],
)
def test_it_refuses_cells_that_do_not_fit(module: Module, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        validate_module(module)


def test_only_an_lstm_has_cells() -> None:
    gru = cells(RecurrentKind.GRU)
    validate_module(gru)
    (program,) = gru.programs
    call = replace(program.calls[0], inputs=(0, 1, 1))
    with pytest.raises(ProgramError, match="only LSTM has cells"):
        validate_module(replace(gru, programs=(replace(program, calls=(call,)),)))
