"""The ONNX domain `ai.sparsefleet`, version 1: six operators as functions with bodies.

A model that uses one of them runs everywhere: `attach_functions` puts the bodies into the file, and
a runtime that does not know the operator executes its dense meaning. The compiler takes
`MoERouter`, `MoEExpert` and `DynamicPrune` by name and inlines the others, whose bodies raise to
kernels like any graph. Bodies that come with a file are compared with these meanings at import
(`function_bodies`).

    MoERouter <k> (x (T, D), weight (E, D), bias (E), factor ()) -> index (T, k) i64, gate (T, k)
        the k best of `x weight^T + factor * bias`, softmax over them
    MoEExpert (x (T, D), index, gate, w_in (E, F, D), w_out (E, D, F)) -> (T, D)
        sum over the choices of `gate * w_out relu(w_in x)`
    DynamicPrune <k> (tokens (1, N, D), scores (1, H, N + 1)) -> (1, k, D), (1, k) i64
        the k tokens of highest mean score, the first key skipped, in their order
    SparseConv <strides, pads, dilations, group> (x, weight, bias, mask) -> as Conv
        a convolution of `weight * mask`; the mask (0 or 1) broadcasts to the weight
    SparseAttention <num_heads, sink, window, scale> (q, k, v (1, T, H * hd)) -> (1, T, H * hd)
        causal attention of every query to the first `sink` keys and the last `window` ones
    DynamicTopK <k> (scores (R, N), mass ()) -> values (R, k), index (R, k) i64, count (R) i64
        softmax weights of the fewest best entries that hold `mass`, at most k; zeros behind them
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import onnx
from onnx import helper, parser

from compiler.frontend.onnx_file import SPARSEFLEET_DOMAIN

VERSION: Final = 1
BODY_OPSET: Final = 18

_BODIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "MoERouter": """MoERouter <k> (x, weight, bias, factor) => (index, gate) {
  turned = Transpose <perm = [1, 0]> (weight)
  plain = MatMul (x, turned)
  shift = Mul (factor, bias)
  logits = Add (plain, shift)
  one = Constant <value_ints = [1]> ()
  number = Constant <value_int : int = @k> ()
  count = Reshape (number, one)
  best, index = TopK <axis = -1> (logits, count)
  gate = Softmax <axis = -1> (best)
}""",
        "MoEExpert": """MoEExpert (x, index, gate, w_in, w_out) => (y) {
  first = Gather <axis = 0> (w_in, index)
  second = Gather <axis = 0> (w_out, index)
  around = Constant <value_ints = [1, 3]> ()
  column = Unsqueeze (x, around)
  inner = MatMul (first, column)
  hidden = Relu (inner)
  outer = MatMul (second, hidden)
  last = Constant <value_ints = [3]> ()
  rows = Squeeze (outer, last)
  two = Constant <value_ints = [2]> ()
  factor = Unsqueeze (gate, two)
  weighted = Mul (rows, factor)
  one = Constant <value_ints = [1]> ()
  y = ReduceSum <keepdims = 0> (weighted, one)
}""",
        "DynamicPrune": """DynamicPrune <k> (tokens, scores) => (kept, index) {
  one = Constant <value_ints = [1]> ()
  two = Constant <value_ints = [2]> ()
  end = Constant <value_ints = [9223372036854775807]> ()
  patches = Slice (scores, one, end, two)
  mean = ReduceMean <keepdims = 0> (patches, one)
  number = Constant <value_int : int = @k> ()
  count = Reshape (number, one)
  best, unordered = TopK <axis = -1> (mean, count)
  floats = Cast <to = 1> (unordered)
  ordered, places = TopK <axis = -1, largest = 0> (floats, count)
  index = Cast <to = 7> (ordered)
  pairs = Unsqueeze (index, two)
  kept = GatherND <batch_dims = 1> (tokens, pairs)
}""",
        "SparseConv": """SparseConv
