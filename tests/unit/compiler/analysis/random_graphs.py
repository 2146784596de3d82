"""Random functions over every row of the zero-rule table, and the check of what is claimed of them.

Everything in the pool is (R, 4) f32 or bool; R is 3 or the run-time length `T`. An emitter adds the
operation of one row, with whatever it needs around it, to a graph.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, i64
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Operation, Region, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.analysis.finite import checked_values
from compiler.analysis.mask_moves import Environment
from compiler.analysis.masks import Mask
from compiler.analysis.propagation import STANDARD, Facts, ZeroLogic, module_facts
from compiler.analysis.reference import ROUTE_ORDERS, Caches, Execution, Run
from compiler.dialects.dims import Dim, symbol_dim
from compiler.dialects.invariant import zero_rule
from compiler.dialects.mm import (
    AttentionOp,
    AttentionRowOp,
    AttentionScoreOp,
    KvAppendOp,
    PruneOp,
    PruneTopPOp,
    RopeOp,
    SpliceOp,
)
from compiler.dialects.moe import ExpertsOp, RouteOp
from compiler.dialects.movement import ConcatOp, ExpandOp, ReshapeOp, SliceOp, TransposeOp
from compiler.dialects.properties import integers
from compiler.dialects.sp import (
    ArgmaxOp,
    BinaryOp,
    ConstantOp,
    Conv2dOp,
    EmbedOp,
    ImageOp,
    LinearOp,
    NormOp,
    OnnxOp,
    SoftmaxOp,
    UnaryOp,
)
from compiler.dialects.types import shape_of, tensor_type

HOSTILE = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e38, -1e38, 1e-45], np.float32)
ROWS, WIDTH, OPERATIONS_PER_GRAPH = 3, 4, 12


class Graph:
    """A function under construction."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.table = ConstantTable()
        self.symbolic = bool(self.rng.random() < 0.3)
        self.rows = symbol_dim("T") if self.symbolic else Dim(ROWS)
        shape = (self.rows, Dim(WIDTH))
        kinds = ["float32", "float32", "bool"]
        self.block = Block(arg_types=[tensor_type(kind, shape) for kind in kinds])
        self.pixels = self.block.insert_arg(tensor_type("uint8", (1, ROWS * WIDTH)), 3)
        self.floats = list(self.block.args[:2])
        self.bools = [self.block.args[2]]
        self.keys: Counter[str] = Counter()
        self.layers = 0

    def pick(self) -> SSAValue:
        recent = self.floats[-5:] if self.rng.random() < 0.8 else self.floats
        return recent[int(self.rng.integers(len(recent)))]

    def mask(self) -> SSAValue:
        return self.bools[int(self.rng.integers(len(self.bools)))]

    def add(self, op: Operation) -> SSAValue:
        op.verify()
        self.block.add_op(op)
        key = zero_rule(op)
        if key is not None:
            self.keys[key] += 1
        return op.results[0]

    def constant(self, array: np.ndarray) -> SSAValue:
        return self.add(self.table.add(array))

    def weights(self, *shape: int) -> SSAValue:
        """Numbers of which some, and some whole rows and columns, are zero."""
        array = self.rng.standard_normal(shape).astype(np.float32)
        array[self.rng.random(shape) < 0.2] = 0
        for axis in range(len(shape)):
            dead = self.rng.random(shape[axis]) < 0.25
            array[(slice(None),) * axis + (dead,)] = 0
        return self.constant(array)

    def onnx(self, op: str, *operands: SSAValue | None, like: SSAValue | None = None, **attrs):
        kind = (like if like is not None else next(o for o in operands if o is not None)).type
        return self.add(OnnxOp(op, operands, attrs, [kind]))

    def keep(self, value: SSAValue) -> None:
        """Put a value of the pool's shape into the pool."""
        pool = self.bools if str(value.type).endswith("i1>") or "xi1" in str(value.type) else None
        (self.floats if pool is None else pool).append(value)

    def fold_back(self, value: SSAValue) -> None:
        """Bring any result back to the pool's shape."""
        shape = shape_of(value)
        if shape == (self.rows, Dim(1)):
            value = self.add(ExpandOp(value, (self.rows, Dim(WIDTH))))
        elif shape != (self.rows, Dim(WIDTH)):
            value = self.add(ReshapeOp(value, (self.rows, Dim(WIDTH))))
        self.keep(value)

    def finish(self) -> FuncOp:
        result = self.floats[-1]
        self.block.add_op(ReturnOp(result))
        return FuncOp("f", (list(self.block.arg_types), [result.type]), Region(self.block))


