"""Which linear layers stand side by side: calls over one input whose results one attention reads.

`FuseGroups` concatenates them. A weight may be used by several programs (`see` fills the cache that
`step` continues); a group is cut where they disagree, so that no weight has to be stored twice.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from compiler.contract.operations import LINEARS, Act, Op
from compiler.dialects.hw import CallOp
from compiler.dialects.sp import ConstantOp
from compiler.passes.functions import operations

Digests = tuple[str, ...]
ALONE: Final[Digests] = ()
"""The group of a linear layer that stands beside no other."""


def call_of(value: SSAValue | None, op: Op) -> CallOp | None:
    """Return the call that makes `value` if it is one of `op`."""
    owner = value.owner if value is not None else None
    return owner if isinstance(owner, CallOp) and owner.op.data == op.name else None


def attention_parts(attention: CallOp) -> list[SSAValue]:
    """Return q, k, v (or k, v of a call that only appends), each of its own operand."""
    parts = [attention.argument(at) for at in range(3)]
    return [part for part in parts if part is not None]


def unrotated(part: SSAValue) -> SSAValue:
    """Return what a rotation reads, or the value itself."""
    rope = call_of(part, Op.ROPE)
    source = rope.argument(0) if rope is not None else None
    return part if source is None else source


def linear_of(value: SSAValue) -> CallOp | None:
    """Return the linear layer behind `value` if it can stand in a group: no residual, no act."""
    call = next((found for op in LINEARS if (found := call_of(value, op))), None)
    if call is None or call.argument(1) is not None or call.weight(2) is not None:
        return None
    return call if int(call.parameters().get("act", Act.NONE)) == Act.NONE else None


def digest_of(linear: CallOp) -> str:
    """Return the content of a linear layer's weight, by digest."""
    weight = linear.weight(0)
    assert weight is not None
    assert isinstance(weight.owner, ConstantOp)
    return weight.owner.sha256.data


def runs_of(parts: Sequence[SSAValue]) -> list[list[SSAValue]]:
    """Return neighbours among `parts` that are linear layers of one kind over one input."""

    def key(part: SSAValue) -> object:
        linear = linear_of(part)
        if linear is None:
            return id(part)
        return linear.op.data, linear.argument(0), linear.weight(1) is None

    return [list(run) for _, run in groupby(parts, key)]


def shared_groups(module: ModuleOp) -> Mapping[str, Digests]:
    """Return, per weight, the weights it is concatenated with in every program, in order."""
    seen: dict[str, set[Digests]] = defaultdict(set)
    inside: set[CallOp] = set()
    for op in operations(module):
        if isinstance(op, CallOp) and op.op.data == Op.ATTENTION.name:
            for run in runs_of([unrotated(part) for part in attention_parts(op)]):
                linears = [linear for part in run if (linear := linear_of(part)) is not None]
                digests = tuple(digest_of(linear) for linear in linears)
                for linear in linears:
                    seen[digest_of(linear)].add(digests)
                    inside.add(linear)
    for op in operations(module):
        if isinstance(op, CallOp) and Op[op.op.data] in LINEARS and op not in inside:
            seen[digest_of(op)].add(ALONE)
    return _agreed(seen)


def _agreed(seen: Mapping[str, set[Digests]]) -> Mapping[str, Digests]:
    groups: dict[str, Digests] = {}
    for runs in seen.values():
        for run in runs:
            for alike, members in groupby(run, lambda digest: frozenset(seen[digest])):
                cut = tuple(members)
                for digest in cut:
                    groups[digest] = cut if ALONE not in alike else (digest,)
    return groups
