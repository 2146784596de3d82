"""Emit a module: plan bytes, weight sections, and what each range of a section is.

The same module and packed weights give the same bytes, for every target: only the kernels differ.
Buffer and weight ids of the module are the positions of the plan's tables.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from compiler.contract.elements import ELL_ROWS, SMALL_KINDS, stored_parts
from compiler.contract.operand_rules import RULES
from compiler.contract.operations import MAX_PARAMS, PARAMS, Op
from compiler.contract.plan import Plan, PlanError, parse_plan
from compiler.contract.plan_format import (
    ABI_VERSION,
    BUFFER,
    CALL,
    CODE_BYTES,
    DTYPE_NAMES,
    HEADER,
    MAGIC,
    PANEL,
    PORT,
    PROGRAM,
    SECTION,
    WEIGHT,
    Direction,
    Kind,
    align,
    weight_parts,
)
from compiler.contract.planes import Plane
from compiler.contract.storage_rules import NEURON_KINDS
from compiler.contract.tiles import live_tiles, tile_parts
from compiler.emitters.elements import pack_elements, unpack_elements
from compiler.emitters.memory import MemoryPlan, buffer_bytes, plan_memory
from compiler.emitters.neurons import pack_neurons, unpack_neurons
from compiler.emitters.nm import pack_nm, unpack_nm
from compiler.emitters.tiles import pack_tiles, unpack_tiles
from compiler.kernels.program import (
    ABSENT,
    COLUMNS,
    COO,
    CSR,
    ELL,
    NM,
    TILES,
    UP_ROWS,
    Call,
    Module,
    ProgramError,
    Weight,
    call_params,
    validate_module,
    weight_shape,
)
from compiler.quant.row_codes import I8, I16, find_codes
from compiler.quant.w4 import PackedW4
from compiler.quant.w8 import find_w8, pack_w8

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_PLANE_KINDS: Mapping[Kind, tuple[str, ...]] = {
    Kind.W4: ("codes4", "scales8", "f32"),
    Kind.F32: ("f32",),
    Kind.I32: ("raw",),
    Kind.F32_TAPS: ("f32",),
    Kind.W4_TILES: ("codes4", "scales8", "f32", "raw", "raw"),
    Kind.I8_ROWS: ("scales8", "f32"),
    Kind.I16_ROWS: ("raw", "f32"),
    Kind.W4_CSR: ("f32", "raw", "raw"),
    Kind.W4_COO: ("f32", "raw", "raw"),
    Kind.W4_ELL: ("f32", "codes4", "scales8", "raw"),
    Kind.W4_UP_ROWS: ("codes4", "scales8", "raw", "f32"),
    Kind.W4_COLUMNS: ("codes4", "scales8", "f32"),
    Kind.W8: ("scales8", "f32", "scales8"),
    Kind.W4_NM: ("codes4", "scales8", "f32", "raw"),
}
_ROW_KINDS: Mapping[str, Kind] = {I8: Kind.I8_ROWS, I16: Kind.I16_ROWS}
_NEURON_LAYOUTS: Mapping[str, Kind] = {UP_ROWS: Kind.W4_UP_ROWS, COLUMNS: Kind.W4_COLUMNS}
_SMALL_LAYOUTS: Mapping[str, Kind] = {CSR: Kind.W4_CSR, COO: Kind.W4_COO, ELL: Kind.W4_ELL}


@dataclass(frozen=True, slots=True)
class EmittedPlan:
    """What a module became.

    Attributes:
        plan_bytes: The tape with its tables.
        plan: What `compiler.contract.plan.parse_plan` reads from these bytes.
        sections: Weight-bearing sections by name.
        planes: For each section, ranges that cover it exactly, in order.
        memory: Where the arena's buffers lie, and the bound of its size.
    """

    plan_bytes: bytes
    plan: Plan
    sections: dict[str, bytes]
    planes: dict[str, tuple[Plane, ...]]
    memory: MemoryPlan


@dataclass(frozen=True, slots=True)
class _Placed:
    kind: Kind
    section: int
    offset: int
    length: int


def emit_plan(module: Module, *, weights_packed: Mapping[int, PackedW4]) -> EmittedPlan:
    """Return plan bytes, sections and planes of a module.

    Args:
        module: Validated here again, because bytes outlive mistakes.
        weights_packed: Packed form of every weight of kind `w4`, by id.

    Raises:
        ProgramError: The module is invalid or a packed weight is missing or of another shape.
    """
    validate_module(module)
    kinds = _storage_kinds(module)
    names = sorted({weight.section for weight in module.weights}, key=_section_order)
    sections: dict[str, bytes] = {}
    planes: dict[str, tuple[Plane, ...]] = {}
    placed: dict[int, _Placed] = {}
    for number, name in enumerate(names):
        writer = _SectionWriter()
        for weight in module.weights:
            if weight.section == name:
                kind, arrays = _stored(kinds[weight.id], weight, weights_packed)
                at, length = writer.add(kind, weight, arrays)
                placed[weight.id] = _Placed(kind, number, at, length)
        sections[name] = bytes(writer.data)
        planes[name] = tuple(writer.planes)
    memory = plan_memory(module, {number: at.length for number, at in placed.items()})
    plan_bytes = _encode(module, placed, sections, memory)
    return EmittedPlan(plan_bytes, _checked(plan_bytes), sections, planes, memory)


def read_packed(plan: Plan, sections: Mapping[str, bytes]) -> dict[int, PackedW4]:
    """Return the packed W4 weights that sections hold, by weight id; the way back from bytes.

    Used to freeze the scales of a new version against those of a released one.
    """
    found: dict[int, PackedW4] = {}
    for number, weight in enumerate(plan.weights):
        live = live_tiles(weight.rows, weight.cols, weight.length)
        if weight.kind is Kind.W4_TILES and live is not None:
            data = sections[plan.sections[weight.section].name]
            stored = data[weight.offset : weight.offset + weight.length]
            found[number] = unpack_tiles(weight.rows, weight.cols, stored, live)
        if weight.kind in SMALL_KINDS:
            data = sections[plan.sections[weight.section].name]
            stored = data[weight.offset : weight.offset + weight.length]
            found[number] = unpack_elements(weight.kind, weight.rows, weight.cols, stored)
        if weight.kind in NEURON_KINDS:
            data = sections[plan.sections[weight.section].name]
            stored = data[weight.offset : weight.offset + weight.length]
            found[number] = unpack_neurons(weight.kind, weight.rows, weight.cols, stored)
        if weight.kind in (Kind.W4, Kind.W4_NM):
            data = sections[plan.sections[weight.section].name]
            parts = tuple(
                data[weight.offset + at : weight.offset + at + length]
                for at, length in weight_parts(weight.kind, weight.rows, weight.cols)
            )
            if weight.kind is Kind.W4_NM:
                found[number] = unpack_nm(weight.rows, weight.cols, parts)
                continue
            codes, scales, rows = parts
            found[number] = PackedW4(weight.rows, weight.cols, codes, scales, rows)
    return found


def _checked(plan_bytes: bytes) -> Plan:
    try:
        return parse_plan(plan_bytes)
    except PlanError as error:
        raise ProgramError(f"the emitted plan does not verify: {error}") from error


def _section_order(name: str) -> tuple[object, ...]:
    """Sections without numbers first, then by their numbers."""
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", name))
    return (len(numbers), numbers, name)


def _storage_kinds(module: Module) -> dict[int, Kind]:
    """Return how each weight is stored; windows of CONV2D are stored by taps."""
    kinds = {
        weight.id: _ROW_KINDS.get(weight.layout, Kind[weight.kind.upper()])
        for weight in module.weights
    }
    taps = {
        call.weights[0]
        for program in module.programs
        for call in program.calls
        if call.op is Op.CONV2D
    }
    others = {
        weight
        for program in module.programs
        for call in program.calls
        for weight in call.weights[1 if call.op is Op.CONV2D else 0 :]
    }
    if taps & others:
        raise ProgramError(f"weights {sorted(taps & others)} serve CONV2D and another operation")
    return kinds | dict.fromkeys(taps, Kind.F32_TAPS)


def _stored(
    kind: Kind, weight: Weight, packed: Mapping[int, PackedW4]
) -> tuple[Kind, tuple[bytes, ...]]:
    """Return how a weight is stored in the end, and its arrays."""
    if kind is Kind.W4:
        found = packed.get(weight.id)
        if found is None or (found.n, found.k) != weight_shape(weight)[:2]:
            raise ProgramError(f"weight {weight.id} has no packed form of its shape")
        tiles = pack_tiles(found) if weight.layout == TILES else None
        if tiles is not None:
            return Kind.W4_TILES, tiles
        halves = pack_nm(found) if weight.layout == NM else None
        if halves is not None:
            return Kind.W4_NM, halves
        small = _SMALL_LAYOUTS.get(weight.layout)
        elements = pack_elements(found, small) if small is not None else None
        if small is not None and elements is not None:
            return small, elements
        single = _NEURON_LAYOUTS.get(weight.layout)
        neurons = pack_neurons(found, single) if single is not None else None
        if single is not None and neurons is not None:
            return single, neurons
        return kind, (found.codes, found.scales, found.rows)
    if kind is Kind.W8:
        return kind, pack_w8(find_w8(weight.array))
    if kind in CODE_BYTES:
        return kind, find_codes(weight.array, weight.layout).arrays(weight.layout)
    if kind is Kind.F32_TAPS:
        rows, cols, _ = weight_shape(weight)
        padded = np.zeros((align(rows, PANEL), cols), "<f4")
        padded[:rows] = weight.array
        return kind, (padded.reshape(-1, PANEL, cols).transpose(0, 2, 1).tobytes(),)
    return kind, (weight.array.astype("<i4" if kind is Kind.I32 else "<f4").tobytes(),)


def _parts(
    kind: Kind, rows: int, cols: int, arrays: tuple[bytes, ...]
) -> tuple[tuple[int, int], ...]:
    """Return (offset, length) of each array of a weight; how many are stored, the last one says."""
    last = len(arrays[-1])
    if kind is Kind.W4_TILES:
        return tile_parts(rows, last)
    if kind in SMALL_KINDS:
        unit = {Kind.W4_CSR: 4, Kind.W4_COO: 2, Kind.W4_ELL: 2 * -(-rows // ELL_ROWS)}[kind]
        return stored_parts(kind, rows, last // unit)
    return weight_parts(kind, rows, cols)


class _SectionWriter:
    """Appends arrays, each at an aligned offset, and keeps the planes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.planes: list[Plane] = []

    def add(self, kind: Kind, weight: Weight, arrays: tuple[bytes, ...]) -> tuple[int, int]:
        """Append the arrays of one weight; return its offset and length."""
        rows, cols, _ = weight_shape(weight)
        parts = _parts(kind, rows, cols, arrays)
        start = align(len(self.data))
        for (at, length), plane, array in zip(parts, _PLANE_KINDS[kind], arrays, strict=True):
            if len(array) != length:
                raise ProgramError(f"weight {weight.id}: {len(array)} bytes, expected {length}")
            self._pad(start + at)
            self.planes.append(Plane(plane, start + at, length))
            self.data += array
        return start, len(self.data) - start

    def _pad(self, to: int) -> None:
        gap = to - len(self.data)
        if gap:
            self.planes.append(Plane("raw", len(self.data), gap))
            self.data += bytes(gap)


