"""Guard products over likely zeros by a run-time check: sparse where it holds, dense otherwise.

Before:
    %1 = "hw.call"(%0, %w) <{op = "LINEAR", params = {act = 0}, ...}>
         : (tensor<?x512xf32, #sp.enc<dims ["T"], levels ["dense", "compressed"], masks [0]>>, ...)
After:
    %1 = "hw.call"(%0, %w) <{op = "LINEAR", params = {act = 0, check = 14}, ...}>

The analysis proves which mask an operand has, never how many of its elements a run will find zero,
and a norm between mask and product may break it (`unproved -> dense` of `fuse-groups`). So nothing
is left out on that ground alone: the call claims that at most `check` of its groups of 32 columns
are live in any of its rows, looks at the quantised rows in every run, and reads the weight at the
live groups if the claim holds, everywhere if not. Both ways have the same bits, because a group of
zeros adds an integer zero. Where there is a calibration set, `compiler.quant.checks` adds and drops
checks by what it saw. Left out: weights that are not stored densely, whose kernels leave out
weights, and LINEAR_F32, whose sums are not exact.
"""

from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import DictionaryAttr, ModuleOp

from compiler.analysis.checks import checked_groups
from compiler.contract.operations import Op
from compiler.dialects.hw import CallOp
from compiler.dialects.properties import integer
from compiler.dialects.types import encoding_of, shape_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import operations


@dataclass(frozen=True)
class CheckZeros(Pass):
    """Give dense LINEAR calls over masked operands a check."""

    name: ClassVar[str] = "check-zeros"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:  # noqa: ARG002 - one signature
        """Annotate every program."""
        changed = 0
        for op in operations(module):
            if not isinstance(op, CallOp) or op.op.data != Op.LINEAR.name or op.layout is not None:
                continue
            encoding = encoding_of(op.arguments[0])
            most = checked_groups(shape_of(op.arguments[0])[1].constant)
            if encoding is None or not encoding.is_sparse or not most:
                continue
            values = {**op.params.data, "check": integer(most)}
            op.properties["params"] = DictionaryAttr(dict(sorted(values.items())))
            changed += 1
        note = f"{changed} products look for zeros at run time, dense where there are too few"
        return PassResult(changed, (note,) if changed else ())
