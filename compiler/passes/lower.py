"""Lower `hw.call` to the plan's records: buffers, weights, calls, programs.

Before:
    func.func @step(%0 : tensor<?x1xi32> {sp.role = "token_ids"}, ...) {
      %1 = "hw.call"(%0, %w) <{op = "EMBED", ...}> : ... -> tensor<?x128xf32>
After:
    Program("step", (Call(Op.EMBED, inputs=(0,), outputs=(2,), weights=(0,), params={}), ...))

Buffers and weights are numbered in order of first use, programs in order. A stack of expert
matrices becomes one weight per expert, in section `expert.L<layer>.E<expert>`; layers are numbered
by first use, so programs that share weights share sections. Matrices of an adapter (see `adapters`)
are in section `adapter.<n>`, everything else in `weights.shared`. An f32 matrix that a file made
from int8 is stored as those codes again: the same values in a quarter of the bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from compiler.analysis.constants import Array
from compiler.dialects.dims import symbol_dim
from compiler.dialects.hw import CallOp
from compiler.dialects.sp import ConstantOp
from compiler.dialects.types import dtype_of, shape_of
from compiler.errors import MalformedModelError, UnsupportedOperatorError
from compiler.kernels.program import (
    ABSENT,
    DENSE,
    SHARED_SECTION,
    Buffer,
    Call,
    KvCache,
    KvKind,
    Module,
    Op,
    Program,
    Weight,
    validate_module,
)
from compiler.passes.adapters import adapter_sections
from compiler.passes.base import PassContext
from compiler.passes.functions import arguments, body, functions, results
from compiler.passes.operand_check import (
    DTYPES,
    STACKED,
    cache_heads,
    expert_parts,
    weight_kind,
)
from compiler.passes.plan_kv import cache_capacity
from compiler.quant.row_codes import I8, find_codes, has_codes
from compiler.quant.w8 import round_w8

CODED: Final = frozenset({(Op.EMBED, 0), (Op.LINEAR_F32, 0)})
"""Where a matrix may be stored in codes: operation, weight."""
LEAST_CODED: Final = 4096
"""Elements from which on that is worth a look."""
EXPERT_PARTS: Final = ("in", "out", "b_in", "b_out")


@dataclass(slots=True)
class _Lowering:
    ctx: PassContext
    buffers: list[Buffer] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    weight_ids: dict[tuple[str, str, str, str], int] = field(default_factory=dict)
    coded: dict[str, bool] = field(default_factory=dict)
    layers: dict[tuple[str, ...], int] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    kv_kind: KvKind = KvKind.F32
    kv: KvCache | None = None
    current: CallOp | None = None

    @property
    def where(self) -> str:
        """The nodes behind the call that is being lowered, for messages."""
        if self.current is None:
            return "an input of a program"
        return self.ctx.origins.where(self.current, self.current.op.data)

    def program(self, func: FuncOp) -> Program:
        ids: dict[SSAValue, int] = {}
        self.current = None
        inputs = {role: self._buffer(value, ids) for role, value in arguments(func)}
        calls = [self._call(op, ids) for op in calls_of(func)]
        outputs = {role: ids[value] for role, value in results(func)}
        return Program(func.sym_name.data, tuple(calls), inputs, outputs)

    def _buffer(self, value: SSAValue, ids: dict[SSAValue, int]) -> int:
        rows, cols = shape_of(value)
        dynamic = rows == symbol_dim("T")
        if not dynamic and not rows.is_static:
            raise UnsupportedOperatorError(
                f"{self.where}: its result has {rows} rows",
                hint="rows at run time must be exactly the token rows of the call",
            )
        count = self.ctx.spec.max_step_tokens if dynamic else rows.constant
        ids[value] = len(self.buffers)
        dtype = DTYPES[dtype_of(value)]
        self.buffers.append(Buffer(len(self.buffers), count, dynamic, cols.constant, dtype))
        return ids[value]

    def _call(self, op: CallOp, ids: dict[SSAValue, int]) -> Call:
        self.current = op
        code = Op[op.op.data]
        inputs = tuple(
            ABSENT if slot < 0 else ids[op.arguments[int(slot)]] for slot in op.slots.get_values()
        )
        outputs = tuple(self._buffer(value, ids) for value in op.outputs)
        if code is Op.ATTENTION:
            self._note_cache(op)
        return Call(code, inputs, outputs, self._weights(code, op), op.parameters())

    def _weights(self, code: Op, op: CallOp) -> tuple[int, ...]:
        slots = [int(slot) for slot in op.weight_slots.get_values()]
        first = STACKED.get(code, len(slots))
        layout = DENSE if op.layout is None else op.layout.kind.data
        single = tuple(
            ABSENT
            if slot < 0
            else self._shared(
                op.weights[slot], weight_kind(op, at, op.weights[slot]), layout, (code, at)
            )
            for at, slot in enumerate(slots[:first])
        )
        stacks = [op.weights[slot] for slot in slots[first:]]
        return (*single, *(self._experts(stacks, layout, op.stored_as) if stacks else ()))

    def _shared(self, value: SSAValue, kind: str, layout: str, place: tuple[Op, int]) -> int:
        digest, array = self._constant(value)
        section = self.adapters.get(digest, SHARED_SECTION)
        if kind == "f32":
            layout = I8 if place in CODED and self._has_codes(digest, array) else DENSE
        return self._weight(kind, digest, array, section, layout)

    def _experts(self, values: Sequence[SSAValue], layout: str, storage: str) -> tuple[int, ...]:
        stacks = [self._constant(value) for value in values]
        layer = self.layers.setdefault(tuple(digest for digest, _ in stacks), len(self.layers))
        return tuple(
            self._weight(
                kind, f"{part}.{digest}", stack[expert], f"expert.L{layer}.E{expert}", layout
            )
            for expert in range(len(stacks[0][1]))
            for part, kind, (digest, stack) in zip(
                EXPERT_PARTS, expert_parts(storage), stacks, strict=False
            )
        )

    def _has_codes(self, digest: str, array: Array) -> bool:
        """Return whether every row is signed bytes times a step, as files of int8 have it."""
        if digest not in self.coded:
            is_large = array.ndim == 2 and array.size >= LEAST_CODED
            self.coded[digest] = is_large and has_codes(array.astype(np.float32, copy=False))
        return self.coded[digest]

    def _constant(self, value: SSAValue) -> tuple[str, Array]:
        assert isinstance(value.owner, ConstantOp)
        array = self.ctx.constants.of(value.owner)
        is_int = array.dtype == np.int32
        return value.owner.sha256.data, array if is_int else array.astype(np.float32, copy=False)

    def _weight(self, kind: str, digest: str, array: Array, section: str, layout: str) -> int:
        key = (kind, digest, section, layout if kind == "f32" else "")
        if key not in self.weight_ids:
            self.weight_ids[key] = len(self.weights)
            stored = np.ascontiguousarray(array)
            if not np.isfinite(stored).all():
                raise MalformedModelError(
                    f"{self.where}: a weight of shape {stored.shape} holds NaN or infinity",
                    hint="the training run or the conversion that wrote it has failed",
                )
            chosen = layout if kind in ("w4", "f32") else DENSE
            if kind == "w8":
                stored = round_w8(stored)
            if kind == "f32" and chosen == I8:
                stored = find_codes(stored, I8).values()
            merged = self.ctx.merges.get(digest) if kind == "w4" else None
            self.weights.append(Weight(len(self.weights), kind, stored, section, chosen, merged))
        return self.weight_ids[key]

    def _note_cache(self, op: CallOp) -> None:
        params = op.parameters()
        layer = int(params["kv_layer"])
        if layer < 0:
            return
        heads, head_dim = cache_heads(op)
        layers = max(layer + 1, self.kv.layers if self.kv is not None else 0)
        rows = shape_of(op.arguments[0])[0]
        most = cache_capacity(self.ctx.spec, rows.constant if rows.is_static else None)
        capacity = max(most, self.kv.capacity if self.kv is not None else 0)
        cache = KvCache(layers, heads, head_dim, capacity, self.kv_kind)
        shared = (cache.heads, cache.head_dim)
        if self.kv is not None and shared != (self.kv.heads, self.kv.head_dim):
            raise UnsupportedOperatorError(
                f"{self.where}: its cache has another shape than that of the layers before",
                hint="all cached layers must have the same number and size of key heads",
            )
        self.kv = cache


def calls_of(func: FuncOp) -> list[CallOp]:
    """Return the calls of a program in the order in which they are lowered."""
    return [op for op in body(func).ops if isinstance(op, CallOp)]


def lower(module: ModuleOp, ctx: PassContext, kv_kind: KvKind = KvKind.F32) -> Module:
    """Return the lowered module of selected programs, its cache stored as `kv_kind`.

    Raises:
        UnsupportedOperatorError: Run-time rows are not the token rows, or caches differ in shape.
        MalformedModelError: A weight is not finite.
        ProgramError: A pass produced calls that break the catalogue's rules.
    """
    lowering = _Lowering(ctx, adapters=adapter_sections(module), kv_kind=kv_kind)
    programs = tuple(lowering.program(func) for func in functions(module))
    lowered = Module(
        programs,
        tuple(lowering.buffers),
        tuple(lowering.weights),
        lowering.kv,
        ctx.spec.max_step_tokens,
    )
    validate_module(lowered)
    return lowered
