"""The operands of one call as the rules see them, and the comparisons that rules are made of.

`operand_rules` holds the rule of each operation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from compiler.contract.errors import ContractError
from compiler.contract.plan_format import KvKind

MAX_HEAD_DIM: Final = 1024


class OperandError(ContractError):
    """A call's operands or parameters break the rules of its operation; the message says which."""

    code: ClassVar[str] = "contract.plan.operand"


class Shape(NamedTuple):
    """A buffer as the rules see it; `dynamic`: `rows` is the maximum, T the run-time value."""

    rows: int
    cols: int
    dtype: str
    dynamic: bool = False


class WeightShape(NamedTuple):
    """A constant as the rules see it; a vector of n is (1, n).

    kind: `w4`, `w8`, `f32`, `i32`, or `i8` and `i16`, which are matrices of codes: of routers,
        and `i8` of EMBED and LINEAR_F32 too.
    """

    rows: int
    cols: int
    kind: str


class KvShape(NamedTuple):
    """The key/value cache: `capacity` rows of `heads * head_dim` numbers per layer, twice."""

    layers: int
    heads: int
    head_dim: int
    capacity: int
    kind: KvKind = KvKind.F32

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole cache."""
        head = self.head_dim + 4 if self.kind is KvKind.I8 else 4 * self.head_dim
        return 2 * self.layers * self.capacity * self.heads * head


@dataclass(frozen=True, slots=True)
class Operands:
    """One call with its operands resolved to shapes; absent operands are None."""

    inputs: tuple[Shape | None, ...]
    outputs: tuple[Shape | None, ...]
    weights: tuple[WeightShape | None, ...]
    params: Mapping[str, int | float]
    kv: KvShape | None = None

    def source(self, at: int) -> Shape:
        """Return input `at`, which must be present."""
        found = self.inputs[at] if at < len(self.inputs) else None
        if found is None:
            raise OperandError(f"input {at} is missing")
        return found

    def result(self, at: int) -> Shape:
        """Return output `at`, which must be present."""
        found = self.outputs[at] if at < len(self.outputs) else None
        if found is None:
            raise OperandError(f"output {at} is missing")
        return found

    def weight(self, at: int) -> WeightShape:
        """Return weight `at`, which must be present."""
        found = self.weights[at] if at < len(self.weights) else None
        if found is None:
            raise OperandError(f"weight {at} is missing")
        return found

    def maybe_source(self, at: int) -> Shape | None:
        """Return input `at` or None."""
        return self.inputs[at] if at < len(self.inputs) else None

    def maybe_weight(self, at: int) -> WeightShape | None:
        """Return weight `at` or None."""
        return self.weights[at] if at < len(self.weights) else None

    def number(self, name: str) -> int:
        """Return integer parameter `name`."""
        return int(self.params[name])


def need(holds: bool, message: str) -> None:
    """Refuse a call unless `holds`."""
    if not holds:
        raise OperandError(message)


def same_rows(a: Shape, b: Shape, what: str) -> None:
    """Need equally many rows, of one kind."""
    need((a.rows, a.dynamic) == (b.rows, b.dynamic), f"{what}: {a} and {b} differ in rows")


def same(a: Shape, b: Shape, what: str) -> None:
    """Need equal rows and columns."""
    same_rows(a, b, what)
    need(a.cols == b.cols, f"{what}: {a.cols} columns against {b.cols}")


def fixed(shape: Shape, rows: int, cols: int, what: str) -> None:
    """Need exactly (rows, cols), known at compile time."""
    need(
        not shape.dynamic and (shape.rows, shape.cols) == (rows, cols),
        f"{what} must be fixed ({rows}, {cols}), not {shape}",
    )


def vector(weight: WeightShape | None, size: int, what: str) -> None:
    """Need an absent weight or a vector of `size`."""
    need(
        weight is None or weight[:2] == (1, size),
        f"{what} must be a vector of {size}, not {weight}",
    )


def head_size(shape: Shape, heads: int, what: str) -> int:
    """Return the columns of one head, in range."""
    need(shape.cols % heads == 0, f"{what}: {shape.cols} columns do not divide into {heads} heads")
    size = shape.cols // heads
    need(size <= MAX_HEAD_DIM, f"{what}: head of {size}, at most {MAX_HEAD_DIM}")
    return size


@dataclass(frozen=True, slots=True)
class Rule:
    """Operand types of one operation ("?" = may be absent) and the check of their shapes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: Callable[[Operands], None]
    weights: tuple[str, ...] = ()
    more_inputs: int = 0
    more_weights: int = 0
