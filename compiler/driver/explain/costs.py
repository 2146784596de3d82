"""What each call of a plan computes and moves, against a dense f32 execution of the same model.

Dense means: every expert runs for every token, every score of a masked attention is computed, no
visual token is dropped, weights are f32. A multiply and an add count as two FLOPs. Bytes are
weights, activations and rows of the key/value cache that a call touches once; caches of the
processor are not modelled.

The expected time is a roofline with a fixed cost per call, in cycles of one core. It ranks calls
and says where time should go; it is no promise about milliseconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from compiler.contract.attention_rules import key_operand
from compiler.contract.elements import ELL_COLS, ELL_ROWS, SMALL_KINDS, stored_count
from compiler.contract.expert_pages import PAGE_OPS
from compiler.contract.moe_rules import CODE_KINDS
from compiler.contract.operations import Op
from compiler.contract.plan import Plan, PlanCall, PlanProgram, PlanWeight
from compiler.contract.plan_format import DTYPE_BYTES, KIND_NAMES, Kind
from compiler.contract.tiles import GROUP, PANEL, live_tiles
from compiler.kernels.registry import KERNELS
from compiler.kernels.select import TileSpec

TILE_ELEMENTS: Final = PANEL * GROUP
CYCLES_PER_CALL: Final = 150.0
BYTES_PER_CYCLE: Final = 8.0
W4_MACS_PER_CYCLE: Final[Mapping[str, float]] = MappingProxyType(
    {"avx512vnni": 64.0, "avx2": 24.0, "sve2": 24.0, "i8mm": 24.0, "dotprod": 24.0}
    | {"ssse3": 10.0, "vec128": 6.0}
)
F32_MACS_PER_CYCLE: Final[Mapping[str, float]] = MappingProxyType(
    {"avx512vnni": 8.0, "avx2": 8.0, "sve2": 4.0, "i8mm": 4.0, "dotprod": 4.0}
    | {"ssse3": 4.0, "vec128": 4.0}
)
PORTABLE_MACS_PER_CYCLE: Final = 2.0
_OTHER_FLOPS: Final[Mapping[Op, int]] = MappingProxyType(
    {Op.NORM: 6, Op.ROPE: 3, Op.SOFTMAX: 12, Op.UNARY: 12, Op.IMAGE_U8: 2}
)
"""FLOPs per element of the result; 1 where nothing stands here."""


@dataclass(frozen=True, slots=True)
class Sparsity:
    """What a call leaves out.

    Attributes:
        kind: `experts`, `tokens`, `causal`, `window` or `weights`.
        kept, of: How many of how many units are computed.
        proof: Why leaving the rest out is allowed.
    """

    kind: str
    kept: int
    of: int
    proof: str


@dataclass(frozen=True, slots=True)
class CallCost:
    """One call. FLOPs and bytes as done, and as a dense execution would."""

    flops: int
    dense_flops: int
    size_bytes: int
    dense_bytes: int
    sparsity: Sparsity | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """At which sizes a program is looked at.

    Attributes:
        tokens: T, rows of dynamic buffers.
        past: Rows in the key/value cache before the run.
        past_ratio: How many rows a dense execution would have for each of them.
    """

    tokens: int = 1
    past: int = 0
    past_ratio: float = 1.0


class ProgramCosts:
    """Costs of the calls of one program, in order; see `costs`."""

    def __init__(self, plan: Plan, program: PlanProgram, situation: Situation) -> None:
        self.plan = plan
        self.situation = situation
        self.costs: list[CallCost] = []
        self.appended = 0
        self.appended_ratio = 1.0
        self._ratios: dict[int, float] = {}
        for call in program.calls:
            self.costs.append(self._cost(call))

    def rows(self, buffer: int) -> int:
        """Return the rows of a buffer in this situation."""
        found = self.plan.buffers[buffer]
        return self.situation.tokens if found.dynamic else found.rows

    def elements(self, buffer: int) -> int:
        """Return the elements of a buffer in this situation."""
        return self.rows(buffer) * self.plan.buffers[buffer].cols

    def ratio(self, call: PlanCall) -> float:
        """Return how many rows a dense execution would have for each row of a call's operands."""
        return max((self._ratios.get(at, 1.0) for at in call.inputs), default=1.0)

    def _cost(self, call: PlanCall) -> CallCost:
        ratio = self.ratio(call)
        made = _RULES.get(call.op, _elementwise)(self, call)
        moved = sum(
            self.elements(at) * DTYPE_BYTES[self.plan.buffers[at].dtype]
            for at in (*call.inputs, *call.outputs)
            if at >= 0
        )
        kept, whole = self._cache_bytes(call)
        stored = self.weight_bytes(call, dense=False)
        dense = self.weight_bytes(call, dense=True)
        share = made.sparsity
        if share is not None and share.kind == "experts":
            busy = min(share.of, share.kept * self.rows(call.inputs[0]))
            stored = stored * busy // share.of
        for at in call.outputs:
            self._ratios[at] = ratio
        if share is not None and share.kind == "tokens":
            for at in call.outputs:
                self._ratios[at] = ratio * share.of / share.kept
        return CallCost(
            made.flops,
            round(made.dense_flops * ratio),
            moved + kept + stored,
            round(moved * ratio) + whole + dense,
            share,
        )

    def _cache_bytes(self, call: PlanCall) -> tuple[int, int]:
        """Return the bytes of cached keys and values that a call reads or appends; as f32, dense.

        A row is counted once: those in the cache that some query sees, and those that are new.
        """
        kv, layer = self.plan.kv, int(call.params.get("kv_layer", -1))
        if call.op is not Op.ATTENTION or kv is None or layer < 0:
            return 0, 0
        rows, past = self.rows(call.inputs[0]), self.situation.past
        old = past if call.outputs else 0
        seen = old
        if window := int(call.params.get("window", 0)):  # the first query sees the most old rows
            seen = min(old, window - 1 + int(call.params.get("sink", 0)))
        each = kv.size_bytes // (kv.layers * kv.capacity)
        whole = 8 * kv.heads * kv.head_dim
        dense = round((old * self.situation.past_ratio + rows * self.ratio(call)) * whole)
        return (seen + rows) * each, dense

    def weight_bytes(self, call: PlanCall, *, dense: bool) -> int:
        """Return the bytes of a call's weights: as stored, or as f32 matrices."""
        if call.op in PAGE_OPS:  # what they name is counted at the call that reads it
            return 0
        held = [self.plan.weights[at] for at in call.weights if at >= 0]
        if call.op in (Op.EMBED, Op.ROPE):  # tables: a row of each per row of the result
            rows = self.rows(call.outputs[0])
            return sum(4 * min(rows, item.rows) * item.cols for item in held)
        return sum(4 * item.rows * item.cols if dense else item.length for item in held)

    def macs_of_weights(self, call: PlanCall) -> int:
        """Return the elements of a call's weights."""
        held = [self.plan.weights[at] for at in call.weights if at >= 0]
        return sum(item.rows * item.cols for item in held)


