"""Compose component functions into the programs that a device runs.

Before:
    func.func @vision(image), @embed(token_ids), @decoder(embeds, positions)
After:
    func.func @see(image u8) -> (embeds, positions)       vision, splice, decoder for its cache
    func.func @see(image u8, positions) -> (embeds, positions)      if vision drops no token
    func.func @step(token_ids, positions) -> (logits, token, routing)    embed, decoder, argmax

With adaptive pruning vision ends at the pruned tokens and a component `projector` follows it:
    func.func @see(image u8) -> (tokens, positions, count)      the most rows, count are real
    func.func @prefill(tokens, positions) -> (embeds)           projector, splice, decoder's cache

Family `graph` has one program, `forward`. In `see` the run-time length of the decoder becomes the
number of kept tokens, and everything that only leads to logits is dead. In `step` logits and
routing are those of the last row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.rewriter import Rewriter

from compiler.analysis.movement import traces
from compiler.dialects.dims import Dim, symbol_dim
from compiler.dialects.mm import SpliceOp
from compiler.dialects.movement import ConcatOp, ReshapeOp, SliceOp, TransposeOp
from compiler.dialects.sp import ArgmaxOp, ImageOp
from compiler.dialects.types import (
    Tensor,
    dtype_of,
    encoding_of,
    shape_of,
    tensor_type,
    type_of,
    type_shape,
)
from compiler.errors import MalformedModelError
from compiler.passes.adapt_pruning import PROJECTOR
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import (
    arguments,
    body,
    function,
    functions,
    refresh_type,
    results,
    role_attributes,
)
from compiler.passes.origins import Origins
from compiler.passes.pipeline_spec import FAMILY_GRAPH, POSITION_ROWS
from compiler.passes.rewriting import erase_dead, replace

SEE: Final = "see"
PREFILL: Final = "prefill"
STEP: Final = "step"
FORWARD: Final = "forward"
INTEGERS: Final = {"int32", "int64"}
"""Interchangeable between components: kernels hold all indices in 32 bits."""


@dataclass(frozen=True)
class Compose(Pass):
    """Replace component functions by programs."""

    name: ClassVar[str] = "compose"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Build the programs of the family and erase the components.

        Raises:
            MalformedModelError: Components do not fit together.
        """
        components = functions(module)
        if ctx.spec.family == FAMILY_GRAPH:
            programs = [_forward(module, ctx)]
        else:
            has_projector = any(f.sym_name.data == PROJECTOR for f in components)
            see = [_look(module, ctx), _prefill(module, ctx)] if has_projector else []
            programs = [*(see or [_see(module, ctx)]), _step(module, ctx)]
        for component in components:
            module.body.block.erase_op(component)
        module.body.block.add_ops(programs)
        for program in programs:
            erase_dead(program, ctx.origins)
        return PassResult(len(programs), tuple(p.sym_name.data for p in programs))


@dataclass(slots=True)
class _Program:
    """A program under construction."""

    name: str
    origins: Origins
    block: Block = field(default_factory=Block)
    inputs: list[str] = field(default_factory=list)

    def argument(self, role: str, kind: Tensor) -> SSAValue:
        self.inputs.append(role)
        return self.block.insert_arg(kind, len(self.block.args))

    def add(self, op: Operation) -> SSAValue:
        self.block.add_op(op)
        return op.results[0]

    def inline(
        self, component: FuncOp, given: Mapping[str, SSAValue], lengths: Mapping[str, Dim]
    ) -> dict[str, SSAValue]:
        """Append a component's body; return its results by role."""
        mapping: dict[SSAValue, SSAValue] = {}
        for role, argument in arguments(component):
            if role in given:
                _same_shape(component, role, argument, given[role], lengths)
                mapping[argument] = given[role]
            elif argument.first_use is not None:
                raise MalformedModelError(
                    f"{component.sym_name.data}: input of role {role} is used outside attention",
                    hint="cache and mask inputs may only feed scaled dot-product attention",
                )
        for op in body(component).ops:
            if not isinstance(op, ReturnOp):
                copy = op.clone(mapping)
                self.origins.copied(op, copy)
                self.block.add_op(copy)
                mapping.update(_with_lengths(op, copy, lengths))
        return {role: mapping.get(value, value) for role, value in results(component)}

    def finish(self, outputs: Sequence[tuple[str, SSAValue]]) -> FuncOp:
        self.block.add_op(ReturnOp(*(value for _, value in outputs)))
        func = FuncOp(
            self.name,
            (list(self.block.arg_types), [value.type for _, value in outputs]),
            Region(self.block),
            arg_attrs=role_attributes(self.inputs),
            res_attrs=role_attributes([role for role, _ in outputs]),
        )
        refresh_type(func)
        return func


