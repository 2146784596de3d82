"""Raise rotary position embedding to `mm.rope` on rows.

Before (heads split, x1 and x2 the halves of the last axis of %x; cosine and sine of position *
frequency computed in the graph):
    %y = "sp.concat"(Sub(Mul(%x1, %c), Mul(%x2, %s)), Add(Mul(%x2, %c), Mul(%x1, %s)))
or
    %y = Add(Mul(%x, %c), Mul("sp.concat"(Neg(%x2), %x1), %s))
After:
    %r = "mm.rope"(%rows, %positions, %inv_freq) <{heads = 4}>
    %y = the movement that led from the rows to %x, now from %r

How rows became heads, how halves were cut and how tables were broadcast is decided on index arrays:
every element must meet its partner in the other half of its own head, and the cosine and sine of
its own row's position times one frequency per column. If columns read different rows of positions
(time, height and width of a picture's tokens), one rotation per row follows the other, with
frequency 0 where a column reads another row: rotating by nothing changes nothing. Left out:
interleaved pairs, scaled tables.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array, ConstantTable
from compiler.analysis.movement import Index, chain_symbols, only_leaf, spread, trace
from compiler.dialects.dims import Binding, Dim, witnesses
from compiler.dialects.mm import RopeOp
from compiler.dialects.movement import ConcatOp, SliceOp
from compiler.dialects.sp import OnnxOp
from compiler.dialects.types import shape_of, sizes_at, symbols_of
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import role_of_argument
from compiler.passes.match import Bind, Env, Pattern, find, node, onnx
from compiler.passes.rewriting import (
    insert_before,
    rebuild_chain,
    replace,
    reshaped,
    sweep,
)


def _orders(a: str, b: str) -> tuple[tuple[Pattern, Pattern], ...]:
    return ((Bind(a), Bind(b)), (Bind(b), Bind(a)))


_FIRST: Final = tuple(
    node("Sub", node("Mul", *first), node("Mul", *second))
    for first in _orders("x1", "c")
    for second in _orders("x2", "s")
)
_WHOLE: Final = tuple(
    node("Add", node("Mul", *first), node("Mul", *second))
    for first in _orders("x", "c")
    for second in _orders("turned", "s")
)


@dataclass(frozen=True, slots=True)
class _Rotation:
    """A candidate: x is rotated by tables c and s; x1 and x2 are its halves as the graph cuts them.

    Attributes:
        halved: The tables are as wide as a half, else as the whole head.
    """

    x: SSAValue
    x1: SSAValue
    x2: SSAValue
    c: SSAValue
    s: SSAValue
    halved: bool


@dataclass(frozen=True, slots=True)
class _Proof:
    """What a candidate turned out to be.

    Attributes:
        sections: Which row of positions each column reads; all 0 if there is one row.
    """

    rows: SSAValue
    positions: SSAValue
    inv_freq: Array
    sections: Index


@dataclass(frozen=True)
class RaiseRope(Pass):
    """Recognise half-split rotations whose tables are computed in the graph."""

    name: ClassVar[str] = "raise-rope"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite every rotation that is proven."""
        return PassResult(sweep(module, ctx, _raise))


def _raise(op: Operation, ctx: PassContext) -> int:
    rotation = _candidate(op, ctx.constants)
    proof = _prove(rotation, ctx.constants) if rotation is not None else None
    if rotation is None or proof is None:
        return 0
    heads = shape_of(proof.rows)[-1].constant // (2 * proof.inv_freq.size)
    rows = proof.rows
    for section in np.unique(proof.sections):
        frequencies = ctx.constants.add(np.where(proof.sections == section, proof.inv_freq, 0))
        positions = _position_row(proof.positions, int(section), op)
        rope = RopeOp(rows, positions, frequencies.result, heads=heads)
        insert_before(op, frequencies, rope)
        rows = rope.result
    replace(op, [rebuild_chain(rotation.x, {proof.rows: rows}, op)], ctx.origins)
    return 1


