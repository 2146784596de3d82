"""Which operands fit ROUTE, EXPERTS and their pages; rows of `operand_rules.RULES` name these."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from compiler.contract.operands import Operands, Shape, need, same, same_rows, vector
from compiler.contract.operations import GATED, SIGMOID_ORDERS, Op

MAX_LINEAR_K: Final = 8192
MAX_EXPERTS: Final = 1024
MOST_FORESEEN_ROWS: Final = 8
"""More rows than these choose so many experts that EXPERT_FORESEE can tell nothing."""
CODES: Final = "codes"
"""Port of a weight of one of `CODE_KINDS`."""
CODE_KINDS: Final = ("w4", "w8")
"""In how many bits the matrices of experts may be stored."""
FIRST_EXPERT: Final[Mapping[Op, int]] = MappingProxyType(
    {
        Op.EXPERTS: 0,
        Op.MOE_LAYER: 4,
        Op.EXPERT_PREFETCH: 0,
        Op.EXPERT_LOAD: 0,
        Op.EXPERT_FORESEE: 5,
    }
)
"""Where the weights of experts begin; from there on they follow one after the other."""


def expert_kinds(biases: int) -> tuple[str, ...]:
    """Return the kinds of the weights of an expert; `CODES`: w4 or w8, as all experts have it."""
    return (CODES, CODES, "f32", "f32") if biases else (CODES, CODES)


def pages(c: Operands) -> None:
    """Check EXPERT_PREFETCH and EXPERT_LOAD: whole experts; which, the order of the tape says."""
    stride = len(expert_kinds(c.number("biases")))
    need(len(c.weights) % stride == 0, f"an expert has {stride} weights")


def foresee(c: Operands) -> None:
    """Check EXPERT_FORESEE: what norm and router take, then an expert per row of the router."""
    x, router, first = c.source(0), c.weight(2), FIRST_EXPERT[Op.EXPERT_FORESEE]
    for at in (0, 1):
        vector(c.maybe_weight(at), x.cols, "EXPERT_FORESEE norm")
    need(
        c.maybe_weight(0) is not None or c.maybe_weight(1) is None,
        "EXPERT_FORESEE has a beta and no gamma",
    )
    chosen = [Shape(x.rows, c.number("k"), dtype, x.dynamic) for dtype in ("i32", "f32")]
    route(replace(c, outputs=tuple(chosen), weights=c.weights[2:first]))
    stride = len(expert_kinds(c.number("biases")))
    need(
        len(c.weights) == first + stride * router.rows,
        f"EXPERT_FORESEE names no {router.rows} experts of {stride} weights",
    )


def route(c: Operands) -> None:
    """Check ROUTE: one weight row per expert, groups only where scores are sigmoids."""
    x, index, gate, weight, k = c.source(0), c.result(0), c.result(1), c.weight(0), c.number("k")
    same_rows(x, index, "ROUTE")
    same(index, gate, "ROUTE")
    if len(c.outputs) > 2:
        entropy = c.result(2)
        same_rows(x, entropy, "ROUTE entropy")
        need(entropy.cols == 1, "ROUTE entropy is one column")
    need(
        weight.cols == x.cols and index.cols == k,
        "ROUTE: weight columns or result columns do not fit",
    )
    need(
        k <= weight.rows <= MAX_EXPERTS,
        f"ROUTE takes {k} of {weight.rows} experts, at most {MAX_EXPERTS}",
    )
    vector(c.maybe_weight(1), weight.rows, "ROUTE bias")
    vector(c.maybe_weight(2), weight.rows, "ROUTE correction")
    _groups(c, weight.rows, k)


def _groups(c: Operands, experts: int, k: int) -> None:
    sigmoid = c.number("order") in SIGMOID_ORDERS
    groups, taken, best = (c.number(name) for name in ("groups", "top_groups", "group_take"))
    need(
        sigmoid or (c.maybe_weight(2) is None and not groups),
        "ROUTE groups and corrections belong to the sigmoid orders",
    )
    if not groups:
        return
    size = experts // groups
    need(
        experts % groups == 0 and 1 <= taken <= groups and 1 <= best <= size,
        f"ROUTE: {experts} experts do not split into {groups} groups with {best} of each",
    )
    need(k <= taken * size, f"ROUTE: {k} experts from {taken} groups of {size}")


def experts(c: Operands) -> None:
    """Check EXPERTS: the same shapes for every expert, and they chain."""
    x, index, gate = c.source(0), c.source(1), c.source(2)
    same(x, c.result(0), "EXPERTS result")
    same_rows(x, index, "EXPERTS index")
    same(index, gate, "EXPERTS gate")
    stride = len(expert_kinds(c.number("biases")))
    need(
        len(c.weights) % stride == 0 and index.cols <= 64,
        f"EXPERTS takes {stride} weights per expert and k <= 64",
    )
    factor = 2 if c.number("act") in GATED else 1
    first_in, first_out = c.weight(0), c.weight(1)
    need(first_in.rows % factor == 0, "EXPERTS swiglu w_in has gate rows and up rows")
    hidden = first_in.rows // factor
    need(max(x.cols, hidden) <= MAX_LINEAR_K, f"EXPERTS over more than {MAX_LINEAR_K} elements")
    need(
        first_in.cols == x.cols and first_out[:2] == (x.cols, hidden), "EXPERTS shapes do not chain"
    )
    for at in range(0, len(c.weights), stride):
        same_shapes = c.weight(at) == first_in and c.weight(at + 1) == first_out
        need(same_shapes, f"EXPERTS expert {at // stride} differs in shape from expert 0")
        if c.number("biases"):
            vector(c.weight(at + 2), first_in.rows, "EXPERTS b_in")
            vector(c.weight(at + 3), x.cols, "EXPERTS b_out")
