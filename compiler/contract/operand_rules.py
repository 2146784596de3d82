"""Which operands fit which operation: arity, types, shapes and parameters of one call.

Pure rules over shapes, shared by the compiler (its lowered programs) and the device (plan bytes of
unknown origin). A call that passes cannot make a kernel touch anything outside its operands, given
that every operand's bytes lie inside its own memory.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from compiler.contract import moe_rules, prune_rules
from compiler.contract.attention_rules import check_attention
from compiler.contract.moe_rules import CODE_KINDS, CODES, MAX_EXPERTS, MAX_LINEAR_K
from compiler.contract.operands import (
    KvShape,
    OperandError,
    Operands,
    Rule,
    Shape,
    WeightShape,
    fixed,
    head_size,
    need,
    same,
    same_rows,
    vector,
)
from compiler.contract.operations import PARAMS, NormKind, Op, PackedKind
from compiler.contract.recurrent_rules import recurrent
from compiler.contract.reference_rules import REFERENCE_RULES
from compiler.contract.tiles import PANEL
from compiler.contract.windows import MAX_PAD_CODE, Window

__all__ = [
    "RULES",
    "KvShape",
    "OperandError",
    "Operands",
    "Rule",
    "Shape",
    "WeightShape",
    "check_call",
    "complete_params",
]

MAX_CONCAT: Final = 64
MASK_BITS: Final = 32
"""Columns that a word of the mask of packed rows tells of."""


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
    _check_weights(op, rule, operands)
    rule.shapes(operands)


def _check_ports(
    op: Op, what: str, ports: Sequence[str], given: Sequence[Shape | None], more: int
) -> None:
    required = sum(not port.endswith("?") for port in ports)
    limit = len(ports) + more
    need(
        required <= len(given) <= limit,
        f"{op.name} takes {required} to {limit} {what}s, not {len(given)}",
    )
    for at, shape in enumerate(given):
        port = ports[min(at, len(ports) - 1)]
        if shape is None:
            need(port.endswith("?"), f"{op.name} {what} {at} must be present")
            continue
        allowed = _DTYPES[port.rstrip("?")]
        need(
            shape.dtype in allowed,
            f"{op.name} {what} {at} is {shape.dtype}, not {' or '.join(allowed)}",
        )


def _check_weights(op: Op, rule: Rule, operands: Operands) -> None:
    given, kinds = operands.weights, rule.weights
    repeated = kinds[-1:]
    first = moe_rules.FIRST_EXPERT.get(op)
    if first is not None:
        repeated = moe_rules.expert_kinds(int(operands.params.get("biases", 0)))
        kinds = (*kinds[:first], *repeated)
    required = sum(not kind.endswith("?") for kind in rule.weights)
    limit = len(rule.weights) + rule.more_weights
    need(
        required <= len(given) <= limit,
        f"{op.name} takes {required} to {limit} weights, not {len(given)}",
    )
    for at, weight in enumerate(given):
        kind = kinds[at] if at < len(kinds) else repeated[(at - len(kinds)) % len(repeated)]
        if weight is None:
            need(kind.endswith("?"), f"{op.name} weight {at} must be present")
        else:
            allowed = _KINDS.get(kind.rstrip("?"), (kind.rstrip("?"),))
            need(
                weight.kind in allowed,
                f"{op.name} weight {at} is {weight.kind}, not {' or '.join(allowed)}",
            )


def _image_u8(c: Operands) -> None:
    x, y = c.source(0), c.result(0)
    need(
        not x.dynamic and not y.dynamic and x.rows == 1, "IMAGE_U8 works on one fixed row of pixels"
    )
    need(x.cols == y.rows * y.cols, f"IMAGE_U8: {x.cols} pixels do not fill {y.rows} x {y.cols}")


def _embed(c: Operands) -> None:
    ids, y, table = c.source(0), c.result(0), c.weight(0)
    need(ids.cols == 1, "EMBED ids are one column")
    same_rows(ids, y, "EMBED")
    need(table.cols == y.cols, f"EMBED: table of {table.cols} columns, result of {y.cols}")


def _linear(c: Operands) -> None:
    x, y, weight = c.source(0), c.result(0), c.weight(0)
    same_rows(x, y, "linear")
    need(
        (weight.rows, weight.cols) == (y.cols, x.cols),
        f"linear weight is {weight.rows} x {weight.cols}, operands need {y.cols} x {x.cols}",
    )
    need(x.cols <= MAX_LINEAR_K, f"linear over {x.cols} elements, at most {MAX_LINEAR_K}")
    vector(c.maybe_weight(1), y.cols, "linear bias")
    residual = c.maybe_source(1)
    if residual is not None:
        same(residual, y, "linear residual")
    gamma, beta, norm = c.maybe_weight(2), c.maybe_weight(3), c.number("norm")
    need((norm > 0) == (gamma is not None), "linear takes gamma exactly if it normalises")
    need(beta is None or norm == NormKind.LAYER + 1, "linear takes beta only for a layer norm")
    vector(gamma, x.cols, "linear gamma")
    vector(beta, x.cols, "linear beta")


def _norm(c: Operands) -> None:
    x = c.source(0)
    same(x, c.result(0), "NORM")
    vector(c.weight(0), x.cols, "NORM gamma")
    vector(c.maybe_weight(1), x.cols, "NORM beta")
    need(c.number("kind") == NormKind.LAYER or c.maybe_weight(1) is None, "NORM rms takes no beta")


def _rope(c: Operands) -> None:
    x, positions = c.source(0), c.source(1)
    same(x, c.result(0), "ROPE")
    same_rows(x, positions, "ROPE positions")
    head_dim = head_size(x, c.number("heads"), "ROPE")
    need(positions.cols == 1 and head_dim % 2 == 0, "ROPE: one position per row, even head size")
    cos, sin = c.weight(0), c.weight(1)
    need(cos == sin and cos.cols == head_dim // 2, f"ROPE tables must both be (P, {head_dim // 2})")


def _conv2d(c: Operands) -> None:
    x, weight = c.source(0), c.weight(0)
    _windows(c, "CONV2D", weight.rows)
    columns = c.number("kh") * c.number("kw") * x.cols
    need(weight.cols == columns, f"CONV2D weight needs {columns} columns")


def _depthwise(c: Operands) -> None:
    x, weight = c.source(0), c.weight(0)
    _windows(c, "CONV_DEPTHWISE", x.cols)
    taps = c.number("kh") * c.number("kw")
    fits = (weight.rows, weight.cols) == (taps, x.cols)
    need(fits, f"CONV_DEPTHWISE weight must be ({taps}, {x.cols})")


def _sparse_conv(c: Operands) -> None:
    x, y, taps, first, runs = c.source(0), c.result(0), c.weight(0), c.weight(1), c.weight(2)
    _windows(c, "SPARSE_CONV", y.cols, bias=3)
    panels = -(-y.cols // PANEL)
    need(taps.cols == PANEL, f"SPARSE_CONV taps need {PANEL} columns")
    all_taps = panels * c.number("kh") * c.number("kw") * x.cols
    need(taps.rows <= all_taps, f"SPARSE_CONV has {all_taps} taps, not {taps.rows}")
    need(
        (first.rows, first.cols) == (2, panels + 1), f"SPARSE_CONV first must be (2, {panels + 1})"
    )
    need(runs.cols == 2 and runs.rows <= taps.rows, "SPARSE_CONV runs are pairs, each of taps")


def _windows(c: Operands, name: str, channels: int, bias: int = 1) -> None:
    """Check whole images against one row of `channels` per window, and the bias."""
    x, y, window = c.source(0), c.result(0), Window.of(c.params)
    pixels = window.height * window.width
    images = x.rows // pixels
    fixed(x, images * pixels, x.cols, f"{name} input")
    need(not c.number("pad") & ~MAX_PAD_CODE, f"{name} pad has bits that mean nothing")
    need(window.fits, f"{name} window exceeds the padded image")
    rows, columns = window.out
    fixed(y, images * rows * columns, channels, f"{name} result")
    vector(c.maybe_weight(bias), channels, f"{name} bias")


def _rows_concat(c: Operands) -> None:
    a, b, constant, y = c.maybe_source(0), c.maybe_source(1), c.maybe_weight(0), c.result(0)
    present = [part for part in (a, b) if part is not None]
    need(
        len(present) == (1 if constant else 2), "ROWS_CONCAT joins two parts, at most one constant"
    )
    need(not constant or y.dtype == "f32", "ROWS_CONCAT constant is f32")
    rows = sum(part.rows for part in present) + (constant.rows if constant else 0)
    for part in (*present, *((constant,) if constant else ())):
        need(part.cols == y.cols, f"ROWS_CONCAT: {part.cols} columns against {y.cols}")
    for part in present:
        need(
            not part.dynamic and part.dtype == y.dtype,
            "ROWS_CONCAT parts are fixed and of one type",
        )
    fixed(y, rows, y.cols, "ROWS_CONCAT result")


def _rows_slice(c: Operands) -> None:
    x, y, start, count = c.source(0), c.result(0), c.number("start"), c.number("count")
    need(x.dtype == y.dtype, "ROWS_SLICE changes no type")
    if start == -1:
        need(count in (-1, 1), "ROWS_SLICE of the last row has count 1")
        fixed(y, 1, x.cols, "ROWS_SLICE result")
        return
    need(not x.dynamic, "ROWS_SLICE of a dynamic operand can only take the last row")
    taken = x.rows - start if count == -1 else count
    need(
        taken >= 1 and start + taken <= x.rows,
        f"ROWS_SLICE [{start}, {start + taken}) of {x.rows} rows",
    )
    fixed(y, taken, x.cols, "ROWS_SLICE result")


def _binary(c: Operands) -> None:
    a, b, constant = c.source(0), c.maybe_source(1), c.maybe_weight(0)
    same(a, c.result(0), "elementwise result")
    need((b is None) != (constant is None), "elementwise takes one second operand or one weight")
    _second(a, b, constant)


def _second(a: Shape, b: Shape | None, constant: WeightShape | None) -> None:
    """Need an operand, or a weight, whose row or column may be repeated."""
    if b is not None:
        need(b.cols in (1, a.cols), f"elementwise: {b.cols} columns against {a.cols}")
        need((b.rows, b.dynamic) in ((1, False), (a.rows, a.dynamic)), "elementwise rows differ")
    if constant is not None:
        need(constant.cols in (1, a.cols), f"elementwise: {constant.cols} columns against {a.cols}")
        need(
            constant.rows == 1 or (constant.rows == a.rows and not a.dynamic),
            "elementwise rows differ",
        )


def _pack(c: Operands) -> None:
    x, values = c.source(0), c.result(0)
    same(x, values, "PACK values")
    _check_mask(values, c.result(1), "PACK")


def _packed(c: Operands) -> None:
    values, b, constant, kind = c.source(0), c.maybe_source(2), c.maybe_weight(0), c.number("kind")
    _check_mask(values, c.source(1), "PACKED")
    same(values, c.result(0), "PACKED result")
    if kind in (PackedKind.RMS, PackedKind.LAYER):
        need(b is None and not c.number("act"), "PACKED norms take no second operand and no act")
        vector(c.weight(0), values.cols, "PACKED gamma")
        vector(c.maybe_weight(1), values.cols, "PACKED beta")
        need(kind == PackedKind.LAYER or c.maybe_weight(1) is None, "only layer norms have a beta")
        return
    need(c.maybe_weight(1) is None, "PACKED elementwise has one weight at most")
    need(b is None or constant is None, "PACKED takes one second operand or one weight")
    need(
        kind == PackedKind.MUL or b is not None or constant is not None,
        "only PACKED MUL takes its rows twice",
    )
    _second(values, b, constant)


def _check_mask(values: Shape, mask: Shape, what: str) -> None:
    same_rows(values, mask, f"{what} mask")
    words = -(-values.cols // MASK_BITS)
    need(mask.cols == words, f"{what}: {values.cols} columns have {words} words of mask")


def _map(c: Operands) -> None:
    same(c.source(0), c.result(0), "elementwise result")


def _argmax(c: Operands) -> None:
    x = c.source(0)
    fixed(x, 1, x.cols, "ARGMAX operand")
    fixed(c.result(0), 1, 1, "ARGMAX result")


def _gather_rows(c: Operands) -> None:
    x, index, y = c.source(0), c.source(1), c.result(0)
    same_rows(index, y, "GATHER_ROWS")
    need(index.cols == 1 and x.cols == y.cols, "GATHER_ROWS: one index column, columns as x")


def _cols_concat(c: Operands) -> None:
    y = c.result(0)
    need(2 <= len(c.inputs) <= MAX_CONCAT, f"COLS_CONCAT joins 2 to {MAX_CONCAT} operands")
    parts = [c.source(at) for at in range(len(c.inputs))]
    for part in parts:
        same_rows(part, y, "COLS_CONCAT")
        need(part.dtype == y.dtype, "COLS_CONCAT parts are of one type")
    need(sum(part.cols for part in parts) == y.cols, "COLS_CONCAT columns do not add up")


def _cols_slice(c: Operands) -> None:
    x, y, start, count = c.source(0), c.result(0), c.number("start"), c.number("count")
    same_rows(x, y, "COLS_SLICE")
    need(
        x.dtype == y.dtype and y.cols == count, "COLS_SLICE result has `count` columns of x's type"
    )
    need(start + count <= x.cols, f"COLS_SLICE [{start}, {start + count}) of {x.cols} columns")


def _moe_layer(c: Operands) -> None:
    x, y, index, gate = c.source(0), c.result(0), c.result(1), c.result(2)
    inner = (
        (Op.NORM, (x,), (x,), c.weights[:2], ("kind", "eps")),
        (Op.ROUTE, (x,), (index, gate, *c.outputs[3:]), c.weights[2:4], ("k", "order")),
        (Op.EXPERTS, (x, index, gate), (y,), c.weights[4:], ("act",)),
    )
    for op, inputs, outputs, weights, names in inner:
        params = complete_params(op, {name: c.params[name] for name in names})
        check_call(op, Operands(inputs, outputs, weights, params))


_DTYPES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"f32": ("f32",), "i32": ("i32",), "u8": ("u8",), "any": ("f32", "i32")}
)
_KINDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "any": ("f32", "i32"),
        "router": ("f32", "i8", "i16"),
        "matrix": ("f32", "i8"),
        CODES: CODE_KINDS,
    }
)
_BINARY: Final = Rule(("f32", "f32?"), ("f32",), _binary, ("f32?",))
_RECURRENT: Final = (("f32", "f32?", "f32?"), ("f32", "f32", "f32?"))
_PAGES: Final = Rule((), (), moe_rules.pages, (CODES, CODES), more_weights=4 * MAX_EXPERTS - 2)

RULES: Final[Mapping[Op, Rule]] = MappingProxyType(
    {
        Op.IMAGE_U8: Rule(("u8",), ("f32",), _image_u8),
        Op.EMBED: Rule(("i32",), ("f32",), _embed, ("matrix",)),
        Op.LINEAR: Rule(("f32", "f32?"), ("f32",), _linear, ("w4", "f32?"), more_weights=2),
        Op.LINEAR_F32: Rule(("f32", "f32?"), ("f32",), _linear, ("matrix", "f32?"), more_weights=2),
        Op.LINEAR_W8: Rule(("f32", "f32?"), ("f32",), _linear, ("w8", "f32?"), more_weights=2),
        Op.NORM: Rule(("f32",), ("f32",), _norm, ("f32", "f32?")),
        Op.ROPE: Rule(("f32", "i32"), ("f32",), _rope, ("f32", "f32")),
        Op.ATTENTION: Rule(
            ("f32", "f32?", "f32?", "i32?"), ("f32?",), check_attention, ("f32?", "f32?")
        ),
        Op.ATTENTION_ROW: Rule(("f32", "f32?"), ("f32",), prune_rules.attention_row),
        Op.PRUNE: Rule(("f32", "f32"), ("f32", "i32"), prune_rules.prune),
        Op.CONV2D: Rule(("f32",), ("f32",), _conv2d, ("f32", "f32?")),
        Op.CONV_DEPTHWISE: Rule(("f32",), ("f32",), _depthwise, ("f32", "f32?")),
        Op.SPARSE_CONV: Rule(("f32",), ("f32",), _sparse_conv, ("f32", "i32", "i32", "f32?")),
        Op.ROWS_CONCAT: Rule(("any?", "any?"), ("any",), _rows_concat, ("f32?",)),
        Op.ROWS_SLICE: Rule(("any",), ("any",), _rows_slice),
        Op.ADD: _BINARY,
        Op.MUL: _BINARY,
        Op.SUB: _BINARY,
        Op.DIV: _BINARY,
        Op.PACK: Rule(("f32",), ("f32", "i32"), _pack),
        Op.PACKED: Rule(("f32", "i32", "f32?"), ("f32",), _packed, ("f32?", "f32?")),
        Op.UNARY: Rule(("f32",), ("f32",), _map),
        Op.SOFTMAX: Rule(("f32",), ("f32",), _map),
        Op.ROUTE: Rule(
            ("f32",), ("i32", "f32", "f32?"), moe_rules.route, ("router", "f32?", "f32?")
        ),
        Op.EXPERTS: Rule(
            ("f32", "i32", "f32"),
            ("f32",),
            moe_rules.experts,
            (CODES, CODES),
            more_weights=4 * MAX_EXPERTS - 2,
        ),
        Op.ARGMAX: Rule(("f32",), ("i32",), _argmax),
        Op.GATHER_ROWS: Rule(("any", "i32"), ("any",), _gather_rows),
        Op.COLS_CONCAT: Rule(("any", "any"), ("any",), _cols_concat, more_inputs=MAX_CONCAT - 2),
        Op.COLS_SLICE: Rule(("any",), ("any",), _cols_slice),
        Op.ATTENTION_SCORE: Rule(("f32", "f32"), ("f32",), prune_rules.attention_score),
        Op.PRUNE_TOP_P: Rule(
            ("f32", "f32", "f32?"), ("f32", "i32", "i32"), prune_rules.prune_top_p
        ),
        Op.MOE_LAYER: Rule(
            ("f32",),
            ("f32", "i32", "f32", "f32?"),
            _moe_layer,
            ("f32", "f32?", "router", "f32?", CODES, CODES),
            more_weights=2 * MAX_EXPERTS - 2,
        ),
        Op.RECURRENT: Rule(*_RECURRENT, recurrent, ("w4", "f32?")),
        Op.RECURRENT_F32: Rule(*_RECURRENT, recurrent, ("f32", "f32?")),
        Op.EXPERT_PREFETCH: _PAGES,
        Op.EXPERT_LOAD: _PAGES,
        Op.EXPERT_FORESEE: Rule(
            ("f32",),
            (),
            moe_rules.foresee,
            ("f32?", "f32?", "router", "f32?", "f32?", CODES, CODES),
            more_weights=4 * MAX_EXPERTS - 2,
        ),
        **REFERENCE_RULES,
    }
)
