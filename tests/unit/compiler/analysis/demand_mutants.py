"""Every way in which we break the backward rules on purpose.

`row_mutants` makes each row of the table excuse everything, and then nothing; `hook_mutants` breaks
each function in the way in which it is easily got wrong.
"""

from collections.abc import Callable
from dataclasses import replace

from compiler.analysis import demand_rules as d
from compiler.analysis.demand import STANDARD_DEMAND, DemandLogic
from compiler.analysis.demand_rules import DEMAND_HOOKS, DEMAND_RULES, Backward, DemandKind, whole
from compiler.analysis.mask_moves import Cut, Expand, Pad, Reshape
from compiler.analysis.masks import BOTTOM, DENSE, Mask, padded
from compiler.analysis.zero_hooks import gathered, operands
from compiler.dialects.dims import Dim
from compiler.dialects.types import shape_of

K = DemandKind
Masks = list[Mask]
Hook = Callable[..., Masks]


def _nothing(op, b: Backward) -> Masks:
    return [BOTTOM for _ in operands(op)]


def _same_element(op, b: Backward) -> Masks:
    """An operation over rows that reads only the element it writes."""
    first, result = operands(op)[0], op.results[0]
    seen = b.demand(result)
    fits = shape_of(first) == shape_of(result)
    return [seen if fits else whole(op, b)[0], *whole(op, b)[1:]]


def _both_factors(op, b: Backward) -> Masks:
    """A product in which zeros excuse each other."""
    result, (x, y) = op.results[0], operands(op)
    seen, wide = b.demand(result), Expand(shape_of(op.results[0]))
    needed = (seen & b.zeros(y).moved(wide), seen & b.zeros(x).moved(wide))
    return [d.narrowed(m, v, result) for m, v in zip(needed, (x, y), strict=True)]


def _infinite_factor(op, b: Backward) -> Masks:
    """A product that forgets that 0 * inf is NaN."""
    return DEMAND_HOOKS[K.PRODUCT](op, _Unconditional(b))


class _Unconditional:
    """A flow that assumes nothing."""

    def __init__(self, flow: Backward) -> None:
        self.flow = flow

    def __getattr__(self, name: str):
        return getattr(self.flow, name)

    def excused(self, mask: Mask, *values) -> Mask:
        return mask


def _own_zeros(op, b: Backward) -> Masks:
    """A product whose zeros excuse themselves."""
    result = op.results[0]
    found = []
    for value in operands(op):
        live = b.zeros(value).moved(Expand(shape_of(result)))
        found.append(d.narrowed(b.demand(result) & live, value, result))
    return found


def _other_branch(op, b: Backward) -> Masks:
    condition, yes, no = DEMAND_HOOKS[K.SELECT](op, b)
    _, yes_value, no_value = operands(op)
    return [condition, no, yes] if shape_of(yes_value) == shape_of(no_value) else [BOTTOM] * 3


def _no_condition(op, b: Backward) -> Masks:
    return [BOTTOM, *DEMAND_HOOKS[K.SELECT](op, b)[1:]]


def _always_lower(op, b: Backward) -> Masks:
    """A triangle one diagonal too small."""
    found = DEMAND_HOOKS[K.BAND](op, b)
    x = op.operands[0]
    shift = b.constants.scalar(op.arguments[1])
    band = d.of_pattern(d.Band(*shape_of(x)[-2:], Dim(int(shift) - 1)))
    return [found[0] & band.moved(Expand(shape_of(x))), *found[1:]]


def _swapped(op, b: Backward) -> Masks:
    return DEMAND_HOOKS[K.EACH](op, b)[::-1]


def _dead_weights_of_results(op, b: Backward) -> Masks:
    """A contraction that takes weights for their transpose."""
    array = b.constants.get(operands(op)[1])
    live = d.of_array((array != 0).any(axis=int(op.name == "sp.linear")))
    found = whole(op, b)
    return [found[0] & live.moved(Expand(shape_of(operands(op)[0]))), *found[1:]]


def _no_residual(op, b: Backward) -> Masks:
    return [
        BOTTOM if value is getattr(op, "residual", None) else mask
        for value, mask in zip(operands(op), DEMAND_HOOKS[K.LINEAR](op, b), strict=True)
    ]


def _no_gates(op, b: Backward) -> Masks:
    x, index, _, *rest = DEMAND_HOOKS[K.EXPERTS](op, b)
    return [x, index, BOTTOM, *rest]


def _own_key(op, b: Backward) -> Masks:
    """An attention whose row sees only its own key."""
    return [b.demand(op.result) for _ in operands(op)]


