"""Raise rotary position embedding to `mm.rope` on rows.

Before (heads split, x1 and x2 the halves of the last axis, c and s cosine and sine of position *
frequency):
    %a = Sub(Mul(%x1, %c), Mul(%x2, %s))
    %b = Add(Mul(%x2, %c), Mul(%x1, %s))
    %y = "sp.concat"(%a, %b) <{axis = 3}>
After:
    %r = "mm.rope"(%rows, %positions, %inv_freq) <{heads = 4}>
    %y = the movement that led from the rows to %x, now from %r

How rows became heads, and how the tables were broadcast, is decided on index arrays: every element
of x1 must meet its partner in x2, and the cosine of its own row and frequency. Left out:
interleaved pairs, and position products by MatMul.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import Array
from compiler.analysis.movement import chain_symbols, trace
from compiler.dialects.dims import Binding, witnesses
from compiler.dialects.mm import RopeOp
from compiler.dialects.movement import ConcatOp, SliceOp
from compiler.dialects.types import shape_of, sizes_at, symbols_of
from compiler.passes.base import PassContext, PassResult
from compiler.passes.functions import functions, operations, role_of_argument
from compiler.passes.match import Bind, Env, find, node, onnx
from compiler.passes.rewriting import erase_dead, insert_before, rebuild_chain, replace

_FIRST: Final = tuple(
    node("Sub", node("Mul", Bind(x1), Bind(c)), node("Mul", Bind(x2), Bind(s)))
    for x1, c in (("x1", "c"), ("c", "x1"))
    for x2, s in (("x2", "s"), ("s", "x2"))
)


@dataclass(frozen=True, slots=True)
class _Tables:
    """Where cosine and sine come from: positions (an argument) times constant frequencies."""

    positions: SSAValue
    inv_freq: Array


@dataclass(frozen=True)
class RaiseRope:
    """Recognise half-split rotations whose tables are computed in the graph."""

    name: ClassVar[str] = "raise-rope"

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Rewrite every matching concatenation."""
        changed = sum(_raise(op, ctx) for op in operations(module) if isinstance(op, ConcatOp))
        for func in functions(module):
            erase_dead(func)
        return PassResult(changed)


def _raise(op: ConcatOp, ctx: PassContext) -> int:
    env = _halves(op, ctx)
    if env is None:
        return 0
    first = env["x1"].owner
    assert isinstance(first, SliceOp)
    x = first.x
    tables = _tables(env, ctx)
    if tables is None or shape_of(x) != shape_of(op.result):
        return 0
    rows = _rows_source(env, tables)
    if rows is None:
        return 0
    heads = shape_of(rows)[-1].constant // (2 * tables.inv_freq.size)
    frequencies = ctx.constants.add(tables.inv_freq)
    rope = RopeOp(rows, tables.positions, frequencies.result, heads=heads)
    insert_before(op, frequencies, rope)
    replace(op, [rebuild_chain(x, {rows: rope.result}, op)])
    return 1


def _halves(op: ConcatOp, ctx: PassContext) -> Env | None:
    """Return x1, x2, c and s of `[x1*c - x2*s, x2*c + x1*s]`, in any order of operands."""
    if len(op.parts) != 2 or op.axis.value.data != len(shape_of(op.result)) - 1:
        return None
    for pattern in _FIRST:
        env = find(pattern, op.parts[0], ctx.constants)
        halves = [env[name].owner for name in ("x1", "x2")] if env is not None else []
        if env is None or not all(isinstance(owner, SliceOp) for owner in halves):
            continue
        if _is_second(op.parts[1], env):
            return env
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


def _tables(env: Env, ctx: PassContext) -> _Tables | None:
    cosine, sine = _function_behind(env["c"], "Cos"), _function_behind(env["s"], "Sin")
    if cosine is None or sine is None or cosine.operands[0] is not sine.operands[0]:
        return None
    angle = onnx(cosine.operands[0], "Mul")
    if angle is None:
        return None
    for at in (0, 1):
        constant = ctx.constants.get(angle.arguments[at])
        if constant is not None:
            return _angle(angle.outputs[0], angle.arguments[1 - at], constant)
    return None


def _function_behind(value: SSAValue, kind: str) -> Operation | None:
    """Return the one Cos or Sin that the movement chain of `value` reads."""
    leaves = trace(value, witnesses(chain_symbols(value))[0]).leaves
    return onnx(leaves[0].value, kind) if len(leaves) == 1 else None


def _angle(angle: SSAValue, factor: SSAValue, constant: Array) -> _Tables | None:
    """Check that angle[..., t, j] = position[t] * inv_freq[j]; return both."""
    inv_freq: Array | None = None
    positions: SSAValue | None = None
    for binding in witnesses(symbols_of(angle) | chain_symbols(factor)):
        sizes = sizes_at(angle, binding)
        found = trace(factor, binding)
        if len(found.leaves) != 1:
            return None
        positions = found.leaves[0].value
        tokens, half = int(np.prod(sizes[:-1])), sizes[-1]
        rows = np.broadcast_to(found.index, sizes).reshape(tokens, half)
        table = np.broadcast_to(constant, sizes).reshape(tokens, half)
        expected = np.broadcast_to(np.arange(tokens)[:, None], rows.shape)
        if not np.array_equal(rows, expected) or (table != table[:1]).any():
            return None
        inv_freq = table[0].copy()
    cast = onnx(positions, "Cast")
    positions = cast.arguments[0] if cast is not None else positions
    if positions is None or role_of_argument(positions) != "positions" or inv_freq is None:
        return None
    return _Tables(positions, inv_freq)


def _rows_source(env: Env, tables: _Tables) -> SSAValue | None:
    """Return the rows (..., T, H*hd) that x1 and x2 are halves of, or None if they are not."""
    source: SSAValue | None = None
    symbols = frozenset[str]().union(*(chain_symbols(env[name]) for name in ("x1", "x2", "c", "s")))
    for binding in witnesses(symbols):
        source = _rows_at(env, tables, binding)
        if source is None:
            return None
    return source


def _rows_at(env: Env, tables: _Tables, binding: Binding) -> SSAValue | None:
    half = tables.inv_freq.size
    first, second = trace(env["x1"], binding), trace(env["x2"], binding)
    if len(first.leaves) != 1 or len(second.leaves) != 1:
        return None
    leaf = first.leaves[0]
    width = leaf.sizes[-1]
    if second.leaves[0].value is not leaf.value or width % (2 * half):
        return None
    column = first.index % width % (2 * half)
    if (column >= half).any() or not np.array_equal(second.index, first.index + half):
        return None
    wanted = first.index // width * half + column
    for name in ("c", "s"):
        table = np.broadcast_to(trace(env[name], binding).index, first.index.shape)
        if not np.array_equal(table, wanted):
            return None
    return leaf.value
