"""Operators of ONNX Runtime's own domain, written out in operators that the passes know.

The decoders that ORT-GenAI builds are made of them. `expand_contrib` is called by the importer on a
checked model; each row of `EXPANSIONS` turns one node into plain nodes, for batch 1, in the form in
which the raising passes recognise attention, cache, rotation and norms. Rotation tables stored in
the file become a frequency per column again, after it was shown that they are cosine and sine of
nothing else. What a node asks beyond that (a window, a soft cap, interleaved pairs) is refused by
name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from compiler.errors import MalformedModelError, UnsupportedOperatorError
from compiler.frontend.node_numbers import marked, numbers_of
from compiler.frontend.onnx_file import CONTRIB_DOMAIN
from compiler.frontend.values import Array

BLOCKED: Final = -3.0e38
TABLE_ERROR: Final = 2e-3
"""Greatest difference between a stored table and cosine or sine of position * frequency: tables are
often kept in half precision."""


def expand_contrib(model: onnx.ModelProto) -> int:
    """Write out every node of domain `com.microsoft` that has a row here.

    Args:
        model: Checked; changed in place.

    Returns:
        How many nodes were written out.

    Raises:
        UnsupportedOperatorError: A node asks for something that its row does not have.
        MalformedModelError: A node's operands or attributes contradict each other.
    """
    graph = model.graph
    known = [n for n in graph.node if n.domain == CONTRIB_DOMAIN and n.op_type in EXPANSIONS]
    if not known:
        return 0
    writer = _Writer(graph)
    for node in graph.node:
        row = EXPANSIONS.get(node.op_type) if node.domain == CONTRIB_DOMAIN else None
        if row is None:
            writer.nodes.append(node)
            continue
        writer.begin(node)
        first = len(writer.nodes)
        try:
            row(writer, node)
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise MalformedModelError(
                f"operator {node.op_type} (node {writer.label}): {error}"
            ) from error
        marked(writer.nodes[first:], numbers_of(node))
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in writer.nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return len(known)


@dataclass(slots=True)
class _Writer:
    """Writes nodes; every method returns the name of the value it makes."""

    graph: onnx.GraphProto
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    tables: dict[tuple[str, str, str], tuple[str, str]] = field(default_factory=dict)
    label: str = ""
    kind: str = ""
    count: int = 0

    def begin(self, node: onnx.NodeProto) -> None:
        """Start the expansion of a node; names of what is written for it begin with its name."""
        self.label = node.name or node.output[0]
        self.kind = node.op_type

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:  # noqa: ANN401
        name = self._name()
        made = out or name
        self.nodes.append(helper.make_node(kind, list(inputs), [made], name=name, **attributes))
        return made

    def split(self, x: str, sizes: list[int]) -> list[str]:
        names = [self._name() for _ in sizes]
        inputs = [x, self.ints(*sizes)]
        self.nodes.append(helper.make_node("Split", inputs, names, name=names[0], axis=2))
        return names

    def store(self, array: Array) -> str:
        name = self._name()
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int) -> str:
        return self.store(np.array(values, np.int64))

    def number(self, value: float) -> str:
        return self.store(np.array(value, np.float32))

    def scalar(self, value: int) -> str:
        return self.store(np.array(value, np.int64))

    def stored(self, name: str, what: str) -> Array:
        for tensor in self.graph.initializer:
            if tensor.name == name:
                return np.asarray(numpy_helper.to_array(tensor))
        raise self.refusal(f"{what} is not stored in the file")

    def last_size(self, name: str) -> int:
        """Return the last size of a graph input."""
        for info in self.graph.input:
            dims = info.type.tensor_type.shape.dim
            if info.name == name and dims and dims[-1].dim_value > 0:
                return int(dims[-1].dim_value)
        raise self.refusal(f"the size of {name!r} is not fixed")

    def refusal(self, reason: str) -> UnsupportedOperatorError:
        return UnsupportedOperatorError(
            f"operator {CONTRIB_DOMAIN}::{self.kind} (node {self.label}): {reason}",
            hint="export the decoder with plain operators, or without this option",
        )

    def need(self, condition: bool, reason: str) -> None:
        if not condition:
            raise self.refusal(reason)

    def _name(self) -> str:
        self.count += 1
        return f"{self.label}/expanded/{self.count}"


class Writing(Protocol):
    """What writing a rotation takes: nodes, constants, and what the file stores."""

    tables: dict[tuple[str, str, str], tuple[str, str]]

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:  # noqa: ANN401
        """Write a node; return the name of its result."""

    def store(self, array: Array) -> str:
        """Add a constant; return its name."""

    def ints(self, *values: int) -> str:
        """Add a constant vector; return its name."""

    def stored(self, name: str, what: str) -> Array:
        """Return a constant's elements, or refuse the node."""

    def need(self, condition: bool, reason: str) -> None:
        """Refuse the node unless a condition holds."""