def integer(value: int) -> IntegerAttr:
    return IntegerAttr(value, i64)


def real(value: float) -> FloatAttr:
    return FloatAttr(value, 64)


Emitter = Callable[[Graph], None]


def _unary(kind: str) -> Emitter:
    return lambda g: g.keep(g.add(UnaryOp(g.pick(), kind=kind)))


def _second(g: Graph, other: SSAValue) -> SSAValue:
    """A factor: another value, or a constant with zeros that broadcasts."""
    if g.rng.random() < 0.5:
        return other
    shape = [(WIDTH,), (1, WIDTH), (1, 1)][int(g.rng.integers(3))]
    array = g.rng.standard_normal(shape).astype(np.float32)
    array[g.rng.random(shape) < 0.3] = 0
    return g.constant(array)


def _binary(kind: str) -> Emitter:
    def emit(g: Graph) -> None:
        act = str(g.rng.choice(["none", "none", "relu", "silu"]))
        g.keep(g.add(BinaryOp(g.pick(), _second(g, g.pick()), kind=kind, act=act)))

    return emit


def _onnx_unary(op: str, **attrs) -> Emitter:
    return lambda g: g.keep(g.onnx(op, g.pick(), **attrs))


def _onnx_binary(op: str) -> Emitter:
    return lambda g: g.keep(g.onnx(op, g.pick(), _second(g, g.pick())))


def _logic(op: str) -> Emitter:
    def emit(g: Graph) -> None:
        _truth(g)
        known, other = g.bools[-1], g.mask()
        g.keep(g.onnx(op, *([known] if op == "Not" else [known, other])))
        if op == "Or":
            _truth(g)
            g.keep(g.onnx(op, known, g.bools[-1]))

    return emit


def _quotient(g: Graph) -> None:
    numbers = g.rng.uniform(0.5, 2.0, (1, WIDTH)).astype(np.float32)
    sparse = g.add(BinaryOp(g.pick(), g.weights(WIDTH), kind="mul"))
    g.keep(g.onnx("Div", g.add(UnaryOp(sparse, kind="relu")), g.constant(numbers)))
    g.keep(g.onnx("Div", g.pick(), _second(g, g.pick())))


def _compare(op: str) -> Emitter:
    return lambda g: g.keep(g.onnx(op, g.pick(), g.pick(), like=g.bools[0]))


def _clip(g: Graph) -> None:
    bounds = [(0, None), (0, 6), (-1, 1), (0.5, 2), (None, 0), (-2, -1)]
    low, high = bounds[int(g.rng.integers(len(bounds)))]
    operands = [None if b is None else g.constant(np.array(b, np.float32)) for b in (low, high)]
    x = g.add(UnaryOp(g.pick(), kind="relu")) if g.rng.random() < 0.5 else g.pick()
    g.keep(g.onnx("Clip", x, *operands))


def _norm(kind: str) -> Emitter:
    def emit(g: Graph) -> None:
        beta = g.weights(WIDTH) if kind == "layer" else None
        g.keep(g.add(NormOp(g.pick(), g.weights(WIDTH), beta, kind=kind, eps=1e-5)))

    return emit


def _onnx_norm(op: str) -> Emitter:
    attrs = {"axis": integer(-1), "epsilon": real(1e-5)}
    return lambda g: g.keep(g.onnx(op, g.pick(), g.weights(WIDTH), **attrs))


