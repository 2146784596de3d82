"""Byte layout of a plan, shared by the compiler, the device and the C runtime.

A plan is little endian, without padding between its tables:

    header | sections | weights | buffers | programs | ports | calls | operands (i32)

The C structs of the runtime are rendered from these records; a test compiles a probe and compares
sizes and offsets. Numbers and layouts never change under one `ABI_VERSION`.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from compiler.contract.neurons import columns_lengths, consecutive, up_rows_lengths

MAGIC: Final = b"SFPLAN01"
ABI_VERSION: Final = 1
ALIGNMENT: Final = 64
NAME_BYTES: Final = 32
GROUP: Final = 32
PANEL: Final = 16

MAX_PLAN_BYTES: Final = 8 * 1024 * 1024
MAX_SECTIONS: Final = 16384
MAX_WEIGHTS: Final = 65536
MAX_BUFFERS: Final = 16384
MAX_PROGRAMS: Final = 16
MAX_PORTS: Final = 256
MAX_CALLS: Final = 16384
MAX_OPERANDS: Final = 262144
MAX_TOKENS: Final = 4096
MAX_ARENA_BYTES: Final = 1 << 28
MAX_KV_BYTES: Final = 1 << 30
MAX_CONTEXT_BYTES: Final = (1 << 30) + (1 << 28)
MAX_SECTION_BYTES: Final = 1 << 32


class DType(IntEnum):
    """Element types of buffers."""

    F32 = 0
    I32 = 1
    U8 = 2


class Kind(IntEnum):
    """Storage of weights."""

    W4 = 0
    """Panel 16: codes, then scales, then row scales, each at a multiple of ALIGNMENT."""
    F32 = 1
    """(rows, cols) f32, row-major."""
    I32 = 2
    """(rows, cols) i32, row-major."""
    F32_TAPS = 3
    """(rows, cols) f32 stored as [rows / PANEL][cols][PANEL], zero padded: windows of CONV2D."""
    W4_TILES = 4
    """Live tiles of W4 only, see `compiler.contract.tiles`; its bytes depend on their number."""
    I8_ROWS = 5
    """Matrices of routers, EMBED and LINEAR_F32: (rows, cols) i8 codes, row-major, then (rows) f32
    steps at a multiple of ALIGNMENT; the value is `float(code) * step`."""
    I16_ROWS = 6
    """The same with i16 codes, of routers alone."""
    W4_CSR = 7
    """Elements of W4 that are not zero, by row; this and what follows: `contract.elements`."""
    W4_COO = 8
    """Elements of W4 that are not zero, each with its row."""
    W4_ELL = 9
    """Blocks of 32 x 4 of W4, equally many per 32 rows."""
    W8 = 10
    """Panel 16: codes u8, then row steps f32, then row zeros u8, each at a multiple of ALIGNMENT;
    the value is `(code - zero) * step`."""
    W4_NM = 11
    """W4 of which every panel keeps 8 of 16 columns: codes, scales, row scales, index; see
    `compiler.emitters.nm`."""
    W4_UP_ROWS = 12
    """Gate rows in panels, up rows one by one; this and what follows: `contract.neurons`."""
    W4_COLUMNS = 13
    """Columns of W4 one by one."""


class KvKind(IntEnum):
    """Storage of the key/value cache."""

    F32 = 0
    """(layers, 2, heads, capacity, head_dim): per layer keys, then values."""
    I8 = 1
    """A row and key head is int8 codes and an f32 scale, `x = code * scale`, amax / 127. First all
    scales (layers, 2, heads, capacity), then all codes (layers, 2, heads, capacity, head_dim)."""


class Direction(IntEnum):
    """Whether the caller fills a port or reads it."""

    INPUT = 0
    OUTPUT = 1


class Status(IntEnum):
    """What a native call returns."""

    OK = 0
    BAD_PLAN = 1
    UNSUPPORTED_OP = 2
    TOO_SMALL = 3
    BAD_ARGUMENT = 4
    TOO_MANY_TOKENS = 5
    CONTEXT_FULL = 6
    BAD_TOKEN = 7
    BAD_POSITION = 8
    BAD_INDEX = 9
    NOT_FINITE = 10
    CONTEXT_LOST = 11
    EXPERT_ABSENT = 12


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a record: `count` elements of a `struct` code."""

    name: str
    code: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Record:
    """A packed record whose natural C layout has no padding."""

    name: str
    fields: tuple[Field, ...]

    @property
    def layout(self) -> struct.Struct:
        """The little-endian `struct` of the record."""
        parts = (f"{f.count}{f.code}" if f.count > 1 else f.code for f in self.fields)
        return struct.Struct("<" + "".join(parts))


def _u32(*names: str) -> tuple[Field, ...]:
    return tuple(Field(name, "I") for name in names)


