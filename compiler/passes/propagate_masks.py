"""Write proved zeros into the types.

Before:
    %1 = "sp.linear"(%0, %w) <{act = "relu"}> : ... -> tensor<65x256xf32>
After:
    %1 = "sp.linear"(%0, %w) <{act = "relu"}> : ... -> tensor<65x256xf32, #sp.enc<dims [],
         levels ["dense", "compressed"], pos 32, crd 16, masks [0], dynamic>>

Says which sources' zeros a value has (`compiler.analysis.propagation`); nothing is computed
differently. Only zeros that hold without assumptions are written. Static zeros alone give
`compressed` columns without `dynamic`. Constants keep their plain types: their zeros are their own.
"""

from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue
from xdsl.rewriter import Rewriter

from compiler.analysis.masks import Mask
from compiler.analysis.savings import is_annotated
from compiler.dialects.encoding import EncodingAttr, coordinate_bits
from compiler.dialects.types import dtype_of, encoding_of, shape_of, tensor_type
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import functions, refresh_type


@dataclass(frozen=True)
class PropagateMasks(Pass):
    """Give values with proved zeros the encoding (dense, ..., compressed) and their masks."""

    name: ClassVar[str] = "propagate-masks"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Annotate every function; a second run finds the same facts."""
        changed = 0
        known = ctx.facts.of(module, ctx.constants)
        for func in functions(module):
            facts = known[func.sym_name.data]
            for value in list(facts.masks):
                mask = facts.proved(value)
                if mask.is_dense or not is_annotated(value) or not shape_of(value):
                    continue
                changed += annotate(value, mask)
            refresh_type(func)
        return PassResult(changed, (f"{changed} values with known zeros",))


def annotate(value: SSAValue, mask: Mask) -> bool:
    """Write a mask into the type of a value that has no encoding of zeros yet."""
    known, shape = encoding_of(value), shape_of(value)
    if known is not None and known.is_sparse:
        return False
    encoding = EncodingAttr.make(
        levels=["dense"] * (len(shape) - 1) + ["compressed"],
        masks=sorted(mask.sources()),
        crd=coordinate_bits(shape),
        dynamic=mask.is_dynamic,
    )
    typed = tensor_type(dtype_of(value), shape, encoding)
    Rewriter.replace_value_with_new_type(value, typed)
    return True