def _encode(
    module: Module,
    placed: Mapping[int, _Placed],
    sections: Mapping[str, bytes],
    memory: MemoryPlan,
) -> bytes:
    calls = [call for program in module.programs for call in program.calls]
    operands = [_operands(call) for call in calls]
    tables = [
        [SECTION.layout.pack(name.encode(), len(data)) for name, data in sections.items()],
        [_weight_record(weight, placed[weight.id]) for weight in module.weights],
        [
            BUFFER.layout.pack(
                _DTYPES[b.dtype], b.dynamic, b.rows, b.cols, memory.offsets[b.id], buffer_bytes(b)
            )
            for b in module.buffers
        ],
        _program_records(module),
        _port_records(module),
        _call_records(calls, operands),
    ]
    flat = [operand for group in operands for part in group for operand in part]
    body = b"".join(row for table in tables for row in table)
    body += struct.pack(f"<{len(flat)}i", *flat)
    kv = module.kv
    header = HEADER.layout.pack(
        MAGIC,
        ABI_VERSION,
        HEADER.layout.size,
        HEADER.layout.size + len(body),
        *(len(table) for table in tables),
        len(flat),
        module.max_tokens,
        *((kv.layers, kv.heads, kv.head_dim, kv.capacity) if kv else (0, 0, 0, 0)),
        memory.arena_bytes,
        kv.kind if kv else 0,
        0,
    )
    return header + body