def _same_shape(
    component: FuncOp, role: str, wanted: SSAValue, given: SSAValue, lengths: Mapping[str, Dim]
) -> None:
    shape = tuple(dim.substitute(lengths) for dim in shape_of(wanted))
    kinds = {dtype_of(wanted), dtype_of(given)}
    if shape != shape_of(given) or (len(kinds) > 1 and kinds != INTEGERS):
        raise MalformedModelError(
            f"{component.sym_name.data}: input of role {role} is {wanted.type},"
            f" the component before it makes {given.type}",
            hint="embeds and positions must have the same width and type in all components",
        )


def _with_lengths(
    old: Operation, new: Operation, lengths: Mapping[str, Dim]
) -> dict[SSAValue, SSAValue]:
    """Give the results of a clone their sizes in the program; return the mapping of results."""
    mapping: dict[SSAValue, SSAValue] = {}
    for at, result in enumerate(old.results):
        kind = type_of(result)
        shape = [dim.substitute(lengths) for dim in type_shape(kind)]
        value: SSAValue = new.results[at]
        if tuple(shape) != type_shape(kind):
            sized = tensor_type(dtype_of(result), shape, encoding_of(result))
            value = Rewriter.replace_value_with_new_type(value, sized)
        mapping[result] = value
    return mapping


def _vision(program: _Program, module: ModuleOp, ctx: PassContext) -> dict[str, SSAValue]:
    """Append vision from the pixels on; return its results by role."""
    image = ctx.spec.image
    assert image is not None
    size = image.height * image.width * image.channels
    pixels = program.argument("image", tensor_type("uint8", [1, size]))
    rows = program.add(
        ImageOp(
            pixels,
            image.height * image.width,
            image.channels,
            divide=image.divide,
            subtract=image.subtract,
        )
    )
    planes = program.add(TransposeOp(rows, [1, 0]))
    shape = [Dim(1), Dim(image.channels), Dim(image.height), Dim(image.width)]
    picture = program.add(ReshapeOp(planes, shape))
    return program.inline(function(module, "vision"), {"image": picture}, {})


def _has_position_rows(decoder: FuncOp) -> bool:
    found = [value for role, value in arguments(decoder) if role == "positions"]
    return bool(found) and len(shape_of(found[0])) == len(POSITION_ROWS)


def _positions(program: _Program, module: ModuleOp, rows: list[SSAValue]) -> SSAValue:
    """Return positions as the decoder takes them; text has one row for all three."""
    if not _has_position_rows(function(module, "decoder")):
        return rows[0]
    full = rows if len(rows) == len(POSITION_ROWS) else rows[:1] * len(POSITION_ROWS)
    sizes = [Dim(1), *shape_of(full[0])]
    parts = [program.add(ReshapeOp(row, sizes)) for row in full]
    return program.add(ConcatOp(parts, 0))


def _pick_rows(joined: SSAValue, origins: Origins) -> None:
    """Let what reads one row of joined positions read that row, so that nothing is joined."""
    concat = joined.owner
    for use in list(joined.uses) if isinstance(concat, ConcatOp) else ():
        op = use.operation
        if isinstance(op, SliceOp) and isinstance(concat, ConcatOp) and op.axis.value.data == 0:
            part = concat.parts[int(op.start.data)]
            if shape_of(part) == shape_of(op.result):
                replace(op, [part], origins)


def _fill_cache(
    program: _Program, module: ModuleOp, seen: Mapping[str, SSAValue], count: Dim
) -> SpliceOp:
    """Append the splice of `count` rows and the decoder, for its cache alone."""
    splice = SpliceOp(seen["embeds"], seen["positions"])
    program.add(splice)
    rows = [splice.positions, *(seen[role] for role in POSITION_ROWS[1:] if role in seen)]
    given = {"embeds": splice.embeds, "positions": _positions(program, module, rows)}
    program.inline(function(module, "decoder"), given, {"T": count})
    _pick_rows(given["positions"], program.origins)
    return splice


def _see(module: ModuleOp, ctx: PassContext) -> FuncOp:
    program = _Program(SEE, ctx.origins)
    seen = _vision(program, module, ctx)
    if "positions" not in seen:  # every token is kept: where they stand is the caller's to say
        kind = tensor_type("int64", shape_of(seen["embeds"])[:-1])
        seen["positions"] = program.argument("positions", kind)
        if _has_position_rows(function(module, "decoder")):
            seen |= {role: program.argument(role, kind) for role in POSITION_ROWS[1:]}
    splice = _fill_cache(program, module, seen, shape_of(seen["positions"])[-1])
    return program.finish([("embeds", splice.embeds), ("positions", splice.positions)])


