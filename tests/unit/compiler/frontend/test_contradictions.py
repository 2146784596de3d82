"""Operands that contradict an attribute or each other: refused by the name of their node."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compiler.dialects.text import print_module
from compiler.errors import MalformedModelError
from compiler.frontend import import_pipeline
from tests.factories.onnx_blocks import GraphBuilder
from tests.factories.onnx_models import write_block

WIDTH, HIDDEN = 32, 48
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def imported(directory: Path, block: Callable[[GraphBuilder, str], str]) -> str:
    return print_module(import_pipeline(write_block(directory, block, width=WIDTH)).module)


def cells(kind: str, *, bias: int = 2, **attrs: int | str) -> Callable[[GraphBuilder, str], str]:
    def block(b: GraphBuilder, x: str) -> str:
        rows = GATES[kind] * HIDDEN
        shapes = ((1, rows, WIDTH), (1, rows, HIDDEN), (1, bias * rows))
        weights = [b.const(np.ones(shape)) for shape in shapes]
        return b.op("Squeeze", b.op(kind, x, *weights, **attrs), b.ints(1))

    return block


def integers(
    shape: tuple[int, ...], side: str, weight: tuple[int, ...] = (WIDTH, HIDDEN)
) -> Callable[[GraphBuilder, str], str]:
    def block(b: GraphBuilder, x: str) -> str:
        quantised, _, zero = b.ops("DynamicQuantizeLinear", x, count=3)
        points = [zero, b.const(np.zeros(shape), "int8")]
        if side == "a":
            points = [b.const(np.zeros(shape), "uint8")]
        sums = b.op("MatMulInteger", quantised, b.const(np.ones(weight), "int8"), *points)
        return b.op("Cast", sums, to=1)

    return block


@pytest.mark.parametrize("kind", GATES)
def test_a_hidden_size_must_be_that_of_the_weights(tmp_path: Path, kind: str) -> None:
    assert kind in imported(tmp_path / "right", cells(kind, hidden_size=HIDDEN))
    rows = GATES[kind]
    message = rf"operator {kind} \(node node_{kind}_0\): W is \(1, {rows * HIDDEN}, {WIDTH}\); "
    with pytest.raises(MalformedModelError, match=message + "with hidden_size 50"):
        imported(tmp_path / "wrong", cells(kind, hidden_size=50))


@pytest.mark.parametrize("kind", GATES)
def test_directions_and_biases_must_be_those_of_the_weights(tmp_path: Path, kind: str) -> None:
    both = cells(kind, hidden_size=HIDDEN, direction="bidirectional")
    with pytest.raises(MalformedModelError, match=rf"{kind} .*must be \(2, "):
        imported(tmp_path / "both", both)
    with pytest.raises(MalformedModelError, match=rf"{kind} .*: B is "):
        imported(tmp_path / "bias", cells(kind, bias=1, hidden_size=HIDDEN))


@pytest.mark.parametrize(
    ("shape", "weight"),
    [
        ((), (WIDTH, HIDDEN)),
        ((1,), (WIDTH, HIDDEN)),
        ((1, 1), (WIDTH, HIDDEN)),
        ((HIDDEN,), (WIDTH, HIDDEN)),
        ((1, HIDDEN), (WIDTH, HIDDEN)),
        ((1, 1, HIDDEN), (1, WIDTH, HIDDEN)),
    ],
)
def test_zero_points_per_column_are_taken(
    tmp_path: Path, shape: tuple[int, ...], weight: tuple[int, ...]
) -> None:
    assert "MatMulInteger" in imported(tmp_path, integers(shape, "b", weight))


@pytest.mark.parametrize(
    ("shape", "side"),
    [((WIDTH, 1), "b"), ((WIDTH,), "b"), ((WIDTH, HIDDEN), "b"), ((WIDTH,), "a")],
)
def test_other_zero_points_are_refused(tmp_path: Path, shape: tuple[int, ...], side: str) -> None:
    with pytest.raises(MalformedModelError, match=r"node_MatMulInteger_1\): zero point \("):
        imported(tmp_path, integers(shape, side))