<strides, pads, dilations, group> (x, weight, bias, mask) => (y) {
  sparse = Mul (weight, mask)
  y = Conv <strides : ints = @strides, pads : ints = @pads, dilations : ints = @dilations,
            group : int = @group> (x, sparse, bias)
}""",
        "SparseAttention": """SparseAttention <num_heads, sink, window, scale> (q, k, v) => (y) {
  heads = Constant <value_int : int = @num_heads> ()
  zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  first = Constant <value_ints = [0]> ()
  single = Constant <value_ints = [1]> ()
  rest = Constant <value_ints = [-1]> ()
  keep = Constant <value_ints = [0]> ()
  count = Reshape (heads, single)
  split = Concat <axis = 0> (keep, keep, count, rest)
  q4 = Reshape (q, split)
  k4 = Reshape (k, split)
  v4 = Reshape (v, split)
  qh = Transpose <perm = [0, 2, 1, 3]> (q4)
  kt = Transpose <perm = [0, 2, 3, 1]> (k4)
  vh = Transpose <perm = [0, 2, 1, 3]> (v4)
  plain = MatMul (qh, kt)
  factor = Constant <value_float : float = @scale> ()
  scaled = Mul (plain, factor)
  length = Shape <start = 1, end = 2> (q)
  total = Squeeze (length, first)
  place = Range (zero, total, one)
  key = Unsqueeze (place, first)
  query = Unsqueeze (place, single)
  distance = Sub (query, key)
  causal = GreaterOrEqual (distance, zero)
  reach = Constant <value_int : int = @window> ()
  near = Less (distance, reach)
  sinks = Constant <value_int : int = @sink> ()
  at_front = Less (key, sinks)
  wanted = Or (near, at_front)
  visible = And (causal, wanted)
  open = Constant <value_float = 0.0> ()
  shut = Constant <value_float = -3.0e38> ()
  lowered = Where (visible, open, shut)
  masked = Add (scaled, lowered)
  weights = Softmax <axis = -1> (masked)
  mixed = MatMul (weights, vh)
  rows = Transpose <perm = [0, 2, 1, 3]> (mixed)
  sizes = Concat <axis = 0> (keep, keep, rest)
  y = Reshape (rows, sizes)
}""",
        "DynamicTopK": """DynamicTopK <k> (scores, mass) => (values, index, count) {
  weights = Softmax <axis = -1> (scores)
  single = Constant <value_ints = [1]> ()
  number = Constant <value_int : int = @k> ()
  most = Reshape (number, single)
  best, index = TopK <axis = -1> (weights, most)
  axis = Constant <value_int = 1> ()
  before = CumSum <exclusive = 1> (best, axis)
  kept = Less (before, mass)
  nothing = Constant <value_float = 0.0> ()
  values = Where (kept, best, nothing)
  ones = Cast <to = 7> (kept)
  count = ReduceSum <keepdims = 0> (ones, single)
}""",
    }
)

NAMES: Final = tuple(_BODIES)


def function(name: str, opset: int = BODY_OPSET) -> onnx.FunctionProto:
    """Return one operator of the domain as a function with its body.

    Args:
        name: One of `NAMES`.
        opset: Version of the default operator set that the model imports, 18 or later.

    Raises:
        KeyError: There is no such operator.
        ValueError: The bodies need a later operator set.
    """
    if opset < BODY_OPSET:
        raise ValueError(f"the bodies need opset {BODY_OPSET}, the model has {opset}")
    head = f'<domain: "{SPARSEFLEET_DOMAIN}", opset_import: ["" : {opset}]>\n'
    return parser.parse_function(head + _BODIES[name])


def attach_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give a model the bodies of all operators of the domain that its nodes call.

    Args:
        model: Changed in place: functions that it has already stay, the domain is imported.

    Returns:
        The same model, which now runs in every runtime that knows functions.

    Raises:
        ValueError: A node calls an operator that the domain does not have, or the model's operator
            set is too old for the bodies.
    """
    called = {node.op_type for node in model.graph.node if node.domain == SPARSEFLEET_DOMAIN}
    unknown = sorted(called - set(NAMES))
    if unknown:
        raise ValueError(f"{SPARSEFLEET_DOMAIN} has no operator {unknown[0]!r}")
    present = {f.name for f in model.functions if f.domain == SPARSEFLEET_DOMAIN}
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    model.functions.extend(function(name, opset) for name in sorted(called - present))
    if called and all(o.domain != SPARSEFLEET_DOMAIN for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(SPARSEFLEET_DOMAIN, VERSION))
    return model
