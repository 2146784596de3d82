"""Floating-point operations of a program run, as counted, and as a dense model would need.

Counted is what the plan does: k experts per row, pruned tokens, attention over the rows that are
there. Dense is the same model without sparsity: every expert for every row, and every token that
pruning drops goes on. A multiply-add counts as two, any other result element as one; copies count
nothing. Heights of dynamic buffers are given by the caller.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final

from compiler.contract.attention_rules import key_operand
from compiler.contract.moe_rules import CODE_KINDS
from compiler.contract.operations import Op
from compiler.contract.reference import geometry_length, unpack_geometry
from compiler.kernels.program import ABSENT, Call, Module, Program, call_params
from compiler.quant.record import CalibrationRecord

PRUNING: Final = (Op.PRUNE, Op.PRUNE_TOP_P)
_MULTIPLY_ADD: Final = 2
_TERMS: Final[Mapping[Op, tuple[tuple[str, ...], int]]] = MappingProxyType(
    {
        Op.REF_CONTRACT: (("sizes", "m", "k", "n"), _MULTIPLY_ADD),
        Op.REF_REDUCE: (("sizes", "inner"), 1),
        Op.REF_POOL: (("planes", "out_h", "out_w", "kh", "kw"), 1),
        Op.REF_RESAMPLE: (("outer", "inner", "m", "taps"), _MULTIPLY_ADD),
        Op.REF_CONV: (
            ("batch", "filters", "out_h", "out_w", "channels", "kh", "kw"),
            _MULTIPLY_ADD,
        ),
        Op.REF_CONV_TRANSPOSE: (
            ("batch", "channels", "height", "width", "filters", "kh", "kw"),
            _MULTIPLY_ADD,
        ),
    }
)
"""Fields of the geometry whose product is the number of terms, and operations per term."""
_COPIES: Final = (
    Op.REF_MOVE,
    Op.REF_GATHER,
    Op.REF_SCATTER,
    Op.EMBED,
    Op.ROWS_CONCAT,
    Op.ROWS_SLICE,
    Op.GATHER_ROWS,
    Op.COLS_CONCAT,
    Op.COLS_SLICE,
)


@dataclass(frozen=True, slots=True)
class RunSize:
    """How high the dynamic buffers of a run are.

    Attributes:
        tokens: Rows of the run.
        context: Rows in the cache before it.
        dense_tokens: Rows of the run if nothing had been pruned.
        dense_context: Rows in the cache if nothing had been pruned.
    """

    tokens: int = 1
    context: int = 0
    dense_tokens: int = 1
    dense_context: int = 0


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Operations of one run.

    Attributes:
        counted: What the plan does.
        dense: What the model without sparsity would do.
        zero: Part of `counted` that multiplies by an activation that calibration saw as zero.
    """

    counted: int
    dense: int
    zero: int

    @property
    def saved_ratio(self) -> float:
        """Share of the dense operations that the plan does not do."""
        return 1.0 - self.counted / self.dense if self.dense else 0.0


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that is counted: heights by buffer, cache rows, whether all experts work."""

    module: Module
    heights: Mapping[int, int]
    context: int
    all_experts: bool

    def cells(self, call: Call) -> int:
        """Return the elements of all results."""
        return sum(self.heights[at] * self.module.buffers[at].cols for at in call.outputs)

    def size(self, weight: int) -> int:
        """Return the elements of a weight."""
        return int(self.module.weights[weight].array.size)


def count_flops(
    module: Module,
    program: Program,
    size: RunSize | None = None,
    record: CalibrationRecord | None = None,
) -> FlopCount:
    """Return the operations of one run of a program.

    Args:
        module: The lowered module.
        program: One of its programs.
        size: Heights of dynamic buffers; one token and an empty cache if not given.
        record: Where the shares of zero activations come from.
    """
    size = size or RunSize()
    now = _Run(module, _heights(module, program, size.tokens), size.context, all_experts=False)
    heights = _unpruned(program, _heights(module, program, size.dense_tokens))
    full = _Run(module, heights, size.dense_context, all_experts=True)
    zero = 0.0
    for call in program.calls:
        for weight, flops in _products(now, call):
            sample = None if record is None else record.sample(weight)
            zero += 0.0 if sample is None else flops * float(sample.zero_ratio.mean())
    return FlopCount(
        counted=sum(_flops(now, call) for call in program.calls),
        dense=sum(_flops(full, call) for call in program.calls),
        zero=int(zero),
    )


def pruned_from(module: Module) -> int:
    """Return the rows that go into pruning, or 0 if nothing is pruned."""
    sizes = (
        module.buffers[call.inputs[0]].rows
        for program in module.programs
        for call in program.calls
        if call.op in PRUNING
    )
    return max(sizes, default=0)


def _heights(module: Module, program: Program, tokens: int) -> dict[int, int]:
    used = {at for call in program.calls for at in (*call.inputs, *call.outputs)} - {ABSENT}
    return {
        at: tokens if module.buffers[at].dynamic else module.buffers[at].rows for at in sorted(used)
    }


def _unpruned(program: Program, heights: dict[int, int]) -> dict[int, int]:
    """Return heights where pruning keeps everything: all rows behind it are as many as before."""
    whole = dict(heights)
    for call in program.calls:
        sources = [at for at in call.inputs if at != ABSENT]
        if call.op in PRUNING:
            grown = {heights[call.outputs[0]]: heights[sources[0]]}
        else:
            grown = {heights[at]: whole[at] for at in sources if whole[at] != heights[at]}
        for at in call.outputs:
            whole[at] = grown.get(heights[at], whole[at])
    return whole


def _flops(run: _Run, call: Call) -> int:
    return _RULES.get(call.op, _Run.cells)(run, call)


def _products(run: _Run, call: Call) -> list[tuple[int, float]]:
    """Return the operations that each W4 weight of a call takes part in."""
    height = run.heights[call.inputs[0]] if call.inputs and call.inputs[0] != ABSENT else 0
    found = [
        (weight, 2.0 * height * run.size(weight))
        for weight in call.weights
        if weight != ABSENT and run.module.weights[weight].kind == "w4"
    ]
    if call.op in (Op.EXPERTS, Op.MOE_LAYER):
        share = _chosen(run, call) / _experts(run, call)
        return [(weight, flops * share) for weight, flops in found]
    return found


def _linear(run: _Run, call: Call) -> int:
    return 2 * run.heights[call.inputs[0]] * run.size(call.weights[0]) + run.cells(call)


def _conv(run: _Run, call: Call) -> int:
    return 2 * run.heights[call.outputs[0]] * run.size(call.weights[0]) + run.cells(call)


def _terms(run: _Run, call: Call) -> int:
    """Count a reference operation by its geometry; convolutions read one group's channels."""
    names, per_term = _TERMS[call.op]
    total = 0
    for row in run.module.weights[call.weights[0]].array.reshape(-1, geometry_length(call.op.name)):
        fields = unpack_geometry(call.op.name, row.tolist())
        terms = prod(prod(fields[name]) for name in names) // prod(fields.get("groups", [1]))
        total += per_term * terms
    return total