def _weight_record(weight: Weight, at: _Placed) -> bytes:
    rows, cols, _ = weight_shape(weight)
    return WEIGHT.layout.pack(at.kind, at.section, rows, cols, at.offset, at.length)


def _program_records(module: Module) -> list[bytes]:
    records: list[bytes] = []
    call = port = 0
    for program in module.programs:
        ports = len(program.inputs) + len(program.outputs)
        records.append(
            PROGRAM.layout.pack(program.name.encode(), call, len(program.calls), port, ports)
        )
        call, port = call + len(program.calls), port + ports
    return records


def _port_records(module: Module) -> list[bytes]:
    records: list[bytes] = []
    for program in module.programs:
        for direction, ports in (
            (Direction.INPUT, program.inputs),
            (Direction.OUTPUT, program.outputs),
        ):
            records += [
                PORT.layout.pack(role.encode(), direction, ports[role]) for role in sorted(ports)
            ]
    return records


def _operands(call: Call) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return inputs, outputs and weights, absent trailing ones written out."""
    rule = RULES[call.op]
    inputs = call.inputs + (ABSENT,) * (len(rule.inputs) - len(call.inputs))
    weights = call.weights + (ABSENT,) * (len(rule.weights) - len(call.weights))
    return inputs, call.outputs, weights


def _call_records(
    calls: list[Call], operands: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
) -> list[bytes]:
    records: list[bytes] = []
    first = 0
    for call, group in zip(calls, operands, strict=True):
        counts = [len(part) for part in group]
        params = call_params(call)
        slots = [
            struct.unpack("<I", struct.pack("<f" if p.is_float else "<i", params[p.name]))[0]
            for p in PARAMS[call.op]
        ]
        slots += [0] * (MAX_PARAMS - len(slots))
        records.append(CALL.layout.pack(call.op, *counts, first, 0, *slots))
        first += sum(counts)
    return records
