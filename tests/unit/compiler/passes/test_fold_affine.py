"""What follows a product per channel becomes part of it: same numbers, fewer calls."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.factories.graph_runs import GraphCase, relative_error
from tests.factories.onnx_blocks import GraphBuilder

TOLERANCE = 1e-5
IMAGE, ROWS = (1, 4, 6, 5), (7, 12)
Build = Callable[[GraphBuilder, str], str]


def batch_norm(b: GraphBuilder, x: str, channels: int, **attrs: float) -> str:
    variance = b.const(0.1 + np.abs(b.rng.standard_normal(channels)))
    vectors = (b.weight(channels), b.weight(channels), b.weight(channels), variance)
    return b.op("BatchNormalization", x, *vectors, **attrs)


def per_channel(b: GraphBuilder, channels: int, *, away_from_zero: bool = False) -> str:
    values = b.rng.standard_normal((channels, 1, 1))
    return b.const(np.sign(values) + values if away_from_zero else values)


def conv(b: GraphBuilder, x: str, **attrs: object) -> str:
    return b.op("Conv", x, b.weight(6, 4, 3, 3), b.weight(6), pads=[1, 1, 1, 1], **attrs)


def plain_conv(b: GraphBuilder, x: str) -> str:
    return b.op("Relu", batch_norm(b, conv(b, x), 6, epsilon=1e-3))


def unbiased_conv(b: GraphBuilder, x: str) -> str:
    return batch_norm(b, b.op("Conv", x, b.weight(6, 4, 1, 1)), 6)


def grouped_conv(b: GraphBuilder, x: str) -> str:
    return batch_norm(b, b.op("Conv", x, b.weight(8, 2, 3, 3), group=2), 8)


def transposed_conv(b: GraphBuilder, x: str) -> str:
    return batch_norm(b, b.op("ConvTranspose", x, b.weight(4, 6, 2, 2), strides=[2, 2]), 6)


def grouped_transposed_conv(b: GraphBuilder, x: str) -> str:
    y = b.op("ConvTranspose", x, b.weight(4, 3, 2, 2), b.weight(6), group=2, strides=[2, 2])
    return batch_norm(b, y, 6)


def chain(b: GraphBuilder, x: str) -> str:
    y = b.op("Add", per_channel(b, 6), conv(b, x))
    y = b.op("Div", batch_norm(b, y, 6), per_channel(b, 6, away_from_zero=True))
    return b.op("Sub", b.op("Mul", y, b.const(1.5)), b.const([[[0.25]]]))


def matrix(b: GraphBuilder, x: str) -> str:
    return batch_norm(b, b.op("MatMul", x, b.weight(12, 8)), 8)


def gemm(b: GraphBuilder, x: str) -> str:
    y = b.op("Gemm", x, b.weight(8, 12), b.weight(8), alpha=0.5, beta=2.0, transB=1)
    return batch_norm(b, y, 8)


FOLDED: dict[str, tuple[Build, tuple[int, ...], int]] = {
    "conv": (plain_conv, IMAGE, 2),
    "conv without bias": (unbiased_conv, IMAGE, 1),
    "grouped conv": (grouped_conv, IMAGE, 2),
    "transposed conv": (transposed_conv, IMAGE, 2),
    "grouped transposed conv": (grouped_transposed_conv, IMAGE, 2),
    "chain": (chain, IMAGE, 5),
    "matrix": (matrix, ROWS, 2),
    "gemm": (gemm, ROWS, 2),
}
"""By name: the graph, the shape of its input, and the least number of calls that it saves."""


def read_twice(b: GraphBuilder, x: str) -> str:
    y = conv(b, x)
    return b.op("Add", batch_norm(b, y, 6), y)


def before_the_product(b: GraphBuilder, x: str) -> str:
    return conv(b, batch_norm(b, x, 4))


def per_element(b: GraphBuilder, x: str) -> str:
    return b.op("Add", conv(b, x), b.weight(1, 1, 6, 5))


def wider(b: GraphBuilder, x: str) -> str:
    return b.op("Mul", b.op("Conv", x, b.weight(1, 4, 1, 1)), per_channel(b, 3))


def reversed_division(b: GraphBuilder, x: str) -> str:
    positive = b.op("Conv", b.op("Exp", x), b.const(np.ones((6, 4, 1, 1))))
    return b.op("Div", per_channel(b, 6), positive)


def computed_weight(b: GraphBuilder, x: str) -> str:
    weight = b.op("Reshape", b.op("ReduceMean", x, b.ints(0, 2, 3), keepdims=0), b.ints(1, 4, 1, 1))
    return batch_norm(b, b.op("Conv", x, weight), 1)


def overflowing(b: GraphBuilder, x: str) -> str:
    y = b.op("Conv", b.op("Mul", x, b.const(1e-35)), b.const(np.full((6, 4, 1, 1), 1e30)))
    return b.op("Mul", y, b.const(1e10))


KEPT = {
    "read twice": (read_twice, "BatchNormalization"),
    "before the product": (before_the_product, "BatchNormalization"),
    "per element": (per_element, "Add"),
    "wider than the product": (wider, "Mul"),
    "divided by the product": (reversed_division, "Div"),
    "weight computed": (computed_weight, "BatchNormalization"),
}


NAMED = ("sink-layouts",)
"""Left out, so that a batch norm keeps its name."""


def saved(build: Build, shape: tuple[int, ...], folder: Path) -> Path:
    b = GraphBuilder(5)
    y = build(b, "x")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(b.model({"x": ("float32", shape)}, {"y": y}), path)
    return path


def worst(case: GraphCase, shape: tuple[int, ...]) -> float:
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    found = case.simulated(case.feeds({"x": x}))
    errors = [
        relative_error(case.array(role, found[role], value), value)
        for role, value in case.wanted({"x": x}).items()
    ]
    return max(errors)


def calls(case: GraphCase) -> int:
    return len(case.pipeline.module.programs[0].calls)


@pytest.mark.parametrize("name", FOLDED)
def test_it_computes_what_the_file_says_in_fewer_calls(name: str, tmp_path: Path) -> None:
    build, shape, fewer = FOLDED[name]
    path = saved(build, shape, tmp_path)
    folded = GraphCase.of(path, tmp_path / "folded", leave_out=NAMED)
    plain = GraphCase.of(path, tmp_path / "plain", leave_out=(*NAMED, "fold-affine"))
    assert calls(folded) <= calls(plain) - fewer
    assert "BatchNormalization" not in folded.pipeline.ir_text["raised"]
    assert "BatchNormalization" in plain.pipeline.ir_text["raised"]
    assert worst(folded, shape) < TOLERANCE
    assert worst(plain, shape) < TOLERANCE


@pytest.mark.parametrize("name", KEPT)
def test_it_leaves_what_is_not_part_of_a_product(name: str, tmp_path: Path) -> None:
    build, kind = KEPT[name]
    case = GraphCase.of(saved(build, IMAGE, tmp_path), tmp_path / "s", leave_out=NAMED)
    assert "fold-affine: 0" in case.pipeline.notes
    if kind == "BatchNormalization":
        assert kind in case.pipeline.ir_text["raised"]
    assert worst(case, IMAGE) < TOLERANCE


def test_it_does_not_fold_into_numbers_that_do_not_fit(tmp_path: Path) -> None:
    """ONNX Runtime folds here, and answers NaN: the answer is compared with f64."""
    case = GraphCase.of(saved(overflowing, IMAGE, tmp_path), tmp_path / "s")
    assert "fold-affine: 0" in case.pipeline.notes
    x = np.random.default_rng(3).standard_normal(IMAGE).astype(np.float32)
    (found,) = case.simulated(case.feeds({"x": x})).values()
    wanted = 1e5 * np.broadcast_to(x.astype(np.float64).sum(1, keepdims=True), (1, 6, 6, 5))
    made = np.frombuffer(found, "<f4").reshape(wanted.shape)
    assert relative_error(made, wanted) < TOLERANCE


def test_the_folded_product_stands_for_all_of_it(tmp_path: Path) -> None:
    case = GraphCase.of(saved(plain_conv, IMAGE, tmp_path), tmp_path / "s")
    found = case.pipeline.provenance
    at = next(
        n for n, call in enumerate(case.pipeline.module.programs[0].calls) if "CONV" in call.op.name
    )
    kinds = {found.nodes[number].operator for number in found.calls["forward"][at]}
    assert kinds >= {"Conv", "BatchNormalization", "Relu"}