def _attention(run: _Run, call: Call) -> int:
    if not call.outputs:
        return 0
    params = call_params(call)
    rows = run.heights[call.inputs[0]]
    width = run.module.buffers[call.outputs[0]].cols
    past = run.context if params["kv_layer"] >= 0 else 0
    keys = rows if params["kv_layer"] >= 0 else run.heights[key_operand(call.inputs)]
    pairs = rows * (keys + past)
    if params["causal"] or params["kv_layer"] >= 0:
        pairs = rows * past + rows * (rows + 1) // 2
    return pairs * (4 * width + int(params["heads"]))


def _scores(run: _Run, call: Call) -> int:
    params = call_params(call)
    source = call.inputs[1] if len(call.inputs) > 1 and call.inputs[1] != ABSENT else call.inputs[0]
    width = int(params.get("cols", 0)) or run.module.buffers[source].cols
    return run.heights[source] * (2 * width + int(params["heads"]))


def _route(run: _Run, call: Call) -> int:
    return 2 * run.heights[call.inputs[0]] * run.size(call.weights[0]) + run.cells(call)


def _experts(run: _Run, call: Call) -> int:
    """Return the number of experts of a layer."""
    sections = (run.module.weights[at] for at in call.weights if at != ABSENT)
    return max(1, len({weight.section for weight in sections if weight.kind in CODE_KINDS}))


def _chosen(run: _Run, call: Call) -> int:
    if run.all_experts:
        return _experts(run, call)
    index = call.outputs[1] if call.op is Op.MOE_LAYER else call.inputs[1]
    return run.module.buffers[index].cols


def _mixed(run: _Run, call: Call) -> int:
    routed = 0
    if call.op is Op.MOE_LAYER:
        routed = 2 * run.heights[call.inputs[0]] * run.size(call.weights[2])
    height = run.heights[call.inputs[0]]
    weights = [
        at for at in call.weights if at != ABSENT and run.module.weights[at].kind in CODE_KINDS
    ]
    one = 2 * sum(run.size(at) for at in weights) // _experts(run, call)
    return routed + height * _chosen(run, call) * one + run.cells(call)


_RULES: Final[Mapping[Op, Callable[[_Run, Call], int]]] = MappingProxyType(
    {
        **dict.fromkeys(_COPIES, lambda _run, _call: 0),
        **dict.fromkeys(_TERMS, _terms),
        Op.LINEAR: _linear,
        Op.LINEAR_F32: _linear,
        Op.LINEAR_W8: _linear,
        Op.CONV2D: _conv,
        Op.CONV_DEPTHWISE: _conv,
        Op.SPARSE_CONV: _conv,
        Op.ATTENTION: _attention,
        Op.ATTENTION_ROW: _scores,
        Op.ATTENTION_SCORE: _scores,
        Op.ROUTE: _route,
        Op.EXPERTS: _mixed,
        Op.MOE_LAYER: _mixed,
    }
)
