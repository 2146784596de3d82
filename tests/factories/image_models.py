"""Convolutional ONNX models of images (N, C, H, W) and lines (N, C, W)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx

from compiler.frontend.describe import write_submission
from tests.factories.onnx_blocks import GraphBuilder

Block = Callable[[GraphBuilder, str], str]
SIDE = 8
CHANNELS = 3
WIDTH = 6


def image_model(
    block: Block, *, images: int = 1, side: int = SIDE, channels: int = CHANNELS
) -> onnx.ModelProto:
    """Return x (images, channels, side, side) -> y of a block."""
    b = GraphBuilder(31)
    return b.model({"x": ("float32", (images, channels, side, side))}, {"y": block(b, "x")})


def write_image_block(directory: Path, block: Block) -> Path:
    """Write a block of one image as a submission; return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    onnx.save(image_model(block), directory / "image.onnx")
    write_submission(directory / "image.onnx", directory / "submission", {}, {})
    return directory / "submission"


def conv(
    b: GraphBuilder,
    x: str,
    channels: int,
    filters: int,
    kernel: int = 1,
    *,
    stride: int = 1,
    depthwise: bool = False,
) -> str:
    """A square convolution that keeps the size at stride one."""
    weight = b.weight(filters, 1 if depthwise else channels, kernel, kernel)
    window = {"kernel_shape": [kernel] * 2, "pads": [kernel // 2] * 4, "strides": [stride] * 2}
    groups = {"group": channels} if depthwise else {}
    return b.op("Conv", x, weight, b.weight(filters), **window, **groups)


def squeezed(b: GraphBuilder, x: str, width: int) -> str:
    """Squeeze and excite: every channel times what its mean says."""
    h = b.op("Relu", conv(b, b.op("GlobalAveragePool", x), width, 2))
    return b.op("Mul", x, b.op("HardSigmoid", conv(b, h, 2, width), alpha=1 / 6, beta=0.5))


def hard_swish(b: GraphBuilder, x: str) -> str:
    """HardSwish as older exporters write it out."""
    inner = b.op("Clip", b.op("Add", x, b.const(3.0)), b.const(0.0), b.const(6.0))
    return b.op("Div", b.op("Mul", x, inner), b.const(6.0))


def inverted(b: GraphBuilder, x: str, width: int, stride: int = 1) -> str:
    """A block of MobileNetV3: wider, depthwise, squeezed, narrower, plus what came in."""
    h = b.op("HardSwish", conv(b, x, width, 2 * width))
    h = hard_swish(b, conv(b, h, 2 * width, 2 * width, 5, stride=stride, depthwise=True))
    h = conv(b, squeezed(b, h, 2 * width), 2 * width, width)
    return h if stride > 1 else b.op("Add", x, h)


def larger(b: GraphBuilder, x: str, factor: int, mode: str = "nearest") -> str:
    scales = b.const([1, 1, factor, factor])
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return b.op("Resize", x, "", scales, mode=mode, **how)


def detector(b: GraphBuilder, x: str) -> str:
    """What PP-OCR's detector is made of: MobileNetV3, a pyramid of features, a joined head."""
    fine = b.op("HardSwish", conv(b, x, CHANNELS, WIDTH, 3, stride=2))
    fine = inverted(b, fine, WIDTH)
    coarse = inverted(b, inverted(b, fine, WIDTH, stride=2), WIDTH)
    low = conv(b, coarse, WIDTH, WIDTH)
    high = b.op("Add", conv(b, fine, WIDTH, WIDTH), larger(b, low, 2))
    parts = [larger(b, squeezed(b, low, WIDTH), 2, "linear"), squeezed(b, high, WIDTH)]
    head = b.op("Relu", conv(b, b.op("Concat", *parts, axis=1), 2 * WIDTH, WIDTH, 3))
    return b.op("Sigmoid", larger(b, conv(b, head, WIDTH, 1, 3), 2))


def between(middle: Block) -> Block:
    """Return a block with `middle`, over WIDTH channels, between two convolutions."""

    def block(b: GraphBuilder, x: str) -> str:
        y = middle(b, conv(b, x, CHANNELS, WIDTH, 3))
        return conv(b, y, WIDTH, 4)

    return block


def _norm(b: GraphBuilder, x: str) -> str:
    """A batch norm that a second reader keeps from being folded."""
    positive = b.const(np.arange(1, WIDTH + 1))
    y = b.op("BatchNormalization", x, b.weight(WIDTH), b.weight(WIDTH), b.weight(WIDTH), positive)
    return b.op("Add", x, y)


def _with_plane(b: GraphBuilder, x: str) -> str:
    plane = b.op("ReduceMax", x, b.ints(1), keepdims=1)
    return b.op("Mul", x, b.op("Sigmoid", plane))


def _joined(b: GraphBuilder, x: str) -> str:
    first = b.op("Slice", x, b.ints(0), b.ints(WIDTH // 2), b.ints(1))
    second = b.op("Slice", x, b.ints(WIDTH // 2), b.ints(WIDTH), b.ints(1))
    return b.op("Concat", b.op("Tanh", second), first, axis=1)


def _stacked(b: GraphBuilder, x: str) -> str:
    """Rows of pixels cut off and put on the other side."""
    rest = b.op("Slice", x, b.ints(2), b.ints(SIDE), b.ints(2))
    return b.op("Concat", rest, b.op("Slice", x, b.ints(0), b.ints(2), b.ints(2)), axis=2)


def _padded(b: GraphBuilder, x: str, mode: str) -> str:
    return b.op("Pad", x, b.ints(0, 0, 1, 2, 0, 0, 0, 3), mode=mode)


MIDDLES: dict[str, Block] = {
    "hard-swish": lambda b, x: b.op("HardSwish", x),
    "written-out": hard_swish,
    "leaky": lambda b, x: b.op("LeakyRelu", x, alpha=0.1),
    "prelu": lambda b, x: b.op("PRelu", x, b.weight(WIDTH, 1, 1)),
    "power": lambda b, x: b.op("Pow", b.op("Abs", x), b.const(1.5)),
    "greatest": lambda b, x: b.op("Max", x, b.weight(1, WIDTH, 1, 1), b.op("Neg", x)),
    "add-plane": lambda b, x: b.op("Add", x, b.weight(SIDE, SIDE)),
    "subtract-from": lambda b, x: b.op("Sub", b.weight(WIDTH, 1, 1), x),
    "chosen": lambda b, x: b.op("Where", b.op("Greater", x, b.const(0.2)), x, b.const(0.1)),
    "norm": _norm,
    "squeezed": lambda b, x: squeezed(b, x, WIDTH),
    "times-plane": _with_plane,
    "mean-of-rows": lambda b, x: b.op("Sub", x, b.op("ReduceMean", x, b.ints(2), keepdims=1)),
    "all": lambda b, x: b.op("Div", x, b.op("ReduceL2", x, b.ints(1, 2, 3), keepdims=1)),
    "global-max": lambda b, x: b.op("Sub", x, b.op("GlobalMaxPool", x)),
    "nearest": lambda b, x: larger(b, x, 2),
    "linear": lambda b, x: larger(b, x, 2, "linear"),
    "joined": _joined,
    "stacked": _stacked,
    "padded": lambda b, x: _padded(b, x, "constant"),
    "reflected": lambda b, x: _padded(b, x, "reflect"),
}
"""What may stand between convolutions without a move, by name."""
