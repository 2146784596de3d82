"""Shapes of a component's inputs, by role: batch is 1, `T` and `P` are the run-time lengths."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import onnx

from compiler.dialects.dims import Dim, static, symbol_dim
from compiler.errors import MalformedModelError
from compiler.frontend.shape_rules import widened
from compiler.passes.pipeline_spec import Port

BATCH: Final = static(1)
TOKENS: Final = symbol_dim("T")
POSITION_ROWS: Final = static(3)
"""Time, height and width, where a model tells them apart."""
PAST: Final = symbol_dim("P")
ANY: Final = None

Template = tuple[Dim | None, ...]

TEMPLATES: Final[Mapping[str, tuple[Template, ...]]] = MappingProxyType(
    {
        "image": ((BATCH, ANY, ANY, ANY),),
        "token_ids": ((BATCH, TOKENS), (TOKENS,)),
        "embeds": ((BATCH, TOKENS, ANY), (TOKENS, ANY)),
        "positions": ((BATCH, TOKENS), (TOKENS,), (POSITION_ROWS, BATCH, TOKENS)),
        "causal_mask": ((BATCH, BATCH, TOKENS, PAST + TOKENS), (TOKENS, PAST + TOKENS)),
        "past_key": ((ANY, BATCH, ANY, PAST, ANY), (BATCH, ANY, PAST, ANY)),
        "past_value": ((ANY, BATCH, ANY, PAST, ANY), (BATCH, ANY, PAST, ANY)),
        "tensor": ((BATCH, TOKENS, ANY), (TOKENS, ANY)),
    }
)
PINNED_TYPES: Final = frozenset({"float32", "int64", "int32", "int8", "uint8", "bool"})
_INTEGER_ROLES: Final = frozenset({"token_ids", "positions"})


def input_type(port: Port, info: onnx.ValueInfoProto, component: str) -> tuple[str, list[Dim]]:
    """Return element type and shape of an input; symbolic axes get their meaning from the role.

    Raises:
        MalformedModelError: Rank, a fixed size or the element type does not fit the role.
    """
    where = f"input {port.name!r} of {component} (role {port.role})"
    tensor = info.type.tensor_type
    if not info.type.HasField("tensor_type") or not tensor.HasField("shape"):
        raise MalformedModelError(f"{where} is not a tensor with a shape")
    dtype = _dtype(tensor.elem_type, where)
    allowed = ("int64", "int32") if port.role in _INTEGER_ROLES else ("float32",)
    if dtype not in allowed:
        raise _wrong_type(where, dtype, allowed)
    sizes = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
    fitting = [t for t in TEMPLATES[port.role] if len(t) == len(sizes)]
    if not fitting:
        ranks = " or ".join(str(len(t)) for t in TEMPLATES[port.role])
        raise MalformedModelError(f"{where} has {len(sizes)} axes, expected {ranks}")
    return dtype, _bind(fitting[0], sizes, where)


def pinned_type(
    port: Port, sizes: Sequence[int], info: onnx.ValueInfoProto, component: str
) -> tuple[str, list[Dim]]:
    """Return element type and shape of an input whose sizes `pipeline.json` gives.

    Raises:
        MalformedModelError: They contradict the file, or the element type has no kernel.
    """
    where = f"input {port.name!r} of {component} (role {port.role})"
    tensor = info.type.tensor_type
    dtype = _dtype(tensor.elem_type, where)
    if dtype not in PINNED_TYPES:
        raise _wrong_type(where, dtype, sorted(PINNED_TYPES))
    declared = [d.dim_value if d.dim_value > 0 else None for d in tensor.shape.dim]
    if tensor.HasField("shape") and len(declared) != len(sizes):
        raise MalformedModelError(f"{where} has {len(declared)} axes, pinned are {len(sizes)}")
    for axis, (size, fixed) in enumerate(zip(sizes, declared, strict=False)):
        if fixed not in (None, size):
            raise MalformedModelError(f"{where}: axis {axis} is {fixed}, pinned at {size}")
    return dtype, [static(size) for size in sizes]


def constant_value(port: Port, info: onnx.ValueInfoProto, component: str) -> np.ndarray:
    """Return the array that replaces an input of role `constant`: its shape must be fixed.

    Raises:
        MalformedModelError: The input's shape or element type is not known.
    """
    where = f"input {port.name!r} of {component} (role constant)"
    tensor = info.type.tensor_type
    sizes = [d.dim_value if d.HasField("dim_value") else 1 for d in tensor.shape.dim]
    return np.full(sizes, port.value, dtype=_dtype(tensor.elem_type, where))


def element_type(info: onnx.ValueInfoProto, where: str) -> str:
    """Return the numpy name of an input's element type, half precision as f32.

    Raises:
        MalformedModelError: It is unknown.
    """
    return _dtype(info.type.tensor_type.elem_type, where)


def _dtype(elem_type: int, where: str) -> str:
    try:
        name = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem_type)).name
    except KeyError as error:
        raise MalformedModelError(f"{where} has unknown element type {elem_type}") from error
    return widened(name)


def _wrong_type(where: str, dtype: str, allowed: Sequence[str]) -> MalformedModelError:
    name = "string" if dtype == "object" else dtype
    return MalformedModelError(
        f"{where} has element type {name}",
        hint=f"export it as one of: {', '.join(allowed)} (float16 and bfloat16 are widened)",
    )


def _bind(template: Template, sizes: Sequence[int | None], where: str) -> list[Dim]:
    result = []
    for axis, (expected, size) in enumerate(zip(template, sizes, strict=True)):
        if expected is None:
            if size is None or size < 1:
                raise MalformedModelError(f"{where}: axis {axis} must have a fixed size")
            result.append(static(size))
        elif expected.is_static:
            if size not in (None, expected.constant):
                raise MalformedModelError(
                    f"{where}: axis {axis} is {size}, batch is always {expected}"
                )
            result.append(expected)
        else:
            if size is not None:
                raise MalformedModelError(
                    f"{where}: axis {axis} is fixed at {size}",
                    hint="export with dynamic sequence axes; lengths are known only at run time",
                )
            result.append(expected)
    return result