def _position_row(positions: SSAValue, section: int, anchor: Operation) -> SSAValue:
    """Return one row (1, T) of positions (1, T), (T) or (sections, 1, T)."""
    shape = shape_of(positions)
    if len(shape) < 3:
        return positions
    row = SliceOp(positions, 0, Dim(section), Dim(1))
    insert_before(anchor, row)
    return reshaped(row.result, (Dim(1), shape[-1]), anchor)


def _candidate(op: Operation, constants: ConstantTable) -> _Rotation | None:
    if isinstance(op, ConcatOp):
        return _by_halves(op, constants)
    if isinstance(op, OnnxOp) and op.op.data == "Add":
        return _by_turning(op, constants)
    return None


def _by_halves(op: ConcatOp, constants: ConstantTable) -> _Rotation | None:
    """Match `[x1*c - x2*s, x2*c + x1*s]`."""
    if len(op.parts) != 2 or op.axis.value.data != len(shape_of(op.result)) - 1:
        return None
    for pattern in _FIRST:
        env = find(pattern, op.parts[0], constants)
        first = env["x1"].owner if env is not None else None
        if env is None or not isinstance(first, SliceOp) or not _is_second(op.parts[1], env):
            continue
        if shape_of(first.x) == shape_of(op.result):
            return _Rotation(first.x, env["x1"], env["x2"], env["c"], env["s"], halved=True)
    return None


def _is_second(value: SSAValue, env: Env) -> bool:
    """Return whether `value` is x2*c + x1*s, in any order of operands."""
    total = onnx(value, "Add")
    if total is None:
        return False
    products = [onnx(argument, "Mul") for argument in total.arguments]
    pairs = [{p.arguments[0], p.arguments[1]} for p in products if p is not None]
    wanted = [{env["x2"], env["c"]}, {env["x1"], env["s"]}]
    return pairs in (wanted, wanted[::-1])


def _by_turning(op: OnnxOp, constants: ConstantTable) -> _Rotation | None:
    """Match `x*c + [-x2, x1]*s`."""
    for pattern in _WHOLE:
        env = find(pattern, op.outputs[0], constants)
        turned = env["turned"].owner if env is not None else None
        if env is None or not isinstance(turned, ConcatOp) or len(turned.parts) != 2:
            continue
        negated = onnx(turned.parts[0], "Neg")
        last = turned.axis.value.data == len(shape_of(turned.result)) - 1
        if negated is None or not last or shape_of(env["x"]) != shape_of(op.outputs[0]):
            continue
        x1, x2 = turned.parts[1], negated.arguments[0]
        return _Rotation(env["x"], x1, x2, env["c"], env["s"], halved=False)
    return None


def _prove(rotation: _Rotation, constants: ConstantTable) -> _Proof | None:
    symbols = frozenset[str]()
    for value in (rotation.x, rotation.x1, rotation.x2, rotation.c, rotation.s):
        symbols |= chain_symbols(value, constants) | symbols_of(value)
    proof: _Proof | None = None
    for binding in witnesses(symbols):
        proof = _prove_at(rotation, constants, binding)
        if proof is None:
            return None
    return proof