def costs(plan: Plan, program: PlanProgram, situation: Situation) -> ProgramCosts:
    """Return the costs of a program's calls."""
    return ProgramCosts(plan, program, situation)


def expected_cycles(op: Op, cost: CallCost, tile: TileSpec) -> float:
    """Return what the cost model expects of a call, in cycles of one core."""
    table = W4_MACS_PER_CYCLE if KERNELS[op].tiled else F32_MACS_PER_CYCLE
    rate = table.get(tile.isa, PORTABLE_MACS_PER_CYCLE)
    compute = cost.flops / 2 / rate
    return CYCLES_PER_CALL + max(compute, cost.size_bytes / BYTES_PER_CYCLE)


def _made(flops: int, dense: int | None = None, sparsity: Sparsity | None = None) -> CallCost:
    return CallCost(flops, flops if dense is None else dense, 0, 0, sparsity)


def _elementwise(program: ProgramCosts, call: PlanCall) -> CallCost:
    size = sum(program.elements(at) for at in call.outputs)
    return _made(_OTHER_FLOPS.get(call.op, 1) * size)


def _moves(program: ProgramCosts, call: PlanCall) -> CallCost:  # noqa: ARG001 - one signature
    return _made(0)


def _matrix(program: ProgramCosts, call: PlanCall) -> CallCost:
    matrix, rows = program.plan.weights[call.weights[0]], program.rows(call.outputs[0])
    dense = 2 * rows * matrix.rows * matrix.cols
    stored = _stored_elements(matrix)
    if stored is None:
        return _made(dense)
    proof = "exact: the weights left out are zero"
    sparsity = Sparsity("weights", stored, matrix.rows * matrix.cols, proof)
    return _made(2 * rows * stored, dense, sparsity)


def _sparse_conv(program: ProgramCosts, call: PlanCall) -> CallCost:
    rows, taps = program.rows(call.outputs[0]), program.plan.weights[call.weights[0]]
    depth, channels = (program.plan.buffers[at].cols for at in (call.inputs[0], call.outputs[0]))
    every = channels * depth * int(call.params["kh"]) * int(call.params["kw"])
    stored = min(every, taps.rows * taps.cols)
    proof = "exact: the weights left out are zero"
    sparsity = Sparsity("weights", stored, every, proof)
    return _made(2 * rows * stored, 2 * rows * every, sparsity)


