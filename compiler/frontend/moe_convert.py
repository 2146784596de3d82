"""Between `ai.sparsefleet` and `com.microsoft`: mixtures of experts both ways, layout exact.

    MoERouter + MoEExpert   <->   MatMul (+ Add) + MoE
    MoERouter + MoEExpert of DequantizeLinear   <->   MatMul (+ Add) + QMoE (int4, int8)

Both sides mean the same: softmax over the k best logits (`normalize_routing_weights = 1`), experts
of two matrices with ReLU between them. Weights keep their layout: `w_in` (E, F, D) is fc1, `w_out`
(E, D, F) is fc2; codes of QMoE, packed along K with the even element in the low nibble, become one
element each and are packed again to the same bytes. A mixture that the other side cannot say
exactly stays as it is, and the report says why.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from compiler.frontend.domain import attach_functions
from compiler.frontend.onnx_file import SPARSEFLEET_DOMAIN
from compiler.frontend.values import Array

CONTRIB: Final = "com.microsoft"
BLOCK_OPSET: Final = 21
"""`DequantizeLinear` knows blocks from this version on."""
BITS: Final = (4, 8)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A converted model.

    Attributes:
        model: A copy; the given one is not changed.
        converted: Names of the nodes that were replaced.
        kept: Why others stayed, by name of the node.
    """

    model: onnx.ModelProto
    converted: tuple[str, ...]
    kept: Mapping[str, str]


class _KeptError(Exception):
    """The other side cannot say this."""


@dataclass(slots=True)
class _Editor:
    """A graph under conversion: what makes a value, what is stored, what is to be removed."""

    graph: onnx.GraphProto
    opset: int
    made: dict[str, onnx.NodeProto] = field(default_factory=dict)
    stored: dict[str, onnx.TensorProto] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.made = {name: node for node in self.graph.node for name in node.output if name}
        self.stored = {tensor.name: tensor for tensor in self.graph.initializer}
        self.used = {*self.made, *self.stored, *(info.name for info in self.graph.input)}

    def array(self, name: str, what: str) -> Array:
        if name not in self.stored:
            raise _KeptError(f"{what} is not stored in the file")
        return np.asarray(numpy_helper.to_array(self.stored[name]))

    def name(self, stem: str) -> str:
        """Return a name that nothing has yet."""
        at, name = 0, stem
        while name in self.used:
            at, name = at + 1, f"{stem}_{at}"
        self.used.add(name)
        return name

    def store(self, stem: str, array: Array) -> str:
        """Store an array; return its name."""
        name = self.name(stem)
        self.stored[name] = numpy_helper.from_array(array, name)
        self.graph.initializer.append(self.stored[name])
        return name


Change = Callable[[_Editor, onnx.NodeProto], list[onnx.NodeProto]]


def to_contrib(model: onnx.ModelProto) -> Conversion:
    """Replace every `MoERouter` + `MoEExpert` by `com.microsoft::MoE`, or `QMoE` if quantised.

    Raises:
        ValueError: The model calls an operator that the domain does not have.
    """
    return _convert(model, SPARSEFLEET_DOMAIN, {"MoEExpert": _to_contrib}, CONTRIB)


def from_contrib(model: onnx.ModelProto) -> Conversion:
    """Replace every `com.microsoft::MoE` and `QMoE` by `MoERouter` + `MoEExpert` with bodies.

    Raises:
        ValueError: The model's operator set is too old for the bodies.
    """
    rows = {"MoE": _from_moe, "QMoE": _from_qmoe}
    return _convert(model, CONTRIB, rows, SPARSEFLEET_DOMAIN)


def _convert(
    model: onnx.ModelProto, source: str, rows: Mapping[str, Change], target: str
) -> Conversion:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    opset = next((o.version for o in copy.opset_import if o.domain in ("", "ai.onnx")), 0)
    editor = _Editor(copy.graph, opset)
    nodes: list[onnx.NodeProto] = []
    converted, kept = [], {}
    for node in copy.graph.node:
        if node.domain != source or node.op_type not in rows:
            nodes.append(node)
            continue
        label = node.name or node.output[0]
        try:
            nodes.extend(rows[node.op_type](editor, node))
            converted.append(label)
        except _KeptError as reason:
            kept[label] = str(reason)
            nodes.append(node)
    _finish(copy, nodes, target if converted else None)
    return Conversion(copy, tuple(converted), kept)