def _attributes(node: onnx.NodeProto, **defaults: Any) -> dict[str, Any]:  # noqa: ANN401
    return {**defaults, **{a.name: helper.get_attribute_value(a) for a in node.attribute}}


def _operands(node: onnx.NodeProto, count: int) -> list[str]:
    return [*node.input, *[""] * count][:count]


# --- norms and activations ------------------------------------------------------------------------


def _simplified_norm(w: _Writer, node: onnx.NodeProto) -> None:
    x, gamma = _operands(node, 2)
    given = _attributes(node, epsilon=1e-5, axis=-1)
    w.need(len([name for name in node.output if name]) == 1, "the deviation is used")
    w.op("RMSNormalization", x, gamma, out=node.output[0], axis=-1, epsilon=given["epsilon"])


def _skip(w: _Writer, node: onnx.NodeProto, bias: str) -> str:
    """Write the sum that a norm with a shortcut normalises; it may be an output of its own."""
    outputs = [*node.output, *[""] * 4][:4]
    w.need(not outputs[1] and not outputs[2], "mean or deviation are used")
    out = outputs[3]
    if not bias:
        return w.op("Add", node.input[0], node.input[1], out=out)
    return w.op("Add", w.op("Add", node.input[0], node.input[1]), bias, out=out)


def _skip_simplified_norm(w: _Writer, node: onnx.NodeProto) -> None:
    *_, gamma, bias = _operands(node, 4)
    total = _skip(w, node, bias)
    eps = _attributes(node, epsilon=1e-12)["epsilon"]
    w.op("RMSNormalization", total, gamma, out=node.output[0], axis=-1, epsilon=eps)


def _skip_norm(w: _Writer, node: onnx.NodeProto) -> None:
    _, _, gamma, beta, bias = _operands(node, 5)
    total = _skip(w, node, bias)
    eps = _attributes(node, epsilon=1e-12)["epsilon"]
    inputs = [total, gamma, beta] if beta else [total, gamma]
    w.op("LayerNormalization", *inputs, out=node.output[0], axis=-1, epsilon=eps)


def _quick_gelu(w: _Writer, node: onnx.NodeProto) -> None:
    x = node.input[0]
    alpha = _attributes(node, alpha=1.702)["alpha"]
    w.op("Mul", x, w.op("Sigmoid", w.op("Mul", x, w.number(alpha))), out=node.output[0])


def _fast_gelu(w: _Writer, node: onnx.NodeProto) -> None:
    x, bias = _operands(node, 2)
    x = w.op("Add", x, bias) if bias else x
    cube = w.op("Mul", w.op("Mul", w.op("Mul", x, x), x), w.number(0.044715))
    inner = w.op("Mul", w.op("Add", x, cube), w.number(0.7978845608028654))
    half = w.op("Mul", x, w.number(0.5))
    w.op("Mul", half, w.op("Add", w.op("Tanh", inner), w.number(1.0)), out=node.output[0])


# --- rotation -------------------------------------------------------------------------------------


def _frequencies(w: Writing, cos_name: str, sin_name: str) -> Array:
    """Return the frequency per column of stored tables (positions, half).

    Raises:
        UnsupportedOperatorError: The tables are not cosine and sine of position * frequency.
    """
    cosine = w.stored(cos_name, "the cosine table").astype(np.float64)
    sine = w.stored(sin_name, "the sine table").astype(np.float64)
    w.need(cosine.shape == sine.shape and cosine.ndim == 2, "the tables differ in shape")
    w.need(len(cosine) >= 2, "the tables have one position")
    angle = np.arctan2(sine[1], cosine[1])
    for step in (4, 16, 64, 256, 1024, 4096):  # the angle of a later row says the same, finer
        if step < len(cosine):
            found = np.arctan2(sine[step], cosine[step])
            turns = np.round((angle * step - found) / (2 * np.pi))
            angle = (found + 2 * np.pi * turns) / step
    wanted = np.arange(len(cosine))[:, None] * angle
    error = max(np.abs(np.cos(wanted) - cosine).max(), np.abs(np.sin(wanted) - sine).max())
    w.need(bool(error <= TABLE_ERROR), "the rotation tables are scaled, or not of one frequency")
    return np.asarray(angle, np.float32)


