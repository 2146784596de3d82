"""Mask facts of a module: which elements of each value may be non-zero, forward to a fixpoint.

Functions are straight lines of operations; what loops is the key-value cache, carried from call to
call. Facts start at the bottom of the lattice, a worklist runs every operation, and again those
that read the cache of a layer whose columns grew. Columns only ever grow, so it ends.

Called by the passes `detect-sources`, `propagate-masks` and `derive-structure`, and by the pass
manager's invariant check. A `ZeroLogic` other than `STANDARD` exists for mutation tests only.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from compiler.analysis.constants import ConstantTable
from compiler.analysis.finite import UNBOUNDED, checked_values, value_bounds
from compiler.analysis.mask_moves import Bits
from compiler.analysis.masks import DENSE, Density, Mask, Produced, of_pattern
from compiler.analysis.zero_hooks import HOOKS, Flow, Hook, broadcast
from compiler.analysis.zero_rules import ZERO_RULES, ZeroKind, ZeroRule
from compiler.dialects.dims import Dim
from compiler.dialects.invariant import zero_rule
from compiler.dialects.mm import KvAppendOp, PruneOp, PruneTopPOp
from compiler.dialects.moe import RouteOp
from compiler.dialects.sp import OnnxOp
from compiler.dialects.types import dtype_of, shape_of

ONE_HOT_KINDS: Final = ("route", "one-hot", "prune")
"""Sources whose pattern says which places of an axis their value, an index array, names."""


@dataclass(frozen=True, slots=True)
class ZeroLogic:
    """The table, the functions, and the interface that an analysis asks."""

    rules: Mapping[str, ZeroRule]
    hooks: Mapping[ZeroKind, Hook]
    key: Callable[[Operation], str | None] = zero_rule


STANDARD: Final = ZeroLogic(ZERO_RULES, HOOKS)


@dataclass(frozen=True, slots=True)
class Source:
    """Something that makes zeros at run time.

    Attributes:
        number: Its number within the function, in order of operations.
        kind: relu, clip, threshold, where, one-hot, route, prune ...
        value: The value whose elements say where zeros are.
        width: For index arrays: the size of the axis that they index.
        granularity: How large the pieces are that are zero together.
        density: Bounds of the share of elements that are not zero.
    """

    number: int
    kind: str
    value: SSAValue
    width: Dim | None
    granularity: str
    density: Density

    @property
    def readiness(self) -> str:
        """When its pattern can be read: after the operation that makes `value`."""
        owner = self.value.owner
        return f"after {owner.name}" if isinstance(owner, Operation) else "with the inputs"

    def pattern(self, array: NDArray[Any], width: int = 0) -> Bits:
        """Return where the source is non-zero, given its value in one execution."""
        if self.kind == "count":
            return np.asarray(np.arange(width) < array.reshape(-1, 1))
        if self.kind not in ONE_HOT_KINDS:
            return np.asarray(array != 0)
        bits = np.zeros((*array.shape[:-1], width), np.bool_)
        np.put_along_axis(bits, array.astype(np.int64) % max(width, 1), True, axis=-1)
        return bits


@dataclass(slots=True)
class Facts:
    """What is known about one function.

    Attributes:
        masks: Mask of every value that is not dense, assumptions included.
        sources: Sources in order of their numbers.
        numbers: Values that some clause assumes finite, by number.
        indices: Index arrays of run-time gathers, by number.
    """

    masks: dict[SSAValue, Mask] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    numbers: list[SSAValue] = field(default_factory=list)
    indices: list[SSAValue] = field(default_factory=list)

    def of(self, value: SSAValue) -> Mask:
        """Return the mask of a value; clauses may rest on assumptions."""
        return self.masks.get(value, DENSE)

    def proved(self, value: SSAValue) -> Mask:
        """Return the mask that holds in every completed execution."""
        return self.of(value).unconditional()


@dataclass(slots=True)
class _Flow:
    constants: ConstantTable
    bounds: Mapping[SSAValue, float]
    checked: frozenset[SSAValue]
    caches: dict[int, list[Bits]]
    facts: Facts
    all_finite: bool = False
    known: dict[tuple[str, SSAValue], Source] = field(default_factory=dict)

    def mask(self, value: SSAValue) -> Mask:
        return self.facts.masks.get(value, DENSE)

    def fresh(self, value: SSAValue, kind: str, *, granularity: str, density: Density) -> Mask:
        key = (kind, value)
        if key not in self.known:
            number, width = len(self.facts.sources), _indexed_width(kind, value)
            made = Source(number, kind, value, width, granularity, density)
            self.known[key] = made
            self.facts.sources.append(made)
        source = self.known[key]
        return of_pattern(Produced(source.number, granularity, density))

    def gather(self, index: SSAValue) -> int:
        return _numbered(self.facts.indices, index)

    def assume(self, mask: Mask, *values: SSAValue) -> Mask:
        open_ones = [v for v in values if not self._is_finite(v)]
        return mask.assuming(_numbered(self.facts.numbers, value) for value in open_ones)

    def refuses(self, value: SSAValue) -> bool:
        return value in self.checked

    def bound(self, value: SSAValue) -> float:
        return self.bounds.get(value, UNBOUNDED)

    def state(self, op: Operation) -> list[Bits]:
        assert isinstance(op, KvAppendOp)
        layer = self.caches.setdefault(op.layer.value.data, [])
        for at, value in enumerate((op.k, op.v)):
            width = shape_of(value)[-1].constant
            columns = self.mask(value).columns()
            grown = np.ones(width, np.bool_) if columns is None else columns
            if at >= len(layer):
                layer.append(np.zeros(width, np.bool_))
            layer[at] = layer[at] | grown
        return list(layer)

    def _is_finite(self, value: SSAValue) -> bool:
        is_real = dtype_of(value).startswith("float") and not self.all_finite
        return not is_real or value in self.bounds or value in self.checked


def module_facts(
    funcs: list[FuncOp],
    constants: ConstantTable,
    logic: ZeroLogic = STANDARD,
    *,
    all_finite: bool = False,
) -> list[Facts]:
    """Return the facts of each function; functions share the cache's layers.

    Args:
        funcs: The functions of a module.
        constants: Their constants.
        logic: The rules.
        all_finite: Return what holds in executions that compute neither NaN nor infinity, instead
            of what holds in all of them.
    """
    bounds, checked = value_bounds(funcs, constants), checked_values(funcs)
    caches: dict[int, list[Bits]] = {}
    flows = [_Flow(constants, bounds, checked, caches, Facts(), all_finite) for _ in funcs]
    home = {op: flow for func, flow in zip(funcs, flows, strict=True) for op in func.body.block.ops}
    readers: dict[int, list[Operation]] = {}
    for op in home:
        if isinstance(op, KvAppendOp):
            readers.setdefault(op.layer.value.data, []).append(op)
    queue, waiting = deque(home), set(home)
    while queue:
        op = queue.popleft()
        waiting.discard(op)
        for later in _step(op, home[op], logic, readers):
            if later not in waiting and later in home:
                queue.append(later)
                waiting.add(later)
    return [flow.facts for flow in flows]


def function_facts(func: FuncOp, constants: ConstantTable, logic: ZeroLogic = STANDARD) -> Facts:
    """Return the facts of a function that stands alone."""
    return module_facts([func], constants, logic)[0]


def transfer(op: Operation, flow: Flow, logic: ZeroLogic) -> list[Mask]:
    """Return the masks of the results of one operation."""
    rule = logic.rules.get(logic.key(op) or "")
    if rule is None:
        return [DENSE for _ in op.results]
    masks = logic.hooks[rule.kind](op, flow, rule)
    act = op.properties.get("act")
    if op.name in ("sp.linear", "sp.conv2d", "sp.binary") and getattr(act, "data", "") == "relu":
        made = _fused_relu(op, flow, logic)
        masks = [made & masks[0]]
    residual = getattr(op, "residual", None)
    if isinstance(residual, SSAValue):
        masks = [masks[0] | broadcast(flow.mask(residual), residual, op.results[0])]
    return masks


def _fused_relu(op: Operation, flow: Flow, logic: ZeroLogic) -> Mask:
    """Return the source of a fused ReLU, if its zeros are those of the result."""
    rule = logic.rules["sp.unary:relu"]
    if rule.kind is not ZeroKind.SOURCE or getattr(op, "residual", None) is not None:
        return DENSE
    return flow.fresh(op.results[0], "relu", granularity="element", density=(0.0, 1.0))


def _step(
    op: Operation, flow: _Flow, logic: ZeroLogic, readers: Mapping[int, list[Operation]]
) -> list[Operation]:
    """Run one operation; return those whose operands or cache changed."""
    is_state = isinstance(op, KvAppendOp)
    layer = op.layer.value.data if isinstance(op, KvAppendOp) else -1
    before = [bits.tobytes() for bits in flow.caches.get(layer, [])]
    later: list[Operation] = []
    for result, mask in zip(op.results, transfer(op, flow, logic), strict=True):
        if mask == flow.facts.masks.get(result, None):
            continue
        if mask.is_dense and result not in flow.facts.masks:
            continue
        flow.facts.masks[result] = mask
        later.extend(use.operation for use in result.uses)
    if is_state and before != [bits.tobytes() for bits in flow.caches[layer]]:
        later.extend(reader for reader in readers[layer] if reader is not op)
    return later


def _numbered(values: list[SSAValue], value: SSAValue) -> int:
    for number, known in enumerate(values):
        if known is value:
            return number
    values.append(value)
    return len(values) - 1


def _indexed_width(kind: str, value: SSAValue) -> Dim | None:
    """Return the size of the axis that an index array indexes."""
    owner = value.owner
    if isinstance(owner, PruneTopPOp) and kind == "count":
        return shape_of(owner.kept)[-2]
    if kind not in ONE_HOT_KINDS:
        return None
    if isinstance(owner, RouteOp):
        return shape_of(owner.weight)[0]
    if isinstance(owner, PruneOp) or (isinstance(owner, OnnxOp) and kind == "prune"):
        return shape_of(owner.operands[0])[-2]
    for use in value.uses:
        user = use.operation
        if isinstance(user, OnnxOp) and user.op.data == "ScatterElements":
            return shape_of(user.arguments[0])[-1]
    return None
