"""Write known zeros into the types.

Before:
    %1 = "sp.linear"(%0, %w) <{act = "relu"}> : ... -> tensor<65x256xf32>
After:
    %1 = "sp.linear"(%0, %w) <{act = "relu"}> : ... -> tensor<65x256xf32, #sp.enc<dims [],
         levels ["dense", "compressed"], block [], masks [0], dynamic>>

Says which ReLU's zeros a value has (`compiler.analysis.zeros`); nothing is computed differently.
"""

from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ModuleOp
from xdsl.rewriter import Rewriter

from compiler.analysis.zeros import zero_masks
from compiler.dialects.encoding import EncodingAttr
from compiler.dialects.types import dtype_of, shape_of, tensor_type
from compiler.passes.base import PassContext, PassResult
from compiler.passes.functions import functions, refresh_type


@dataclass(frozen=True)
class PropagateZeros:
    """Give sparse values the encoding (dense, ..., compressed), dynamic, with their masks."""

    name: ClassVar[str] = "propagate-zeros"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Annotate every function."""
        changed = 0
        for func in functions(module):
            for value, masks in zero_masks(func, ctx.constants).items():
                shape = shape_of(value)
                levels = ["dense"] * (len(shape) - 1) + ["compressed"]
                encoding = EncodingAttr.make((), levels, (), sorted(masks), dynamic=True)
                Rewriter.replace_value_with_new_type(
                    value, tensor_type(dtype_of(value), shape, encoding)
                )
                changed += 1
            refresh_type(func)
        return PassResult(changed, (f"{changed} values with known zeros",))