def _stored_elements(matrix: PlanWeight) -> int | None:
    """Return how many elements of a weight are stored, padding included; None if all are."""
    rows, cols, length = matrix.rows, matrix.cols, matrix.length
    if matrix.kind is Kind.W4_TILES:
        live = live_tiles(rows, cols, length)
        return min(rows * cols, (live or 0) * TILE_ELEMENTS)
    if matrix.kind is Kind.W4_NM:
        return -(-rows * cols // 2)
    if matrix.kind not in SMALL_KINDS:
        return None
    count = stored_count(matrix.kind, rows, cols, length) or 0
    blocks = -(-rows // ELL_ROWS) * ELL_ROWS * ELL_COLS
    return min(rows * cols, count * (blocks if matrix.kind is Kind.W4_ELL else 1))


def _attention(program: ProgramCosts, call: PlanCall) -> CallCost:
    rows, layer = program.rows(call.inputs[0]), int(call.params["kv_layer"])
    if layer >= 0:
        program.appended, program.appended_ratio = rows, program.ratio(call)
    if not call.outputs:
        return _made(0)
    width, ratio = program.plan.buffers[call.outputs[0]].cols, program.ratio(call)
    past = program.situation.past if layer >= 0 else 0
    keys = rows if layer >= 0 else program.rows(key_operand(call.inputs))
    every = rows * (past + keys)
    done = rows * past + rows * (rows + 1) // 2 if layer >= 0 or call.params["causal"] else every
    window = int(call.params.get("window", 0))
    if window:
        sink = int(call.params.get("sink", 0))
        done = sum(min(past + at + 1, window + sink) for at in range(rows))
    dense = rows * (past * program.situation.past_ratio + keys * ratio)
    sparsity = None
    if done < every:
        what = "comes after it or left its window" if window else "comes after it"
        proof = f"exact: a query never sees what {what}"
        sparsity = Sparsity("window" if window else "causal", done, every, proof)
    return _made(4 * width * done, round(4 * width * dense), sparsity)


def _scores(program: ProgramCosts, call: PlanCall) -> CallCost:
    return _made(2 * program.elements(call.inputs[min(1, len(call.inputs) - 1)]))


def _prune(program: ProgramCosts, call: PlanCall) -> CallCost:
    of, kept = program.rows(call.inputs[0]), program.rows(call.outputs[0])
    most = int(call.params.get("max_keep", kept))
    what = "at most so many rows, by mass" if "max_keep" in call.params else "k rows of best score"
    proof = f"by design of the model: {what} go on"
    sparsity = Sparsity("tokens", min(kept, most), of, proof) if kept < of else None
    return _made(of, of, sparsity)


def _route(program: ProgramCosts, call: PlanCall) -> CallCost:
    return _made(2 * program.rows(call.inputs[0]) * program.macs_of_weights(call))


def _experts(program: ProgramCosts, call: PlanCall) -> CallCost:
    return _chosen(program, call, program.plan.buffers[call.inputs[1]].cols)


def _moe_layer(program: ProgramCosts, call: PlanCall) -> CallCost:
    inner = _chosen(program, call, int(call.params["k"]))
    held = [program.plan.weights[at] for at in call.weights if at >= 0]
    router = sum(item.rows * item.cols for item in held if KIND_NAMES[item.kind] not in CODE_KINDS)
    routed = 2 * program.rows(call.inputs[0]) * router
    return _made(inner.flops + routed, inner.dense_flops + routed, inner.sparsity)


def _chosen(program: ProgramCosts, call: PlanCall, chosen: int) -> CallCost:
    held = [
        item
        for at in call.weights
        if at >= 0 and KIND_NAMES[(item := program.plan.weights[at]).kind] in CODE_KINDS
    ]
    rows, macs = program.rows(call.inputs[0]), sum(item.rows * item.cols for item in held)
    experts = max(1, len(held) // 2)
    proof = "exact: the router gives every other expert the weight 0"
    return _made(
        2 * rows * chosen * macs // experts,
        2 * rows * macs,
        Sparsity("experts", chosen, experts, proof) if chosen < experts else None,
    )


_RULES: Final[Mapping[Op, Callable[[ProgramCosts, PlanCall], CallCost]]] = MappingProxyType(
    {
        Op.EMBED: _moves,
        Op.ROWS_CONCAT: _moves,
        Op.ROWS_SLICE: _moves,
        Op.COLS_CONCAT: _moves,
        Op.COLS_SLICE: _moves,
        Op.GATHER_ROWS: _moves,
        Op.LINEAR: _matrix,
        Op.LINEAR_F32: _matrix,
        Op.LINEAR_W8: _matrix,
        Op.CONV2D: _matrix,
        Op.CONV_DEPTHWISE: _matrix,
        Op.SPARSE_CONV: _sparse_conv,
        Op.RECURRENT: _matrix,
        Op.RECURRENT_F32: _matrix,
        Op.ATTENTION: _attention,
        Op.ATTENTION_ROW: _scores,
        Op.ATTENTION_SCORE: _scores,
        Op.PRUNE: _prune,
        Op.PRUNE_TOP_P: _prune,
        Op.ROUTE: _route,
        Op.EXPERTS: _experts,
        Op.MOE_LAYER: _moe_layer,
        Op.EXPERT_PREFETCH: _moves,
        Op.EXPERT_LOAD: _moves,
        Op.EXPERT_FORESEE: _moves,
    }
)
