"""Launches of operations on rows and elements: binary, unary, softmax, norms, rotation, images."""

from typing import Final

from compiler.contract.operations import Op
from compiler.contract.plan import PlanCall
from compiler.contract.windows import Window
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
    _convolve(f, call, "run_conv2d", (f.required(call, 0).cols, f.output(call).cols))


def conv_depthwise(f: Frame, call: PlanCall) -> None:
    """Launch CONV_DEPTHWISE."""
    _convolve(f, call, "run_depthwise", (f.output(call).cols,))


def sparse_conv(f: Frame, call: PlanCall) -> None:
    """Launch SPARSE_CONV."""
    x, y, bias, m = f.required(call, 0), f.output(call), f.weight(call, 3), Window.of(call.params)
    out_h, out_w = m.out
    f.device.launch(
        "run_sparse_conv",
        (y.cols, x.rows // (m.height * m.width) * out_h * out_w),
        x.at,
        *(f.constant(call.weights[at]) for at in range(3)),
        f.constant(bias),
        y.at,
        f.status,
        *(f.plan.weights[call.weights[at]].rows for at in (0, 2)),
        *(x.cols, y.cols, m.kh, m.kw, m.down, m.across, m.top, m.left),
        *(m.height, m.width, out_h, out_w),
        int(call.params["act"]),
        bias is not None,
    )


def _convolve(f: Frame, call: PlanCall, kernel: str, depths: tuple[int, ...]) -> None:
    """Launch a kernel over windows: one work item per channel and pixel of the result."""
    x, y, bias = f.required(call, 0), f.output(call), f.weight(call, 1)
    m = Window.of(call.params)
    out_h, out_w = m.out
    f.device.launch(
        kernel,
        (y.cols, x.rows // (m.height * m.width) * out_h * out_w),
        x.at,
        f.constant(call.weights[0]),
        f.constant(bias),
        y.at,
        *(*depths, m.kh, m.kw, m.down, m.across, m.top, m.left, m.height, m.width, out_h, out_w),
        int(call.params["act"]),
        bias is not None,
    )
