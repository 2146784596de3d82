"""The lowered form of a model: programs over buffers, weights and one key/value cache.

Passes produce a `Module`; emitters turn it into plan bytes, sections and C; the simulator runs it.
The operations, with their operands and parameters, are documented on `Op`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final

import numpy as np

from compiler.contract.expert_pages import check_pages
from compiler.contract.operand_rules import (
    KvShape,
    OperandError,
    Operands,
    Shape,
    WeightShape,
    check_call,
    complete_params,
)
from compiler.contract.operations import (
    MAX_DIM,
    PARAMS,
    Act,
    ExpertAct,
    NormKind,
    Op,
    PackedKind,
    RecurrentKind,
    RouteOrder,
    UnaryKind,
)
from compiler.contract.plan_format import KvKind
from compiler.errors import CompilerError
from compiler.kernels.merged import Merged

__all__ = [
    "ABSENT",
    "COLUMNS",
    "COO",
    "CSR",
    "DENSE",
    "ELL",
    "NEURON_LAYOUTS",
    "NM",
    "PARAMS",
    "SHARED_SECTION",
    "TILES",
    "UP_ROWS",
    "W4_LAYOUTS",
    "Act",
    "Buffer",
    "Call",
    "ExpertAct",
    "KvCache",
    "KvKind",
    "Module",
    "NormKind",
    "Op",
    "PackedKind",
    "Program",
    "ProgramError",
    "RecurrentKind",
    "RouteOrder",
    "UnaryKind",
    "Weight",
    "call_params",
    "validate_module",
    "weight_shape",
]

ABSENT: Final = -1
SHARED_SECTION: Final = "weights.shared"
DTYPES: Final = ("f32", "i32", "u8")
DENSE: Final = "dense"
TILES: Final = "tiles"
CSR: Final = "csr"
COO: Final = "coo"
ELL: Final = "blocked_ell<32,4>"
UP_ROWS: Final = "up_rows"
COLUMNS: Final = "columns"
NM: Final = "nm<2,4,16>"
W4_LAYOUTS: Final = (DENSE, TILES, CSR, COO, ELL, NM)
"""What may be left out of a W4 weight that has zeros; the last four only as weight 0 of LINEAR."""
NEURON_LAYOUTS: Final = (UP_ROWS, COLUMNS)
"""How a W4 weight is stored whose operand has zeros: up_rows as the first matrix of an expert with
reglu, columns as the second one of any expert or as weight 0 of LINEAR."""
WEIGHT_KINDS: Final = ("w4", "w8", "f32", "i32")
LAYOUTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "w4": (*W4_LAYOUTS, *NEURON_LAYOUTS),
        "w8": (DENSE,),
        "f32": (DENSE, "i8", "i16"),
        "i32": (DENSE,),
    }
)
"""How weights of each kind may be stored."""
MAX_NAME_BYTES: Final = 31


class ProgramError(CompilerError):
    """A lowered program breaks the rules of its operations: a defect of a pass."""

    code: ClassVar[str] = "build.app.program"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A row-major activation matrix.

    Attributes:
        id: Position in `Module.buffers`.
        rows: Rows, or the most rows (`Module.max_tokens`) if `dynamic`.
        dynamic: Run-time rows are the number of tokens T of the run.
        cols: Columns.
        dtype: `f32`, `i32` or `u8`.
    """

    id: int
    rows: int
    dynamic: bool
    cols: int
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A constant.

    Attributes:
        id: Position in `Module.weights`.
        kind: `w4` ((N, K) f32 original, quantised when packed), `w8` ((N, K) f32 on a grid of 8
            bits per row, see `compiler.quant.w8`), `f32` or `i32`.
        array: One or two dimensions, finite. A vector of n counts as (1, n).
        section: `weights.shared` or `expert.L<layer>.E<expert>`.
        layout: How it is stored, one of `LAYOUTS` of its kind: what a W4 weight leaves out; or `i8`
            or `i16`: an f32 matrix on a grid per row is stored as codes, of routers and, `i8`, of
            EMBED and LINEAR_F32.
        merged: What the weight was before adapters were merged into it.
    """

    id: int
    kind: str
    array: np.ndarray
    section: str
    layout: str = DENSE
    merged: Merged | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One operation. Ids index buffers and weights; -1 = absent; trailing ones may be left out."""

    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: tuple[int, ...]
    params: Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class Program:
    """Calls in order, and the buffers that the caller fills and reads, by role."""

    name: str
    calls: tuple[Call, ...]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class KvCache:
    """`capacity` rows of keys and values per layer, each `heads * head_dim` wide."""

    layers: int
    heads: int
    head_dim: int
    capacity: int
    kind: KvKind = KvKind.F32

    @property
    def shape(self) -> KvShape:
        """The cache as rules and plans see it."""
        return KvShape(self.layers, self.heads, self.head_dim, self.capacity, self.kind)


