"""Damaged models end in one of our typed errors, or compile; nothing else leaves the compiler."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from compiler.errors import MalformedModelError, UserModelError
from compiler.frontend import import_pipeline
from compiler.passes.pipeline import lower_pipeline
from tests.factories.graph_runs import GraphCase, relative_error
from tests.factories.onnx_blocks import GraphBuilder
from tests.factories.onnx_models import TinyShape, tiny_document, tiny_models, write_submission

SHAPE = TinyShape(layers=1, keep=3, side=4, width=8, vocabulary=8, experts=3, hidden=4)
MODELS = tiny_models(SHAPE)
INTEGERS = (-1, 0, 1, 2, 3, 7, 2**40, -(2**63))
DTYPES = ("float64", "int64", "float16", "int32", "bool", "uint8")


def damaged_bytes(data: bytes, chooser: random.Random) -> bytes:
    copy = bytearray(data)
    for _ in range(chooser.randrange(1, 4)):
        copy[chooser.randrange(len(copy))] = chooser.randrange(256)
    return bytes(copy)


def damaged_node(model: onnx.ModelProto, chooser: random.Random) -> None:
    node = chooser.choice(model.graph.node)
    match chooser.randrange(5):
        case 0 if node.attribute:
            damaged_attribute(chooser.choice(node.attribute), chooser)
        case 1:
            node.op_type = chooser.choice([other.op_type for other in model.graph.node])
        case 2 if len(node.input) > 1:
            i, j = chooser.sample(range(len(node.input)), 2)
            node.input[i], node.input[j] = node.input[j], node.input[i]
        case 3:
            at = chooser.randrange(len(node.input))
            node.input[at] = chooser.choice([t.name for t in model.graph.initializer])
        case _:
            node.input.pop()


def damaged_attribute(attribute: onnx.AttributeProto, chooser: random.Random) -> None:
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i = chooser.choice(INTEGERS)
    elif attribute.ints:
        attribute.ints[chooser.randrange(len(attribute.ints))] = chooser.choice(INTEGERS)
    else:
        attribute.f = chooser.choice([0.0, float("nan"), float("inf"), -1.0])


def damaged_constant(model: onnx.ModelProto, chooser: random.Random) -> None:
    tensor = chooser.choice(model.graph.initializer)
    array = onnx.numpy_helper.to_array(tensor).copy()
    match chooser.randrange(4):
        case 0:
            array.reshape(-1)[chooser.randrange(array.size)] = chooser.choice(
                [0, -1, 1000, 2**31 - 1]
            )
        case 1:
            array = array.reshape(-1)
        case 2:
            array = array.astype(chooser.choice(DTYPES))
        case _:
            array = array[..., None] if chooser.random() < 0.5 else np.zeros((0,), array.dtype)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def damaged(model: onnx.ModelProto, chooser: random.Random) -> bytes:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    match chooser.randrange(3):
        case 0:
            return damaged_bytes(copy.SerializeToString(), chooser)
        case 1:
            damaged_node(copy, chooser)
        case _:
            damaged_constant(copy, chooser)
    return copy.SerializeToString()


def compile_damaged(directory: Path, seed: int) -> str:
    chooser = random.Random(seed)
    write_submission(directory, MODELS, tiny_document(SHAPE))
    name = chooser.choice(["vision", "decoder"])
    (directory / f"{name}.onnx").write_bytes(damaged(MODELS[name], chooser))
    try:
        lower_pipeline(import_pipeline(directory))
    except UserModelError as error:
        return type(error).__name__
    return "compiled"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_it_lets_only_typed_errors_out(tmp_path: Path) -> None:
    outcomes = {compile_damaged(tmp_path, seed) for seed in range(16)}
    assert "MalformedModelError" in outcomes


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("part", range(8))
def test_it_lets_only_typed_errors_out_at_length(
    tmp_path: Path, part: int, record_property
) -> None:
    seeds = range(100 + part * 50, 150 + part * 50)
    for outcome, count in sorted(
        Counter(compile_damaged(tmp_path, seed) for seed in seeds).items()
    ):
        record_property(outcome, count)


def normalising(path: Path, scale: tuple[int, ...], shift: tuple[int, ...]) -> Path:
    b = GraphBuilder(5)
    y = b.op("LayerNormalization", "x", b.weight(*scale), b.weight(*shift), axis=-1)
    onnx.save(b.model({"x": ("float32", (1, 2, 8))}, {"y": y}), path)
    return path


@pytest.mark.parametrize(
    ("scale", "shift"),
    [((8,), (1,)), ((1,), (8,)), ((8,), (2, 8)), ((2, 8), (2, 8)), ((8,), (1, 8)), ((8,), ())],
)
def test_it_computes_a_normalisation_whose_vectors_broadcast(
    tmp_path: Path, scale: tuple[int, ...], shift: tuple[int, ...]
) -> None:
    case = GraphCase.of(normalising(tmp_path / "norm.onnx", scale, shift), tmp_path / "out")
    arrays = {"x": np.random.default_rng(1).standard_normal((1, 2, 8)).astype(np.float32)}
    found = case.simulated(case.feeds(arrays))
    ((role, wanted),) = case.wanted(arrays).items()
    assert relative_error(case.array(role, found[role], wanted), wanted) <= 1e-5


@pytest.mark.parametrize("shift", [(4,), (16,), (2, 4)])
def test_it_refuses_a_normalisation_whose_vectors_do_not(
    tmp_path: Path, shift: tuple[int, ...]
) -> None:
    path = normalising(tmp_path / "norm.onnx", (8,), shift)
    with pytest.raises(MalformedModelError, match="LayerNormalization"):
        GraphCase.of(path, tmp_path / "out")
