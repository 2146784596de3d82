"""Whether the known zeros of a group's input survive its members: the rule table of fusion.

`FuseGroups` asks before it fuses. A chain keeps its zeros while every member is preserving; a
contraction (a matrix product) reads them, which ends the question well; a breaking member loses
them, and the group is only right as a dense one. Sources of the rules: f(0) = 0 keeps zeros; a sum
has the zeros that both operands have; a mean, a softmax, or a rotation of pairs makes new values.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final

from xdsl.ir import SSAValue

from compiler.contract.operations import NormKind, Op, UnaryKind
from compiler.dialects.hw import CallOp
from compiler.dialects.types import encoding_of


class Invariant(Enum):
    """What an operation does to the zeros of its first operand."""

    PRESERVING = "preserving"
    UNION = "union"
    CONTRACTION = "contraction"
    BREAKING = "breaking"


class Verdict(Enum):
    """What is known of a group."""

    DENSE = "dense"
    PROVED = "proved"
    UNPROVED = "unproved -> dense"


INVARIANTS: Final[Mapping[Op, Invariant]] = MappingProxyType(
    {
        Op.LINEAR: Invariant.CONTRACTION,
        Op.LINEAR_F32: Invariant.CONTRACTION,
        Op.LINEAR_W8: Invariant.CONTRACTION,
        Op.CONV2D: Invariant.CONTRACTION,
        Op.CONV_DEPTHWISE: Invariant.CONTRACTION,
        Op.SPARSE_CONV: Invariant.CONTRACTION,
        Op.ROUTE: Invariant.CONTRACTION,
        Op.EXPERTS: Invariant.CONTRACTION,
        Op.ADD: Invariant.UNION,
        Op.SUB: Invariant.UNION,
        Op.MUL: Invariant.BREAKING,
    }
)
"""Everything else breaks. MUL too: zero times infinity is NaN."""
_KEEPING_UNARIES: Final = frozenset(
    {
        *(UnaryKind.RELU, UnaryKind.SILU, UnaryKind.NEG, UnaryKind.SQRT, UnaryKind.TANH),
        *(UnaryKind.GELU, UnaryKind.GELU_TANH),
    }
)


def invariant_of(call: CallOp) -> Invariant:
    """Return what a call does to the zeros of its first operand."""
    op, params = Op[call.op.data], call.parameters()
    if op is Op.NORM:
        is_rms = params["kind"] == NormKind.RMS and call.weight(1) is None
        return Invariant.PRESERVING if is_rms else Invariant.BREAKING
    if op is Op.UNARY:
        keeps = params["kind"] in _KEEPING_UNARIES
        return Invariant.PRESERVING if keeps else Invariant.BREAKING
    found = INVARIANTS.get(op, Invariant.BREAKING)
    is_summed_with_constant = found is Invariant.UNION and call.argument(1) is None
    return Invariant.BREAKING if is_summed_with_constant else found


def verdict_of(members: Sequence[CallOp]) -> Verdict:
    """Return what is known of a vertical chain, first member first.

    A horizontal group is one member here: its calls read one operand, so one mask.
    """
    masks = _masks(members[0].argument(0))
    if not masks:
        return Verdict.DENSE
    for member in members:
        match invariant_of(member):
            case Invariant.CONTRACTION:
                return Verdict.PROVED
            case Invariant.UNION:
                masks &= _masks(member.argument(0)) & _masks(member.argument(1))
            case Invariant.BREAKING:
                masks = frozenset()
            case Invariant.PRESERVING:
                pass
        if not masks:
            return Verdict.UNPROVED
    return Verdict.PROVED


def _masks(value: SSAValue | None) -> frozenset[int]:
    encoding = encoding_of(value) if value is not None else None
    return frozenset(mask.data for mask in encoding.masks.data) if encoding else frozenset()
