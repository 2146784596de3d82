"""Bodies of `ai.sparsefleet` functions in a file: they must compute what the operator means.

The compiler maps MoERouter, MoEExpert and DynamicPrune to kernels by name and domain. A file may
carry bodies for other runtimes; if a body computed something else, the device would give other
answers than its author measured. So each body is run on fixed numbers and compared: the importer
calls `check_function_bodies` for the operators that have kernels and `inline_operators` for the
others, whose bodies are what is compiled.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, inliner
from onnx.reference import ReferenceEvaluator

from compiler.errors import CompilerError, MalformedModelError
from compiler.frontend.domain import attach_functions
from compiler.frontend.evaluate import evaluate, same_everywhere
from compiler.frontend.node_numbers import mark_inlined
from compiler.frontend.onnx_file import SPARSEFLEET_DOMAIN
from compiler.frontend.values import Array

TOLERANCE: Final = 1e-5
K: Final = 2
SINK: Final = 1
WINDOW: Final = 2
SCALE: Final = 0.5

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


def sparse_conv(x: Array, weight: Array, bias: Array, mask: Array) -> Arrays:
    """SparseConv: a convolution (1-D windows written out) of `weight * mask`, strides 2, pads 1."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, weight.shape[2:], axis=(2, 3))
    chosen = windows[:, :, ::2, ::2]
    return [np.einsum("bihwkl,oikl->bohw", chosen, weight * mask) + bias[:, None, None]]


def sparse_attention(q: Array, k: Array, v: Array) -> Arrays:
    """SparseAttention: two heads, causal, one sink and a window of two keys, scale 1/2."""
    rows = q.shape[1]
    heads = [a.reshape(rows, 2, -1).transpose(1, 0, 2) for a in (q, k, v)]
    distance = np.arange(rows)[:, None] - np.arange(rows)
    seen = (distance >= 0) & ((distance < WINDOW) | (np.arange(rows) < SINK))
    scores = np.where(seen, SCALE * heads[0] @ heads[1].transpose(0, 2, 1), -np.inf)
    return [(_softmax(scores) @ heads[2]).transpose(1, 0, 2).reshape(q.shape)]


def dynamic_topk(scores: Array, mass: Array) -> Arrays:
    """DynamicTopK: weights of the fewest best entries that hold `mass`, at most K."""
    weights = _softmax(scores)
    index = np.argsort(-weights, axis=-1, kind="stable")[:, :K]
    best = np.take_along_axis(weights, index, -1)
    kept = np.cumsum(best, -1) - best < mass
    return [np.where(kept, best, 0), index, kept.sum(-1)]


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

_CONV: Final = (
    _floats(10, 1, 2, 5, 5),
    _floats(11, 3, 2, 3, 3),
    _floats(12, 3),
    (np.abs(_floats(13, 3, 2, 1, 1)) > 0.5).astype(np.float32),
)
_CONV_ATTRS: Final = {"strides": [2, 2], "pads": [1, 1, 1, 1], "dilations": [1, 1], "group": 1}
_ATTENTION: Final = tuple(_floats(seed, 1, 5, 8) for seed in (14, 15, 16))
_ATTENTION_ATTRS: Final = {"num_heads": 2, "sink": SINK, "window": WINDOW, "scale": SCALE}
_TOPK: Final = (2.0 * _floats(17, 4, 6), np.asarray(0.5, np.float32))

INLINED: Final[Mapping[str, tuple[Callable[..., Arrays], tuple[Array, ...], dict[str, Any]]]] = (
    MappingProxyType(
        {
            "SparseConv": (sparse_conv, _CONV, _CONV_ATTRS),
            "SparseAttention": (sparse_attention, _ATTENTION, _ATTENTION_ATTRS),
            "DynamicTopK": (dynamic_topk, _TOPK, {"k": K}),
        }
    )
)
"""Operators of the domain that are inlined: their bodies are what runs, and must say the truth."""
_INLINED_KEYS: Final = frozenset((SPARSEFLEET_DOMAIN, name) for name in INLINED)

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
            raise _untrue(function, file)


def inline_operators(model: onnx.ModelProto, file: str) -> onnx.ModelProto:
    """Replace operators of the domain that have no kernel of their own by their bodies.

    A body that is missing is ours; one that is there must compute the same.

    Raises:
        MalformedModelError: A body cannot be run or computes something else, or the model's
            operator set is too old for ours.
    """
    called = {node.op_type for node in model.graph.node if node.domain == SPARSEFLEET_DOMAIN}
    if not called & set(INLINED):
        return model
    try:
        attach_functions(model)
        ours = [f for f in model.functions if (f.domain, f.name) in _INLINED_KEYS]
        _check_inlined(ours, file)
        inlined = inliner.inline_selected_functions(model, sorted(_INLINED_KEYS))
    except (ValueError, RuntimeError) as error:
        raise MalformedModelError(f"functions of {file} cannot be inlined: {error}") from error
    mark_inlined(model.graph.node, inlined.graph.node, ours)
    return inlined


def _check_inlined(functions: Sequence[onnx.FunctionProto], file: str) -> None:
    for function in functions:
        meaning, operands, attrs = INLINED[function.name]
        wanted = meaning(*operands)
        model, inputs, outputs = _calling(function, operands, attrs, len(wanted))
        try:
            made = ReferenceEvaluator(model).run(outputs, dict(zip(inputs, operands, strict=True)))
            found = [np.asarray(array) for array in made]
        except Exception as error:  # the evaluator raises whatever its operators raise
            raise _uncheckable(function, file, error) from error
        if not all(_close(a, b) for a, b in zip(found, wanted, strict=True)):
            raise _untrue(function, file)


def _untrue(function: onnx.FunctionProto, file: str) -> MalformedModelError:
    return MalformedModelError(
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
    model, inputs, outputs = _calling(function, operands, attrs, results)
    try:
        flat = inliner.inline_local_functions(model).graph
        given = {n: same_everywhere(a, ({},)) for n, a in zip(inputs, operands, strict=True)}
        evaluation = evaluate(flat, given, outputs, ({},))
        found = [evaluation.constant(name) for name in outputs]
    except (CompilerError, ValueError, RuntimeError, KeyError) as error:
        raise _uncheckable(function, file, error) from error
    return [array if array is not None else np.zeros(0) for array in found]


def _uncheckable(function: onnx.FunctionProto, file: str, error: Exception) -> MalformedModelError:
    return MalformedModelError(
        f"{file}: the body of {SPARSEFLEET_DOMAIN}::{function.name} cannot be checked: {error}"
    )


def _calling(
    function: onnx.FunctionProto, operands: tuple[Array, ...], attrs: dict[str, Any], results: int
) -> tuple[onnx.ModelProto, list[str], list[str]]:
    """Return a model that calls a function once, and the names of its inputs and outputs."""
    inputs, outputs = [f"in{i}" for i in range(len(operands))], [f"out{i}" for i in range(results)]
    call = helper.make_node(function.name, inputs, outputs, domain=SPARSEFLEET_DOMAIN, **attrs)
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in zip(inputs, operands, strict=True)
    ]
    graph = helper.make_graph([call], "body", infos, [onnx.ValueInfoProto(name=n) for n in outputs])
    imports = [helper.make_opsetid(SPARSEFLEET_DOMAIN, 1), *function.opset_import]
    model = helper.make_model(graph, opset_imports=imports, functions=[function])
    return model, inputs, outputs


def _close(found: Array, wanted: Array) -> bool:
    if found.shape != wanted.shape:
        return False
    return bool(np.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE))