def rotation_tables(w: Writing, positions: str, cos_name: str, sin_name: str) -> tuple[str, str]:
    """Write cosine and sine (1, 1, T, 2 * half) of positions (1, T); layers share them."""
    key = (positions, cos_name, sin_name)
    if key not in w.tables:
        frequencies = w.store(_frequencies(w, cos_name, sin_name).reshape(1, -1, 1))
        row = w.op("Unsqueeze", w.op("Cast", positions, to=TensorProto.FLOAT), w.ints(1))
        angle = w.op("Transpose", w.op("MatMul", frequencies, row), perm=[0, 2, 1])
        whole = w.op("Concat", angle, angle, axis=-1)
        cosine, sine = (w.op("Unsqueeze", w.op(k, whole), w.ints(1)) for k in ("Cos", "Sin"))
        w.tables[key] = (cosine, sine)
    return w.tables[key]


def rotated(w: Writing, x: str, tables: tuple[str, str], head_dim: int) -> str:
    """Write the rotation of heads (1, H, T, hd)."""
    half, axes, one = head_dim // 2, w.ints(3), w.ints(1)
    first = w.op("Slice", x, w.ints(0), w.ints(half), axes, one)
    second = w.op("Slice", x, w.ints(half), w.ints(head_dim), axes, one)
    turned = w.op("Concat", w.op("Neg", second), first, axis=-1)
    return w.op("Add", w.op("Mul", x, tables[0]), w.op("Mul", turned, tables[1]))


def _rotary_embedding(w: _Writer, node: onnx.NodeProto) -> None:
    x, positions, cos_name, sin_name = _operands(node, 4)
    given = _attributes(node, interleaved=0, num_heads=0, rotary_embedding_dim=0, scale=1.0)
    w.need(not given["interleaved"], "interleaved pairs")
    w.need(not given["rotary_embedding_dim"] and given["scale"] == 1.0, "a part of the head")
    head_dim = 2 * w.stored(cos_name, "the cosine table").shape[-1]
    tables = rotation_tables(w, positions, cos_name, sin_name)
    split = w.op("Reshape", x, w.ints(1, -1, given["num_heads"] or -1, head_dim))
    heads = w.op("Transpose", split, perm=[0, 2, 1, 3])
    turned = w.op("Transpose", rotated(w, heads, tables, head_dim), perm=[0, 2, 1, 3])
    w.need(given["num_heads"] > 0, "the number of heads is not given")
    sizes = w.ints(1, -1, given["num_heads"] * head_dim)
    w.op("Reshape", turned, sizes, out=node.output[0])


# --- attention ------------------------------------------------------------------------------------

_PLAIN: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "local_window_size": -1,
        "rotary_interleaved": 0,
        "smooth_softmax": 0,
        "softcap": 0.0,
        "k_quant_type": b"NONE",
        "v_quant_type": b"NONE",
    }
)