def _finish(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], target: str | None) -> None:
    """Put the nodes in, drop what nothing reads, and make the imports and functions fit."""
    graph = model.graph
    read = {info.name for info in graph.output}
    alive = []
    for node in reversed(nodes):
        if read.intersection(node.output):
            read.update(node.input)
            alive.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del graph.node[:]
    graph.node.extend(reversed(alive))
    stored = [tensor for tensor in graph.initializer if tensor.name in read]
    copies = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in stored]
    del graph.initializer[:]
    graph.initializer.extend(copies)
    called = {(node.domain, node.op_type) for node in graph.node}
    functions = [f for f in model.functions if f.domain != SPARSEFLEET_DOMAIN]
    kept = [f for f in model.functions if (f.domain, f.name) in called]
    bodies = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in (*functions, *kept)]
    del model.functions[:]
    model.functions.extend(bodies)
    if target == CONTRIB and all(o.domain != CONTRIB for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    attach_functions(model)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


# --- ours to contrib ------------------------------------------------------------------------------


def _to_contrib(editor: _Editor, expert: onnx.NodeProto) -> list[onnx.NodeProto]:
    x, index, gate, w_in, w_out = expert.input
    router = editor.made.get(index)
    same = router is not None and router.op_type == "MoERouter"
    if router is None or not same or list(router.output) != [index, gate] or router.input[0] != x:
        raise _KeptError("index and gate do not come from one MoERouter of the same rows")
    logits, nodes = _logits(editor, router)
    attributes = {"k": _attributes(router)["k"], "activation_type": "relu"}
    attributes["normalize_routing_weights"] = 1
    quantised = [editor.made.get(name) for name in (w_in, w_out)]
    if all(node is not None and node.op_type == "DequantizeLinear" for node in quantised):
        pair = [_packed(editor, node) for node in quantised if node is not None]
        attributes |= _quantisation(pair)
        per_row = "block_size" not in attributes
        stored = [name for matrix in pair for name in matrix.store(editor, per_row=per_row)]
        inputs = [x, logits, *stored[:2], "", *stored[2:]]
        kind = "QMoE"
    else:
        inputs, kind = [x, logits, w_in, "", w_out], "MoE"
    mixture = helper.make_node(
        kind, inputs, list(expert.output), name=expert.name, domain=CONTRIB, **attributes
    )
    return [*nodes, mixture]


def _logits(editor: _Editor, router: onnx.NodeProto) -> tuple[str, list[onnx.NodeProto]]:
    """Return the logits of a router and the nodes that make them: x W^T + factor * bias."""
    x, weight, bias, factor = router.input
    turned = editor.store(f"{weight}/turned", editor.array(weight, "the router's weight").T.copy())
    plain, shift, logits = (editor.name(f"{router.output[0]}/{n}") for n in ("x", "b", "logits"))
    return logits, [
        helper.make_node("MatMul", [x, turned], [plain]),
        helper.make_node("Mul", [factor, bias], [shift]),
        helper.make_node("Add", [plain, shift], [logits]),
    ]


@dataclass(frozen=True, slots=True)
class _Packed:
    """One matrix in QMoE's layout: packed codes, scales (E, N, blocks), width K."""

    stem: str
    codes: Array
    scales: Array
    bits: int
    block: int
    width: int

    def store(self, editor: _Editor, *, per_row: bool) -> tuple[str, str]:
        """Store codes and scales; return their names."""
        scales = self.scales[..., 0] if per_row else self.scales
        return editor.store(f"{self.stem}/q", self.codes), editor.store(f"{self.stem}/s", scales)


def _quantisation(pair: Sequence[_Packed]) -> dict[str, int]:
    """Return the attributes that both matrices agree on; one block per row is no block."""
    first, second = pair
    if first.bits != second.bits:
        raise _KeptError("the two matrices have codes of different widths")
    if all(matrix.block == matrix.width for matrix in pair):
        return {"expert_weight_bits": first.bits}
    if first.block != second.block:
        raise _KeptError("the two matrices have blocks of different sizes")
    return {"expert_weight_bits": first.bits, "block_size": first.block}


def _packed(editor: _Editor, node: onnx.NodeProto) -> _Packed:
    codes = editor.array(node.input[0], "a quantised matrix")
    scales = editor.array(node.input[1], "its scales")
    zero = editor.array(node.input[2], "its zero points") if len(node.input) > 2 else None
    width = codes.shape[-1]
    given = _attributes(node)
    block = int(given.get("block_size", 0))
    plain = codes.ndim == 3 and codes.dtype == np.uint8 and given.get("axis", 1) in (2, -1)
    if (
        not plain
        or not block
        or width % block
        or scales.shape != (*codes.shape[:2], width // block)
    ):
        raise _KeptError("the matrices are not quantised to bytes in blocks of the last axis")
    bits = _bits_of(zero)
    packed = codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)
    if bits == 4 and (codes.max(initial=0) > 15 or width % 2):
        raise _KeptError("a code does not fit 4 bits")
    return _Packed(node.output[0], packed, scales, bits, block, width)


def _bits_of(zero: Array | None) -> int:
    """Return the width of codes by their zero point, which QMoE leaves out: half of the range."""
    for bits in BITS:
        if zero is not None and (zero == 1 << (bits - 1)).all():
            return bits
    raise _KeptError("the zero points are not half of the range of 4 or 8 bits")


# --- contrib to ours ------------------------------------------------------------------------------

_DEFAULTS: Final[Mapping[str, Any]] = {
    "k": 1,
    "activation_type": b"relu",
    "normalize_routing_weights": 0,
    "use_sparse_mixer": 0,
    "swiglu_fusion": 0,
    "expert_weight_bits": 4,
    "block_size": 0,
    "quant_type": b"int",
}


def _checked(node: onnx.NodeProto, *, always_normalised: bool) -> dict[str, Any]:
    given = {**_DEFAULTS, **_attributes(node)}
    if given["activation_type"] != b"relu" or given["use_sparse_mixer"]:
        raise _KeptError("experts have another activation than ReLU, or a sparse mixer routes")
    if not given["normalize_routing_weights"] and not always_normalised and given["k"] > 1:
        raise _KeptError("gates are not normalised over the choices")
    return given


def _from_moe(editor: _Editor, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    given = _checked(node, always_normalised=False)
    if not given["normalize_routing_weights"]:
        raise _KeptError("gates are not normalised over the choices")
    inputs = [*node.input, *[""] * 8]
    if any(inputs[at] for at in (3, 5, 6, 7)):
        raise _KeptError("experts have biases or a third matrix")
    return _ours(editor, node, given["k"], [], (inputs[2], inputs[4]))


def _from_qmoe(editor: _Editor, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    given = _checked(node, always_normalised=True)
    inputs = [*node.input, *[""] * 21]
    if any(inputs[at] for at in (4, 7, *range(8, 21))):
        raise _KeptError("experts have biases, zero points or a third matrix")
    if given["quant_type"] != b"int" or given["expert_weight_bits"] not in BITS:
        raise _KeptError("codes are not integers of 4 or 8 bits")
    if editor.opset < BLOCK_OPSET:
        raise _KeptError(f"blocks need opset {BLOCK_OPSET}, the model has {editor.opset}")
    weights, nodes = [], []
    for codes, scales in ((inputs[2], inputs[3]), (inputs[5], inputs[6])):
        made = _dequantised(editor, codes, scales, given)
        nodes.append(made)
        weights.append(made.output[0])
    return _ours(editor, node, given["k"], nodes, (weights[0], weights[1]))


def _dequantised(
    editor: _Editor, codes: str, scales: str, given: Mapping[str, Any]
) -> onnx.NodeProto:
    """Return the node that makes a matrix (E, N, K) of QMoE's codes and scales."""
    packed, scale = editor.array(codes, "a matrix"), editor.array(scales, "its scales")
    bits = given["expert_weight_bits"]
    flat = packed
    if bits == 4:
        flat = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1)
    width = flat.shape[2]
    block = int(given["block_size"]) or width
    if scale.ndim == 2:
        scale, block = scale[..., None], width
    zero = np.full(scale.shape, 1 << (bits - 1), np.uint8)
    names = [editor.store(f"{codes}/{n}", a) for n, a in (("c", flat), ("s", scale), ("z", zero))]
    out = editor.name(f"{codes}/w")
    return helper.make_node("DequantizeLinear", names, [out], axis=2, block_size=block)


def _ours(
    editor: _Editor,
    node: onnx.NodeProto,
    k: int,
    before: list[onnx.NodeProto],
    weights: tuple[str, str],
) -> list[onnx.NodeProto]:
    x, logits = node.input[:2]
    weight, bias = _router_of(editor, logits, x)
    names = [editor.name(f"{node.output[0]}/{stem}") for stem in ("index", "gate")]
    one = editor.store(f"{node.output[0]}/one", np.asarray(1.0, np.float32))
    router = helper.make_node(
        "MoERouter", [x, weight, bias, one], names, domain=SPARSEFLEET_DOMAIN, k=k
    )
    expert = helper.make_node(
        "MoEExpert", [x, *names, *weights], list(node.output), name=node.name,
        domain=SPARSEFLEET_DOMAIN,
    )  # fmt: skip
    return [*before, router, expert]


def _router_of(editor: _Editor, logits: str, x: str) -> tuple[str, str]:
    """Return names of the router's weight (E, D) and bias (E) behind logits `x W + b`."""
    node, bias = editor.made.get(logits), None
    while node is not None and node.op_type == "Reshape":
        node = editor.made.get(node.input[0])
    if node is not None and node.op_type == "Add":
        shift, inner = _bias(editor, node)
        bias, node = shift, editor.made.get(inner)
    if node is None or node.op_type != "MatMul" or node.input[0] != x:
        raise _KeptError("the logits are not a matrix product of the same rows")
    weight = editor.array(node.input[1], "the router's weight")
    if bias is None:
        bias = np.zeros(weight.shape[1], weight.dtype)
    stem = node.input[1]
    return editor.store(f"{stem}/rows", weight.T.copy()), editor.store(f"{stem}/bias", bias)


def _bias(editor: _Editor, add: onnx.NodeProto) -> tuple[Array, str]:
    """Return the constant operand of an Add, possibly a product of constants, and the other."""
    for constant, other in (add.input, list(add.input)[::-1]):
        product = editor.made.get(constant)
        names = [constant] if product is None else list(product.input)
        if all(name in editor.stored for name in names) and (
            product is None or product.op_type == "Mul"
        ):
            arrays = [editor.array(name, "the router's bias") for name in names]
            return np.asarray(np.prod(np.broadcast_arrays(*arrays), axis=0)), other
    raise _KeptError("the router's bias is not stored in the file")