def _same_shape(op, b: Backward) -> Masks:
    """A reshape that turns the demand about."""
    turned = b.demand(op.result).moved(
        Cut(0, shape_of(op.result)[0] + Dim(-1), shape_of(op.result)[0], -1)
    )
    return [turned.moved(Reshape(shape_of(op.x)))]


def _first_copy(op, b: Backward) -> Masks:
    """An expansion of which only the first copy is observed."""
    mask, wide = b.demand(op.result), shape_of(op.result)
    aligned = (Dim(1),) * (len(wide) - len(shape_of(op.x))) + shape_of(op.x)
    for axis, (own, size) in enumerate(zip(aligned, wide, strict=True)):
        if own != size:
            mask = mask.moved(Cut(axis, Dim(0), Dim(1), 1))
    return [mask.moved(Reshape(shape_of(op.x)))]


def _untransposed(op, b: Backward) -> Masks:
    """A transposition that keeps the flat order."""
    return [b.demand(op.result).moved(Reshape(shape_of(op.x)))]


def _from_the_start(op, b: Backward) -> Masks:
    axis, count = op.axis.value.data, shape_of(op.result)
    return [padded(b.demand(op.result), Pad(axis, Dim(0), shape_of(op.x)[axis]), count)]


def _first_part(op, b: Backward) -> Masks:
    axis = op.axis.value.data
    seen = b.demand(op.result)
    return [seen.moved(Cut(axis, Dim(0), shape_of(part)[axis], 1)) for part in op.parts]


def _no_index(op, b: Backward) -> Masks:
    return [BOTTOM if mask is DENSE else mask for mask in DEMAND_HOOKS[K.GATHER](op, b)]


def _first_slices(op, b: Backward) -> Masks:
    table, index, axis = gathered(op)
    result = op.results[0]
    count = shape_of(result)[axis]
    rows = padded(b.demand(result), Pad(axis, Dim(0), shape_of(table)[axis]), shape_of(result))
    found = {table: rows if count.is_static else DENSE, index: DENSE}
    return [found[value] for value in operands(op)]


def _no_scores(op, b: Backward) -> Masks:
    tokens, *_ = DEMAND_HOOKS[K.PRUNE](op, b)
    return [tokens, *(BOTTOM for _ in operands(op)[1:])]


def _first_rows(op, b: Backward) -> Masks:
    tokens, kept = op.operands[0], op.results[0]
    axis = len(shape_of(tokens)) - 2
    step = Pad(axis, Dim(0), shape_of(tokens)[axis])
    return [padded(b.demand(kept), step, shape_of(kept)), *whole(op, b)[1:]]


BROKEN_HOOKS: tuple[tuple[DemandKind, Hook], ...] = (
    *((kind, _nothing) for kind in DemandKind),
    (K.PRODUCT, _both_factors),
    (K.PRODUCT, _infinite_factor),
    (K.PRODUCT, _own_zeros),
    (K.SELECT, _other_branch),
    (K.SELECT, _no_condition),
    (K.BAND, _always_lower),
    (K.EACH, _swapped),
    (K.ROWS, _same_element),
    (K.LINEAR, _same_element),
    (K.LINEAR, _dead_weights_of_results),
    (K.LINEAR, _no_residual),
    (K.EXPERTS, _no_gates),
    (K.ATTENTION, _own_key),
    (K.RESHAPE, _same_shape),
    (K.EXPAND, _first_copy),
    (K.TRANSPOSE, _untransposed),
    (K.SLICE, _from_the_start),
    (K.CONCAT, _first_part),
    (K.GATHER, _no_index),
    (K.GATHER, _first_slices),
    (K.PRUNE, _no_scores),
    (K.PRUNE, _first_rows),
)

Mutants = dict[str, tuple[frozenset[str], DemandLogic]]
"""By name: the rows of which a graph must hold one to tell, and the mutant."""


def hook_mutants() -> Mutants:
    """At least one mutant per kind that excuses too much."""
    return {
        f"hook {kind}: {hook.__name__}": (
            frozenset(key for key, own in DEMAND_RULES.items() if own is kind),
            replace(STANDARD_DEMAND, hooks={**DEMAND_HOOKS, kind: hook}),
        )
        for kind, hook in BROKEN_HOOKS
    }


def row_mutants(hook: Hook) -> Mutants:
    """One mutant per row: its operation has another rule."""
    hooks = {**DEMAND_HOOKS, "other": hook}
    return {
        f"row {key}: {hook.__name__}": (
            frozenset({key}),
            DemandLogic({**DEMAND_RULES, key: "other"}, hooks),  # type: ignore[dict-item]
        )
        for key in DEMAND_RULES
    }


def greedy_rows() -> Mutants:
    """Rows that excuse everything."""
    return row_mutants(_nothing)


def timid_rows() -> Mutants:
    """Rows that excuse nothing."""
    return row_mutants(whole)
