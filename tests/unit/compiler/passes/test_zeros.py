"""Known zeros are zeros, on random graphs and hostile inputs."""

from pathlib import Path

import numpy as np
import pytest
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Region, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.analysis.zeros import zero_masks
from compiler.dialects.dims import Dim
from compiler.dialects.movement import ReshapeOp, TransposeOp
from compiler.dialects.sp import BINARY_KINDS, UNARY_KINDS, BinaryOp, UnaryOp
from compiler.dialects.types import tensor_type
from tests.factories.onnx_models import write_tiny
from tests.factories.onnx_runs import lowered

SHAPE = (3, 4)
HOSTILE = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e38, -1e38, 1e-45], np.float32)

UNARY = {
    "relu": lambda x: np.where(x > 0, x, np.where(np.isnan(x), x, np.float32(0))),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "neg": np.negative,
    "sqrt": np.sqrt,
    "reciprocal": np.reciprocal,
    "exp": np.exp,
    "tanh": np.tanh,
}
BINARY = {"add": np.add, "mul": np.multiply, "sub": np.subtract, "div": np.divide}


def random_function(seed: int) -> tuple[FuncOp, ConstantTable, dict[SSAValue, np.ndarray]]:
    """Build a random function and run it on hostile numbers."""
    rng = np.random.default_rng(seed)
    table = ConstantTable()
    block = Block(arg_types=[tensor_type("float32", SHAPE)] * 2)
    runs = {arg: _hostile(rng) for arg in block.args}
    values = list(block.args)
    for _ in range(12):
        a, b = (values[int(rng.integers(len(values)))] for _ in range(2))
        choice = int(rng.integers(4))
        if choice == 0:
            kind = str(rng.choice(UNARY_KINDS))
            op, result = UnaryOp(a, kind=kind), UNARY[kind](runs[a])
        elif choice == 1:
            factor = _hostile(rng) if rng.random() < 0.3 else rng.standard_normal(SHAPE)
            constant = table.add(factor.astype(np.float32))
            block.add_op(constant)
            runs[constant.result] = factor.astype(np.float32)
            b = constant.result
        if choice in (1, 2):
            kind, act = str(rng.choice(BINARY_KINDS)), str(rng.choice(["none", "relu", "silu"]))
            op, result = BinaryOp(a, b, kind=kind, act=act), BINARY[kind](runs[a], runs[b])
            result = result if act == "none" else UNARY[act](result)
        if choice == 3:
            turn = TransposeOp(a, [1, 0])
            block.add_op(turn)
            op, result = ReshapeOp(turn.result, [Dim(3), Dim(4)]), runs[a].T.reshape(SHAPE)
        block.add_op(op)
        values.append(op.results[0])
        runs[op.results[0]] = np.asarray(result, np.float32)
    block.add_op(ReturnOp(values[-1]))
    func = FuncOp("f", (list(block.arg_types), [values[-1].type]), Region(block))
    return func, table, runs


def _hostile(rng: np.random.Generator) -> np.ndarray:
    plain = rng.standard_normal(SHAPE).astype(np.float32)
    return np.where(rng.random(SHAPE) < 0.4, rng.choice(HOSTILE, SHAPE), plain)


def sources_in_order(func: FuncOp) -> list[SSAValue]:
    found = []
    for op in func.body.block.ops:
        is_unary = isinstance(op, UnaryOp) and op.kind.data == "relu"
        if is_unary or (isinstance(op, BinaryOp) and op.act.data == "relu"):
            found.append(op.results[0])
    return found


@pytest.mark.parametrize("part", range(4))
def test_it_claims_no_zero_that_is_not_one(part: int) -> None:
    claims = 0
    with np.errstate(all="ignore"):
        for seed in range(part * 60, part * 60 + 60):
            func, table, runs = random_function(seed)
            sources = sources_in_order(func)
            for value, masks in zero_masks(func, table).items():
                for mask in masks:
                    claims += 1
                    dead = runs[sources[mask]].reshape(-1) == 0
                    assert (runs[value].reshape(-1)[dead] == 0).all(), f"seed {seed}"
    assert claims > 60


def test_it_writes_masks_into_types(tmp_path: Path) -> None:
    text = lowered(write_tiny(tmp_path)).ir_text["programs"]
    assert 'levels ["dense", "compressed"], block [], masks [0], dynamic' in text