def _grouped_query_attention(w: _Writer, node: onnx.NodeProto) -> None:
    operands = _operands(node, 16)
    query, key, value, past_key, past_value = operands[:5]
    given = _attributes(node, scale=0.0, do_rotary=0, **_PLAIN)
    for name, plain in _PLAIN.items():
        w.need(given[name] == plain, f"{name} = {given[name]}")
    w.need(not any(operands[10:]), "an attention bias or a head sink")
    heads, kv_heads = int(given["num_heads"]), int(given["kv_num_heads"])
    w.need(heads > 0 and kv_heads > 0 and heads % kv_heads == 0, "the numbers of heads")
    head_dim = w.last_size(past_key)
    if not key:
        sizes = [n * head_dim for n in (heads, kv_heads, kv_heads)]
        query, key, value = _projections(w, query, sizes)
    place, total = _lengths(w, query, past_key)
    q, k, v = (
        w.op("Transpose", w.op("Reshape", x, w.ints(1, -1, n, head_dim)), perm=[0, 2, 1, 3])
        for x, n in ((query, heads), (key, kv_heads), (value, kv_heads))
    )
    if given["do_rotary"]:
        positions = operands[9] or w.op("Unsqueeze", place, w.ints(0))
        tables = rotation_tables(w, positions, operands[7], operands[8])
        width = 2 * w.stored(operands[7], "the cosine table").shape[-1]
        w.need(width == head_dim, "a part of the head is rotated")
        q, k = rotated(w, q, tables, head_dim), rotated(w, k, tables, head_dim)
    k = w.op("Concat", past_key, k, axis=2, out=_output(node, 1))
    v = w.op("Concat", past_value, v, axis=2, out=_output(node, 2))
    k, v = (_shared(w, x, heads, kv_heads, head_dim) for x in (k, v))
    scale = float(given["scale"]) or head_dim**-0.5
    scores = w.op("MatMul", q, w.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = w.op("Add", w.op("Mul", scores, w.number(scale)), _causal(w, place, total))
    mixed = w.op("MatMul", w.op("Softmax", scores, axis=-1), v)
    rows = w.op("Transpose", mixed, perm=[0, 2, 1, 3])
    w.op("Reshape", rows, w.ints(1, -1, heads * head_dim), out=node.output[0])


def _projections(w: _Writer, packed: str, sizes: list[int]) -> list[str]:
    """Write queries, keys and values of one packed projection `x W (+ b)` as three."""
    made = {name: node for node in w.nodes for name in node.output}
    node, bias = made.get(packed), None
    if node is not None and node.op_type == "Add":
        stored = {tensor.name for tensor in w.graph.initializer}
        constant = [name for name in node.input if name in stored]
        w.need(len(constant) == 1, "the packed projection's bias is not stored in the file")
        bias = w.stored(constant[0], "the packed projection's bias")
        node = made.get(next(name for name in node.input if name != constant[0]))
    part_of = None if node is None else _PARTS.get((node.domain, node.op_type))
    if node is None or part_of is None:
        return w.split(packed, sizes)
    ends = [int(end) for end in np.cumsum(sizes)]
    results = []
    for start, end in zip([0, *ends], ends, strict=False):
        part = part_of(w, node, slice(start, end), ends[-1])
        results.append(part if bias is None else w.op("Add", part, w.store(bias[start:end].copy())))
    return results


def _part_of_product(w: _Writer, node: onnx.NodeProto, columns: slice, width: int) -> str:
    """Write some columns of a product with a stored matrix of so many."""
    weight = w.stored(node.input[1], "the packed projection")
    w.need(weight.shape[-1] == width, "the packed projection has another width")
    return w.op("MatMul", node.input[0], w.store(weight[:, columns].copy()))


def _part_of_codes(w: _Writer, node: onnx.NodeProto, columns: slice, width: int) -> str:
    """The same of a matrix in few bits, whose columns are rows: codes, scales, zeros, bias."""
    given = _attributes(node)
    w.need(given.get("N") == width, "the packed projection has another width")
    x, codes, scales, zeros, order, bias = _operands(node, 6)
    parts = [_rows(w, name, columns, width) for name in (codes, scales, zeros, bias)]
    inputs = [x, *parts[:3], order, parts[3]]
    while not inputs[-1]:
        inputs.pop()
    given["N"] = columns.stop - columns.start
    return w.op("MatMulNBits", *inputs, domain=CONTRIB_DOMAIN, **given)


def _rows(w: _Writer, name: str, rows: slice, of: int) -> str:
    """Store some rows of an array that has `of`, with its other axes; nothing of an absent one."""
    if not name:
        return ""
    array = w.stored(name, "the packed projection")
    part = array.reshape(of, -1)[rows]
    return w.store(part.reshape(-1, *array.shape[1:]).copy())


_PARTS: Final[Mapping[tuple[str, str], Callable[[_Writer, onnx.NodeProto, slice, int], str]]] = (
    MappingProxyType(
        {("", "MatMul"): _part_of_product, (CONTRIB_DOMAIN, "MatMulNBits"): _part_of_codes}
    )
)
"""Products of which single columns can be written."""


def _output(node: onnx.NodeProto, at: int) -> str:
    return node.output[at] if at < len(node.output) else ""


def _lengths(w: _Writer, query: str, past: str) -> tuple[str, str]:
    """Write the positions of a call's rows (T), and the number of keys."""
    rows = w.op("Gather", w.op("Shape", query), w.scalar(1), axis=0)
    seen = w.op("Gather", w.op("Shape", past), w.scalar(2), axis=0)
    total = w.op("Add", seen, rows)
    return w.op("Range", seen, total, w.scalar(1)), total


def _causal(w: _Writer, place: str, total: str) -> str:
    """Write the mask (T, P + T): 0 where a key is not after its query."""
    keys = w.op("Range", w.scalar(0), total, w.scalar(1))
    keys, queries = w.op("Unsqueeze", keys, w.ints(0)), w.op("Unsqueeze", place, w.ints(1))
    visible = w.op("LessOrEqual", keys, queries)
    return w.op("Where", visible, w.number(0.0), w.number(BLOCKED))


def _shared(w: _Writer, x: str, heads: int, kv_heads: int, head_dim: int) -> str:
    copies = heads // kv_heads
    if copies == 1:
        return x
    grown = w.op("Expand", w.op("Unsqueeze", x, w.ints(2)), w.ints(1, 1, copies, 1, 1))
    return w.op("Reshape", grown, w.ints(1, heads, -1, head_dim))


Expansion = Callable[[_Writer, onnx.NodeProto], None]

EXPANSIONS: Final[Mapping[str, Expansion]] = MappingProxyType(
    {
        "FastGelu": _fast_gelu,
        "GroupQueryAttention": _grouped_query_attention,
        "QuickGelu": _quick_gelu,
        "RotaryEmbedding": _rotary_embedding,
        "SimplifiedLayerNormalization": _simplified_norm,
        "SkipLayerNormalization": _skip_norm,
        "SkipSimplifiedLayerNormalization": _skip_simplified_norm,
    }
)