def _scores(g: Graph) -> SSAValue:
    """Scores, masked in one of the ways that exporters use."""
    way = int(g.rng.integers(4))
    if way == 0:
        return g.pick()
    low = np.float32(-np.inf if way == 1 else -1e9)
    added = np.where(g.rng.random((1, WIDTH)) < 0.5, low, np.float32(0)).astype(np.float32)
    if way in (1, 2):
        scores = g.pick() if way == 1 else g.add(UnaryOp(g.pick(), kind="tanh"))
        return g.add(BinaryOp(scores, g.constant(added), kind="add"))
    return g.onnx(
        "Where", g.mask(), g.pick(), g.constant(low.reshape(1, 1) * np.inf), like=g.floats[0]
    )


def _linear(g: Graph) -> None:
    bias = g.weights(WIDTH) if g.rng.random() < 0.5 else None
    residual = g.pick() if g.rng.random() < 0.3 else None
    act, storage = str(g.rng.choice(["none", "relu", "silu"])), str(g.rng.choice(["w4", "f32"]))
    weight = g.weights(WIDTH, WIDTH)
    g.keep(g.add(LinearOp(g.pick(), weight, bias, residual, act=act, storage=storage)))


def _conv(g: Graph) -> None:
    image = g.add(ReshapeOp(g.pick(), [Dim(ROWS * WIDTH), Dim(1)]))
    act = str(g.rng.choice(["none", "relu"]))
    weight, bias = g.weights(2, 9), g.weights(2) if g.rng.random() < 0.5 else None
    y = g.add(Conv2dOp(image, weight, bias, (ROWS, WIDTH, 3, 3, 1, 1), act=act))
    g.fold_back(g.add(SliceOp(y, 1, Dim(int(g.rng.integers(2))), Dim(1))))


def _transpose(g: Graph) -> None:
    g.fold_back(g.add(TransposeOp(g.pick(), [1, 0])))