def _prove_at(rotation: _Rotation, constants: ConstantTable, binding: Binding) -> _Proof | None:
    x = trace(rotation.x, binding)
    leaf, head_dim = only_leaf(x), x.index.shape[-1]
    half = head_dim // 2
    if leaf is None or head_dim % 2 or leaf.sizes[-1] % head_dim:
        return None
    halves = [_of_leaf(value, leaf.value, binding) for value in (rotation.x1, rotation.x2)]
    width = leaf.sizes[-1]
    row, column = x.index // width, x.index % width % head_dim
    whole = np.arange(head_dim)
    cut = (x.index[..., :half], x.index[..., half:])
    if not np.array_equal(column, np.broadcast_to(whole, column.shape)):
        return None
    if any(
        part is None or not np.array_equal(part, c) for part, c in zip(halves, cut, strict=True)
    ):
        return None
    tables = [
        _table(value, kind, rotation, constants, binding)
        for value, kind in ((rotation.c, "Cos"), (rotation.s, "Sin"))
    ]
    proofs = [
        _frequencies(table, row, column % half, half, leaf.numbers().size // width)
        for table in tables
        if table
    ]
    if len(proofs) != 2 or proofs[0] is None or proofs[1] is None:
        return None
    cosine, sine = proofs[0], proofs[1]
    same = np.array_equal(cosine.inv_freq, sine.inv_freq)
    if cosine.positions is not sine.positions or not same:
        return None
    if not np.array_equal(cosine.sections, sine.sections):
        return None
    return _Proof(leaf.value, cosine.positions, cosine.inv_freq, cosine.sections)


def _of_leaf(value: SSAValue, leaf: SSAValue, binding: Binding) -> Index | None:
    found = trace(value, binding)
    return found.index if [entry.value for entry in found.leaves] == [leaf] else None


@dataclass(frozen=True, slots=True)
class _Table:
    """For each element of x: which position its angle reads, and its frequency."""

    positions: SSAValue
    position: Index
    frequency: Array


def _table(
    value: SSAValue, kind: str, rotation: _Rotation, constants: ConstantTable, binding: Binding
) -> _Table | None:
    """Follow a table through broadcasting, the function, movement, and the product before it."""
    sizes = sizes_at(rotation.x, binding)
    found = trace(value, binding, constants)
    function = onnx(found.leaves[0].value, kind) if len(found.leaves) == 1 else None
    if function is None or found.uniform_factor() != 1.0:
        return None
    angle = trace(function.arguments[0], binding)
    product = (
        _product(angle.leaves[0].value, constants, binding) if angle.leaves[1:] == [] else None
    )
    if product is None:
        return None
    positions, position, frequency = product
    sizes = (*sizes[:-1], sizes[-1] // 2) if rotation.halved else sizes
    called = spread(found.index, sizes)
    if called is None:
        return None
    element = angle.index.reshape(-1)[called]
    if rotation.halved:
        element = np.concatenate([element, element], axis=-1)
    return _Table(positions, position.reshape(-1)[element], frequency.reshape(-1)[element])


def _product(
    value: SSAValue, constants: ConstantTable, binding: Binding
) -> tuple[SSAValue, Index, Array] | None:
    """Return (positions, index of position, frequency) of each element of an angle."""
    op = onnx(value, "Mul") or onnx(value, "MatMul")
    if op is None:
        return None
    if op.op.data == "MatMul" and shape_of(op.arguments[0])[-1].constant != 1:
        return None
    for at in (0, 1):
        constant = constants.get(op.arguments[at])
        found = trace(op.arguments[1 - at], binding)
        positions = _positions(found.leaves[0].value) if len(found.leaves) == 1 else None
        if constant is None or positions is None:
            continue
        sizes = sizes_at(value, binding)
        position, frequency = spread(found.index, sizes), spread(constant, sizes)
        if position is not None and frequency is not None:
            return positions, position, frequency
    return None


def _positions(value: SSAValue) -> SSAValue | None:
    cast = onnx(value, "Cast")
    source = cast.arguments[0] if cast is not None else value
    return source if role_of_argument(source) == "positions" else None


@dataclass(frozen=True, slots=True)
class _Columns:
    """What the columns of a table are: their frequency, and the row of positions they read."""

    positions: SSAValue
    inv_freq: Array
    sections: Index


def _frequencies(table: _Table, row: Index, column: Index, half: int, rows: int) -> _Columns | None:
    """Return the columns if the table is position[section[column]][row] * inv_freq[column]."""
    inv_freq = np.zeros(half, table.frequency.dtype)
    sections = np.zeros(half, np.int64)
    inv_freq[column] = table.frequency
    sections[column] = table.position // rows
    wanted = sections[column] * rows + row
    same = np.array_equal(table.frequency, inv_freq[column])
    if not same or not np.array_equal(table.position, wanted):
        return None
    return _Columns(table.positions, inv_freq, sections)
