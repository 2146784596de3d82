"""Every way in which we break the zero rules on purpose: rows of the table, hooks, the interface.

A mutant is a `ZeroLogic` that differs from the standard one in one place. `ROWS` flips the kind of
each row of the table, `HOOKS` breaks each hook, `INTERFACES` lets each operation name a wrong row.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from xdsl.ir import Operation

from compiler.analysis import zero_hooks as h
from compiler.analysis.mask_moves import Cut, Expand, Pad, Reshape
from compiler.analysis.masks import BOTTOM, DENSE, Band, Mask, of_array, of_pattern, padded
from compiler.analysis.propagation import STANDARD, ZeroLogic
from compiler.analysis.zero_hooks import HOOKS, Flow, operands
from compiler.analysis.zero_rules import ZERO_RULES, ZeroKind, ZeroRule
from compiler.dialects.dims import Dim
from compiler.dialects.invariant import zero_rule
from compiler.dialects.types import shape_of

K = ZeroKind
FLIPPED: dict[ZeroKind, ZeroKind] = {
    K.CONSTANT: K.BREAKING,
    K.SOURCE: K.PRESERVING,
    K.ANNIHILATING: K.UNION,
    K.UNION: K.ANNIHILATING,
    K.PRESERVING: K.BREAKING,
    K.CAST: K.PRESERVING,
    K.QUOTIENT: K.ANNIHILATING,
    K.BREAKING: K.PRESERVING,
    K.SOFTMAX: K.BREAKING,
    K.CONTRACTION: K.PRESERVING,
    K.RESHAPE: K.BREAKING,
    K.EXPAND: K.BREAKING,
    K.TRANSPOSE: K.BREAKING,
    K.SLICE: K.BREAKING,
    K.CONCAT: K.UNION,
    K.GATHER: K.BREAKING,
    K.ROUTE: K.BREAKING,
    K.EXPERTS: K.PRESERVING,
    K.SCATTER: K.UNION,
    K.WHERE: K.UNION,
    K.BAND: K.PRESERVING,
    K.ATTENTION: K.PRESERVING,
    K.PRUNE: K.BREAKING,
    K.PRUNE_MERGE: K.BREAKING,
    K.STATE: K.PRESERVING,
}

Masks = list[Mask]


def _any_factor(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A product whose other factor may be infinite."""
    found = [h.broadcast(flow.mask(v), v, op.results[0]) for v in operands(op)]
    return [found[0] & found[1]]


