"""Merge adapters (LoRA) into the weights they stand beside; only if `pipeline.json` asks for it.

Before (see `adapters` for how a branch is found):
    %h = "hw.call"(%x, %A) <{op = "LINEAR_F32"}>      %u = "hw.call"(%h, %B) <{op = "LINEAR_F32"}>
    %s = "hw.call"(%u, %scale) <{op = "MUL"}>         %y = "hw.call"(%x, %s, %W) <{op = "LINEAR"}>
After:
    %y = "hw.call"(%x, %W') <{op = "LINEAR"}>         W' = W + scale * B A

The context keeps W, B and A of every W' (`merges`), so that quantisation can replay the adapter on
the codes of a base and an update ships as its factors. Left as branches: adapters beside weights
that are not stored in four bits or that have a pattern of zeros (a product would fill it), beside
layers whose result something else reads too, and those whose scale is no number.
"""

from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from compiler.contract.operations import Act, Op
from compiler.dialects.hw import CallOp
from compiler.dialects.types import dtype_of, shape_of, tensor_type
from compiler.kernels.merged import Merged
from compiler.passes.adapters import SCALES, SUMS, only_reader, second_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import body, functions
from compiler.passes.horizontal import digest_of
from compiler.passes.rewriting import erase, erase_dead, insert_before, swap

MOST_ZEROS: Final = 0.25
"""Share of zeros from which on a weight has a pattern that is worth more than the branch costs."""


class _Branch(NamedTuple):
    """An adapter, and where its result is added.

    Attributes:
        chain: The calls that go, last one first.
        factor: What the product is multiplied with.
        total: The call that adds it to the result of `base`, or `base` itself.
        base: The layer beside it.
    """

    chain: tuple[CallOp, ...]
    factor: float
    total: CallOp
    base: CallOp


@dataclass(frozen=True)
class MergeAdapters(Pass):
    """Replace every branch that can be merged."""

    name: ClassVar[str] = "merge-adapters"

    @property
    def changes_values(self) -> bool:
        """Sums are rounded in another order."""
        return True

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Merge until no branch is left that can be."""
        merged = sum(_merge_all(func, ctx) for func in functions(module))
        for func in functions(module):
            erase_dead(func, ctx.origins)
        return PassResult(merged)


def _merge_all(func: FuncOp, ctx: PassContext) -> int:
    """Merge branch after branch; one that is added to a sum can be merged after the inner one."""
    count = 0
    while True:
        merged = 0
        for op in list(body(func).ops):
            if not isinstance(op, CallOp) or op.parent is None:
                continue
            branch = _branch(op, ctx)
            if branch is not None and _is_mergeable(branch, ctx):
                _merge(branch, ctx)
                merged += 1
        if not merged:
            return count
        count += merged


def _branch(down: CallOp, ctx: PassContext) -> _Branch | None:
    """Return the branch that begins with `down`, if there is one and its sum is plain."""
    up = second_of(down)
    if up is None:
        return None
    rest = up.argument(1)
    if rest is not None:
        beside = rest.owner
        return _Branch((up, down), 1.0, up, beside) if isinstance(beside, CallOp) else None
    chain: tuple[CallOp, ...]
    chain, factor, value = (up, down), 1.0, up.outputs[0]
    reader = only_reader(value)
    while reader is not None and reader.op.data in SCALES:
        found = _factor(reader, value, ctx)
        if found is None:
            return None
        chain, factor, value = (reader, *chain), factor * found, reader.outputs[0]
        reader = only_reader(value)
    if reader is None:
        return None
    if reader.op.data == Op.LINEAR.name and reader.argument(1) is value:
        return _Branch(chain, factor, reader, reader)
    others = [reader.argument(at) for at in (0, 1) if reader.argument(at) is not value]
    if reader.op.data not in SUMS or len(others) != 1 or others[0] is None:
        return None
    base = others[0].owner
    return _Branch(chain, factor, reader, base) if isinstance(base, CallOp) else None


def _factor(scale: CallOp, value: SSAValue, ctx: PassContext) -> float | None:
    """Return the number that MUL or DIV multiplies `value` with; None if it is something else."""
    if int(scale.parameters().get("act", Act.NONE)) != Act.NONE or scale.argument(0) is not value:
        return None
    number = ctx.constants.scalar(scale.weight(0) if scale.weights else scale.argument(1))
    if number is None or scale.op.data == Op.MUL.name:
        return number
    return 1.0 / number if number else None


def _is_mergeable(branch: _Branch, ctx: PassContext) -> bool:
    """Return whether the base is a plain layer in four bits of the same input and shape."""
    base, (up, down) = branch.base, branch.chain[-2:]
    left, right = (ctx.constants.get(call.weight(0)) for call in (up, down))
    weight = ctx.constants.get(base.weight(0)) if base.op.data == Op.LINEAR.name else None
    if weight is None or left is None or right is None:
        return False
    if base.argument(0) is not down.argument(0) or base.weight(2) is not None:
        return False
    if weight.shape != (left.shape[0], right.shape[1]):
        return False
    if branch.total is not base:
        act = int(base.parameters().get("act", Act.NONE))
        if act != Act.NONE or only_reader(base.outputs[0]) is not branch.total:
            return False
        if shape_of(branch.total.outputs[0]) != shape_of(base.outputs[0]):
            return False
    return float(np.count_nonzero(weight == 0)) < MOST_ZEROS * weight.size


def _merge(branch: _Branch, ctx: PassContext) -> None:
    base, total, (up, down) = branch.base, branch.total, branch.chain[-2:]
    old, left, right = (ctx.constants.get(call.weight(0)) for call in (base, up, down))
    assert old is not None
    assert left is not None
    assert right is not None
    before = ctx.merges.get(digest_of(base)) or Merged.nothing(old)
    merged = before.plus((left * np.float32(branch.factor)).astype(np.float32), right)
    weight = ctx.constants.add(merged.values())
    ctx.merges[weight.sha256.data] = merged
    insert_before(total, weight)
    residual = None if total is base else base.argument(1)
    arguments = [base.argument(0), *([residual] if residual is not None else [])]
    bias = base.weight(1)
    weights = [weight.result, *([bias] if bias is not None else [])]
    params = base.parameters() | {"act": int(total.parameters().get("act", Act.NONE))}
    result = total.outputs[0]
    kind = tensor_type(dtype_of(result), shape_of(result))
    swap(total, CallOp(base.op.data, arguments, weights, params, [kind]), ctx.origins)
    for call in (*branch.chain, base):
        if call.parent is not None and all(out.first_use is None for out in call.outputs):
            erase(call, ctx.origins)
