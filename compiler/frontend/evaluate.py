"""Shapes and constants of a graph: abstract evaluation under a few bindings of the lengths.

Instead of symbolic algebra, every node is evaluated for concrete lengths (`dims.witnesses`); a size
that is linear in the lengths is pinned down by its values, anything else is refused. Values known
and equal for all bindings are constants, values known but different are shape arithmetic, the
rest exists at run time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import onnx

from compiler.dialects.dims import Binding, Dim, fit
from compiler.dialects.types import is_supported_dtype
from compiler.errors import MalformedModelError, UnsupportedOperatorError
from compiler.frontend.control_flow import (
    CONTROL,
    MAX_TRIPS,
    LoopExpansion,
    ScanExpansion,
    branch,
    reads,
)
from compiler.frontend.expansions import EXPANSIONS
from compiler.frontend.fold_rules import ANNOUNCED
from compiler.frontend.generic_rules import LATEST
from compiler.frontend.limits import FoldBudget
from compiler.frontend.node_numbers import marked, name_of, numbers_of
from compiler.frontend.onnx_ops import (
    OPERATORS,
    REQUIRED,
    OnnxOperator,
    plain_value,
)
from compiler.frontend.operator_check import kind_of, require_operators, unsupported
from compiler.frontend.sequences import Sequences, is_held, resolve
from compiler.frontend.shape_rules import widened
from compiler.frontend.values import Array, Known, Node, Runtime, Value, stand_in
from compiler.frontend.writer import Writer

MAX_EXPANDED_NODES: Final = 1 << 16
FLOAT8: Final = frozenset({"float8_e4m3fn", "float8_e5m2"})
"""Types of stored weights that are read as f32, exactly; nothing is rounded to them at run time."""
_BROKEN: Final = (ValueError, IndexError, TypeError, ArithmeticError, KeyError, RuntimeError)
"""What operands that contradict their operator raise in rules and in the ONNX package."""
ALONG_ONE_AXIS: Final = 13
"""From this operator set on a softmax runs along exactly one axis."""

Family = tuple[Value, ...]
"""One ONNX value under every binding, in the order of the bindings."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All needed values of a graph, and its needed nodes in file order.

    Attributes:
        reached: Numbers of the nodes of the file that were evaluated or opened.
    """

    bindings: tuple[Binding, ...]
    values: Mapping[str, Family]
    nodes: Sequence[Node]
    reached: frozenset[int] = frozenset()

    def constant(self, name: str) -> Array | None:
        """Return the elements of a value that is the same for all lengths."""
        first, *others = self.values[name]
        if not isinstance(first, Known):
            return None
        for other in others:
            if not isinstance(other, Known):
                return None
            if other is not first and not _equal(first.array, other.array):
                return None
        return first.array

    def is_known(self, name: str) -> bool:
        """Return whether a value follows from constants and lengths alone."""
        return all(isinstance(value, Known) for value in self.values[name])

    def uniform(self, name: str) -> Array | None:
        """Return the one number that fills a value for all lengths, without axes."""
        arrays = [value.array for value in self.values[name] if isinstance(value, Known)]
        numbers = {array.reshape(-1)[0].item() for array in arrays if array.size}
        same = all((array == array.reshape(-1)[:1]).all() for array in arrays)
        if len(arrays) != len(self.bindings) or len(numbers) != 1 or not same:
            return None
        return np.asarray(numbers.pop(), dtype=arrays[0].dtype)

    def shape(self, name: str) -> list[Dim] | None:
        """Return the sizes of a value, or None if one is not linear in the lengths."""
        family = self.values[name]
        if len({len(value.shape) for value in family}) != 1:
            return None
        axes = [
            fit([value.shape[axis] for value in family], self.bindings)
            for axis in range(len(family[0].shape))
        ]
        return [axis for axis in axes if axis is not None] if None not in axes else None


def make_node(proto: onnx.NodeProto, opset: int = 0) -> tuple[Node, OnnxOperator]:
    """Return a node with complete attributes, and its row.

    Raises:
        UnsupportedOperatorError: The operator or one of its attributes is unknown.
    """
    kind = kind_of(proto)
    name = name_of(proto)
    row = OPERATORS.get(kind)
    if row is None:
        raise unsupported({kind: [name]})
    attrs, given = dict(row.attrs), {}
    for attribute in proto.attribute:
        if attribute.name not in attrs:
            raise UnsupportedOperatorError(
                f"operator {kind} (node {name}): attribute {attribute.name!r} is not supported",
                hint=f"supported attributes: {', '.join(sorted(attrs)) or 'none'}",
            )
        value = plain_value(onnx.helper.get_attribute_value(attribute))
        attrs[attribute.name] = given[attribute.name] = value
    if row.arity is not None and row.arity != (len(proto.input), len(proto.output)):
        raise MalformedModelError(
            f"operator {kind} (node {name}) has {len(proto.input)} operands and"
            f" {len(proto.output)} results, it takes {row.arity[0]} and {row.arity[1]}"
        )
    missing = [key for key, value in attrs.items() if value is REQUIRED]
    if missing:
        raise MalformedModelError(f"operator {kind} (node {name}) has no {missing[0]!r}")
    inputs, outputs = tuple(proto.input), tuple(proto.output)
    return Node(kind, name, inputs, outputs, attrs, given, opset, numbers_of(proto)), row


def evaluate(
    graph: onnx.GraphProto,
    inputs: Mapping[str, Family],
    outputs: Sequence[str],
    bindings: tuple[Binding, ...],
    budget: FoldBudget | None = None,
    opset: int = 0,
) -> Evaluation:
    """Evaluate everything that `outputs` depend on.

    Args:
        graph: Checked graph; its control flow must be decided by constants and fixed sizes.
        inputs: Graph inputs under every binding.
        outputs: Names of the values that matter.
        bindings: Witnesses of the run-time lengths.
        budget: What folding may make; by default what `DEFAULT_LIMITS` allows.
        opset: Version of the default operator set.

    Raises:
        UnsupportedOperatorError: A needed node has no row, or a condition is not known.
        LimitError: A tensor or the constants are larger than the budget allows.
        MalformedModelError: Shapes contradict each other.
    """
    budget = FoldBudget() if budget is None else budget
    values: dict[str, Family] = dict(inputs)
    for initializer in graph.initializer:
        values.setdefault(initializer.name, (_constant(initializer),) * len(bindings))
    if graph.sparse_initializer:
        raise UnsupportedOperatorError(
            "sparse initializers are not supported", hint="store weights as dense tensors"
        )
    walk = _Walk(values, bindings, budget, opset)
    nodes = needed(graph.node, outputs)
    require_operators(nodes)
    walk.run(nodes)
    return Evaluation(bindings, values, walk.nodes, frozenset(walk.reached))


@dataclass(slots=True)
class _Walk:
    """Evaluates nodes in order; control flow is replaced by what it stands for.

    Attributes:
        within: Numbers of the node that is being opened: what is written for it stands for it.
    """

    values: dict[str, Family]
    bindings: tuple[Binding, ...]
    budget: FoldBudget
    opset: int
    nodes: list[Node] = field(default_factory=list)
    sequences: Sequences = field(default_factory=dict)
    expansions: int = 0
    reached: set[int] = field(default_factory=set)
    within: tuple[int, ...] = ()

    def run(self, protos: Sequence[onnx.NodeProto]) -> None:
        for proto in marked(protos, self.within):
            kind, numbers = kind_of(proto), numbers_of(proto)
            self.reached.update(numbers)
            outer, self.within = self.within, numbers
            if kind in CONTROL:
                self._control(proto)
            elif kind in EXPANSIONS or is_held(kind, list(proto.input), self.sequences):
                self._written_out(proto, kind)
            else:
                self._node(proto)
            self.within = outer

    def _node(self, proto: onnx.NodeProto) -> None:
        node, row = make_node(proto, self.opset)
        unknown = [name for name in node.inputs if name and name not in self.values]
        if unknown:
            raise MalformedModelError(
                f"node {node.name} reads {unknown[0]!r}, which is not in pipeline.json",
                hint="give every graph input a role",
            )
        if 0 < self.opset < ALONG_ONE_AXIS:
            node = _along_last(node, self.values)
        results = _evaluate_node(node, row, self.values, len(self.bindings), self.budget)
        self.values.update(zip(node.outputs, results, strict=False))
        self.nodes.append(node)

    def _written_out(self, proto: onnx.NodeProto, kind: str) -> None:
        """Replace a node by the nodes that it stands for, or by what it says about sequences."""
        self.expansions += 1
        prefix = f"{kind}{self.expansions}/"
        opset = self.opset or LATEST
        writer = Writer(proto, self.values, self.run, opset, prefix, self.bindings, self.budget)
        try:
            if kind in EXPANSIONS:
                EXPANSIONS[kind](writer)
            else:
                resolve(writer, self.sequences)
        except _BROKEN as error:
            raise MalformedModelError(f"operator {kind} (node {writer.label}): {error}") from error

    def _control(self, proto: onnx.NodeProto) -> None:
        try:
            self._unrolled(proto)
        except _BROKEN as error:
            where = f"operator {proto.op_type} (node {proto.name or proto.output[0]})"
            raise MalformedModelError(f"{where}: {error}") from error

    def _unrolled(self, proto: onnx.NodeProto) -> None:
        self.expansions += 1
        prefix = f"{proto.op_type}{self.expansions}/"
        if proto.op_type == "If":
            condition = bool(self._decided(proto, proto.input[0]).reshape(-1)[0])
            self._expanded(branch(proto, condition, prefix), proto.output)
            return
        if proto.op_type == "Scan":
            self._scan(proto, prefix)
            return
        limit, first = proto.input[:2]
        trips = int(self._decided(proto, limit).reshape(-1)[0]) if limit else MAX_TRIPS + 1
        going = bool(self._decided(proto, first).reshape(-1)[0]) if first else True
        loop = LoopExpansion(proto, trips if going else 0, prefix)
        for at in range(loop.trips):
            self._within_limits(proto)
            nodes, condition_name = loop.trip(at)
            self.run(nodes)
            if not self._decided(proto, condition_name).reshape(-1)[0]:
                break
        self.run(loop.finish())

    def _scan(self, proto: onnx.NodeProto, prefix: str) -> None:
        shapes = [[v.shape for v in self.values[name]] for name in proto.input]
        count = int(next(a.i for a in proto.attribute if a.name == "num_scan_inputs"))
        scan = ScanExpansion(proto, [len(shape[0]) for shape in shapes], prefix)
        trips = {
            shape[axis]
            for family, axis in zip(shapes[-count:], scan.axes, strict=True)
            for shape in family
        }
        scan.check(trips)
        for at in range(scan.trips):
            self._within_limits(proto)
            self.run(scan.trip(at))
        self.run(scan.finish())

    def _within_limits(self, proto: onnx.NodeProto) -> None:
        if len(self.nodes) > MAX_EXPANDED_NODES:
            raise _too_many(proto)

    def _expanded(self, nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> None:
        self.run(needed(nodes, [name for name in outputs if name]))

    def _decided(self, proto: onnx.NodeProto, name: str) -> Array:
        family = self.values.get(name)
        known = [value.array for value in family or () if isinstance(value, Known)]
        if (
            not known
            or len(known) != len(self.bindings)
            or any(not _equal(known[0], other) for other in known)
        ):
            raise UnsupportedOperatorError(
                f"operator {proto.op_type} (node {proto.name or proto.output[0]}):"
                f" {name!r} is known only at run time",
                hint="pin what it depends on: sizes with dims, scalar inputs with constants",
            )
        return known[0]


def _too_many(proto: onnx.NodeProto) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"operator {proto.op_type} (node {proto.name or proto.output[0]}):"
        f" control flow unrolls to more than {MAX_EXPANDED_NODES} nodes"
    )


def _along_last(node: Node, values: Mapping[str, Family]) -> Node:
    """Return a softmax of an old operator set, which flattens from its axis on, as a new one.

    Raises:
        UnsupportedOperatorError: It spans more than one axis.
    """
    if node.op not in ("Softmax", "LogSoftmax", "Hardmax"):
        return node
    shape = values[node.inputs[0]][0].shape
    axis = int(node.given.get("axis", 1)) % max(len(shape), 1)
    if any(size != 1 for size in shape[axis + 1 :]) and axis != len(shape) - 1:
        raise UnsupportedOperatorError(
            f"operator {node.op} (node {node.name}) spans several axes",
            hint="export again with opset 13 or later",
        )
    return replace(node, attrs={**node.attrs, "axis": axis})


def needed(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """Return the nodes that `outputs` depend on, in file order."""
    wanted = set(outputs)
    kept = []
    for proto in reversed(nodes):
        if wanted.intersection(proto.output):
            wanted.update(reads(proto))
            kept.append(proto)
    return kept[::-1]


def _constant(initializer: onnx.TensorProto) -> Known:
    try:
        array = onnx.numpy_helper.to_array(initializer)
        kind = array.dtype.name
        stored = array.astype("float32" if kind in FLOAT8 else widened(kind), copy=False)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise MalformedModelError(
            f"initializer {initializer.name!r} cannot be read: {error}"
        ) from error
    if not is_supported_dtype(stored.dtype.name):
        raise UnsupportedOperatorError(
            f"initializer {initializer.name!r} has element type {stored.dtype.name}",
            hint="store weights as float32, float16, or int8 behind DequantizeLinear",
        )
    return Known(stored)


def _evaluate_node(
    node: Node,
    row: OnnxOperator,
    values: Mapping[str, Family],
    count: int,
    budget: FoldBudget,
) -> list[Family]:
    columns: list[list[Value]] = []
    memo: dict[tuple[int, ...], list[Value]] = {}
    families = [values[name] if name else None for name in node.inputs]
    for at in range(count):
        operands = [family[at] if family is not None else None for family in families]
        key = tuple(id(operand) for operand in operands)
        if key not in memo:
            memo[key] = _apply(node, row, operands, budget)
        columns.append(memo[key])
    return [tuple(column[i] for column in columns) for i in range(len(columns[0]))]


def _apply(
    node: Node, row: OnnxOperator, operands: list[Value | None], budget: FoldBudget
) -> list[Value]:
    every = all(operand is None or isinstance(operand, Known) for operand in operands)
    where = f"operator {node.op} (node {node.name})"
    try:
        if row.fold is not None and (every or row.of_shape):
            _announce(node, row, operands, budget, where)
            return [_stored(a, operands, budget, where) for a in row.fold(node, operands)]
        found: Sequence[Value]
        found = (
            row.shapes(node, operands) if row.shapes else _by_stand_ins(node, row, operands, where)
        )
    except (ValueError, IndexError, TypeError, ArithmeticError, KeyError) as error:
        hint = "check the shapes, element types and attributes of this node"
        raise MalformedModelError(f"{where}: {error}", hint=hint) from error
    for value in found:
        budget.elements(value.shape, where)
    return list(found)


def _announce(
    node: Node, row: OnnxOperator, operands: list[Value | None], budget: FoldBudget, where: str
) -> None:
    """Check how large the results of folding will be before they are made."""
    if row.shapes is not None:
        for value in row.shapes(node, operands):
            budget.elements(value.shape, where)
    elif node.op in ANNOUNCED:
        budget.elements(ANNOUNCED[node.op](operands), where)


def _by_stand_ins(
    node: Node, row: OnnxOperator, operands: list[Value | None], where: str
) -> Sequence[Runtime]:
    if row.way_out:
        reason = f"{where}: its result depends on elements known only at run time"
        raise UnsupportedOperatorError(reason, hint=row.way_out)
    if row.fold is None or row.build == "constant":
        raise ValueError("it would have to be computed at run time")
    return [Runtime(a.shape, _result_dtype(a, operands)) for a in row.fold(node, operands)]


def _result_dtype(array: Array, operands: list[Value | None]) -> str:
    first = next(operand for operand in operands if operand is not None)
    return first.dtype if array.dtype == stand_in(first).dtype else array.dtype.name


def _stored(array: Array, operands: list[Value | None], budget: FoldBudget, where: str) -> Known:
    """Return a folded result; what it takes beyond the operands it looks into is counted."""
    budget.elements(array.shape, where)
    seen = [o.array.nbytes for o in operands if isinstance(o, Known) and _views(array, o.array)]
    budget.spend(max(0, array.nbytes - max(seen, default=0)), where)
    return Known(array.astype(widened(array.dtype.name), copy=False))


def _views(array: Array, other: Array) -> bool:
    return array is other or np.may_share_memory(array, other)


def _equal(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def bind_shape(shape: Sequence[Dim], dtype: str, bindings: tuple[Binding, ...]) -> Family:
    """Return a run-time value of `shape` under every binding; one object if all sizes are fixed."""
    if all(dim.is_static for dim in shape):
        return (Runtime(tuple(dim.constant for dim in shape), dtype),) * len(bindings)
    return tuple(Runtime(tuple(d.at(b) for d in shape), dtype) for b in bindings)


def same_everywhere(array: Array, bindings: tuple[Binding, ...]) -> Family:
    """Return a constant under every binding."""
    return (Known(np.asarray(array)),) * len(bindings)