HEADER: Final = Record(
    "sf_header",
    (
        Field("magic", "s", 8),
        *_u32("abi", "header_bytes"),
        Field("total_bytes", "Q"),
        *_u32("sections", "weights", "buffers", "programs", "ports", "calls", "operands"),
        *_u32("max_tokens", "kv_layers", "kv_heads", "kv_head_dim", "kv_capacity"),
        Field("arena_bytes", "Q"),
        *_u32("kv_kind", "reserved"),
    ),
)
SECTION: Final = Record("sf_section_record", (Field("name", "s", NAME_BYTES), Field("bytes", "Q")))
WEIGHT: Final = Record(
    "sf_weight_record",
    (*_u32("kind", "section", "rows", "cols"), Field("offset", "Q"), Field("bytes", "Q")),
)
BUFFER: Final = Record(
    "sf_buffer_record",
    (*_u32("dtype", "dynamic", "rows", "cols"), Field("offset", "Q"), Field("bytes", "Q")),
)
PROGRAM: Final = Record(
    "sf_program_record",
    (Field("name", "s", NAME_BYTES), *_u32("first_call", "calls", "first_port", "ports")),
)
PORT: Final = Record(
    "sf_port_record", (Field("role", "s", NAME_BYTES), *_u32("direction", "buffer"))
)
CALL: Final = Record(
    "sf_call_record",
    (
        *(Field(name, "H") for name in ("op", "inputs", "outputs", "weights")),
        *_u32("first_operand", "reserved"),
        Field("params", "I", 8),
    ),
)
RECORDS: Final = (HEADER, SECTION, WEIGHT, BUFFER, PROGRAM, PORT, CALL)

DTYPE_NAMES: Final = {DType.F32: "f32", DType.I32: "i32", DType.U8: "u8"}
DTYPE_BYTES: Final = {DType.F32: 4, DType.I32: 4, DType.U8: 1}
KIND_NAMES: Final = {
    Kind.W4: "w4",
    Kind.F32: "f32",
    Kind.I32: "i32",
    Kind.F32_TAPS: "taps",
    Kind.W4_TILES: "w4",
    Kind.I8_ROWS: "i8",
    Kind.I16_ROWS: "i16",
    Kind.W4_CSR: "w4",
    Kind.W4_COO: "w4",
    Kind.W4_ELL: "w4",
    Kind.W4_UP_ROWS: "w4",
    Kind.W4_COLUMNS: "w4",
    Kind.W8: "w8",
    Kind.W4_NM: "w4",
}
CODE_BYTES: Final = {Kind.I8_ROWS: 1, Kind.I16_ROWS: 2}


def align(value: int, to: int = ALIGNMENT) -> int:
    """Return `value` rounded up to a multiple of `to`."""
    return -(-value // to) * to


def weight_parts(kind: Kind, rows: int, cols: int) -> tuple[tuple[int, int], ...]:
    """Return (offset, length) in bytes of each stored array of a weight, relative to its start.

    W4 has three: codes, scales, row scales; W4_NM an index besides. W8 has three: codes, row steps,
    row zeros. Rows of codes have two, codes and steps. Weights of single neurons have what
    `contract.neurons` says; others one.
    """
    if kind is Kind.W4:
        panels, groups = -(-rows // PANEL), -(-cols // GROUP)
        codes, scales = panels * groups * PANEL * GROUP // 2, panels * groups * PANEL
        at_scales = align(codes)
        return (
            (0, codes),
            (at_scales, scales),
            (at_scales + align(scales), panels * PANEL * 4),
        )
    if kind is Kind.W4_UP_ROWS:
        return consecutive(up_rows_lengths(rows, cols))
    if kind is Kind.W4_COLUMNS:
        return consecutive(columns_lengths(rows, cols))
    if kind is Kind.W4_NM:
        panels, groups = -(-rows // PANEL), -(-cols // GROUP)
        halves, scales = panels * groups * PANEL * GROUP // 4, align(panels * groups * PANEL)
        at_rows = halves + scales
        return (
            (0, halves),
            (halves, panels * groups * PANEL),
            (at_rows, panels * PANEL * 4),
            (at_rows + panels * PANEL * 4, panels * groups * 8),
        )
    if kind is Kind.W8:
        panels = -(-rows // PANEL)
        codes, steps = panels * PANEL * align(cols, GROUP), panels * PANEL * 4
        return ((0, codes), (codes, steps), (codes + align(steps), panels * PANEL))
    if kind in CODE_BYTES:
        codes = rows * cols * CODE_BYTES[kind]
        return ((0, codes), (align(codes), rows * 4))
    if kind is Kind.F32_TAPS:
        return ((0, cols * align(rows, PANEL) * 4),)
    return ((0, rows * cols * 4),)


def weight_bytes(kind: Kind, rows: int, cols: int) -> int:
    """Return how many bytes a weight takes from its first array to the end of its last."""
    offset, length = weight_parts(kind, rows, cols)[-1]
    return offset + length