def _look(module: ModuleOp, ctx: PassContext) -> FuncOp:
    program = _Program(SEE, ctx.origins)
    seen = _vision(program, module, ctx)
    return program.finish([(role, seen[role]) for role in ("tokens", "positions", "count")])


def _prefill(module: ModuleOp, ctx: PassContext) -> FuncOp:
    program = _Program(PREFILL, ctx.origins)
    projector = function(module, PROJECTOR)
    given = {role: program.argument(role, type_of(value)) for role, value in arguments(projector)}
    made = program.inline(projector, given, {})
    splice = _fill_cache(program, module, made, symbol_dim("T"))
    return program.finish([("embeds", splice.embeds)])


def _step(module: ModuleOp, ctx: PassContext) -> FuncOp:
    program = _Program(STEP, ctx.origins)
    embed, decoder = function(module, "embed"), function(module, "decoder")
    tokens = symbol_dim("T")
    ids = program.argument("token_ids", type_of(_argument(embed, "token_ids")))
    given: dict[str, SSAValue] = {}
    if any(role == "positions" for role, _ in arguments(decoder)):
        kind = type_of(_argument(decoder, "positions"))
        if _has_position_rows(decoder):
            kind = tensor_type("int64", [Dim(1), tokens])
        row = program.argument("positions", kind)
        given["positions"] = _positions(program, module, [row])
    given.update(program.inline(embed, {"token_ids": ids}, {}))
    made = program.inline(decoder, given, {})
    if "positions" in given:
        _pick_rows(given["positions"], program.origins)
    logits = made["logits"]
    if shape_of(logits)[:-1] not in ((tokens,), (Dim(1), tokens)):
        raise MalformedModelError(
            f"decoder: output of role logits is {logits.type}, expected (1, T, vocabulary)"
        )
    rows, width = len(shape_of(logits)) - 2, shape_of(logits)[-1]
    last = program.add(SliceOp(logits, rows, tokens + Dim(-1), Dim(1)))
    last = program.add(ReshapeOp(last, [Dim(1), width]))
    outputs = [("logits", last), ("token", program.add(ArgmaxOp(last)))]
    if "routing" in made:
        outputs.append(("routing", _last_routing(program, made["routing"])))
    return program.finish(outputs)


def _last_routing(program: _Program, routing: SSAValue) -> SSAValue:
    """Return the expert ids of the last row, layer after layer, as (1, layers * k).

    Raises:
        MalformedModelError: The output is not the routers' indices stacked by layer.
    """
    layers: list[SSAValue] = []
    for found in traces(routing):
        layers = [leaf.value for leaf in found.leaves]
        in_order = all(
            (found.index.reshape(-1)[leaf.base : leaf.base + leaf.numbers().size]).tolist()
            == leaf.numbers().reshape(-1).tolist()
            for leaf in found.leaves
        )
        if not in_order:
            raise MalformedModelError(
                "decoder: output of role routing is not the layers' expert ids, one after the other"
            )
    lasts = []
    for value in layers:
        shape = shape_of(value)
        if len(shape) != 2 or dtype_of(value) != "int64" or shape[0] != symbol_dim("T"):
            raise MalformedModelError(
                f"decoder: output of role routing holds {value.type}, expected (T, k) expert ids"
            )
        axis = len(shape) - 2
        last = program.add(SliceOp(value, axis, shape[axis] + Dim(-1), Dim(1)))
        lasts.append(program.add(ReshapeOp(last, [Dim(1), shape[-1]])))
    if isinstance(routing.owner, Operation):
        owners = [last.owner for last in lasts]
        program.origins.stands(routing.owner, [o for o in owners if isinstance(o, Operation)])
    return lasts[0] if len(lasts) == 1 else program.add(ConcatOp(lasts, 1))


def _forward(module: ModuleOp, ctx: PassContext) -> FuncOp:
    program = _Program(FORWARD, ctx.origins)
    model = function(module, "model")
    given = {role: program.argument(role, type_of(value)) for role, value in arguments(model)}
    made = program.inline(model, given, {})
    return program.finish(list(made.items()))


def _argument(func: FuncOp, role: str) -> SSAValue:
    found = [value for name, value in arguments(func) if name == role]
    if not found:
        raise MalformedModelError(f"{func.sym_name.data} has no input of role {role}")
    return found[0]
