"""Let each picture decide how many tokens it keeps: `mm.prune` to `mm.prune_top_p`, in two parts.

Before, in @vision:
    %a = "mm.attention_row"(%q, %k) <{heads = 4, scale, row = 0}>
    %t, %i = "mm.prune"(%tokens, %a) <{k = 32, score_offset = 1}>      (1, 32, D), (1, 32)
    %e = "sp.linear"(%t, ...)                                          the projector
    func.return %e, %i : embeds, positions
After, for `prune = {mode = top_p, p = 0.8, ...}` of `pipeline.json`:
    func.func @vision(image) -> (tokens, positions, count)
      %s = "mm.attention_score"(%q, %k) <{heads = 4, scale, row = 0, first = 1}>
      %t, %i, %n = "mm.prune_top_p"(%tokens, %s, %k) <{p = 0.8, ...}>   (1, M, D), (1, M), (1, 1)
    func.func @projector(tokens (1, T, D), positions (1, T)) -> (embeds, positions)
      %e = "sp.linear"(%t, ...)

What follows the pruning runs on the T rows that were kept, so it must be row-wise; anything else
would mix rows of another number than it was written for and is refused. A model that prunes
nothing is given a pruning first, see `prune_source`. Runs before `compose`; does nothing without
the option.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.rewriter import Rewriter

from compiler.dialects.dims import Dim, symbol_dim
from compiler.dialects.mm import AttentionRowOp, PruneOp, PruneTopPOp
from compiler.dialects.mm import AttentionScoreOp as Score
from compiler.dialects.movement import ReshapeOp
from compiler.dialects.sp import BinaryOp, ConstantOp
from compiler.dialects.types import dtype_of, shape_of, tensor_type
from compiler.errors import MalformedModelError, UnsupportedOperatorError
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import (
    body,
    function,
    functions,
    refresh_type,
    results,
    role_attributes,
)
from compiler.passes.functions import set_results as set_function_results
from compiler.passes.last_row import ROW_OPERANDS
from compiler.passes.pipeline_spec import PruneSpec
from compiler.passes.prune_source import keep_every_token
from compiler.passes.rewriting import erase_dead, insert_before
from compiler.passes.selection import refuse

VISION: Final = "vision"
PROJECTOR: Final = "projector"
ALL_ROWS: Final = -1


@dataclass(frozen=True)
class AdaptPruning(Pass):
    """Replace the fixed number of kept tokens by the rule that the submission states."""

    name: ClassVar[str] = "adapt-pruning"

    @property
    def changes_values(self) -> bool:
        """It keeps other tokens than the file says."""
        return True

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Split vision at its one pruning.

        Raises:
            UnsupportedOperatorError: There is no pruning and no place for one, what follows it is
                not row-wise, or a class token is asked for that does not exist.
            MalformedModelError: The bounds do not fit the tokens or the cache.
        """
        rule = ctx.spec.prune
        if rule is None or any(func.sym_name.data == PROJECTOR for func in functions(module)):
            return PassResult(0)
        vision = function(module, VISION)
        old = _pruning(vision)
        if rule.score == "row" and not old.score_offset.value.data:
            raise UnsupportedOperatorError(
                "pruning by the attention of one row needs a class token, and there is none",
                hint='write "score": "mean" into "prune" of pipeline.json',
            )
        projector = _Projector(ctx, old).function(vision)
        new = _adapted(old, rule, ctx)
        set_function_results(
            vision, [("tokens", new.kept), ("positions", new.index), ("count", new.count)]
        )
        erase_dead(vision, ctx.origins)
        module.body.block.insert_op_after(projector, vision)
        most = shape_of(new.kept)[-2]
        return PassResult(1, (f"top-p {rule.p:g}, at most {most} rows",))


def _pruning(vision: FuncOp) -> PruneOp:
    """Return the one pruning of vision; one that keeps every token if it has none."""
    prunes = [op for op in body(vision).ops if isinstance(op, PruneOp)]
    old = prunes[0] if len(prunes) == 1 else None if prunes else keep_every_token(vision)
    if old is None or not isinstance(old.score.owner, AttentionRowOp):
        raise UnsupportedOperatorError(
            "pruning top_p needs one DynamicPrune in vision, or none and tokens that are the rows"
            " of its last attention",
            hint='leave "prune" out of pipeline.json, or export the model with DynamicPrune',
        )
    return old