@dataclass(frozen=True, slots=True)
class Module:
    """Everything that is emitted for one model version.

    Attributes:
        max_tokens: The most tokens T of one run; the rows of every dynamic buffer.
    """

    programs: tuple[Program, ...]
    buffers: tuple[Buffer, ...]
    weights: tuple[Weight, ...]
    kv: KvCache | None
    max_tokens: int

    @property
    def ops(self) -> frozenset[Op]:
        """The operations that the kernels must offer, as `compiler.contract.plan.Plan.ops`."""
        return frozenset(call.op for program in self.programs for call in program.calls)


def weight_shape(weight: Weight) -> WeightShape:
    """Return (rows, cols, kind) of a weight.

    Raises:
        ProgramError: The array has no or more than two dimensions.
    """
    shape = weight.array.shape
    if len(shape) == 1:
        return WeightShape(1, shape[0], weight.kind)
    if len(shape) != 2:
        raise ProgramError(f"weight {weight.id} has {len(shape)} dimensions")
    return WeightShape(shape[0], shape[1], weight.kind)


def call_params(call: Call) -> dict[str, int | float]:
    """Return all parameters of a call in slot order, defaults filled in.

    Raises:
        ProgramError: A parameter is unknown, missing or out of range.
    """
    try:
        return complete_params(call.op, call.params)
    except OperandError as error:
        raise ProgramError(str(error)) from error


def validate_module(module: Module) -> None:
    """Check everything that emitters and simulator rely on.

    Ids equal positions; shapes and names are in range; every call fits its operation; buffers are
    written before they are read and never by two calls of a program; results do not alias operands;
    all cache users of a program append the same rows, each layer at most once; experts are used
    after their load step, where a program has any.

    Raises:
        ProgramError: The first rule that is broken, with program and call.
    """
    _validate_tables(module)
    names = [program.name for program in module.programs]
    _need(
        bool(names) and len(set(names)) == len(names), "program names must be unique, at least one"
    )
    for program in module.programs:
        _validate_program(module, program)
    cached = [
        params
        for program in module.programs
        for call in program.calls
        if call.op is Op.ATTENTION and (params := call_params(call))["kv_layer"] >= 0
    ]
    windows = {(params["window"], params["sink"]) for params in cached}
    _need(len(windows) <= 1, "attentions over one cache see different windows")


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ProgramError(message)


