"""Which rows behind a ReLU are packed, and that the program means the same then."""

import numpy as np
import pytest

from compiler.analysis.packed_points import packed_bytes
from compiler.kernels.program import Module, Op, validate_module
from compiler.quant.packing import Points, choose_packed
from compiler.simulator import Simulator
from tests.factories.modules import ModuleBuilder

FAST = Points(sizes=(0.0, 1e9), reader=(1.6, 1.6), packing=(1.1, 1.1))
"""A device on which reading half of the bytes is worth it."""
WIDTH = 40


def chain(reader: str) -> Module:
    """Return relu(x), then something that reads it, then a norm of it."""
    b = ModuleBuilder(2, 6)
    x, h, y, z = (b.buffer(None, WIDTH) for _ in range(4))
    b.call(Op.UNARY, [x], [h], kind=0)
    match reader:
        case "square":
            b.call(Op.MUL, [h, h], [y], act=0)
        case "scaled":
            b.call(Op.MUL, [h], [y], [b.vector(WIDTH)], act=1)
        case "less":
            b.call(Op.SUB, [h, x], [y], act=0)
        case "second":
            b.call(Op.SUB, [x, h], [y], act=0)
        case _:
            b.call(Op.SOFTMAX, [h], [y])
    b.call(Op.NORM, [h], [z], [b.vector(WIDTH, offset=1.0)], kind=0, eps=1e-5)
    outputs = {"y": y, "z": z} | ({"h": h} if reader == "output" else {})
    b.program("run", {"x": x}, outputs)
    return b.module()


@pytest.mark.parametrize("reader", ["square", "scaled", "less"])
def test_it_packs_rows_that_all_readers_can_spread(reader: str) -> None:
    module = chain(reader)
    packed, (row,) = choose_packed(module, FAST)
    validate_module(packed)
    assert [call.op for call in packed.programs[0].calls] == [Op.PACK, Op.PACKED, Op.PACKED]
    assert (row.readers, row.dense_bytes, row.chosen) == (2, 4 * 6 * WIDTH, True)
    assert row.packed_bytes == packed_bytes(6, WIDTH, 0.5)
    assert row.gain == pytest.approx(3 / (1.1 + 2 / 1.6), abs=1e-3)
    x = np.random.default_rng(0).standard_normal((6, WIDTH)).astype(np.float32)
    found, wanted = (Simulator(m, {}).run("run", {"x": x}) for m in (packed, module))
    assert {role: bytes(value) for role, value in found.items()} == {
        role: bytes(value) for role, value in wanted.items()
    }


@pytest.mark.parametrize("reader", ["second", "other", "output"])
def test_it_leaves_rows_that_others_read(reader: str) -> None:
    module = chain(reader)
    assert choose_packed(module, FAST) == (module, ())


def test_measured_speeds_keep_rows_dense_and_say_so() -> None:
    module = chain("scaled")
    same, (row,) = choose_packed(module)
    assert same is module
    assert not row.chosen
    assert row.gain < 1


def test_half_of_the_elements_are_at_most_six_tenths_of_the_bytes() -> None:
    assert packed_bytes(8, 1024, 0.5) / (8 * 1024 * 4) == 0.53125
