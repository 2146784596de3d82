"""Shape and fold rules from the ONNX package itself, for operators without a rule of ours.

Shapes come from the operator's own inference, constants from the reference evaluator of the ONNX
project; both see one node at a time, with fixed sizes.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper, shape_inference

from compiler.frontend.values import Array, Known, Node, Runtime, Value, Values

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