def _first_term(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A sum that is zero where its first term is."""
    value = operands(op)[0]
    return [h.broadcast(flow.mask(value), value, op.results[0])]


def _any_divisor(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A quotient whose divisor may be zero."""
    return _first_term(op, flow, rule)


def _hard_threshold(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A source that maps zero to zero whatever its bounds are."""
    made = flow.fresh(op.results[0], rule.source, granularity="element", density=(0.0, 1.0))
    return [made & flow.mask(op.operands[0])]


def _half_dense(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A source that is never more than half full."""
    return [flow.fresh(op.results[0], rule.source, granularity="element", density=(0.0, 0.5))]


def _all_zero(op, flow: Flow, rule: ZeroRule) -> Masks:
    return [BOTTOM for _ in op.results]


def _no_claim(op, flow: Flow, rule: ZeroRule) -> Masks:
    return [DENSE for _ in op.results]


def _no_bias(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A contraction that forgets its bias."""
    array = flow.constants.get(op.operands[1])
    if array is None or op.name not in ("sp.linear", "sp.conv2d"):
        return h.contraction(op, flow, rule)
    return [of_array((array != 0).any(axis=1)).moved(Expand(shape_of(op.results[0])))]


def _flat(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A transposition that keeps the flat order."""
    return [flow.mask(op.x).moved(Reshape(shape_of(op.result)))]


def _no_stride(op, flow: Flow, rule: ZeroRule) -> Masks:
    axis = op.axis.value.data
    count = shape_of(op.result)[axis]
    return [flow.mask(op.x).moved(Cut(axis, Dim(0), count, 1))]


def _same_place(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A concatenation that puts every part in front."""
    axis, joined = op.axis.value.data, BOTTOM
    total = shape_of(op.result)[axis]
    for part in op.parts:
        mask = padded(flow.mask(part), Pad(axis, Dim(0), total), shape_of(part))
        joined = joined | mask
    return [joined]


def _first_row(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A gather that always takes the first slice."""
    table, _, axis = h.gathered(op)
    mask = flow.mask(table).moved(Cut(axis, Dim(0), Dim(1), 1))
    return [mask.moved(Expand(shape_of(op.results[0])))]


def _one_expert_less(op, flow: Flow, rule: ZeroRule) -> Masks:
    share = (op.k.value.data - 1) / shape_of(op.weight)[0].constant
    flow.fresh(op.index, rule.source, granularity="block", density=(share, share))
    return [DENSE, DENSE]


def _sparser(op, flow: Flow, rule: ZeroRule) -> Masks:
    _, index, _ = operands(op)
    return [flow.fresh(index, rule.source, granularity="block", density=(0.0, 0.25))]


def _other_branch(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A selection with its branches swapped."""
    condition, yes, _ = operands(op)
    result = op.results[0]
    made = flow.fresh(condition, rule.source, granularity="element", density=(0.0, 1.0))
    yes_mask = h.broadcast(flow.mask(yes), yes, result)
    return [made | yes_mask]


def _narrow_band(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A triangle without its diagonal."""
    x = op.operands[0]
    if op.attrs.data["upper"].value.data:
        return h.band(op, flow, rule)
    shift = int(flow.constants.scalar(op.arguments[1]))
    return [of_pattern(Band(*shape_of(x)[-2:], Dim(shift - 1))).moved(Expand(shape_of(x)))]


def _low_is_zero(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A softmax that is zero where its operand is."""
    return [flow.mask(op.operands[0])]


def _heads_in_turn(op, flow: Flow, rule: ZeroRule) -> Masks:
    """An attention whose queries take the groups of values in turn: 0, 1, 0, 1."""
    columns = flow.mask(op.v).columns()
    if columns is None:
        return [DENSE]
    shared = np.tile(columns, op.heads.value.data // op.kv_heads.value.data)
    return [flow.assume(of_array(shared).moved(Expand(shape_of(op.result))), op.result)]


def _rows_stay(op, flow: Flow, rule: ZeroRule) -> Masks:
    """Kept rows are the first ones."""
    kept = shape_of(op.results[0])
    axis = len(kept) - 2
    flow.fresh(op.results[1], rule.source, granularity="row", density=(0.0, 1.0))
    return [flow.mask(op.operands[0]).moved(Cut(axis, Dim(0), kept[axis], 1)), DENSE]


def _always_fewest(op, flow: Flow, rule: ZeroRule) -> Masks:
    """Rows beyond the fewest that are kept are zero."""
    rows = shape_of(op.kept)[-2].constant
    real = np.arange(rows) < op.min_keep.value.data
    return [of_array(real[:, None]).moved(Expand(shape_of(op.kept))), DENSE, DENSE]


def _last_step_only(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A cache that forgets what earlier steps wrote: their rows are called zero."""
    before = [np.zeros(shape_of(v)[-1].constant, np.bool_) for v in op.operands]
    return [
        of_array(bits).moved(Expand(shape_of(result)))
        for bits, result in zip(before, op.results, strict=True)
    ]


def _first_column(op, flow: Flow, rule: ZeroRule) -> Masks:
    """A repetition that repeats the wrong axis."""
    mask = of_array(np.arange(shape_of(op.result)[-1].constant) == 0)
    return [mask.moved(Expand(shape_of(op.result)))]


BROKEN_HOOKS: tuple[tuple[ZeroKind, Callable[..., Masks]], ...] = (
    (K.CONSTANT, _all_zero),
    (K.SOURCE, _hard_threshold),
    (K.SOURCE, _half_dense),
    (K.ANNIHILATING, _any_factor),
    (K.ANNIHILATING, _all_zero),
    (K.UNION, _first_term),
    (K.PRESERVING, _no_claim),
    (K.PRESERVING, _all_zero),
    (K.CAST, _no_claim),
    (K.QUOTIENT, _any_divisor),
    (K.BREAKING, _first_term),
    (K.BREAKING, _all_zero),
    (K.SOFTMAX, _low_is_zero),
    (K.CONTRACTION, _no_bias),
    (K.CONTRACTION, _all_zero),
    (K.RESHAPE, _all_zero),
    (K.EXPAND, _first_column),
    (K.TRANSPOSE, _flat),
    (K.SLICE, _no_stride),
    (K.CONCAT, _same_place),
    (K.GATHER, _first_row),
    (K.ROUTE, _one_expert_less),
    (K.EXPERTS, _all_zero),
    (K.SCATTER, _sparser),
    (K.WHERE, _other_branch),
    (K.BAND, _narrow_band),
    (K.ATTENTION, _all_zero),
    (K.ATTENTION, _heads_in_turn),
    (K.PRUNE, _rows_stay),
    (K.PRUNE_MERGE, _always_fewest),
    (K.STATE, _last_step_only),
)

WRONG_KEY = {
    K.BREAKING: "sp.unary:neg",
    K.CONTRACTION: "sp.unary:neg",
    K.EXPERTS: "sp.unary:neg",
    K.ATTENTION: "sp.unary:neg",
}
"""What an operation without claims names instead: a row that claims something."""


Mutants = dict[str, tuple[str | None, ZeroLogic]]
"""By name: the row that a graph must hold to tell, if there is one, and the mutant."""


def row_mutants() -> Mutants:
    """One mutant per row of the table."""
    found: Mutants = {}
    for key, rule in ZERO_RULES.items():
        rules = {**ZERO_RULES, key: replace(rule, kind=FLIPPED[rule.kind])}
        name = f"row {key}: {rule.kind} -> {FLIPPED[rule.kind]}"
        found[name] = (key, replace(STANDARD, rules=rules))
    return found


def hook_mutants() -> Mutants:
    """At least one mutant per hook."""
    return {
        f"hook {kind}: {hook.__name__}": (None, replace(STANDARD, hooks={**HOOKS, kind: hook}))
        for kind, hook in BROKEN_HOOKS
    }


def interface_mutants() -> Mutants:
    """One mutant per row: the operation names another row, or none at all."""

    def wrong(key: str, named: str | None) -> Callable[[Operation], str | None]:
        def answer(op: Operation) -> str | None:
            found = zero_rule(op)
            return named if found == key else found

        return answer

    return {
        f"interface of {key}": (key, replace(STANDARD, key=wrong(key, WRONG_KEY.get(rule.kind))))
        for key, rule in ZERO_RULES.items()
    }
