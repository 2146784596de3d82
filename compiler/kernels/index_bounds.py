"""Which index checks of a lowered module can never fail: intervals of i32 values, call by call.

A kernel checks every index that it reads (a token id, a position, an expert, a row) and ends the
run if one is out of range. This analysis walks each program once, in order, and keeps for every i32
buffer an interval that holds all its elements in every run, with the calls that it follows from.
A check whose interval lies in the required range is *proved*; every other one is *kept*, with the
reason. What a caller passes in is unknown: checks of ports stay whatever a model's card promises.

Proved checks stay in the native code too. The device compiles no plan but also trusts none: the
same tape can arrive damaged or forged, and the proof speaks of the module that was compiled here.

Called by `compiler.driver` for the compile report. Pure; wants a module that `validate_module`
accepts, and claims nothing of a call that would not pass (a router that takes more experts than it
has, a geometry that leaves its operand).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from compiler.contract.moe_rules import expert_kinds
from compiler.contract.operations import Op
from compiler.contract.reference import MapKind, ReduceKind, ScatterKind, unpack_geometry
from compiler.kernels.intervals import FULL, MAP_INTERVALS, Interval, hull, wrapped
from compiler.kernels.program import (
    ABSENT,
    Call,
    Module,
    Program,
    call_params,
    weight_shape,
)
from compiler.kernels.reference import MAPS

MAX_MARKED: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Known:
    """What is known about the elements of one i32 operand.

    Attributes:
        interval: Holds every element in every run.
        calls: Positions in the program of the calls that it follows from, ascending.
        ports: Roles of the program's inputs whose values it may depend on.
    """

    interval: Interval
    calls: tuple[int, ...] = ()
    ports: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """One run-time check of an index operand, and what is proved about it.

    Attributes:
        program, call, op: Where it stands.
        what: What the index names: `token id`, `position`, `expert`, `row`, `element`.
        known: What is known about the indices.
        required: The range that the kernel demands.
    """

    program: str
    call: int
    op: Op
    what: str
    known: Known
    required: Interval

    @property
    def id(self) -> str:
        """Its name in reports: `program#call.what`."""
        return f"{self.program}#{self.call}.{self.what.replace(' ', '_')}"

    @property
    def is_proved(self) -> bool:
        """Whether no run can fail it."""
        return self.required.low <= self.required.high and self.known.interval.inside(self.required)

    @property
    def is_internal(self) -> bool:
        """Whether the indices are made inside the program, whatever the caller passes."""
        return not self.known.ports

    @property
    def reason(self) -> str:
        """Why it is proved, or why it is kept."""
        low, high = self.known.interval
        if self.is_proved:
            return f"[{low}, {high}] lies in [{self.required.low}, {self.required.high}]"
        if self.known.ports:
            return f"comes from input {', '.join(sorted(self.known.ports))}"
        if self.known.interval.is_full:
            return "nothing is known about its producer"
        return f"[{low}, {high}] leaves [{self.required.low}, {self.required.high}]"


@dataclass(frozen=True, slots=True)
class _Scene:
    """One call with what is known before it."""

    module: Module
    call: Call
    params: Mapping[str, int | float]
    values: Mapping[int, Known]

    def rows(self, at: int) -> int:
        """Return the fewest rows that input `at` can have; a dynamic one has at least one."""
        buffer = self.module.buffers[self.call.inputs[at]]
        return 1 if buffer.dynamic else buffer.rows

    def cols(self, at: int) -> int:
        return self.module.buffers[self.call.inputs[at]].cols

    def weight_rows(self, at: int) -> int:
        return weight_shape(self.module.weights[self.call.weights[at]]).rows

    def input(self, at: int) -> Known:
        """Return what is known about an operand; nothing about one that is not i32."""
        return self.values.get(self.call.inputs[at], Known(FULL))

    def source(self, number: int) -> Known:
        """Return what is known about a source of a geometry: an input, or minus a weight."""
        if number >= 0:
            return self.input(number)
        weight = self.module.weights[self.call.weights[-number]]
        if weight.kind != "i32":
            return Known(FULL)
        return Known(Interval(int(weight.array.min()), int(weight.array.max())))

    def geometry(self) -> list[dict[str, list[int]]]:
        rows = np.atleast_2d(self.module.weights[self.call.weights[0]].array)
        return [unpack_geometry(self.call.op.name, row) for row in rows.tolist()]

    def size(self, at: int = 0) -> int:
        buffer = self.module.buffers[self.call.outputs[at]]
        return buffer.rows * buffer.cols


Results = list[Known]


def index_checks(module: Module) -> list[IndexCheck]:
    """Return every index check of a module, in order of programs and calls."""
    return [check for program in module.programs for check in _walk(module, program)[1]]


def known_values(module: Module, program: Program) -> Mapping[int, Known]:
    """Return what is known about each i32 buffer of a program, by buffer."""
    return _walk(module, program)[0]


def _walk(module: Module, program: Program) -> tuple[dict[int, Known], list[IndexCheck]]:
    values = {
        at: Known(FULL, (), frozenset({role}))
        for role, at in program.inputs.items()
        if module.buffers[at].dtype == "i32"
    }
    checks: list[IndexCheck] = []
    for at, call in enumerate(program.calls):
        scene = _Scene(module, call, call_params(call), values)
        rule = CHECKS.get(call.op)
        for what, known, required in rule(scene) if rule else ():
            checks.append(IndexCheck(program.name, at, call.op, what, known, required))
        found = RESULTS.get(call.op, _nothing)(scene)
        for buffer, known in zip(call.outputs, found, strict=True):
            if module.buffers[buffer].dtype == "i32":
                values[buffer] = Known(known.interval, (*known.calls, at), known.ports)
    return values, checks


def _joined(parts: list[Known], interval: Interval) -> Known:
    calls = sorted({at for part in parts for at in part.calls})
    return Known(interval, tuple(calls), frozenset().union(*(part.ports for part in parts)))


def _hull(parts: list[Known]) -> Known:
    return _joined(parts, hull(part.interval for part in parts))


def _below(count: int) -> Known:
    """Positions among `count` things."""
    return Known(Interval(0, count - 1)) if count >= 1 else Known(FULL)


def _nothing(s: _Scene) -> Results:
    """Whatever comes out, it may depend on everything that goes in."""
    ports = frozenset().union(*(s.input(at).ports for at in range(len(s.call.inputs))))
    return [Known(FULL, (), ports) for _ in s.call.outputs]


def _same(s: _Scene) -> Results:
    """Elements of the i32 operands, moved."""
    return [_hull([s.input(at) for at, b in enumerate(s.call.inputs) if b != ABSENT])]


def _gather_rows(s: _Scene) -> Results:
    return [s.input(0)]


def _chosen(s: _Scene, experts: int) -> Known:
    """K different experts: sound only if there are k."""
    return _below(experts) if int(s.params["k"]) <= experts else Known(FULL)


def _route(s: _Scene) -> Results:
    return [_chosen(s, s.weight_rows(0)), *_others(s, 1)]


def _moe_layer(s: _Scene) -> Results:
    return [Known(FULL), _chosen(s, s.weight_rows(2)), *_others(s, 2)]


def _others(s: _Scene, before: int) -> Results:
    """The results behind the first `before`: no indices."""
    return [Known(FULL) for _ in s.call.outputs[before:]]


def _argmax(s: _Scene) -> Results:
    return [_below(s.cols(0))]


def _prune(s: _Scene) -> Results:
    rows = s.rows(0)
    return [Known(FULL), _below(rows) if int(s.params["k"]) <= rows else Known(FULL)]


def _prune_top_p(s: _Scene) -> Results:
    return [Known(FULL), _below(s.rows(0)), Known(Interval(1, s.rows(0)))]


def _ref_move(s: _Scene) -> Results:
    """The moved elements and the fill; an element that nothing writes may be anything."""
    pieces = s.geometry()
    found = _hull([s.source(piece["x"][0]) for piece in pieces])
    if int(s.params["fill"]):
        value = int(s.params["value"])
        return [_joined([found], hull([found.interval, Interval(value, value)]))]
    return [found if _covers(s.size(), pieces) else _joined([found], FULL)]


def _covers(size: int, pieces: list[dict[str, list[int]]]) -> bool:
    """Return whether pieces write every one of `size` elements."""
    if size > MAX_MARKED:
        return False
    written = np.zeros(size, np.bool_)
    for piece in pieces:
        at = np.array(piece["y_at"][0], np.int64)
        for count, step in zip(piece["sizes"], piece["y_steps"], strict=True):
            at = np.asarray(at[..., None] + np.arange(count) * step)
        if not at.size or at.min() < 0 or at.max() >= size:
            return False
        written[at.reshape(-1)] = True
    return bool(written.all())


def _ref_map(s: _Scene) -> Results:
    kind, (g,) = MapKind(int(s.params["kind"])), s.geometry()
    parts = [s.source(g[name][0]) for name in "abc"[: len(MAPS[kind].takes)]]
    if kind is MapKind.QUANTISE:
        return [_joined(parts, wrapped(int(s.params[end]) for end in ("alpha", "beta")))]
    rule = MAP_INTERVALS.get(kind)
    return [_joined(parts, rule(*(part.interval for part in parts)) if rule else FULL)]


def _ref_reduce(s: _Scene) -> Results:
    (g,) = s.geometry()
    kind, count = ReduceKind(int(s.params["kind"])), int(np.prod(g["inner"]))
    x = s.source(g["x"][0])
    if kind >= ReduceKind.ARG_MAX:
        return [_below(count)]
    sums = wrapped((x.interval.low * count, x.interval.high * count))
    match kind:
        case ReduceKind.MAX | ReduceKind.MIN:
            return [x]
        case ReduceKind.SUM:
            return [_joined([x], sums)]
        case ReduceKind.MEAN if not sums.is_full:
            return [x]
        case _:
            return [_joined([x], FULL)]


def _ref_gather(s: _Scene) -> Results:
    (g,) = s.geometry()
    return [s.source(g["x"][0])]


def _ref_scatter(s: _Scene) -> Results:
    (g,) = s.geometry()
    parts = [s.source(g["x"][0]), s.source(g["u"][0])]
    is_sum = int(s.params["kind"]) in (ScatterKind.ADD, ScatterKind.MUL)
    return [_joined(parts, FULL) if is_sum else _hull(parts)]


def _ref_topk(s: _Scene) -> Results:
    (g,) = s.geometry()
    enough = g["k"][0] <= g["n"][0]
    return [s.source(g["x"][0]), _below(g["n"][0]) if enough else Known(FULL)]


def _ref_scan(s: _Scene) -> Results:
    (g,) = s.geometry()
    x, n = s.source(g["x"][0]), g["n"][0]
    ends = (0, *x.interval, x.interval.low * n, x.interval.high * n)
    return [_joined([x], wrapped(ends))]


RESULTS: Final[Mapping[Op, Callable[[_Scene], Results]]] = MappingProxyType(
    {
        Op.ROUTE: _route,
        Op.MOE_LAYER: _moe_layer,
        Op.ARGMAX: _argmax,
        Op.PRUNE: _prune,
        Op.PRUNE_TOP_P: _prune_top_p,
        Op.GATHER_ROWS: _gather_rows,
        Op.ROWS_CONCAT: _same,
        Op.ROWS_SLICE: _same,
        Op.COLS_CONCAT: _same,
        Op.COLS_SLICE: _same,
        Op.REF_MOVE: _ref_move,
        Op.REF_MAP: _ref_map,
        Op.REF_REDUCE: _ref_reduce,
        Op.REF_GATHER: _ref_gather,
        Op.REF_SCATTER: _ref_scatter,
        Op.REF_TOPK: _ref_topk,
        Op.REF_SCAN: _ref_scan,
    }
)
"""By operation: what its results hold. An operation without a row makes no index."""

Checks = list[tuple[str, Known, Interval]]


def _table(what: str, operand: int) -> Callable[[_Scene], Checks]:
    """Rows of weight 0, named by an optional operand."""

    def checks(s: _Scene) -> Checks:
        if operand >= len(s.call.inputs) or s.call.inputs[operand] == ABSENT:
            return []
        return [(what, s.input(operand), Interval(0, s.weight_rows(0) - 1))]

    return checks


def _expert_checks(s: _Scene) -> Checks:
    count = len(s.call.weights) // len(expert_kinds(int(s.params["biases"])))
    return [("expert", s.input(1), Interval(0, count - 1))]


def _layer_checks(s: _Scene) -> Checks:
    """The router's choice goes to the experts inside the same call."""
    count = (len(s.call.weights) - 4) // 2
    return [("expert", _moe_layer(s)[1], Interval(0, count - 1))]


def _row_checks(s: _Scene) -> Checks:
    return [("row", s.input(1), Interval(0, s.rows(0) - 1))]


def _element_checks(s: _Scene) -> Checks:
    (g,) = s.geometry()
    limit = g["limit"][0]
    return [("element", s.source(g["index"][0]), Interval(-limit, limit - 1))]


def _tap_checks(s: _Scene) -> Checks:
    (g,) = s.geometry()
    return [("element", s.source(g["index"][0]), Interval(0, g["n"][0] - 1))]


CHECKS: Final[Mapping[Op, Callable[[_Scene], Checks]]] = MappingProxyType(
    {
        Op.EMBED: _table("token id", 0),
        Op.ROPE: _table("position", 1),
        Op.ATTENTION: _table("position", 3),
        Op.EXPERTS: _expert_checks,
        Op.MOE_LAYER: _layer_checks,
        Op.GATHER_ROWS: _row_checks,
        Op.REF_GATHER: _element_checks,
        Op.REF_SCATTER: _element_checks,
        Op.REF_RESAMPLE: _tap_checks,
    }
)
"""By operation: the indices that its kernel checks at run time, and the range that it demands."""