def _validate_tables(module: Module) -> None:
    _need(1 <= module.max_tokens <= MAX_DIM, f"max_tokens {module.max_tokens} is out of range")
    for at, buffer in enumerate(module.buffers):
        _need(buffer.id == at, f"buffer {buffer.id} stands at position {at}")
        _need(buffer.dtype in DTYPES, f"buffer {at} has unknown dtype {buffer.dtype!r}")
        _need(
            1 <= buffer.rows <= MAX_DIM and 1 <= buffer.cols <= MAX_DIM,
            f"buffer {at} is out of range",
        )
        _need(
            not buffer.dynamic or buffer.rows == module.max_tokens,
            f"dynamic buffer {at} has {buffer.rows} rows, max_tokens is {module.max_tokens}",
        )
    for at, weight in enumerate(module.weights):
        _need(weight.id == at, f"weight {weight.id} stands at position {at}")
        _need(weight.kind in WEIGHT_KINDS, f"weight {at} has unknown kind {weight.kind!r}")
        _need(
            weight.layout in LAYOUTS[weight.kind],
            f"weight {at} of kind {weight.kind} has layout {weight.layout!r}",
        )
        rows, cols, _ = weight_shape(weight)
        _need(1 <= rows <= MAX_DIM and 1 <= cols <= MAX_DIM, f"weight {at} is out of range")
        _need(0 < len(weight.section.encode()) <= MAX_NAME_BYTES, f"weight {at}: bad section name")
        _need(bool(np.isfinite(weight.array).all()), f"weight {at} is not finite")
    if module.kv is not None:
        sizes = (module.kv.layers, module.kv.heads, module.kv.head_dim, module.kv.capacity)
        _need(all(1 <= size <= MAX_DIM for size in sizes), f"cache {sizes} is out of range")


def _validate_program(module: Module, program: Program) -> None:
    where = f"program {program.name!r}"
    _need(0 < len(program.name.encode()) <= MAX_NAME_BYTES, f"{where}: bad name")
    for role, buffer in (*program.inputs.items(), *program.outputs.items()):
        _need(0 < len(role.encode()) <= MAX_NAME_BYTES, f"{where}: bad role {role!r}")
        _need(0 <= buffer < len(module.buffers), f"{where}: role {role!r} names buffer {buffer}")
    written = set(program.inputs.values())
    _need(len(written) == len(program.inputs), f"{where}: two inputs share a buffer")
    appended: dict[int, Shape] = {}
    for at, call in enumerate(program.calls):
        place = f"{where} call {at} ({call.op.name})"
        try:
            operands = resolve_operands(module, call)
            check_call(call.op, operands)
        except OperandError as error:
            raise ProgramError(f"{place}: {error}") from error
        sources = {operand for operand in call.inputs if operand != ABSENT}
        _need(
            sources <= written,
            f"{place}: reads buffers {sorted(sources - written)} before they are written",
        )
        _need(not written & set(call.outputs), f"{place}: writes a buffer that already has a value")
        _need(len(set(call.outputs)) == len(call.outputs), f"{place}: two results share a buffer")
        written |= set(call.outputs)
        if call.op is Op.ATTENTION and operands.number("kv_layer") >= 0:
            layer = operands.number("kv_layer")
            _need(layer not in appended, f"{place}: cache layer {layer} is appended to twice")
            appended[layer] = operands.source(0)
    rows = {(shape.rows, shape.dynamic) for shape in appended.values()}
    _need(len(rows) <= 1, f"{where}: cache layers receive different numbers of rows")
    try:
        check_pages(program.calls)
    except OperandError as error:
        raise ProgramError(f"{where}: {error}") from error
    missing = set(program.outputs.values()) - written
    _need(not missing, f"{where}: outputs {sorted(missing)} are never written")


def resolve_operands(module: Module, call: Call) -> Operands:
    """Return the shapes behind a call's operand ids.

    Raises:
        ProgramError: An id is out of range or a parameter is wrong.
    """
    kv = module.kv
    return Operands(
        inputs=tuple(_shape(module, at) for at in call.inputs),
        outputs=tuple(_shape(module, at) for at in call.outputs),
        weights=tuple(_weight(module, at) for at in call.weights),
        params=call_params(call),
        kv=None if kv is None else kv.shape,
    )


def _shape(module: Module, at: int) -> Shape | None:
    if at == ABSENT:
        return None
    _need(0 <= at < len(module.buffers), f"there is no buffer {at}")
    buffer = module.buffers[at]
    return Shape(buffer.rows, buffer.cols, buffer.dtype, buffer.dynamic)


def _weight(module: Module, at: int) -> WeightShape | None:
    if at == ABSENT:
        return None
    _need(0 <= at < len(module.weights), f"there is no weight {at}")
    return weight_shape(module.weights[at])
