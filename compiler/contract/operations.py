"""The operations of a plan's tape: stable numbers, operands and parameters.

One table serves both parties: the compiler checks what it lowered against it, the device checks
the plan bytes it received against it. Matrices are row-major `(rows, cols)`; `R` is the number of
rows of an operand at run time; `-1` stands for an absent operand. Every f32 operation is IEEE
single precision, round to nearest even, never contracted, in the order written in the C templates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from compiler.contract.reference import MapKind, PoolKind, ReduceKind, ScatterKind
from compiler.contract.windows import MAX_PAD_CODE


class Op(IntEnum):
    """Operation codes. A number, once used, never changes its meaning."""

    IMAGE_U8 = 1
    """pixels u8 (1, n) -> f32 (H*W, C), n = H*W*C, row-major HWC: `x / divide - subtract`."""
    EMBED = 2
    """ids i32 (R, 1); weight f32 or i8 (V, D) -> f32 (R, D).
    An id outside [0, V) is a run-time error."""
    LINEAR = 3
    """x (R, K), [residual (R, N)]; weight w4 (N, K), [bias f32 (N)],
    [gamma f32 (K), [beta f32 (K)]] -> (R, N).
    `y = residual + act(float(acc) * (r * xscale) + bias)`; K <= 8192.
    norm 0: of x; otherwise of NORM of x with gamma, beta and eps, kind = norm - 1.
    check > 0 claims that at most `check` groups of 32 columns of the quantised rows hold anything
    but zeros: looked at in every run, it decides what is read, never what comes out."""
    LINEAR_F32 = 4
    """As LINEAR with weight f32 or i8 (N, K), in f32. Small matrices, and those of models that ask
    for no rounding."""
    NORM = 5
    """x (R, D); gamma f32 (D), [beta f32 (D)] -> (R, D). kind = NormKind."""
    ROPE = 6
    """x (R, H*hd), positions i32 (R, 1); cos f32 (P, hd/2), sin f32 (P, hd/2) -> (R, H*hd).
    Halves a, b of each head: `a*cos - b*sin`, `b*cos + a*sin`.
    A position outside [0, P) is a run-time error."""
    ATTENTION = 7
    """q (R, H*hd), k (R, G*hd), v (R, G*hd), [positions i32 (R, 1)]; [cos, sin f32 (P, hd/2)] ->
    (R, H*hd): softmax of `dot(q, k) * scale` over keys.
    heads = H, kv_heads = G (0 = H), H % G == 0. kv_layer -1: over these rows only; k and v may have
    other rows if q stands alone and nothing is causal or rotated. Otherwise k and v are appended to
    that cache layer first, and row i sees the past and rows 0..i.
    q, k and v lie side by side in inputs 0 to 2: an operand may hold the next parts as further
    columns, and the inputs left over are -1. With positions, q and k are rotated as by ROPE first.
    window > 0: row i sees only rows j < sink and j > i - window; the cache then keeps row j in slot
    j, or beyond its capacity C in slot sink + (j - sink) % (C - sink).
    append_only 1: there is no q and no result; rows are only appended."""
    ATTENTION_ROW = 8
    """q (R, H*hd), k (R, H*hd) -> (R, 1): mean over heads of `softmax(dot(q[row], k) * scale)`.
    cols > 0: q is the first `cols` columns of input 0; without input 1, k is the next `cols`."""
    PRUNE = 9
    """tokens (R, D), score (S, 1) -> kept (k, D), index i32 (k, 1). S >= R + score_offset.
    The k tokens of highest `score[token + score_offset]`, in ascending token order; ties go to the
    lower token."""
    CONV2D = 10
    """x (N*H*W, Ci); weight f32 (Co, kh*kw*Ci) in (ky, kx, ci) order, [bias f32 (Co)] ->
    (N*Ho*Wo, Co), image by image; the rows of x say how many there are. Zero padding `pad` on all
    sides or on each (`contract.windows`), windows `stride` rows and `stride_x` columns apart (0 =
    stride), Ho = (H + padding - kh) / stride + 1; `act(sum + bias)`."""
    ROWS_CONCAT = 11
    """a (R1, D) or -1, b (R2, D) or -1; weight (R', D) or -1 -> (R1+R2, D), fixed rows only.
    Exactly one of a, b may be -1: the f32 weight takes its place."""
    ROWS_SLICE = 12
    """x (R, D) -> rows [start, start+count). start -1 = the last row, count 1 or -1.
    Otherwise x has fixed rows and count -1 means to the end."""
    ADD = 13
    """a (R, C), b (R|1, C|1) or weight f32 (R|1, C|1) -> act(a + b).
    inputs are (a,) with the weight, (a, b) without."""
    MUL = 14
    """As ADD: act(a * b)."""
    SUB = 15
    """As ADD: act(a - b)."""
    DIV = 16
    """As ADD: act(a / b)."""
    UNARY = 17
    """x (R, C) -> (R, C). kind = UnaryKind."""
    SOFTMAX = 18
    """x (R, C) -> (R, C) along the row."""
    ROUTE = 19
    """x (R, D); weight (E, D) of f32 or codes, [bias f32 (E), already times lambda],
    [correction f32 (E)] -> i32 (R, k), f32 (R, k), [entropy f32 (R, 1)]. Expert index and gate,
    best first, ties to the lower index. order = RouteOrder. A logit that is infinite or NaN is a
    run-time error. The sigmoid orders choose by
    `sigmoid(logit) + correction` and mix by `sigmoid(logit)`. groups > 0 splits the experts evenly;
    only the top_groups groups whose group_take best scores have the greatest sum may be chosen
    from. Gates are multiplied by scale (0 = not). jitter is the sparse mixer's threshold. The
    entropy is that of the softmax over all logits, nats, not negative: with t = e^(l - top),
    `top + ln(sum t) - sum(t * l) / sum t`."""
    EXPERTS = 20
    """x (R, D), index i32 (R, k), gate f32 (R, k); weights w_in, w_out per expert -> (R, D).
    Either matrix is w4 or w8, in all experts alike. Weights stand in expert order; with biases = 1
    each pair is followed by f32 b_in, b_out.
    Gated acts: w_in (2F, D) = gate rows, then up rows; others: w_in (F, D). w_out (D, F).
    Merged in ascending expert id. alpha, limit, shift belong to swiglu_clipped."""
    ARGMAX = 21
    """x (1, V) -> i32 (1, 1); ties to the lower index."""
    GATHER_ROWS = 22
    """x (R, D), index i32 (k, 1) -> (k, D). An index outside [0, R) is a run-time error."""
    COLS_CONCAT = 23
    """2 to 64 operands (R, C_i) of one dtype (f32 or i32) -> (R, sum C_i)."""
    COLS_SLICE = 24
    """x (R, C) of f32 or i32 -> columns [start, start+count)."""
    ATTENTION_SCORE = 25
    """q (S, H*hd), k (S, H*hd) -> (S - first, 1), not negative, sum about 1: how much is looked at
    each row from `first` on. Per head p = softmax(dot(q[row], k) * scale) over these rows, or with
    row -1 its mean over their queries; H = -sum p ln p / ln N; the score is the mean of p over
    heads, weighted by 1 - H. Needs 2 * S floats, never S * S. NaN is a run-time error."""
    PRUNE_TOP_P = 26
    """tokens (R, D), score (R, 1), keys (S, W) or -1 -> kept (M, D), index i32 (M, 1),
    count i32 (1, 1); M = min(R, max_keep + merge).
    Kept are the fewest tokens of highest score whose scores add up to p of all, at least min_keep,
    at most max_keep; ties go to the lower token. With `merge`, the next best tokens become context
    tokens: each of the others joins the one whose key is most similar (dot product over its
    length, ties to the lower token), and a context token is the mean of its tokens weighted by
    score. S >= R + key_offset. Rows stand in ascending token order; those from count on are zero.
    A sum of scores that is negative, infinite or NaN is a run-time error."""
    MOE_LAYER = 27
    """x (R, D); gamma f32 (D), [beta f32 (D)], router (E, D) of f32 or of codes, [bias f32 (E)],
    w_in, w_out per expert as of EXPERTS -> y (R, D), index i32 (R, k), gate f32 (R, k),
    [entropy f32 (R, 1)]: h = NORM(x), index, gate, entropy = ROUTE(h),
    y = EXPERTS(h, index, gate), plus x if residual."""
    EXPERT_PREFETCH = 28
    """No operands; the weights of some experts of a later call, complete and in its order: they are
    likely to be needed, and may be brought nearer. Computes nothing and waits for nothing. Without
    a pager the processor is told to read the first `bytes` of every W4 weight ahead."""
    EXPERT_LOAD = 29
    """No operands; the weights of every expert of a later call, as there: from here to that call
    they are in memory. Computes nothing; a pager that cannot have one ends the run."""
    LINEAR_W8 = 30
    """As LINEAR with weight w8 (N, K), and no check: `y = residual + act(float(acc) * (step *
    xscale) + bias)` with `acc = sum((code - zero) * q)`, which K <= 8192 keeps within 31 bits.
    x_step > 0: rows are multiples of it as a file rounded them; amax = 127 * x_step for all of
    them, and q is cut to +-127."""
    RECURRENT = 31
    """x (S*B, G*H), [state (B, H)], [cell (B, H)]; weight w4 (G*H, H), [bias f32 (G*H)] ->
    y (S*B, H), last state (B, H), [last cell (B, H)]: S steps of B rows, from the last to the first
    if reverse; absent states are zero. kind = RecurrentKind, B = batch; x has what the step's input
    gives to its G gates. With p = weight @ state + bias of a step and v = x + p, see the kinds.
    Only LSTM has cells. A run-time number of rows needs batch 1."""
    RECURRENT_F32 = 32
    """As RECURRENT with weight f32; only here the kind may be GRU_RESET_BEFORE."""
    CONV_DEPTHWISE = 33
    """x (N*H*W, C); weight f32 (kh*kw, C), [bias f32 (C)] -> (N*Ho*Wo, C): every channel by itself,
    otherwise as CONV2D. Taps in the padding are left out."""
    PACK = 34
    """x (R, C) -> values (R, C), mask i32 (R, W), W = ceil(C / 32): act(x) without its zeros. Bit
    i % 32 of word i / 32 of a row is set where element i is not +0; these elements stand in order
    at the start of the row of values, zeros behind them."""
    PACKED = 35
    """values (R, C), mask i32 (R, ceil(C/32)), [b (R|1, C|1)] or weight f32 (R|1, C|1) -> (R, C):
    with x the rows that PACK packed, act(x + b), act(x * b), act(x - b) or NORM of x with gamma,
    [beta] and eps, as kind = PackedKind says. MUL of neither b nor weight is x * x. Of a row only
    as many values are read as its mask has bits below C."""
    SPARSE_CONV = 36
    """As CONV2D of which few taps are stored: x (N*H*W, Ci); taps f32 (S, 16), first i32
    (2, P + 1), runs i32 (R, 2), [bias f32 (Co)], P = ceil(Co / 16). Output channels 16 p to
    16 p + 15 sum over the taps of runs first[0, p] to first[0, p + 1] alone: a run (place, count)
    is `count` taps from `place` on in (ky, kx, ci) order, within one ky, after the runs before it.
    Its taps stand in `taps` in order, those of a panel from first[1, p] on, one column per channel;
    columns of channels beyond Co are not used. Runs that are not like this are a run-time error."""
    EXPERT_FORESEE = 37
    """x (R, D); [gamma], [beta], router, [bias], [correction] as of NORM and ROUTE, then experts
    of a later call as in EXPERT_LOAD; no results. What ROUTE would choose of NORM(x), without gamma
    of x, is told as by EXPERT_PREFETCH, of at most `MOST_FORESEEN_ROWS` rows."""
    REF_MOVE = 128
    """Reference operations work on flat operands as their geometry, weight i32 0, says; the layout
    is in `compiler.contract.reference`. Sources are inputs or further weights, f32 or i32.
    Pieces: y[y_at + sum(i * y_steps)] = x[x_at + sum(i * x_steps)]; fill = y is `value` before."""
    REF_MAP = 129
    """y[i] = kind(a[i], b[i], c[i]), operands by strides; alpha and beta are the kind's numbers."""
    REF_REDUCE = 130
    """y[i] = kind over all j of x[i, j], j in row-major order."""
    REF_CONTRACT = 131
    """y[s, m, n] = sum over k, ascending, of a[s, m, k] * b[s, k, n]; f32 or i32 (wrapping)."""
    REF_CONV = 132
    """x (N, C, H, W), w (M, C/groups, kh, kw), [bias (M)] -> (N, M, Ho, Wo): bias, then taps in
    order (channel, ky, kx) added one by one; f32 or i32 (wrapping)."""
    REF_CONV_TRANSPOSE = 133
    """x (N, C, H, W), w (C, M/groups, kh, kw), [bias (M)] -> (N, M, Ho, Wo), in the same order."""
    REF_POOL = 134
    """x (planes, H, W) -> (planes, Ho, Wo), f32; averages are summed in f64."""
    REF_RESAMPLE = 135
    """y[o, j, i] = sum over t of w[j, t] * x[o, index[j, t], i], f32, in order."""
    REF_GATHER = 136
    """y[i] = x[x_at + sum(i * x_steps) + step * index[i]]; an index below 0 counts from `limit`.
    An index outside [-limit, limit) is a run-time error."""
    REF_SCATTER = 137
    """y = x, then every update u[i], in row-major order, meets y[y_at + ... + step * index[i]]."""
    REF_TOPK = 138
    """x (outer, n, inner) -> k greatest or least of the middle axis, best first, ties to the lower
    index; values and i32 indices."""
    REF_SCAN = 139
    """Running sums along the middle axis of x (outer, n, inner)."""


class Act(IntEnum):
    """Activation after a sum; `silu(x) = x / (1 + exp(-x))`."""

    NONE = 0
    RELU = 1
    SILU = 2


class NormKind(IntEnum):
    """`rms`: x / sqrt(mean(x^2) + eps) * gamma.

    `layer`: (x - mean) / sqrt(var + eps) * gamma + beta.
    """

    RMS = 0
    LAYER = 1


class UnaryKind(IntEnum):
    """Elementwise functions of one operand."""

    RELU = 0
    SIGMOID = 1
    SILU = 2
    NEG = 3
    SQRT = 4
    RECIPROCAL = 5
    EXP = 6
    TANH = 7
    GELU = 8
    """As `ExpertAct.GELU`."""
    GELU_TANH = 9
    """As `ExpertAct.GELU_TANH`."""


class PackedKind(IntEnum):
    """What is computed of packed rows; the norms count their zeros."""

    ADD = 0
    MUL = 1
    SUB = 2
    RMS = 3
    LAYER = 4


class RecurrentKind(IntEnum):
    """A cell: the order of its gates and its new state h'."""

    LSTM = 0
    """i, o, f, c: `c' = sigmoid(f) * c + sigmoid(i) * tanh(c)`, `h' = sigmoid(o) * tanh(c')`."""
    GRU = 1
    """z, r, n: `n = tanh(x + sigmoid(r) * p)`, `h' = (1 - sigmoid(z)) * n + sigmoid(z) * h`."""
    GRU_RESET_BEFORE = 2
    """The same with `n = tanh(x + (weight @ (sigmoid(r) * h) + bias))`."""
    RNN = 3
    """`h' = tanh(v)`."""


RECURRENT_GATES: Final = MappingProxyType(
    {
        RecurrentKind.LSTM: 4,
        RecurrentKind.GRU: 3,
        RecurrentKind.GRU_RESET_BEFORE: 3,
        RecurrentKind.RNN: 1,
    }
)


class RouteOrder(IntEnum):
    """How gates come from router logits: where the softmax stands, whether gates sum to 1."""

    TOPK_SOFTMAX = 0
    SOFTMAX_TOPK = 1
    SOFTMAX_TOPK_RENORM = 2
    SPARSEMIXER = 3
    """k times: the best expert; its gate is the softmax over the experts whose logit is within
    `jitter` of the best, `(best - l) / max(|l|, best) <= jitter`, earlier choices left out."""
    SIGMOID_TOPK = 4
    SIGMOID_TOPK_RENORM = 5


class ExpertAct(IntEnum):
    """What stands between the two matrices of an expert."""

    RELU = 0
    SWIGLU = 1
    """`silu(g) * u`."""
    GELU = 2
    """`x / 2 * (1 + erf(x / sqrt 2))`."""
    GELU_TANH = 3
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`."""
    SILU = 4
    IDENTITY = 5
    SWIGLU_CLIPPED = 6
    """`g * sigmoid(alpha * g) * (u + shift)`, first g to at most limit and u to within +-limit
    (limit 0 = not clipped)."""
    REGLU = 7
    """0 where g <= 0, whatever u is, `g * u` elsewhere."""


GATED: Final = frozenset({ExpertAct.SWIGLU, ExpertAct.SWIGLU_CLIPPED, ExpertAct.REGLU})
"""Activations of two operands: gate rows and up rows."""

SIGMOID_ORDERS: Final = frozenset({RouteOrder.SIGMOID_TOPK, RouteOrder.SIGMOID_TOPK_RENORM})
"""Orders that score each expert on its own."""


class ExpertEvent(IntEnum):
    """What a pager is told about an expert, by the number of its first weight."""

    PREFETCH = 0
    """It will likely be needed; the answer is not looked at."""
    LOAD = 1
    """The call that may need it comes next."""
    USE = 2
    """A row chose it: its weights are read as soon as the pager returns."""


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of an operation; its slot in the record is its position in the tuple.

    Attributes:
        low: Least allowed value, inclusive.
        high: Greatest allowed value, inclusive.
        default: Value when the call does not give it; None = required.
        is_float: Stored as f32 bits instead of i32.
    """

    name: str
    low: float
    high: float
    default: int | float | None = None
    is_float: bool = False


MAX_DIM: Final = 1 << 20
MAX_PARAMS: Final = 8
MAX_WINDOW: Final = 4096
"""Rows or columns of the window of a convolution, and from one window to the next."""
MAX_CHECKED_GROUPS: Final = 256
"""Groups of 32 columns that a linear operation can have."""
_FLOAT_MAX: Final = 3.0e38


def _f(name: str, low: float = -_FLOAT_MAX, default: float | None = None) -> Param:
    return Param(name, low, _FLOAT_MAX, default, is_float=True)


def _act() -> Param:
    return Param("act", 0, max(Act), int(Act.NONE))


def _choice() -> tuple[Param, ...]:
    groups = (Param(name, 0, MAX_DIM, 0) for name in ("groups", "top_groups", "group_take"))
    return Param("k", 1, 64), Param("order", 0, max(RouteOrder)), *groups


def _windows() -> tuple[Param, ...]:
    return (
        Param("kh", 1, MAX_WINDOW),
        Param("kw", 1, MAX_WINDOW),
        Param("stride", 1, MAX_WINDOW),
        Param("pad", 0, MAX_PAD_CODE),
        _act(),
        Param("H", 1, MAX_DIM),
        Param("W", 1, MAX_DIM),
        Param("stride_x", 0, MAX_WINDOW, 0),
    )


PARAMS: Final[Mapping[Op, tuple[Param, ...]]] = MappingProxyType(
    {
        Op.IMAGE_U8: (_f("divide", 1e-30), _f("subtract")),
        Op.EMBED: (),
        Op.LINEAR: (
            _act(),
            Param("norm", 0, max(NormKind) + 1, 0),
            _f("eps", 0.0, 0.0),
            Param("check", 0, MAX_CHECKED_GROUPS, 0),
        ),
        Op.LINEAR_F32: (_act(), Param("norm", 0, max(NormKind) + 1, 0), _f("eps", 0.0, 0.0)),
        Op.LINEAR_W8: (
            _act(),
            Param("norm", 0, max(NormKind) + 1, 0),
            _f("eps", 0.0, 0.0),
            _f("x_step", 0.0, 0.0),
        ),
        Op.NORM: (Param("kind", 0, max(NormKind)), _f("eps", 0.0)),
        Op.ROPE: (Param("heads", 1, MAX_DIM),),
        Op.ATTENTION: (
            Param("heads", 1, MAX_DIM),
            _f("scale"),
            Param("causal", 0, 1, 0),
            Param("kv_layer", -1, MAX_DIM, -1),
            Param("kv_heads", 0, MAX_DIM, 0),
            Param("window", 0, MAX_DIM, 0),
            Param("sink", 0, MAX_DIM, 0),
            Param("append_only", 0, 1, 0),
        ),
        Op.ATTENTION_ROW: (
            Param("heads", 1, MAX_DIM),
            _f("scale"),
            Param("row", 0, MAX_DIM),
            Param("cols", 0, MAX_DIM, 0),
        ),
        Op.PRUNE: (Param("k", 1, MAX_DIM), Param("score_offset", 0, MAX_DIM, 0)),
        Op.CONV2D: _windows(),
        Op.CONV_DEPTHWISE: _windows(),
        Op.SPARSE_CONV: _windows(),
        Op.ROWS_CONCAT: (),
        Op.ROWS_SLICE: (Param("start", -1, MAX_DIM), Param("count", -1, MAX_DIM)),
        Op.ADD: (_act(),),
        Op.MUL: (_act(),),
        Op.SUB: (_act(),),
        Op.DIV: (_act(),),
        Op.UNARY: (Param("kind", 0, max(UnaryKind)),),
        Op.SOFTMAX: (),
        Op.ROUTE: (*_choice(), _f("scale", 0.0, 0.0), _f("jitter", 0.0, 0.0)),
        Op.EXPERTS: (
            Param("act", 0, max(ExpertAct)),
            Param("biases", 0, 1, 0),
            _f("alpha", default=0.0),
            _f("limit", 0.0, 0.0),
            _f("shift", default=0.0),
        ),
        Op.ARGMAX: (),
        Op.GATHER_ROWS: (),
        Op.COLS_CONCAT: (),
        Op.COLS_SLICE: (Param("start", 0, MAX_DIM), Param("count", 1, MAX_DIM)),
        Op.ATTENTION_SCORE: (
            Param("heads", 1, MAX_DIM),
            _f("scale"),
            Param("row", -1, MAX_DIM),
            Param("first", 0, MAX_DIM, 0),
        ),
        Op.PRUNE_TOP_P: (
            Param("p", 1e-6, 1.0, is_float=True),
            Param("min_keep", 1, MAX_DIM, 1),
            Param("max_keep", 1, MAX_DIM),
            Param("merge", 0, MAX_DIM, 0),
            Param("key_offset", 0, MAX_DIM, 0),
        ),
        Op.MOE_LAYER: (
            Param("k", 1, 64),
            Param("order", 0, max(RouteOrder)),
            Param("act", 0, max(ExpertAct)),
            Param("kind", 0, max(NormKind)),
            _f("eps", 0.0),
            Param("residual", 0, 1, 0),
        ),
        Op.EXPERT_PREFETCH: (Param("biases", 0, 1, 0), Param("bytes", 0, MAX_DIM, 0)),
        Op.EXPERT_LOAD: (Param("biases", 0, 1, 0),),
        Op.EXPERT_FORESEE: (
            *_choice(),
            Param("kind", 0, max(NormKind), 0),
            _f("eps", 0.0, 0.0),
            Param("biases", 0, 1, 0),
        ),
        **dict.fromkeys(
            (Op.RECURRENT, Op.RECURRENT_F32),
            (
                Param("kind", 0, max(RecurrentKind)),
                Param("batch", 1, MAX_DIM, 1),
                Param("reverse", 0, 1, 0),
            ),
        ),
        Op.PACK: (_act(),),
        Op.PACKED: (Param("kind", 0, max(PackedKind)), _act(), _f("eps", 0.0, 0.0)),
        Op.REF_MOVE: (Param("fill", 0, 1, 0), Param("value", -(1 << 31), (1 << 31) - 1, 0)),
        Op.REF_MAP: (
            Param("kind", 0, max(MapKind)),
            _f("alpha", default=0.0),
            _f("beta", default=0.0),
        ),
        Op.REF_REDUCE: (Param("kind", 0, max(ReduceKind)),),
        Op.REF_CONTRACT: (),
        Op.REF_CONV: (),
        Op.REF_CONV_TRANSPOSE: (),
        Op.REF_POOL: (Param("kind", 0, max(PoolKind)),),
        Op.REF_RESAMPLE: (),
        Op.REF_GATHER: (),
        Op.REF_SCATTER: (Param("kind", 0, max(ScatterKind), 0),),
        Op.REF_TOPK: (Param("largest", 0, 1, 1),),
        Op.REF_SCAN: (Param("exclusive", 0, 1, 0), Param("reverse", 0, 1, 0)),
    }
)

LINEARS: Final = (Op.LINEAR, Op.LINEAR_F32, Op.LINEAR_W8)
"""Products with one matrix, alike in everything but how it is stored."""
_BINARY_OPS: Final = (Op.ADD, Op.MUL, Op.SUB, Op.DIV)
IN_PLACE: Final[Mapping[Op, tuple[int, ...]]] = MappingProxyType(
    {**dict.fromkeys(_BINARY_OPS, (0, 1)), Op.UNARY: (0,), Op.NORM: (0,), Op.ROPE: (0,)}
)
"""Inputs over which a kernel may write its only result: same bytes, exactly, dead afterwards.

Each of these kernels reads an element before it writes that element and never reads it again.
"""