def _adapted(old: PruneOp, rule: PruneSpec, ctx: PassContext) -> PruneTopPOp:
    """Insert score and pruning by the rule in front of the old one."""
    row = old.score.owner
    assert isinstance(row, AttentionRowOp)
    first, tokens = old.score_offset.value.data, shape_of(old.tokens)[-2].constant
    if rule.min_keep > tokens:
        raise MalformedModelError(
            f"pruning keeps at least {rule.min_keep} of {tokens} tokens",
            hint=f"'min_keep' of pipeline.json is at most {tokens}",
        )
    most = min(rule.max_keep, tokens)
    if min(tokens, most + rule.merge) >= ctx.spec.max_context:
        raise MalformedModelError(
            f"a picture of up to {min(tokens, most + rule.merge)} tokens leaves no room for words",
            hint="raise 'max_context' or lower 'max_keep' in pipeline.json",
        )
    score = Score(
        row.q,
        row.k,
        heads=row.heads.value.data,
        scale=row.scale.value.data,
        row=row.row.value.data if rule.score == "row" else ALL_ROWS,
        first=first,
    )
    new = PruneTopPOp(
        old.tokens,
        score.result,
        row.k if rule.merge else None,
        p=rule.p,
        min_keep=rule.min_keep,
        max_keep=most,
        merge=rule.merge,
        key_offset=first if rule.merge else 0,
    )
    insert_before(old, score, new)
    ctx.origins.stands(old, [new])
    return new


class _Projector:
    """What follows the pruning, copied into a function over T rows."""

    def __init__(self, ctx: PassContext, prune: PruneOp) -> None:
        self.ctx = ctx
        self.prune = prune
        self.rows = shape_of(prune.kept)[-2]
        self.block = Block()
        self.mapping: dict[SSAValue, SSAValue] = {}
        for at, value in enumerate((prune.kept, prune.index)):
            shape = self._run_time(shape_of(value), axis=-2 if value is prune.kept else -1)
            argument = self.block.insert_arg(tensor_type(dtype_of(value), shape), at)
            self.mapping[value] = argument
        self.follows: set[SSAValue] = {prune.kept, prune.index}
        self.indices: set[SSAValue] = {prune.index}

    def function(self, vision: FuncOp) -> FuncOp:
        """Return @projector, the copy of all that depends on the pruning's results."""
        for op in body(vision).ops:
            if not isinstance(op, ReturnOp) and not self.follows.isdisjoint(op.operands):
                self._copy(op)
        outputs = [(role, self._result(role, value)) for role, value in results(vision)]
        self.block.add_op(ReturnOp(*(value for _, value in outputs)))
        func = FuncOp(
            PROJECTOR,
            (list(self.block.arg_types), [value.type for _, value in outputs]),
            Region(self.block),
            arg_attrs=role_attributes(["tokens", "positions"]),
            res_attrs=role_attributes([role for role, _ in outputs]),
        )
        refresh_type(func)
        return func

    def _result(self, role: str, value: SSAValue) -> SSAValue:
        if value not in self.follows:
            raise UnsupportedOperatorError(
                f"vision's result of role {role} does not depend on its pruning",
                hint="tokens and positions must both come from DynamicPrune",
            )
        return self.mapping[value]

    def _copy(self, op: Operation) -> None:
        """Copy one row-wise operation, its rows now T."""
        self._check(op)
        for operand in op.operands:
            if operand not in self.mapping and isinstance(operand.owner, ConstantOp):
                constant = operand.owner.clone()
                self.block.add_op(constant)
                self.mapping[operand] = constant.result
        copy = op.clone(self.mapping)
        self.ctx.origins.copied(op, copy)
        self.block.add_op(copy)
        for at, result in enumerate(op.results):
            is_index = self._is_index(op)
            shape = self._run_time(shape_of(result), axis=-1 if is_index else -2)
            kind = tensor_type(dtype_of(result), shape)
            self.mapping[result] = Rewriter.replace_value_with_new_type(copy.results[at], kind)
            self.follows.add(result)
            if is_index:
                self.indices.add(result)

    def _is_index(self, op: Operation) -> bool:
        return not self.indices.isdisjoint(op.operands)

    def _check(self, op: Operation) -> None:
        """Refuse what could mix rows, or reads something else of the picture."""
        if isinstance(op, ReshapeOp):
            kept = 1 if self._is_index(op) else 2
            source, target = shape_of(op.x), shape_of(op.result)
            if source[-kept:] != target[-kept:] or any(d != Dim(1) for d in target[:-kept]):
                self._refuse(op)
            return
        names = ROW_OPERANDS.get(type(op))
        if names is None or self._is_index(op):
            self._refuse(op)
        row_operands = [getattr(op, name) for name in names or ()]
        for operand in op.operands:
            is_row = any(operand is value for value in row_operands)
            if is_row and operand in self.follows:
                continue
            leading = shape_of(operand)[:-1]
            is_one_row = isinstance(op, BinaryOp) and all(dim == Dim(1) for dim in leading)
            if not isinstance(operand.owner, ConstantOp) or (is_row and not is_one_row):
                self._refuse(op)

    def _refuse(self, op: Operation) -> None:
        refuse(op, self.ctx, "it follows an adaptive pruning and is not row-wise")

    def _run_time(self, shape: tuple[Dim, ...], axis: int) -> list[Dim]:
        """Return a shape with T in place of the kept rows."""
        sizes = list(shape)
        if sizes[axis] != self.rows:
            raise UnsupportedOperatorError("rows of a pruned picture are not where they were")
        sizes[axis] = symbol_dim("T")
        return sizes