def _reshape(g: Graph) -> None:
    flat = g.add(ReshapeOp(g.pick(), [g.rows.times(2), Dim(WIDTH // 2)]))
    g.fold_back(g.add(UnaryOp(flat, kind="neg")))


def _expand(g: Graph) -> None:
    at = int(g.rng.integers(WIDTH))
    g.fold_back(g.add(SliceOp(g.pick(), 1, Dim(at), Dim(1))))


def _slice(g: Graph) -> None:
    value = g.pick()
    if g.rng.random() < 0.5:
        turned = SliceOp(value, 1, Dim(WIDTH - 1), Dim(WIDTH), -1)
        g.keep(g.add(turned))
        return
    parts = [g.add(SliceOp(g.pick(), 1, Dim(at), Dim(2), 2)) for at in (0, 1)]
    g.keep(g.add(ConcatOp(parts, 1)))


def _concat(g: Graph) -> None:
    cut = int(g.rng.integers(1, WIDTH))
    left = g.add(SliceOp(g.pick(), 1, Dim(0), Dim(cut)))
    right = g.add(SliceOp(g.pick(), 1, Dim(cut), Dim(WIDTH - cut)))
    g.keep(g.add(ConcatOp([left, right], 1)))


def _embed(g: Graph) -> None:
    table = g.weights(5, WIDTH) if g.rng.random() < 0.5 else g.pick()
    g.add(EmbedOp(g.constant(g.rng.integers(0, 3, 2)), table))
    best = g.add(ArgmaxOp(g.pick()))
    index = g.add(ReshapeOp(best, [g.rows]))
    if table in g.floats and not g.symbolic:
        index = g.constant(g.rng.integers(0, ROWS, ROWS))
    elif table in g.floats:
        table = g.weights(5, WIDTH)
    g.keep(g.add(EmbedOp(index, table)))


def _gather(g: Graph) -> None:
    index = g.constant(g.rng.integers(-WIDTH, WIDTH, WIDTH))
    g.keep(g.onnx("Gather", g.pick(), index, axis=integer(1)))


def _route(g: Graph) -> tuple[RouteOp, SSAValue]:
    x = g.pick()
    bias = g.weights(5) if g.rng.random() < 0.5 else None
    op = RouteOp(x, g.weights(5, WIDTH), bias, k=2, order=str(g.rng.choice(ROUTE_ORDERS)))
    g.add(op)
    return op, x


def _gates(g: Graph) -> None:
    op, _ = _route(g)
    g.keep(g.add(ConcatOp([op.gate, op.gate], 1)))


def _experts(g: Graph) -> None:
    route, x = _route(g)
    act = str(g.rng.choice(["relu", "swiglu"]))
    inner = 4 if act == "swiglu" else 2
    weights = g.weights(5, inner, WIDTH), g.weights(5, WIDTH, 2)
    g.keep(g.add(ExpertsOp(x, route.index, route.gate, *weights, act=act)))


def _scatter(g: Graph) -> None:
    x = g.pick()
    kinds = [tensor_type(kind, (g.rows, Dim(2))) for kind in ("float32", "int64")]
    top = OnnxOp("TopK", [x], {}, kinds)
    g.add(top)
    base = g.constant(np.zeros((1, WIDTH), np.float32))
    zeros = g.add(ExpandOp(base, (g.rows, Dim(WIDTH))))
    g.keep(g.onnx("ScatterElements", zeros, top.outputs[1], top.outputs[0], axis=integer(-1)))


def _where(g: Graph) -> None:
    zero = g.constant(np.zeros((1, 1), np.float32))
    yes, no = (g.pick(), zero) if g.rng.random() < 0.4 else (g.pick(), g.pick())
    if g.rng.random() < 0.3:
        yes, no = zero, yes
    g.keep(g.onnx("Where", g.mask(), yes, no, like=g.floats[0]))


def _trilu(g: Graph) -> None:
    shift = g.constant(np.array(int(g.rng.integers(-1, 2)), np.int64))
    g.keep(g.onnx("Trilu", g.pick(), shift, upper=integer(int(g.rng.random() < 0.3))))


def _attention(g: Graph) -> None:
    mask = str(g.rng.choice(["none", "causal"]))
    heads, groups = (WIDTH, WIDTH // 2) if mask == "causal" else (2, 2)
    v = g.pick()
    if g.rng.random() < 0.5:
        columns = g.weights(WIDTH)
        if groups < heads:  # known to be finite, so that dead columns are proved
            v = g.add(ExpandOp(columns, (g.rows, Dim(WIDTH))))
        else:
            v = g.add(BinaryOp(v, columns, kind="mul"))
    q, k = (g.add(UnaryOp(g.pick(), kind="tanh")) for _ in range(2))
    if groups < heads:
        k, v = (g.add(SliceOp(x, 1, Dim(0), Dim(WIDTH * groups // heads))) for x in (k, v))
    g.keep(g.add(AttentionOp(q, k, v, heads=heads, kv_heads=groups, scale=0.5, mask=mask)))


def _attention_row(g: Graph) -> None:
    g.fold_back(g.add(AttentionRowOp(g.pick(), g.pick(), heads=2, scale=0.5, row=0)))


def _prune(g: Graph, *, splice: bool = False) -> None:
    score = g.add(SliceOp(g.pick(), 1, Dim(0), Dim(1)))
    op = PruneOp(g.pick(), score, k=2, score_offset=0)
    kept = g.add(op)
    if splice:
        kept = g.add(SpliceOp(kept, op.index))
    rest = g.add(SliceOp(g.pick(), 0, Dim(0), Dim(1)))
    g.keep(g.add(ConcatOp([kept, rest], 0)))


def _prune_top_p(g: Graph) -> None:
    score = AttentionScoreOp(g.pick(), g.pick(), heads=2, scale=0.5, row=-1, first=0)
    tokens = g.pick()
    if g.rng.random() < 0.5:
        tokens = g.add(BinaryOp(tokens, g.weights(WIDTH), kind="mul"))
    g.keep(g.add(PruneTopPOp(tokens, g.add(score), p=0.6, min_keep=1, max_keep=ROWS)))


def _attention_score(g: Graph) -> None:
    score = AttentionScoreOp(g.pick(), g.pick(), heads=2, scale=0.5, row=0, first=0)
    g.fold_back(g.add(score))


def _dynamic_prune(g: Graph) -> None:
    tokens = g.add(ReshapeOp(g.pick(), [Dim(1), Dim(ROWS), Dim(WIDTH)]))
    probabilities = g.add(ReshapeOp(g.pick(), [Dim(1), Dim(ROWS), Dim(WIDTH)]))
    kinds = [tensor_type("float32", (1, 2, WIDTH)), tensor_type("int64", (1, 2))]
    kept = g.add(OnnxOp("ai.sparsefleet::DynamicPrune", [tokens, probabilities], {}, kinds))
    rest = g.add(SliceOp(tokens, 1, Dim(1), Dim(1)))
    g.fold_back(g.add(ConcatOp([kept, rest], 1)))


def _append(g: Graph) -> None:
    k, v = g.pick(), g.pick()
    if g.rng.random() < 0.6:
        v = g.add(BinaryOp(v, g.weights(WIDTH), kind="mul"))
    op = KvAppendOp(k, v, layer=g.layers, heads=2)
    g.layers += 1
    g.add(op)
    g.keep(g.add(SliceOp(op.values, 0, Dim(0), Dim(ROWS))))


def _rope(g: Graph) -> None:
    positions = g.constant(np.arange(ROWS))
    frequencies = g.constant(np.array([0.5], np.float32))
    g.keep(g.add(RopeOp(g.pick(), positions, frequencies, heads=2)))


def _reduce(op: str) -> Emitter:
    def emit(g: Graph) -> None:
        kind = tensor_type("float32", (g.rows, Dim(1)))
        reduced = OnnxOp(op, [g.pick()], {"axes": integers([1])}, [kind])
        g.fold_back(g.add(reduced))

    return emit


def _cast(g: Graph) -> None:
    g.keep(g.onnx("Cast", g.mask(), like=g.floats[0], to=integer(1)))


def _truth(g: Graph) -> None:
    truth = g.constant(g.rng.random((1, WIDTH)) < 0.5)
    g.bools.append(g.add(ExpandOp(truth, (g.rows, Dim(WIDTH)))))


def _masked(g: Graph) -> None:
    cast = g.onnx("Cast", g.mask(), like=g.floats[0], to=integer(1))
    g.keep(g.onnx("Mul", g.pick(), cast))


def _image(g: Graph) -> None:
    dark = g.constant(g.rng.integers(0, 2, (1, ROWS * WIDTH)).astype(np.uint8))
    pixels = dark if g.rng.random() < 0.5 else g.pixels
    g.fold_back(g.add(ImageOp(pixels, 12, 1, divide=255.0, subtract=0.5)))


STATIC_ONLY = frozenset(
    {"sp.conv2d", "sp.image", "mm.prune", "mm.splice", "mm.kv_append", "mm.rope"}
    | {"mm.prune_top_p", "mm.attention_score"}
    | {"sp.onnx:ai.sparsefleet::DynamicPrune"}
)
EMITTERS: dict[str, Emitter] = {
    "sp.constant": lambda g: g.keep(g.add(ExpandOp(g.weights(1, WIDTH), (g.rows, Dim(WIDTH))))),
    **{f"sp.unary:{k}": _unary(k) for k in ("relu", "silu", "neg", "sqrt", "tanh")},
    **{f"sp.unary:{k}": _unary(k) for k in ("gelu", "gelu_tanh")},
    **{f"sp.unary:{k}": _unary(k) for k in ("exp", "sigmoid", "reciprocal")},
    **{f"sp.binary:{k}": _binary(k) for k in ("add", "sub", "mul", "div")},
    **{
        f"sp.onnx:{k}": _onnx_unary(k)
        for k in (
            *("Relu", "Abs", "Ceil", "Erf", "Floor", "Identity", "Neg", "Sin", "Sqrt", "Swish"),
            *("Gelu", "Round", "Sign", "Tanh", "Cos", "Exp", "Log", "Reciprocal", "Sigmoid"),
        )
    },
    **{f"sp.onnx:{k}": _onnx_binary(k) for k in ("Mul", "Add", "Sub", "Max", "Min", "Pow")},
    "sp.onnx:Div": _quotient,
    **{f"sp.onnx:{k}": _logic(k) for k in ("And", "Or", "Not")},
    **{
        f"sp.onnx:{k}": _compare(k)
        for k in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    },
    **{f"sp.onnx:{k}": _reduce(k) for k in ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")},
    "sp.onnx:Clip": _clip,
    "sp.onnx:ThresholdedRelu": _onnx_unary("ThresholdedRelu", alpha=real(0.3)),
    "sp.onnx:LeakyRelu": _onnx_unary("LeakyRelu", alpha=real(0.1)),
    "sp.onnx:Cast": _cast,
    "sp.norm:rms": _norm("rms"),
    "sp.norm:layer": _norm("layer"),
    "sp.onnx:RMSNormalization": _onnx_norm("RMSNormalization"),
    "sp.onnx:LayerNormalization": _onnx_norm("LayerNormalization"),
    "sp.softmax": lambda g: g.keep(g.add(SoftmaxOp(_scores(g)))),
    "sp.onnx:Softmax": lambda g: g.keep(g.onnx("Softmax", _scores(g), axis=integer(-1))),
    "sp.linear": _linear,
    "sp.conv2d": _conv,
    "sp.onnx:MatMul": lambda g: g.keep(g.onnx("MatMul", g.pick(), g.weights(WIDTH, WIDTH))),
    "sp.reshape": _reshape,
    "sp.expand": _expand,
    "sp.transpose": _transpose,
    "sp.slice": _slice,
    "sp.concat": _concat,
    "sp.embed": _embed,
    "sp.onnx:Gather": _gather,
    "moe.route": _gates,
    "moe.experts": _experts,
    "sp.onnx:ScatterElements": _scatter,
    "sp.onnx:Where": _where,
    "sp.onnx:Trilu": _trilu,
    "mm.attention": _attention,
    "mm.attention_row": _attention_row,
    "mm.prune": _prune,
    "mm.splice": lambda g: _prune(g, splice=True),
    "sp.onnx:ai.sparsefleet::DynamicPrune": _dynamic_prune,
    "mm.kv_append": _append,
    "mm.rope": _rope,
    "mm.attention_score": _attention_score,
    "mm.prune_top_p": _prune_top_p,
    "sp.image": _image,
    "sp.argmax": _embed,
    "masked product": _masked,
    "constant truth": _truth,
}


def random_graph(seed: int) -> tuple[Graph, FuncOp]:
    """Return a random function; equal seeds give equal functions."""
    graph = Graph(seed)
    keys = sorted(k for k in EMITTERS if not (graph.symbolic and k in STATIC_ONLY))
    for _ in range(OPERATIONS_PER_GRAPH):
        EMITTERS[keys[int(graph.rng.integers(len(keys)))]](graph)
    return graph, graph.finish()


def random_inputs(rng: np.random.Generator, *, hostile: bool) -> list[np.ndarray]:
    """Return arguments for a random function."""
    found: list[np.ndarray] = []
    for _ in range(2):
        plain = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
        bad = rng.choice(HOSTILE, (ROWS, WIDTH))
        found.append(np.where((rng.random((ROWS, WIDTH)) < 0.4) & hostile, bad, plain))
    found.append(rng.random((ROWS, WIDTH)) < 0.5)
    found.append(rng.integers(0, 256, (1, ROWS * WIDTH)).astype(np.uint8))
    return found


@dataclass
class Outcome:
    """What was claimed about one graph, and what was wrong.

    Attributes:
        keys: How often each row of the table occurs.
        zeros: Elements proved zero by more than being their own source, over all executions.
        claims: Parts of all masks: sources, clauses, atoms. Fewer of them say less.
        violations: Claims that an execution contradicts.
    """

    keys: Counter[str]
    zeros: int = 0
    claims: int = 0
    violations: list[str] = field(default_factory=list)


def check_graph(seed: int, logic: ZeroLogic = STANDARD) -> Outcome:
    """Execute a random function and compare its values with what the analysis claims of them."""
    graph, func = random_graph(seed)
    facts = module_facts([func], graph.table, logic)[0]
    outcome = Outcome(graph.keys, claims=_size(facts))
    checked = checked_values([func])
    rng = np.random.default_rng([seed, 1])
    empty: Caches = {k: (np.zeros((0, WIDTH), np.float32),) * 2 for k in range(graph.layers)}
    caches = empty
    for past, hostile in ((0, True), (0, False), (ROWS, False)):
        if past and (caches is empty or not graph.layers):
            continue
        execution = Execution(graph.table, {"T": ROWS, "P": past}, caches if past else empty)
        run = execution.run(func, random_inputs(rng, hostile=hostile))
        if all(np.isfinite(run[value]).all() for value in checked):
            _compare_claims(facts, run, execution, outcome, f"seed {seed}")
            caches = execution.caches
    return outcome


def _compare_claims(
    facts: Facts, run: Run, execution: Execution, outcome: Outcome, place: str
) -> None:
    env = environment(facts, run, execution)
    finite = [bool(np.isfinite(run[value]).all()) for value in facts.numbers]
    for value, mask in facts.masks.items():
        holding = Mask(frozenset(c for c in mask.clauses if all(finite[n] for n in c.assumes)))
        dead = ~holding.evaluate(env, run[value].shape)
        if bool((run[value][dead] != 0).any()) or bool(np.isnan(_floats(run[value][dead])).any()):
            outcome.violations.append(f"{place}: {value.owner}")
        low, high = holding.density
        share = 1 - dead.mean() if dead.size else 1.0
        if not low - 1e-9 <= share <= high + 1e-9:
            outcome.violations.append(f"{place}: density {share} outside [{low}, {high}]")
        if not isinstance(value.owner, ConstantOp):
            inherited = _without_own_source(holding, facts, value)
            outcome.zeros += int((~inherited.evaluate(env, run[value].shape)).sum())
    for source in facts.sources:
        share = env.patterns[source.number].mean()
        if not source.density[0] - 1e-9 <= share <= source.density[1] + 1e-9:
            outcome.violations.append(f"{place}: source {source.kind} density {share}")


def _size(facts: Facts) -> int:
    clauses = [clause for mask in facts.masks.values() for clause in mask.clauses]
    parts = sum(1 + len(clause.atoms) - len(clause.assumes) for clause in clauses)
    return 1000 * len(facts.sources) + parts


def _without_own_source(mask: Mask, facts: Facts, value: SSAValue) -> Mask:
    """Drop clauses that only say that a source is zero where it is."""
    own = {s.number for s in facts.sources if s.value is value}
    return Mask(frozenset(c for c in mask.clauses if not Mask(frozenset({c})).sources() & own))


def _floats(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def environment(facts: Facts, run: Run, execution: Execution) -> Environment:
    """Return what masks need to know about an execution."""
    patterns = {}
    for source in facts.sources:
        width = source.width.at(execution.binding) if source.width is not None else 0
        patterns[source.number] = source.pattern(run[source.value], width)
    indices = {number: run[value] for number, value in enumerate(facts.indices)}
    return Environment(execution.binding, patterns, indices)
