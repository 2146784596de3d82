"""Which operands fit which operation: arity, types, shapes and parameters of one call.

Pure rules over shapes, shared by the compiler (its lowered programs) and the device (plan bytes of
unknown origin). A call that passes cannot make a kernel touch anything outside its operands, given
that every operand's bytes lie inside its own memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple

from compiler.contract.errors import ContractError
from compiler.contract.operations import PARAMS, ExpertAct, NormKind, Op

MAX_LINEAR_K: Final = 8192
MAX_HEAD_DIM: Final = 1024
MAX_EXPERTS: Final = 1024
MAX_CONCAT: Final = 64


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
    """A constant as the rules see it: kind `w4`, `f32` or `i32`; a vector of n is (1, n)."""

    rows: int
    cols: int
    kind: str


class KvShape(NamedTuple):
    """The key/value cache: `capacity` rows of `heads * head_dim` floats per layer, twice."""

    layers: int
    heads: int
    head_dim: int
    capacity: int


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


def complete_params(op: Op, given: Mapping[str, int | float]) -> dict[str, int | float]:
    """Return every parameter of `op` in slot order, defaults filled in.

    Raises:
        OperandError: A name is unknown, a required one is missing, or a value is out of range.
    """
    table = PARAMS[op]
    unknown = set(given) - {param.name for param in table}
    if unknown:
        raise OperandError(f"{op.name} has no parameter {min(unknown)!r}")
    values: dict[str, int | float] = {}
    for param in table:
        value = given.get(param.name, param.default)
        if value is None:
            raise OperandError(f"{op.name} needs parameter {param.name!r}")
        if not param.is_float and value != int(value):
            raise OperandError(f"{op.name}.{param.name} = {value!r} must be an integer")
        if not param.low <= value <= param.high:
            raise OperandError(
                f"{op.name}.{param.name} = {value!r} is outside [{param.low}, {param.high}]"
            )
        values[param.name] = float(value) if param.is_float else int(value)
    return values


def check_call(op: Op, operands: Operands) -> None:
    """Check one call whose parameters are complete.

    Raises:
        OperandError: Arity, a type, a shape or a parameter breaks the rules of `op`.
    """
    rule = RULES[op]
    _check_ports(op, "input", rule.inputs, operands.inputs, rule.more_inputs)
    _check_ports(op, "output", rule.outputs, operands.outputs, 0)
    _check_weights(op, rule, operands.weights)
    rule.shapes(operands)


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise OperandError(message)


def _check_ports(
    op: Op, what: str, ports: Sequence[str], given: Sequence[Shape | None], more: int
) -> None:
    required = sum(not port.endswith("?") for port in ports)
    limit = len(ports) + more
    _need(
        required <= len(given) <= limit,
        f"{op.name} takes {required} to {limit} {what}s, not {len(given)}",
    )
    for at, shape in enumerate(given):
        port = ports[min(at, len(ports) - 1)]
        if shape is None:
            _need(port.endswith("?"), f"{op.name} {what} {at} must be present")
            continue
        allowed = _DTYPES[port.rstrip("?")]
        _need(
            shape.dtype in allowed,
            f"{op.name} {what} {at} is {shape.dtype}, not {' or '.join(allowed)}",
        )


def _check_weights(op: Op, rule: "Rule", given: Sequence[WeightShape | None]) -> None:
    required = sum(not kind.endswith("?") for kind in rule.weights)
    limit = len(rule.weights) + rule.more_weights
    _need(
        required <= len(given) <= limit,
        f"{op.name} takes {required} to {limit} weights, not {len(given)}",
    )
    for at, weight in enumerate(given):
        kind = rule.weights[min(at, len(rule.weights) - 1)]
        if weight is None:
            _need(kind.endswith("?"), f"{op.name} weight {at} must be present")
        else:
            _need(
                weight.kind == kind.rstrip("?"),
                f"{op.name} weight {at} is {weight.kind}, not {kind}",
            )


def _same_rows(a: Shape, b: Shape, what: str) -> None:
    _need((a.rows, a.dynamic) == (b.rows, b.dynamic), f"{what}: {a} and {b} differ in rows")


def _same(a: Shape, b: Shape, what: str) -> None:
    _same_rows(a, b, what)
    _need(a.cols == b.cols, f"{what}: {a.cols} columns against {b.cols}")


def _fixed(shape: Shape, rows: int, cols: int, what: str) -> None:
    _need(
        not shape.dynamic and (shape.rows, shape.cols) == (rows, cols),
        f"{what} must be fixed ({rows}, {cols}), not {shape}",
    )


def _vector(weight: WeightShape | None, size: int, what: str) -> None:
    _need(
        weight is None or weight[:2] == (1, size),
        f"{what} must be a vector of {size}, not {weight}",
    )


def _image_u8(c: Operands) -> None:
    x, y = c.source(0), c.result(0)
    _need(
        not x.dynamic and not y.dynamic and x.rows == 1, "IMAGE_U8 works on one fixed row of pixels"
    )
    _need(x.cols == y.rows * y.cols, f"IMAGE_U8: {x.cols} pixels do not fill {y.rows} x {y.cols}")


def _embed(c: Operands) -> None:
    ids, y, table = c.source(0), c.result(0), c.weight(0)
    _need(ids.cols == 1, "EMBED ids are one column")
    _same_rows(ids, y, "EMBED")
    _need(table.cols == y.cols, f"EMBED: table of {table.cols} columns, result of {y.cols}")


def _linear(c: Operands) -> None:
    x, y, weight = c.source(0), c.result(0), c.weight(0)
    _same_rows(x, y, "linear")
    _need(
        (weight.rows, weight.cols) == (y.cols, x.cols),
        f"linear weight is {weight.rows} x {weight.cols}, operands need {y.cols} x {x.cols}",
    )
    _need(x.cols <= MAX_LINEAR_K, f"linear over {x.cols} elements, at most {MAX_LINEAR_K}")
    _vector(c.maybe_weight(1), y.cols, "linear bias")
    residual = c.maybe_source(1)
    if residual is not None:
        _same(residual, y, "linear residual")


def _norm(c: Operands) -> None:
    x = c.source(0)
    _same(x, c.result(0), "NORM")
    _vector(c.weight(0), x.cols, "NORM gamma")
    _vector(c.maybe_weight(1), x.cols, "NORM beta")
    _need(c.number("kind") == NormKind.LAYER or c.maybe_weight(1) is None, "NORM rms takes no beta")


def _head_dim(shape: Shape, heads: int, what: str) -> int:
    _need(shape.cols % heads == 0, f"{what}: {shape.cols} columns do not divide into {heads} heads")
    head_dim = shape.cols // heads
    _need(head_dim <= MAX_HEAD_DIM, f"{what}: head of {head_dim}, at most {MAX_HEAD_DIM}")
    return head_dim


def _rope(c: Operands) -> None:
    x, positions = c.source(0), c.source(1)
    _same(x, c.result(0), "ROPE")
    _same_rows(x, positions, "ROPE positions")
    head_dim = _head_dim(x, c.number("heads"), "ROPE")
    _need(positions.cols == 1 and head_dim % 2 == 0, "ROPE: one position per row, even head size")
    cos, sin = c.weight(0), c.weight(1)
    _need(
        cos == sin and cos.cols == head_dim // 2, f"ROPE tables must both be (P, {head_dim // 2})"
    )


def _attention(c: Operands) -> None:
    q, k, v = c.source(0), c.source(1), c.source(2)
    _same(q, c.result(0), "ATTENTION result")
    _same_rows(q, k, "ATTENTION keys")
    _same(k, v, "ATTENTION values")
    heads = c.number("heads")
    kv_heads = c.number("kv_heads") or heads
    _need(heads % kv_heads == 0, f"ATTENTION: {heads} heads do not share {kv_heads}")
    head_dim = _head_dim(q, heads, "ATTENTION")
    _need(
        k.cols == kv_heads * head_dim,
        f"ATTENTION keys need {kv_heads * head_dim} columns, not {k.cols}",
    )
    layer = c.number("kv_layer")
    if layer < 0:
        return
    if c.kv is None:
        raise OperandError("ATTENTION uses a cache, the plan has none")
    _need(layer < c.kv.layers, f"ATTENTION cache layer {layer} of {c.kv.layers}")
    _need(
        (c.kv.heads, c.kv.head_dim) == (kv_heads, head_dim),
        "ATTENTION heads differ from the cache's",
    )


def _attention_row(c: Operands) -> None:
    q, k, y = c.source(0), c.source(1), c.result(0)
    _same(q, k, "ATTENTION_ROW")
    _head_dim(q, c.number("heads"), "ATTENTION_ROW")
    _fixed(y, k.rows, 1, "ATTENTION_ROW result")
    _need(not q.dynamic and c.number("row") < q.rows, "ATTENTION_ROW needs a fixed row inside q")


def _prune(c: Operands) -> None:
    x, score, kept, index = c.source(0), c.source(1), c.result(0), c.result(1)
    k = c.number("k")
    _need(
        not x.dynamic and not score.dynamic and score.cols == 1,
        "PRUNE works on fixed rows and one score column",
    )
    _need(
        k <= x.rows and x.rows + c.number("score_offset") <= score.rows,
        "PRUNE: k or score_offset beyond the rows",
    )
    _fixed(kept, k, x.cols, "PRUNE kept")
    _fixed(index, k, 1, "PRUNE index")


def _conv2d(c: Operands) -> None:
    x, y, weight = c.source(0), c.result(0), c.weight(0)
    kh, kw, stride, pad = (c.number(n) for n in ("kh", "kw", "stride", "pad"))
    height, width = c.number("H"), c.number("W")
    _fixed(x, height * width, x.cols, "CONV2D input")
    _need(
        height + 2 * pad >= kh and width + 2 * pad >= kw, "CONV2D window exceeds the padded image"
    )
    rows = ((height + 2 * pad - kh) // stride + 1) * ((width + 2 * pad - kw) // stride + 1)
    _fixed(y, rows, weight.rows, "CONV2D result")
    _need(weight.cols == kh * kw * x.cols, f"CONV2D weight needs {kh * kw * x.cols} columns")
    _vector(c.maybe_weight(1), weight.rows, "CONV2D bias")


def _rows_concat(c: Operands) -> None:
    a, b, constant, y = c.maybe_source(0), c.maybe_source(1), c.maybe_weight(0), c.result(0)
    present = [part for part in (a, b) if part is not None]
    _need(
        len(present) == (1 if constant else 2), "ROWS_CONCAT joins two parts, at most one constant"
    )
    _need(not constant or y.dtype == "f32", "ROWS_CONCAT constant is f32")
    rows = sum(part.rows for part in present) + (constant.rows if constant else 0)
    for part in (*present, *((constant,) if constant else ())):
        _need(part.cols == y.cols, f"ROWS_CONCAT: {part.cols} columns against {y.cols}")
    for part in present:
        _need(
            not part.dynamic and part.dtype == y.dtype,
            "ROWS_CONCAT parts are fixed and of one type",
        )
    _fixed(y, rows, y.cols, "ROWS_CONCAT result")


def _rows_slice(c: Operands) -> None:
    x, y, start, count = c.source(0), c.result(0), c.number("start"), c.number("count")
    _need(x.dtype == y.dtype, "ROWS_SLICE changes no type")
    if start == -1:
        _need(count in (-1, 1), "ROWS_SLICE of the last row has count 1")
        _fixed(y, 1, x.cols, "ROWS_SLICE result")
        return
    _need(not x.dynamic, "ROWS_SLICE of a dynamic operand can only take the last row")
    taken = x.rows - start if count == -1 else count
    _need(
        taken >= 1 and start + taken <= x.rows,
        f"ROWS_SLICE [{start}, {start + taken}) of {x.rows} rows",
    )
    _fixed(y, taken, x.cols, "ROWS_SLICE result")


def _binary(c: Operands) -> None:
    a, b, constant = c.source(0), c.maybe_source(1), c.maybe_weight(0)
    _same(a, c.result(0), "elementwise result")
    _need((b is None) != (constant is None), "elementwise takes one second operand or one weight")
    if b is not None:
        _need(b.cols in (1, a.cols), f"elementwise: {b.cols} columns against {a.cols}")
        _need((b.rows, b.dynamic) in ((1, False), (a.rows, a.dynamic)), "elementwise rows differ")
    if constant is not None:
        _need(
            constant.cols in (1, a.cols), f"elementwise: {constant.cols} columns against {a.cols}"
        )
        _need(
            constant.rows == 1 or (constant.rows == a.rows and not a.dynamic),
            "elementwise rows differ",
        )


def _map(c: Operands) -> None:
    _same(c.source(0), c.result(0), "elementwise result")


def _route(c: Operands) -> None:
    x, index, gate, weight, k = c.source(0), c.result(0), c.result(1), c.weight(0), c.number("k")
    _same_rows(x, index, "ROUTE")
    _same(index, gate, "ROUTE")
    _need(
        weight.cols == x.cols and index.cols == k,
        "ROUTE: weight columns or result columns do not fit",
    )
    _need(
        k <= weight.rows <= MAX_EXPERTS,
        f"ROUTE takes {k} of {weight.rows} experts, at most {MAX_EXPERTS}",
    )
    _vector(c.maybe_weight(1), weight.rows, "ROUTE bias")


def _experts(c: Operands) -> None:
    x, index, gate = c.source(0), c.source(1), c.source(2)
    _same(x, c.result(0), "EXPERTS result")
    _same_rows(x, index, "EXPERTS index")
    _same(index, gate, "EXPERTS gate")
    _need(
        len(c.weights) % 2 == 0 and index.cols <= 64, "EXPERTS takes pairs of weights and k <= 64"
    )
    factor = 2 if c.number("act") == ExpertAct.SWIGLU else 1
    first_in, first_out = c.weight(0), c.weight(1)
    _need(first_in.rows % factor == 0, "EXPERTS swiglu w_in has gate rows and up rows")
    hidden = first_in.rows // factor
    _need(max(x.cols, hidden) <= MAX_LINEAR_K, f"EXPERTS over more than {MAX_LINEAR_K} elements")
    _need(
        first_in.cols == x.cols and first_out[:2] == (x.cols, hidden), "EXPERTS shapes do not chain"
    )
    for at in range(0, len(c.weights), 2):
        same = c.weight(at) == first_in and c.weight(at + 1) == first_out
        _need(same, f"EXPERTS expert {at // 2} differs in shape from expert 0")


def _argmax(c: Operands) -> None:
    x = c.source(0)
    _fixed(x, 1, x.cols, "ARGMAX operand")
    _fixed(c.result(0), 1, 1, "ARGMAX result")


def _gather_rows(c: Operands) -> None:
    x, index, y = c.source(0), c.source(1), c.result(0)
    _same_rows(index, y, "GATHER_ROWS")
    _need(index.cols == 1 and x.cols == y.cols, "GATHER_ROWS: one index column, columns as x")


def _cols_concat(c: Operands) -> None:
    y = c.result(0)
    _need(2 <= len(c.inputs) <= MAX_CONCAT, f"COLS_CONCAT joins 2 to {MAX_CONCAT} operands")
    parts = [c.source(at) for at in range(len(c.inputs))]
    for part in parts:
        _same_rows(part, y, "COLS_CONCAT")
        _need(part.dtype == y.dtype, "COLS_CONCAT parts are of one type")
    _need(sum(part.cols for part in parts) == y.cols, "COLS_CONCAT columns do not add up")


def _cols_slice(c: Operands) -> None:
    x, y, start, count = c.source(0), c.result(0), c.number("start"), c.number("count")
    _same_rows(x, y, "COLS_SLICE")
    _need(
        x.dtype == y.dtype and y.cols == count, "COLS_SLICE result has `count` columns of x's type"
    )
    _need(start + count <= x.cols, f"COLS_SLICE [{start}, {start + count}) of {x.cols} columns")


@dataclass(frozen=True, slots=True)
class Rule:
    """Operand types of one operation ("?" = may be absent) and the check of their shapes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: Callable[[Operands], None]
    weights: tuple[str, ...] = ()
    more_inputs: int = 0
    more_weights: int = 0


