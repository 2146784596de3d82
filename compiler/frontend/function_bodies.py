"""Bodies of `ai.sparsefleet` functions in a file: they must compute what the operator means.

The compiler maps MoERouter, MoEExpert and DynamicPrune to kernels by name and domain. A file may
carry bodies for other runtimes; if a body computed something else, the device would give other
answers than its author measured. So each body is run on fixed numbers and compared.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, inliner

from compiler.errors import CompilerError, MalformedModelError
from compiler.frontend.evaluate import evaluate, same_everywhere
from compiler.frontend.onnx_file import SPARSEFLEET_DOMAIN
from compiler.frontend.values import Array

TOLERANCE: Final = 1e-5
K: Final = 2

Arrays = list[Array]


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def router(x: Array, weight: Array, bias: Array, factor: Array) -> Arrays:
    """MoERouter: the k best of `x w^T + lambda * bias`, softmax over them."""
    logits = x @ weight.T + factor * bias
    index = np.argsort(-logits, axis=-1, kind="stable")[:, :K]
    return [index, _softmax(np.take_along_axis(logits, index, -1))]


def expert(x: Array, index: Array, gate: Array, w_in: Array, w_out: Array) -> Arrays:
    """MoEExpert: sum over choices of `gate * w_out relu(w_in x)`."""
    hidden = np.maximum(np.einsum("tkfd,td->tkf", w_in[index], x), 0)
    return [np.einsum("tkdf,tkf,tk->td", w_out[index], hidden, gate)]


def prune(tokens: Array, scores: Array) -> Arrays:
    """DynamicPrune: the k tokens of highest mean score (first key skipped), in order."""
    mean = scores[:, :, 1:].mean(1)
    index = np.sort(np.argsort(-mean, axis=-1, kind="stable")[:, :K], axis=-1)
    return [np.take_along_axis(tokens, index[..., None], axis=1), index]


def _floats(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


_INDEX: Final = np.array([[0, 2], [3, 1], [1, 0]], np.int64)
_ROUTER: Final = (_floats(1, 3, 6), _floats(2, 4, 6), _floats(3, 4), np.asarray(0.5, np.float32))
_EXPERT: Final = (
    _floats(4, 3, 6),
    _INDEX,
    np.abs(_floats(5, 3, 2)),
    _floats(6, 4, 5, 6),
    _floats(7, 4, 6, 5),
)
_PRUNE: Final = (_floats(8, 1, 5, 4), _floats(9, 1, 3, 6))

MEANINGS: Final[Mapping[str, tuple[Callable[..., Arrays], tuple[Array, ...], dict[str, Any]]]] = (
    MappingProxyType(
        {
            "MoERouter": (router, _ROUTER, {"k": K}),
            "MoEExpert": (expert, _EXPERT, {}),
            "DynamicPrune": (prune, _PRUNE, {"k": K}),
        }
    )
)


def check_function_bodies(model: onnx.ModelProto, file: str) -> None:
    """Check the bodies of all known functions of a model.

    Raises:
        MalformedModelError: A body cannot be run, or it computes something else.
    """
    for function in model.functions:
        if function.domain != SPARSEFLEET_DOMAIN or function.name not in MEANINGS:
            continue
        meaning, operands, attrs = MEANINGS[function.name]
        wanted = meaning(*operands)
        found = _run(function, operands, attrs, len(wanted), file)
        if not all(_close(a, b) for a, b in zip(found, wanted, strict=True)):
            raise MalformedModelError(
                f"{file}: the body of {SPARSEFLEET_DOMAIN}::{function.name} does not compute what"
                " the operator means",
                hint="use another domain for other operators; their functions are inlined",
            )


def _run(
    function: onnx.FunctionProto,
    operands: tuple[Array, ...],
    attrs: dict[str, Any],
    results: int,
    file: str,
) -> Arrays:
    inputs, outputs = [f"in{i}" for i in range(len(operands))], [f"out{i}" for i in range(results)]
    call = helper.make_node(function.name, inputs, outputs, domain=SPARSEFLEET_DOMAIN, **attrs)
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in zip(inputs, operands, strict=True)
    ]
    graph = helper.make_graph([call], "body", infos, [onnx.ValueInfoProto(name=n) for n in outputs])
    imports = [helper.make_opsetid(SPARSEFLEET_DOMAIN, 1), *function.opset_import]
    model = helper.make_model(graph, opset_imports=imports, functions=[function])
    try:
        flat = inliner.inline_local_functions(model).graph
        given = {n: same_everywhere(a, ({},)) for n, a in zip(inputs, operands, strict=True)}
        evaluation = evaluate(flat, given, outputs, ({},))
        found = [evaluation.constant(name) for name in outputs]
    except (CompilerError, ValueError, RuntimeError, KeyError) as error:
        raise MalformedModelError(
            f"{file}: the body of {SPARSEFLEET_DOMAIN}::{function.name} cannot be checked: {error}"
        ) from error
    return [array if array is not None else np.zeros(0) for array in found]


def _close(found: Array, wanted: Array) -> bool:
    if found.shape != wanted.shape:
        return False
    return bool(np.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE))
