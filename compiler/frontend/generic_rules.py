"""Shape and fold rules from the ONNX package itself, for operators without a rule of ours.

Shapes come from the operator's own inference, constants from the reference evaluator of the ONNX
project; both see one node at a time, with fixed sizes.
"""

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper, shape_inference

from compiler.contract.operations import RECURRENT_GATES, RecurrentKind
from compiler.frontend.values import Array, Known, Node, Runtime, Value, Values, operand

LATEST: Final = 26
IR_VERSION: Final = 10
MAX_FOLDED: Final = 1 << 22


def inferred(node: Node, values: Values) -> list[Runtime]:
    """Return result shapes and types by the operator's own shape inference.

    Raises:
        ValueError: The operands do not fit the operator, or a size depends on run-time elements.
    """
    version = node.opset or LATEST
    schema = defs.get_schema(node.op, version, "")
    proto = _proto(node, values)
    present = [(f"i{at}", value) for at, value in enumerate(values) if value is not None]
    kinds = {name: _type(value) for name, value in present}
    data = {
        name: numpy_helper.from_array(np.asarray(value.array), name)
        for name, value in present
        if isinstance(value, Known) and value.array.size <= MAX_FOLDED
    }
    opsets = [helper.make_opsetid("", version)]
    try:
        found = shape_inference.infer_node_outputs(
            schema, proto, kinds, data, opset_imports=opsets, ir_version=IR_VERSION
        )
    except (shape_inference.InferenceError, RuntimeError) as error:
        raise ValueError(str(error).strip().splitlines()[-1]) from error
    return [_result(found, f"o{at}", name) for at, name in enumerate(node.outputs)]


def integer_product(node: Node, values: Values) -> list[Runtime]:
    """Return the result of MatMulInteger, whose zero points must be as its definition says.

    Raises:
        ValueError: A zero point has neither one element nor one per row of A or column of B.
    """
    for side, axis in ((0, -2), (1, -1)):
        point = values[side + 2] if len(values) > side + 2 else None
        matrix = operand(values, side).shape
        if point is None or math.prod(point.shape) == 1:
            continue
        if len(matrix) == 1:
            raise ValueError(f"zero point {point.shape} of a vector {matrix}")
        count = matrix[axis]
        whole = tuple(1 if at == -3 - axis else n for at, n in enumerate(matrix, -len(matrix)))
        allowed = [(count,), whole]
        if point.shape not in allowed:
            texts = " or ".join(map(str, allowed))
            raise ValueError(f"zero point {point.shape} of {matrix}; it may be () or {texts}")
    return inferred(node, values)


def recurrent(node: Node, values: Values) -> list[Runtime]:
    """Return the results of LSTM, GRU or RNN, whose weights must have the size it names.

    Raises:
        ValueError: W (D, G*H, I), R (D, G*H, H) or B (D, 2*G*H) contradict `hidden_size` H, the
            directions D or the input.
    """
    width, hidden = operand(values, 0).shape[-1], node.attrs["hidden_size"]
    hidden = hidden or operand(values, 2).shape[-1]
    directions = 1 + (node.attrs["direction"] == "bidirectional")
    rows = RECURRENT_GATES[RecurrentKind[node.op]] * hidden
    wanted = ((rows, width), (rows, hidden), (2 * rows,))
    for name, value, sizes in zip("WRB", values[1:4], wanted, strict=False):
        right = (directions, *sizes)
        if value is not None and value.shape != right:
            text = f"with hidden_size {hidden} it must be {right}"
            raise ValueError(f"{name} is {value.shape}; {text}")
    return inferred(node, values)


def evaluated(node: Node, values: Values) -> list[Array]:
    """Return results of a node whose operands are known.

    Raises:
        ValueError: The evaluator refuses it.
    """
    from onnx.reference import ReferenceEvaluator  # a heavy import that most models never need

    arrays = {f"i{at}": v.array for at, v in enumerate(values) if isinstance(v, Known)}
    proto = _proto(node, values)
    inputs = [helper.make_value_info(name, _type(Known(a))) for name, a in arrays.items()]
    outputs = [onnx.ValueInfoProto(name=name) for name in proto.output if name]
    graph = helper.make_graph([proto], "one", inputs, outputs)
    opsets = [helper.make_opsetid("", node.opset or LATEST)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    try:
        with np.errstate(all="ignore"):
            made = ReferenceEvaluator(model).run(None, arrays)
    except Exception as error:
        raise ValueError(f"cannot be evaluated: {error}") from error
    results = iter(made)
    return [np.asarray(next(results)) if name else np.zeros(()) for name in node.outputs]


def truth(rule: Callable[[Node, Values], list[Runtime]]) -> Callable[[Node, Values], list[Runtime]]:
    """Return a shape rule whose results are truth values."""

    def shapes(node: Node, values: Values) -> list[Runtime]:
        return [Runtime(result.shape, "bool") for result in rule(node, values)]

    return shapes


def _proto(node: Node, values: Values) -> onnx.NodeProto:
    names = [f"i{at}" if value is not None else "" for at, value in enumerate(values)]
    outputs = [f"o{at}" if name else "" for at, name in enumerate(node.outputs)]
    attrs = {key: value for key, value in node.given.items() if value is not None}
    return helper.make_node(node.op, names, outputs, **attrs)


def _type(value: Value) -> onnx.TypeProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(value.dtype))
    return helper.make_tensor_type_proto(kind, value.shape)


def _result(found: dict[str, onnx.TypeProto], key: str, name: str) -> Runtime:
    if not name:
        return Runtime((), "float32")
    tensor = found[key].tensor_type if key in found else onnx.TypeProto.Tensor()
    sizes = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
    if not tensor.HasField("shape") or min(sizes, default=0) < 0:
        raise ValueError("the size of its result depends on elements known only at run time")
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)).name
    return Runtime(tuple(sizes), dtype)
