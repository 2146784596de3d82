"""Group calls that belong together into fewer calls with the same bits.

Before:
    %1 = "hw.call"(%0, %g) <{op = "NORM", ...}>
    %2 = "hw.call"(%1, %wq) <{op = "LINEAR", ...}>          %3, %4 the same with %wk and %wv
    %5 = "hw.call"(%2, %p, %cos, %sin) <{op = "ROPE"}>      %6 the same of %3
    %7 = "hw.call"(%5, %6, %4) <{op = "ATTENTION", ...}>
After:
    %1 = "hw.call"(%0, %wqkv, %g) <{op = "LINEAR", params = {norm = 1, ...}}>
    %7 = "hw.call"(%1, %p, %cos, %sin) <{op = "ATTENTION", ...}>

Vertical groups: ROPE into ATTENTION, NORM into LINEAR, and NORM > ROUTE > EXPERTS > ADD into one
MOE_LAYER. Horizontal groups: linear layers over one input whose results only attention reads (QKV)
become one, over concatenated weights; attention reads them as columns, so nothing is copied. Rows
of weights are quantised one by one, so concatenation changes no bit. A weight that another program
groups differently is left in the largest group that all programs share: none is stored twice.

What fuses is decided by structure; whether known zeros survive it is decided by the rules of
`compiler.analysis.fusion` and reported per group: `proved` (the zeros reach the group's reader),
`dense` (there are none), or `unproved -> dense` (a member breaks them: the group computes with
all elements, which is always right; one that ends in a four-bit product looks at run time whether
the zeros are there after all, see `check-zeros`). Left out: gate/up pairs outside routed layers.
"""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from compiler.analysis.fusion import Verdict, verdict_of
from compiler.dialects.hw import CallOp
from compiler.dialects.sp import ConstantOp
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import body, functions
from compiler.passes.fusion_rules import FusionState, fuse_attention, fuse_moe, fuse_norm
from compiler.passes.horizontal import shared_groups
from compiler.passes.rewriting import erase

MAX_DEPTH = 4


@dataclass(frozen=True)
class FuseGroups(Pass):
    """Fuse to at most `max_depth` members in a chain.

    Attributes:
        max_depth: Longest vertical chain.
        allow_dense_fallback: Fuse groups that lose known zeros, too.
    """

    name: ClassVar[str] = "fuse-groups"
    max_depth: int = MAX_DEPTH
    allow_dense_fallback: bool = True

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Fuse in every program; one note per program says what, one how many calls are left."""
        programs = functions(module)
        before = [_calls(func) for func in programs]
        state = FusionState(ctx, shared_groups(module), self._admits)
        notes = []
        for func in programs:
            state.groups.clear()
            for rule in (fuse_attention, fuse_moe, fuse_norm):
                for op in list(body(func).ops):
                    if isinstance(op, CallOp) and op.parent is not None:
                        rule(op, state)
            _erase_unread_constants(func, ctx)
            found = Counter(state.groups)
            notes += [f"{func.sym_name.data}: {n} x {group}" for group, n in sorted(found.items())]
        after = [_calls(func) for func in programs]
        for func, old, new in zip(programs, before, after, strict=True):
            notes.append(f"{func.sym_name.data}: {old} calls became {new}")
        return PassResult(sum(before) - sum(after), tuple(notes))

    def _admits(self, members: list[CallOp]) -> Verdict | None:
        verdict = verdict_of(members)
        if len(members) > self.max_depth:
            return None
        if verdict is Verdict.UNPROVED and not self.allow_dense_fallback:
            return None
        return verdict


def _calls(func: FuncOp) -> int:
    return sum(isinstance(op, CallOp) for op in body(func).ops)


def _erase_unread_constants(func: FuncOp, ctx: PassContext) -> None:
    for op in list(body(func).ops):
        if isinstance(op, ConstantOp) and op.result.first_use is None:
            erase(op, ctx.origins)
