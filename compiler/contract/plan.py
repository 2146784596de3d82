"""Read a plan: pure, total, and suspicious of every number in it.

    emitter -(writes)-> plan bytes -(sha256 in the signed manifest)-> device -(parse_plan)-> runtime

After `parse_plan` returned, the native runtime can run the plan without touching a byte outside its
arena, context and sections: every table lies inside the file, every weight inside its section,
every buffer inside the arena, buffers that live at the same time do not overlap (but a result may
take exactly the place of a dying operand where `IN_PLACE` allows it), every value is written before
it is read, every call fits the rules of its operation, and experts are loaded before they are used.
"""

import struct
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from compiler.contract.elements import SMALL_KINDS, stored_count
from compiler.contract.errors import ContractError
from compiler.contract.expert_pages import check_pages
from compiler.contract.moe_rules import MAX_LINEAR_K
from compiler.contract.operand_rules import (
    KvShape,
    OperandError,
    Operands,
    Shape,
    WeightShape,
    check_call,
    complete_params,
)
from compiler.contract.operations import IN_PLACE, MAX_DIM, PARAMS, Op
from compiler.contract.plan_format import (
    ABI_VERSION,
    ALIGNMENT,
    BUFFER,
    CALL,
    DTYPE_BYTES,
    DTYPE_NAMES,
    HEADER,
    KIND_NAMES,
    MAGIC,
    MAX_ARENA_BYTES,
    MAX_BUFFERS,
    MAX_CALLS,
    MAX_KV_BYTES,
    MAX_OPERANDS,
    MAX_PLAN_BYTES,
    MAX_PORTS,
    MAX_PROGRAMS,
    MAX_SECTION_BYTES,
    MAX_SECTIONS,
    MAX_TOKENS,
    MAX_WEIGHTS,
    PORT,
    PROGRAM,
    SECTION,
    WEIGHT,
    Direction,
    DType,
    Kind,
    KvKind,
    Record,
    weight_bytes,
)
from compiler.contract.storage_rules import may_read
from compiler.contract.tiles import live_tiles


class PlanError(ContractError):
    """The plan bytes break the format or would make the runtime leave its memory: drop them."""

    code: ClassVar[str] = "contract.plan"


@dataclass(frozen=True, slots=True)
class PlanSection:
    """A weight section that the plan needs, and its exact length."""

    name: str
    length: int


@dataclass(frozen=True, slots=True)
class PlanWeight:
    """A constant inside a section."""

    kind: Kind
    section: int
    rows: int
    cols: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PlanBuffer:
    """An activation matrix inside the arena."""

    dtype: DType
    dynamic: bool
    rows: int
    cols: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PlanPort:
    """A buffer that the caller fills or reads."""

    role: str
    direction: Direction
    buffer: int


