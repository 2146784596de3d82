"""Blocks whose products a file rounds to bytes at run time, as dynamic quantisers write them."""

from dataclasses import dataclass

import numpy as np

from tests.factories.onnx_blocks import Block, GraphBuilder


@dataclass(frozen=True)
class Bytes:
    """How weights (cols, rows) are stored and where the steps are multiplied.

    Attributes:
        dtype: Of the weights.
        zero: Their zero point; None leaves it out.
        per_column: One step per column of the weights, otherwise one for all.
        step_shape: Axes that the steps are written with; None: as many as they need.
        order: `together` multiplies the steps first, `rows` and `weights` one after the other.
    """

    cols: int = 32
    rows: int = 48
    dtype: str = "int8"
    zero: int | None = 0
    per_column: bool = True
    step_shape: tuple[int, ...] | None = None
    order: str = "together"


def product(b: GraphBuilder, x: str, how: Bytes) -> str:
    """Write one dynamically quantised product without a bias."""
    limits = np.iinfo(how.dtype)
    codes = b.rng.integers(limits.min, limits.max + 1, (how.cols, how.rows))
    shape = (how.rows if how.per_column else ()) if how.step_shape is None else how.step_shape
    steps = b.rng.uniform(0.001, 0.003, shape)
    quantised, step, zero = b.ops("DynamicQuantizeLinear", x, count=3)
    operands = [quantised, b.const(codes, how.dtype), zero]
    operands += [] if how.zero is None else [b.const(how.zero, how.dtype)]
    sums = b.op("Cast", b.op("MatMulInteger", *operands), to=1)
    weight_step = b.const(steps)
    if how.order == "together":
        return b.op("Mul", sums, b.op("Mul", step, weight_step))
    first, second = (step, weight_step) if how.order == "rows" else (weight_step, step)
    return b.op("Mul", b.op("Mul", sums, first), second)


def int8_block(how: Bytes = Bytes()) -> Block:
    """Return relu(product + bias)."""

    def block(b: GraphBuilder, x: str) -> str:
        return b.op("Relu", b.op("Add", product(b, x, how), b.weight(how.rows)))

    return block


@dataclass(frozen=True)
class Codes:
    """A product between bytes, `QLinearMatMul`, between a QuantizeLinear and its reverse.

    Attributes:
        dtype: Of activations and weights.
        zero: Zero point of the activations.
        step: What one code of them stands for.
        per_column: One step and one zero per column of the weights.
    """

    dtype: str = "uint8"
    zero: int = 128
    step: float = 0.04
    per_column: bool = False
    cols: int = 40
    rows: int = 48


def static_block(how: Codes) -> Block:
    """Return the product as a static quantiser writes it; weights may have any code."""

    def block(b: GraphBuilder, x: str) -> str:
        step, zero = b.const(how.step), b.const(how.zero, how.dtype)
        low = int(np.iinfo(how.dtype).min)
        y_step, y_zero = b.const(0.05), b.const(low + 121, how.dtype)
        columns = (how.rows,) if how.per_column else ()
        weights = [
            b.const(low + b.rng.integers(0, 256, (how.cols, how.rows)), how.dtype),
            b.const(b.rng.uniform(0.005, 0.02, columns)),
            b.const(low + b.rng.integers(100, 150, columns), how.dtype),
        ]
        bytes_of_x = b.op("QuantizeLinear", x, step, zero)
        made = b.op("QLinearMatMul", bytes_of_x, step, zero, *weights, y_step, y_zero)
        return b.op("DequantizeLinear", made, y_step, y_zero)

    return block
