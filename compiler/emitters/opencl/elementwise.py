"""Launches of operations on rows and elements: binary, unary, softmax, norms, rotation, images."""

from typing import Final

from compiler.contract.operations import Op
from compiler.contract.plan import PlanCall
from compiler.emitters.opencl.frame import Frame
from compiler.emitters.opencl.products import norm_rows

BINARY: Final = (Op.ADD, Op.MUL, Op.SUB, Op.DIV)


def binary(f: Frame, call: PlanCall) -> None:
    """Launch ADD, MUL, SUB or DIV."""
    a, second, y = f.required(call, 0), f.input(call, 1), f.output(call)
    weight = f.weight(call, 0)
    if second is not None:
        at, cols = second.at, second.cols
        is_dynamic = f.plan.buffers[call.inputs[1]].dynamic
        many = is_dynamic or second.rows > 1
    else:
        assert weight is not None
        constant = f.plan.weights[weight]
        at, cols, many = f.constant(weight), constant.cols, constant.rows > 1
    size = (-(-a.cols // 8), a.rows)
    name = f"run_{call.op.name.lower()}"
    act = int(call.params["act"])
    f.device.launch(name, size, a.at, at, y.at, a.cols, cols, cols if many else 0, act)


def unary(f: Frame, call: PlanCall) -> None:
    """Launch UNARY."""
    x, y = f.required(call, 0), f.output(call)
    n = x.rows * x.cols
    f.device.launch("run_unary", (-(-n // 8),), x.at, y.at, n, int(call.params["kind"]))


def softmax(f: Frame, call: PlanCall) -> None:
    """Launch SOFTMAX."""
    x = f.required(call, 0)
    f.device.launch("run_softmax", (x.rows,), x.at, f.output(call).at, x.cols)


def image(f: Frame, call: PlanCall) -> None:
    """Launch IMAGE_U8."""
    x, params = f.required(call, 0), call.params
    scale = float(params["divide"]), float(params["subtract"])
    f.device.launch("run_image_u8", (x.cols,), x.at, f.output(call).at, *scale)


def argmax(f: Frame, call: PlanCall) -> None:
    """Launch ARGMAX."""
    x = f.required(call, 0)
    f.device.launch("run_argmax", (1,), x.at, f.output(call).at, x.cols)


def norm(f: Frame, call: PlanCall) -> None:
    """Launch NORM."""
    weights = f.weight(call, 0), f.weight(call, 1)
    kind, eps = int(call.params["kind"]), float(call.params["eps"])
    norm_rows(f, f.required(call, 0), f.output(call).at, weights, kind, eps)


def rope(f: Frame, call: PlanCall) -> None:
    """Launch ROPE."""
    x, positions, y = f.required(call, 0), f.required(call, 1), f.output(call)
    cosines, sines = call.weights[:2]
    f.device.launch(
        "run_rope",
        (x.rows,),
        x.at,
        positions.at,
        y.at,
        f.constant(cosines),
        f.constant(sines),
        f.status,
        x.cols,
        int(call.params["heads"]),
        f.plan.weights[cosines].rows,
    )


def conv2d(f: Frame, call: PlanCall) -> None:
    """Launch CONV2D."""
    x, y, stride = f.required(call, 0), f.output(call), int(call.params["stride"])
    _convolve(f, call, "run_conv2d", (x.cols, y.cols), (stride,))


def conv_depthwise(f: Frame, call: PlanCall) -> None:
    """Launch CONV_DEPTHWISE."""
    down, across = (int(call.params[name]) for name in ("stride", "stride_x"))
    _convolve(f, call, "run_depthwise", (f.output(call).cols,), (down, across or down))


def _convolve(
    f: Frame, call: PlanCall, kernel: str, depths: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Launch a kernel over windows: one work item per channel and pixel of the result."""
    x, y, bias = f.required(call, 0), f.output(call), f.weight(call, 1)
    kh, kw, pad, height, width = (int(call.params[name]) for name in ("kh", "kw", "pad", "H", "W"))
    out_h = (height + 2 * pad - kh) // strides[0] + 1
    out_w = (width + 2 * pad - kw) // strides[-1] + 1
    f.device.launch(
        kernel,
        (y.cols, x.rows // (height * width) * out_h * out_w),
        x.at,
        f.constant(call.weights[0]),
        f.constant(bias),
        y.at,
        *(*depths, kh, kw, *strides, pad, height, width, out_h, out_w),
        int(call.params["act"]),
        bias is not None,
    )
