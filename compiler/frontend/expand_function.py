"""Operators that the ONNX standard itself defines by other operators, written out as it says.

The body is the one of the schema in the model's operator set; some bodies depend on the node's
attributes and on the types of its operands. Values inside a body get names of their own.
"""

from typing import Any

import numpy as np
import onnx
from onnx import defs, helper

from compiler.frontend.control_flow import rename_node
from compiler.frontend.writer import Writer


def expand_function(w: Writer) -> None:
    """Write a node out as the body of its schema.

    Raises:
        UnsupportedOperatorError: The schema has no body for these operands.
    """
    schema: Any = defs.get_schema(w.proto.op_type, w.opset, "")
    if schema.has_function:
        body = schema.function_body
    else:
        types = [_type(w, name) for name in w.proto.input]
        found = schema.get_context_dependent_function(w.proto.SerializeToString(), types)
        body = onnx.FunctionProto.FromString(found)
    w.need(bool(body.node), "the standard does not say how it is computed")
    defaults = {k: a.default_value for k, a in schema.attributes.items() if a.default_value.type}
    given = {**defaults, **{a.name: a for a in w.proto.attribute}}
    names = dict.fromkeys((*body.input, *body.output), "")
    names |= dict(zip(body.input, w.proto.input, strict=False))
    names |= {n: made or w.fresh() for n, made in zip(body.output, w.outputs, strict=False)}
    for node in body.node:
        names |= {n: w.fresh() for n in node.output if n and n not in names}
    w.run([rename_node(_with_attributes(node, given), names, w.label) for node in body.node])


def _type(w: Writer, name: str) -> bytes:
    if not name:
        return b""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(w.dtype(name)))
    proto: bytes = helper.make_tensor_type_proto(kind, w.sizes(name)[0]).SerializeToString()
    return proto


def _with_attributes(node: onnx.NodeProto, given: dict[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """Return a body's node with references to attributes replaced by those of the call."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            copy.attribute.append(attribute)
        elif attribute.ref_attr_name in given:
            copy.attribute.append(given[attribute.ref_attr_name])
            copy.attribute[-1].name = attribute.name
    return copy
