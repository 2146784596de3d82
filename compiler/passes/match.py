"""Patterns over imported ONNX operations: structure and constants, never names.

A pattern is a tree of `Node`, `Scalar`, `Bind` and `OneOf`. `find` returns the bindings of the
first way it fits, trying both operand orders of commutative operators.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from xdsl.dialects.builtin import ArrayAttr, FloatAttr, IntegerAttr, StringAttr
from xdsl.ir import Attribute, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.dialects.sp import OnnxOp

COMMUTATIVE: Final = frozenset({"Add", "Mul", "Max", "Min"})

Env = Mapping[str, SSAValue]


@dataclass(frozen=True, slots=True)
class Bind:
    """Any value; the same name must be the same value everywhere in a pattern."""

    name: str


@dataclass(frozen=True, slots=True)
class Scalar:
    """A constant with one element, equal to `number` if that is given."""

    name: str
    number: float | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """Result 0 of the ONNX operation `op` with matching operands; `name` binds the result."""

    op: str
    args: tuple["Pattern", ...]
    name: str = ""
    attrs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OneOf:
    """The first alternative that fits."""

    alternatives: tuple["Pattern", ...]


Pattern = Bind | Scalar | Node | OneOf


def node(op: str, *args: Pattern, name: str = "", **attrs: object) -> Node:
    """Build a `Node` pattern; keyword arguments are attribute values that must be equal."""
    return Node(op, args, name, attrs)


def find(pattern: Pattern, value: SSAValue, constants: ConstantTable) -> Env | None:
    """Return the bindings of the first way `pattern` fits `value`, or None."""
    return next(_fits(pattern, value, {}, constants), None)


def onnx(value: SSAValue | None, op: str) -> OnnxOp | None:
    """Return the imported operation `op` whose first result is `value`, or None."""
    if value is None or not isinstance(value.owner, OnnxOp) or value.owner.op.data != op:
        return None
    return value.owner if value.owner.results[0] is value else None


def plain(attribute: Attribute | None) -> object:
    """Return an attribute as a Python value."""
    match attribute:
        case IntegerAttr():
            return attribute.value.data
        case FloatAttr():
            return attribute.value.data
        case StringAttr():
            return attribute.data
        case ArrayAttr():
            return [plain(item) for item in attribute.data]
        case _:
            return None


def attr(op: OnnxOp, name: str) -> object:
    """Return an ONNX attribute of an imported operation as a Python value."""
    return plain(op.attrs.data.get(name))


def single_use(value: SSAValue) -> bool:
    """Return whether exactly one operand slot reads `value`."""
    return value.has_one_use()


def _fits(pattern: Pattern, value: SSAValue, env: Env, constants: ConstantTable) -> Iterator[Env]:
    match pattern:
        case Bind(name):
            yield from _bound(name, value, env)
        case Scalar(name, number):
            found = constants.scalar(value)
            if found is not None and (number is None or found == number):
                yield from _bound(name, value, env)
        case OneOf(alternatives):
            for alternative in alternatives:
                yield from _fits(alternative, value, env, constants)
        case Node():
            yield from _node_fits(pattern, value, env, constants)


def _bound(name: str, value: SSAValue, env: Env) -> Iterator[Env]:
    if name not in env:
        yield {**env, name: value}
    elif env[name] is value:
        yield env


def _node_fits(pattern: Node, value: SSAValue, env: Env, constants: ConstantTable) -> Iterator[Env]:
    op = onnx(value, pattern.op)
    if op is None or len(op.arguments) != len(pattern.args):
        return
    if any(attr(op, key) != wanted for key, wanted in pattern.attrs.items()):
        return
    start = {**env, pattern.name: value} if pattern.name else env
    orders = [pattern.args]
    if pattern.op in COMMUTATIVE and len(pattern.args) == 2:
        orders.append(pattern.args[::-1])
    for order in orders:
        yield from _all_fit(order, tuple(op.arguments), start, constants)


def _all_fit(
    patterns: tuple[Pattern, ...],
    values: tuple[SSAValue, ...],
    env: Env,
    constants: ConstantTable,
) -> Iterator[Env]:
    if not patterns:
        yield env
        return
    for found in _fits(patterns[0], values[0], env, constants):
        yield from _all_fit(patterns[1:], values[1:], found, constants)
