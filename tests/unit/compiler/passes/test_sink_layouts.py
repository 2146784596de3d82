"""Images change their layout as seldom as they can, and no element changes its bits."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from compiler.kernels.program import Op
from tests.factories.graph_runs import GraphCase, relative_error
from tests.factories.image_models import (
    CHANNELS,
    MIDDLES,
    SIDE,
    WIDTH,
    Block,
    between,
    conv,
    detector,
    image_model,
)
from tests.factories.onnx_blocks import GraphBuilder


def cases(
    block: Block, tmp_path: Path, *, images: int = 1, side: int = SIDE
) -> tuple[GraphCase, GraphCase]:
    """Return the block compiled with the pass and without."""
    path = tmp_path / "m.onnx"
    onnx.save(image_model(block, images=images, side=side), path)
    with_it, without = (
        GraphCase.of(path, tmp_path / name, leave_out=left)
        for name, left in (("with", ()), ("without", ("sink-layouts",)))
    )
    return with_it, without


def moved(case: GraphCase) -> tuple[int, int]:
    """Return how many calls move elements, and how many elements they move."""
    module = case.pipeline.module
    calls = [call for call in module.programs[0].calls if call.op is Op.REF_MOVE]
    sizes = [module.buffers[call.outputs[0]] for call in calls]
    return len(calls), sum(size.rows * size.cols for size in sizes)


def require_same_bits(with_it: GraphCase, without: GraphCase, x: np.ndarray) -> None:
    feeds = with_it.feeds({"x": x})
    native = with_it.native(feeds)
    assert native == with_it.simulated(feeds) == without.simulated(feeds)
    (wanted,) = with_it.wanted({"x": x}).values()
    assert relative_error(with_it.array("tensor", native["tensor"], wanted), wanted) <= 2e-6


def picture(images: int = 1, side: int = SIDE) -> np.ndarray:
    shape = (images, CHANNELS, side, side)
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", MIDDLES)
def test_nothing_moves_between_two_convolutions(name: str, tmp_path: Path) -> None:
    with_it, without = cases(between(MIDDLES[name]), tmp_path)
    frames = int(name == "padded")  # a frame of zeros is filled by a call that moves
    assert moved(with_it)[0] == 2 + frames, "one at the input, one at the output"
    assert moved(without)[0] > moved(with_it)[0]
    require_same_bits(with_it, without, picture())


@pytest.mark.parametrize("name", ["squeezed", "written-out", "joined", "linear", "norm"])
def test_several_images_stay_in_rows_too(name: str, tmp_path: Path) -> None:
    with_it, without = cases(between(MIDDLES[name]), tmp_path, images=3)
    assert moved(with_it)[0] == 2
    require_same_bits(with_it, without, picture(3))


def test_a_detector_moves_its_input_and_output_alone(tmp_path: Path) -> None:
    with_it, without = cases(detector, tmp_path, side=16)
    assert moved(with_it) == (2, CHANNELS * 16 * 16 + 16 * 16)
    assert moved(without)[0] >= 20
    require_same_bits(with_it, without, picture(side=16))


def test_it_moves_a_value_once_for_all_its_readers(tmp_path: Path) -> None:
    """Three readers keep channels first, so the value is moved before them, not their results."""

    def block(b: GraphBuilder, x: str) -> str:
        y = conv(b, x, CHANNELS, WIDTH, 3)
        parts = [b.op(kind, y) for kind in ("Tanh", "Sigmoid", "Softplus")]
        pools = [b.op("MaxPool", part, kernel_shape=[2, 2], strides=[2, 2]) for part in parts]
        return b.op("Sum", *pools)

    with_it, without = cases(block, tmp_path)
    assert moved(with_it)[1] == moved(without)[1]
    require_same_bits(with_it, without, picture())


def test_it_moves_where_the_image_is_smaller(tmp_path: Path) -> None:
    """Behind a mean over the picture there are fewer elements than before it."""

    def block(b: GraphBuilder, x: str) -> str:
        y = b.op("HardSwish", conv(b, x, CHANNELS, WIDTH, 3))
        return b.op("ReduceMean", y, b.ints(3), keepdims=1)

    with_it, without = cases(block, tmp_path)
    assert moved(with_it) == (2, CHANNELS * SIDE * SIDE + WIDTH * SIDE)
    require_same_bits(with_it, without, picture())


def test_a_model_without_convolutions_stays_as_it_is(tmp_path: Path) -> None:
    def block(b: GraphBuilder, x: str) -> str:
        return b.op("Tanh", b.op("Mul", x, b.op("GlobalAveragePool", x)))

    with_it, without = cases(block, tmp_path)
    assert with_it.pipeline.module.programs[0].calls == without.pipeline.module.programs[0].calls


def test_lines_stay_in_rows_too(tmp_path: Path) -> None:
    b = GraphBuilder(31)
    shape = {"kernel_shape": [5], "pads": [2, 2]}
    y = b.op("Conv", "x", b.weight(6, 3, 5), b.weight(6), **shape)
    y = b.op("BatchNormalization", b.op("HardSwish", y), *(b.const(np.ones(6)) for _ in range(4)))
    y = b.op("Add", y, b.op("ReduceMean", y, b.ints(2), keepdims=1))
    y = b.op("Concat", b.op("LeakyRelu", y), b.op("Add", y, b.weight(6, 1)), axis=1)
    y = b.op("Pad", y, b.ints(0, 0, 1, 0, 0, 2), mode="edge")
    y = b.op("Conv", y, b.weight(4, 12, 3), kernel_shape=[3], strides=[2])
    path = tmp_path / "m.onnx"
    onnx.save(b.model({"x": ("float32", (2, 3, 24))}, {"y": y}), path)
    with_it = GraphCase.of(path, tmp_path / "with")
    without = GraphCase.of(path, tmp_path / "without", leave_out=("sink-layouts",))
    assert moved(with_it)[0] == 2 < moved(without)[0]
    x = np.random.default_rng(5).standard_normal((2, 3, 24)).astype(np.float32)
    require_same_bits(with_it, without, x)


@pytest.mark.parametrize("perm", [[0, 2, 1], [0, 2, 3, 1]], ids=["line", "plane"])
def test_keys_that_are_transposed_are_no_images(perm: list[int], tmp_path: Path) -> None:
    b, shape = GraphBuilder(31), (1, 4, 6, 8)[: len(perm)]
    keys = b.op("Tanh", b.op("Mul", "x", b.weight(shape[-1])))
    y = b.op("Softmax", b.op("Transpose", b.op("Neg", keys), perm=perm), axis=-1)
    path = tmp_path / "m.onnx"
    onnx.save(b.model({"x": ("float32", shape)}, {"y": y}), path)
    case = GraphCase.of(path, tmp_path / "s")
    assert "sink-layouts: 0" in case.pipeline.notes


@pytest.mark.parametrize("kind", ["softmax", "two-readers", "running-min"])
def test_what_it_cannot_turn_is_computed_as_before(kind: str, tmp_path: Path) -> None:
    def block(b: GraphBuilder, x: str) -> str:
        y = conv(b, x, CHANNELS, WIDTH, 3)
        if kind == "softmax":
            return conv(b, b.op("Softmax", y, axis=1), WIDTH, 2)
        if kind == "two-readers":
            y = b.op("Tanh", y)
            return b.op("Concat", y, b.op("Identity", x), axis=1)
        low = b.op("ReduceMin", x, keepdims=0)
        return conv(b, b.op("Clip", y, low, b.const(2.0)), WIDTH, 2)

    require_same_bits(*cases(block, tmp_path), picture())