_DTYPES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"f32": ("f32",), "i32": ("i32",), "u8": ("u8",), "any": ("f32", "i32")}
)
_BINARY: Final = Rule(("f32", "f32?"), ("f32",), _binary, ("f32?",))

RULES: Final[Mapping[Op, Rule]] = MappingProxyType(
    {
        Op.IMAGE_U8: Rule(("u8",), ("f32",), _image_u8),
        Op.EMBED: Rule(("i32",), ("f32",), _embed, ("f32",)),
        Op.LINEAR: Rule(("f32", "f32?"), ("f32",), _linear, ("w4", "f32?")),
        Op.LINEAR_F32: Rule(("f32", "f32?"), ("f32",), _linear, ("f32", "f32?")),
        Op.NORM: Rule(("f32",), ("f32",), _norm, ("f32", "f32?")),
        Op.ROPE: Rule(("f32", "i32"), ("f32",), _rope, ("f32", "f32")),
        Op.ATTENTION: Rule(("f32", "f32", "f32"), ("f32",), _attention),
        Op.ATTENTION_ROW: Rule(("f32", "f32"), ("f32",), _attention_row),
        Op.PRUNE: Rule(("f32", "f32"), ("f32", "i32"), _prune),
        Op.CONV2D: Rule(("f32",), ("f32",), _conv2d, ("f32", "f32?")),
        Op.ROWS_CONCAT: Rule(("any?", "any?"), ("any",), _rows_concat, ("f32?",)),
        Op.ROWS_SLICE: Rule(("any",), ("any",), _rows_slice),
        Op.ADD: _BINARY,
        Op.MUL: _BINARY,
        Op.SUB: _BINARY,
        Op.DIV: _BINARY,
        Op.UNARY: Rule(("f32",), ("f32",), _map),
        Op.SOFTMAX: Rule(("f32",), ("f32",), _map),
        Op.ROUTE: Rule(("f32",), ("i32", "f32"), _route, ("f32", "f32?")),
        Op.EXPERTS: Rule(
            ("f32", "i32", "f32"),
            ("f32",),
            _experts,
            ("w4", "w4"),
            more_weights=2 * MAX_EXPERTS - 2,
        ),
        Op.ARGMAX: Rule(("f32",), ("i32",), _argmax),
        Op.GATHER_ROWS: Rule(("any", "i32"), ("any",), _gather_rows),
        Op.COLS_CONCAT: Rule(("any", "any"), ("any",), _cols_concat, more_inputs=MAX_CONCAT - 2),
        Op.COLS_SLICE: Rule(("any",), ("any",), _cols_slice),
    }
)