@dataclass(frozen=True, slots=True)
class PlanCall:
    """One record of the tape."""

    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: tuple[int, ...]
    params: Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class PlanProgram:
    """A range of the tape with its ports."""

    name: str
    calls: tuple[PlanCall, ...]
    ports: tuple[PlanPort, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A verified plan."""

    sections: tuple[PlanSection, ...]
    weights: tuple[PlanWeight, ...]
    buffers: tuple[PlanBuffer, ...]
    programs: tuple[PlanProgram, ...]
    kv: KvShape | None
    max_tokens: int
    arena_bytes: int

    @property
    def ops(self) -> frozenset[Op]:
        """The operations that the kernels must offer."""
        return frozenset(call.op for program in self.programs for call in program.calls)


def parse_plan(data: bytes) -> Plan:
    """Return the plan in `data` after checking all of it.

    Raises:
        PlanError: Anything is wrong; the message says what. Nothing was allocated for it.
    """
    try:
        return _parse(data)
    except OperandError as error:
        raise PlanError(str(error)) from error


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise PlanError(message)


@dataclass(frozen=True, slots=True)
class _Header:
    counts: tuple[int, ...]
    max_tokens: int
    kv: KvShape | None
    arena_bytes: int


_TABLES = (SECTION, WEIGHT, BUFFER, PROGRAM, PORT, CALL)
_LIMITS = (MAX_SECTIONS, MAX_WEIGHTS, MAX_BUFFERS, MAX_PROGRAMS, MAX_PORTS, MAX_CALLS, MAX_OPERANDS)


def _parse(data: bytes) -> Plan:
    header = _read_header(data)
    at = HEADER.layout.size
    tables: list[list[tuple[object, ...]]] = []
    for record, count in zip(_TABLES, header.counts, strict=False):
        tables.append(list(_rows(record, data, at, count)))
        at += record.layout.size * count
    operands = struct.unpack_from(f"<{header.counts[-1]}i", data, at)
    sections = _read_sections(tables[0])
    weights = tuple(_read_weight(row, sections) for row in tables[1])
    buffers = tuple(_read_buffer(row, header) for row in tables[2])
    ports = tuple(_read_port(row, len(buffers)) for row in tables[4])
    calls = tuple(_read_calls(tables[5], operands))
    programs = tuple(_read_programs(tables[3], calls, ports))
    plan = Plan(
        sections, weights, buffers, programs, header.kv, header.max_tokens, header.arena_bytes
    )
    for program in programs:
        _check_program(plan, program)
    windows = {
        (call.params["window"], call.params["sink"])
        for program in programs
        for call in program.calls
        if call.op is Op.ATTENTION and call.params["kv_layer"] >= 0
    }
    _need(len(windows) <= 1, "attentions over one cache see different windows")
    return plan


def _read_header(data: bytes) -> _Header:
    size = HEADER.layout.size
    _need(size <= len(data) <= MAX_PLAN_BYTES, f"a plan of {len(data)} bytes is out of range")
    fields = HEADER.layout.unpack_from(data)
    magic, abi, header_bytes, total = fields[:4]
    counts, max_tokens, kv_sizes = fields[4:11], fields[11], fields[12:16]
    arena_bytes, kv_kind, reserved = fields[16:]
    _need(magic == MAGIC, "this is not a plan")
    _need(abi == ABI_VERSION, f"plan ABI {abi}, this runtime has {ABI_VERSION}")
    _need(header_bytes == size and reserved == 0, "the header is damaged")
    for count, limit in zip(counts, _LIMITS, strict=True):
        _need(count <= limit, f"a table of {count} entries, at most {limit}")
    expected = size + 4 * counts[6]
    expected += sum(r.layout.size * n for r, n in zip(_TABLES, counts, strict=False))
    _need(total == expected == len(data), f"{len(data)} bytes, the tables need {expected}")
    _need(1 <= max_tokens <= MAX_TOKENS, f"max_tokens {max_tokens} is out of range")
    _need(arena_bytes <= MAX_ARENA_BYTES, f"an arena of {arena_bytes} bytes is too large")
    return _Header(counts, max_tokens, _read_kv(kv_sizes, kv_kind), arena_bytes)


def _read_kv(sizes: tuple[int, ...], kind: int) -> KvShape | None:
    _need(kind in list(KvKind), f"a cache of unknown kind {kind}")
    if not any(sizes):
        return None
    _need(all(1 <= size <= MAX_DIM for size in sizes), f"a cache of {sizes} is out of range")
    layers, heads, head_dim, capacity = sizes
    kv = KvShape(layers, heads, head_dim, capacity, KvKind(kind))
    _need(kv.size_bytes <= MAX_KV_BYTES, f"a cache of {kv.size_bytes} bytes is too large")
    return kv


def _rows(record: Record, data: bytes, at: int, count: int) -> Iterator[tuple[object, ...]]:
    size = record.layout.size
    return record.layout.iter_unpack(memoryview(data)[at : at + size * count])


def _name(field: object, what: str) -> str:
    raw = bytes(field).rstrip(b"\0") if isinstance(field, bytes) else b""
    _need(0 < len(raw) < 32 and all(33 <= byte < 127 for byte in raw), f"{what} has no proper name")
    return raw.decode("ascii")


def _ints(row: tuple[object, ...]) -> list[int]:
    return [value for value in row if isinstance(value, int)]


def _read_sections(rows: list[tuple[object, ...]]) -> tuple[PlanSection, ...]:
    sections = []
    for row in rows:
        (length,) = _ints(row)
        _need(1 <= length <= MAX_SECTION_BYTES, f"a section of {length} bytes is out of range")
        sections.append(PlanSection(_name(row[0], "a section"), length))
    _need(len({s.name for s in sections}) == len(sections), "two sections share a name")
    return tuple(sections)


def _read_weight(row: tuple[object, ...], sections: tuple[PlanSection, ...]) -> PlanWeight:
    kind, section, rows, cols, offset, length = _ints(row)
    _need(kind in list(Kind), f"weight kind {kind} is unknown")
    _need(section < len(sections), f"a weight lies in section {section} of {len(sections)}")
    _need(1 <= rows <= MAX_DIM and 1 <= cols <= MAX_DIM, f"a weight of {rows} x {cols}")
    if Kind(kind) is Kind.W4_TILES:
        _need(
            live_tiles(rows, cols, length) is not None,
            f"{length} bytes hold no number of tiles of a weight of {rows} x {cols}",
        )
    elif Kind(kind) in SMALL_KINDS:
        _need(
            cols <= MAX_LINEAR_K and stored_count(Kind(kind), rows, cols, length) is not None,
            f"{length} bytes hold no {Kind(kind).name} weight of {rows} x {cols}",
        )
    else:
        expected = weight_bytes(Kind(kind), rows, cols)
        _need(
            length == expected, f"a weight of {rows} x {cols} takes {expected} bytes, not {length}"
        )
    _need(offset % ALIGNMENT == 0, f"a weight starts at {offset}, not at a multiple of {ALIGNMENT}")
    _need(
        offset + length <= sections[section].length,
        f"a weight ends at {offset + length}, its section at {sections[section].length}",
    )
    return PlanWeight(Kind(kind), section, rows, cols, offset, length)


def _read_buffer(row: tuple[object, ...], header: _Header) -> PlanBuffer:
    dtype, dynamic, rows, cols, offset, length = _ints(row)
    _need(dtype in list(DType) and dynamic in (0, 1), "a buffer has an unknown type")
    _need(1 <= rows <= MAX_DIM and 1 <= cols <= MAX_DIM, f"a buffer of {rows} x {cols}")
    _need(not dynamic or rows == header.max_tokens, "a dynamic buffer holds max_tokens rows")
    expected = rows * cols * DTYPE_BYTES[DType(dtype)]
    _need(length == expected, f"a buffer of {rows} x {cols} takes {expected} bytes, not {length}")
    _need(offset % ALIGNMENT == 0, f"a buffer starts at {offset}, not at a multiple of {ALIGNMENT}")
    _need(offset + length <= header.arena_bytes, "a buffer ends beyond the arena")
    return PlanBuffer(DType(dtype), bool(dynamic), rows, cols, offset, length)


def _read_port(row: tuple[object, ...], buffers: int) -> PlanPort:
    direction, buffer = _ints(row)
    _need(direction in list(Direction), f"port direction {direction} is unknown")
    _need(buffer < buffers, f"a port names buffer {buffer} of {buffers}")
    return PlanPort(_name(row[0], "a port"), Direction(direction), buffer)


def _read_calls(rows: list[tuple[object, ...]], operands: tuple[int, ...]) -> Iterator[PlanCall]:
    at = 0
    for row in rows:
        code, inputs, outputs, weights, first, reserved, *raw = _ints(row)
        _need(code in list(Op), f"operation {code} is unknown")
        _need(first == at and reserved == 0, "operands do not follow each other")
        at += inputs + outputs + weights
        _need(at <= len(operands), "a call's operands end beyond the table")
        taken = operands[first:at]
        yield PlanCall(
            Op(code),
            taken[:inputs],
            taken[inputs : inputs + outputs],
            taken[inputs + outputs :],
            _params(Op(code), raw),
        )
    _need(at == len(operands), "operands are left over")


def _params(op: Op, raw: list[int]) -> dict[str, int | float]:
    table = PARAMS[op]
    _need(not any(raw[len(table) :]), f"{op.name} has values in unused parameter slots")
    values: dict[str, int | float] = {}
    for param, bits in zip(table, raw, strict=False):
        word = struct.pack("<I", bits)
        values[param.name] = struct.unpack("<f" if param.is_float else "<i", word)[0]
    return complete_params(op, values)


def _read_programs(
    rows: list[tuple[object, ...]], calls: tuple[PlanCall, ...], ports: tuple[PlanPort, ...]
) -> Iterator[PlanProgram]:
    at_call = at_port = 0
    names = set()
    for row in rows:
        first_call, n_calls, first_port, n_ports = _ints(row)
        name = _name(row[0], "a program")
        _need(name not in names, f"two programs are called {name!r}")
        names.add(name)
        _need((first_call, first_port) == (at_call, at_port), "programs do not follow each other")
        at_call, at_port = at_call + n_calls, at_port + n_ports
        _need(at_call <= len(calls) and at_port <= len(ports), f"{name!r} ends beyond the tables")
        yield PlanProgram(name, calls[first_call:at_call], ports[first_port:at_port])
    _need(bool(names), "a plan without programs")
    _need((at_call, at_port) == (len(calls), len(ports)), "calls or ports are left over")


def _check_program(plan: Plan, program: PlanProgram) -> None:
    roles = [(port.direction, port.role) for port in program.ports]
    _need(len(set(roles)) == len(roles), f"{program.name!r} has two ports of one role")
    appended: dict[int, Shape] = {}
    for call in program.calls:
        operands = _operands(plan, call)
        check_call(call.op, operands)
        if call.op is Op.ATTENTION and operands.number("kv_layer") >= 0:
            layer = operands.number("kv_layer")
            _need(layer not in appended, f"cache layer {layer} is appended to twice")
            appended[layer] = operands.source(0)
    rows = {(shape.rows, shape.dynamic) for shape in appended.values()}
    _need(len(rows) <= 1, "cache layers receive different numbers of rows")
    check_pages(program.calls)
    _check_lifetimes(plan, program)


def _operands(plan: Plan, call: PlanCall) -> Operands:
    weights = [_weight_shape(plan, at) for at in call.weights]
    for at, weight in enumerate(call.weights):
        _need(
            weight == -1 or may_read(call.op, at, plan.weights[weight].kind, call.params),
            f"{call.op.name} cannot read weight {weight} as it is stored",
        )
    if call.op is Op.CONV2D and weights and weights[0] is not None:
        _need(weights[0].kind == "taps", "CONV2D needs its weight stored by taps")
        weights[0] = weights[0]._replace(kind="f32")
    return Operands(
        tuple(_shape(plan, at) for at in call.inputs),
        tuple(_shape(plan, at) for at in call.outputs),
        tuple(weights),
        call.params,
        plan.kv,
    )


def _shape(plan: Plan, at: int) -> Shape | None:
    if at == -1:
        return None
    _need(0 <= at < len(plan.buffers), f"there is no buffer {at}")
    buffer = plan.buffers[at]
    return Shape(buffer.rows, buffer.cols, DTYPE_NAMES[buffer.dtype], buffer.dynamic)


def _weight_shape(plan: Plan, at: int) -> WeightShape | None:
    if at == -1:
        return None
    _need(0 <= at < len(plan.weights), f"there is no weight {at}")
    weight = plan.weights[at]
    return WeightShape(weight.rows, weight.cols, KIND_NAMES[weight.kind])


def _check_lifetimes(plan: Plan, program: PlanProgram) -> None:
    """Check order of writes and reads, and that no two live buffers share a byte of the arena."""
    last = _last_uses(program)
    live = _LiveBytes(plan.buffers)
    for port in program.ports:
        if port.direction is Direction.INPUT:
            live.add(port.buffer)
    for at, call in enumerate(program.calls):
        for buffer in call.inputs:
            _need(buffer == -1 or buffer in live.held, f"buffer {buffer} is read before written")
        dying = {b for b in (*call.inputs, *call.outputs) if b >= 0 and last[b] == at}
        replaced = _replaced(plan, call, dying)
        live.drop(replaced)
        for buffer in call.outputs:
            live.add(buffer)
        live.drop(dying - replaced)
    for port in program.ports:
        if port.direction is Direction.OUTPUT:
            _need(port.buffer in live.held, f"output {port.role!r} is never written")


def _replaced(plan: Plan, call: PlanCall, dying: set[int]) -> set[int]:
    """Return the operands, read here for the last time, that the result may and does replace."""
    taken = {call.inputs[slot] for slot in IN_PLACE.get(call.op, ()) if slot < len(call.inputs)}
    result = plan.buffers[call.outputs[0]] if call.outputs and taken else None
    return {
        at for at in taken & dying if result is not None and _same_bytes(plan.buffers[at], result)
    }


def _same_bytes(some: PlanBuffer, other: PlanBuffer) -> bool:
    return (some.offset, some.length) == (other.offset, other.length)


def _last_uses(program: PlanProgram) -> dict[int, int]:
    last: dict[int, int] = {}
    for at, call in enumerate(program.calls):
        last.update(dict.fromkeys((*call.inputs, *call.outputs), at))
    for port in program.ports:
        if port.direction is Direction.OUTPUT:
            last[port.buffer] = len(program.calls)
    return last


class _LiveBytes:
    """Intervals of the arena that hold a value."""

    def __init__(self, buffers: tuple[PlanBuffer, ...]) -> None:
        self._buffers = buffers
        self._spans: list[tuple[int, int]] = []
        self._written: set[int] = set()
        self.held: set[int] = set()

    def add(self, at: int) -> None:
        """Start the life of buffer `at`; it must touch no other live one."""
        _need(at not in self._written, f"buffer {at} is written twice")
        start = self._buffers[at].offset
        end = start + self._buffers[at].length
        place = bisect_left(self._spans, (start, end))
        below = self._spans[place - 1][1] if place else 0
        above = self._spans[place][0] if place < len(self._spans) else end
        _need(below <= start and end <= above, f"buffer {at} overlaps a live buffer")
        insort(self._spans, (start, end))
        self._written.add(at)
        self.held.add(at)

    def drop(self, dead: set[int]) -> None:
        """End the lives of buffers."""
        for at in dead:
            buffer = self._buffers[at]
            self._spans.remove((buffer.offset, buffer.offset + buffer.length))
        self.held -= dead
