"""The C structs of the runtime's calls, as ctypes sees them.

`C_STRUCTS` is the one description: the compiler renders the C declarations from it, the loader uses
the classes, and a test compares sizes and offsets with what the C compiler made of them.
"""

import ctypes
from dataclasses import dataclass
from typing import Final

from compiler.contract.pool_abi import SfBuddyCounts, SfPoolCounts, SfPoolExpert, SfPoolSetup


class SfSection(ctypes.Structure):
    """One weight section in memory, 64-byte aligned."""

    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64))


class SfSizeReport(ctypes.Structure):
    """What `sf_sizes` answers; `struct_bytes` is filled by the caller."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("sections", ctypes.c_uint32),
        ("context_bytes", ctypes.c_uint64),
        ("arena_bytes", ctypes.c_uint64),
    )


class SfSetup(ctypes.Structure):
    """What `sf_init` takes."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("sections", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("context_bytes", ctypes.c_uint64),
        ("arena", ctypes.c_void_p),
        ("arena_bytes", ctypes.c_uint64),
        ("plan", ctypes.c_void_p),
        ("plan_bytes", ctypes.c_uint64),
        ("section", ctypes.c_void_p),
    )


class SfArgs(ctypes.Structure):
    """What `sf_run` takes: T; and what it says: where it failed, which policy it followed."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("tokens", ctypes.c_uint32),
        ("failed_call", ctypes.c_uint32),
        ("epoch", ctypes.c_uint32),
    )


class SfMeter(ctypes.Structure):
    """What the calls of one cell took, in ticks of the machine's clock, and how many they were."""

    _fields_ = (("ticks", ctypes.c_uint64), ("runs", ctypes.c_uint64))


class SfPolicy(ctypes.Structure):
    """One published policy table; a run says its epoch. `meters` may be NULL."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("epoch", ctypes.c_uint32),
        ("cells", ctypes.c_uint64),
        ("variants", ctypes.c_void_p),
        ("meters", ctypes.c_void_p),
    )


class SfSteering(ctypes.Structure):
    """What routers go by besides their own logits; see `compiler.contract.steering`.

    `resident` and `bias` have one entry per weight of the plan, read where an expert's first weight
    is; either may be NULL.
    """

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("epoch", ctypes.c_uint32),
        ("weights", ctypes.c_uint32),
        ("may_load", ctypes.c_uint32),
        ("protect", ctypes.c_uint32),
        ("max_k", ctypes.c_uint32),
        ("pull", ctypes.c_float),
        ("margin", ctypes.c_float),
        ("modality", ctypes.c_float),
        ("reserved", ctypes.c_uint32),
        ("resident", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class SfSteered(ctypes.Structure):
    """What steering did; see `compiler.contract.steering.Counts`."""

    _fields_ = (
        ("rows", ctypes.c_uint64),
        ("chosen", ctypes.c_uint64),
        ("narrowed", ctypes.c_uint64),
        ("substituted", ctypes.c_uint64),
        ("missing", ctypes.c_uint64),
    )


class SfEvent(ctypes.Structure):
    """One event of a trace; see trace.c.in."""

    _fields_ = (
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("thread", ctypes.c_uint64),
        ("program", ctypes.c_uint32),
        ("call", ctypes.c_uint32),
        ("piece", ctypes.c_uint32),
        ("point", ctypes.c_uint32),
    )


class SfTrace(ctypes.Structure):
    """A ring of events that the caller lends; see trace.c.in."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("next", ctypes.c_uint64),
        ("started", ctypes.c_uint64),
        ("stopped", ctypes.c_uint64),
        ("events", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class CField:
    """One field of a struct, in C."""

    name: str
    c_type: str


@dataclass(frozen=True, slots=True)
class CStruct:
    """One struct, in C and in ctypes."""

    name: str
    ctype: type[ctypes.Structure]
    fields: tuple[CField, ...]


_POINTERS: Final = {
    "data": "const uint8_t *",
    "context": "void *",
    "arena": "uint8_t *",
    "plan": "const uint8_t *",
    "section": "const sf_section *",
    "variants": "const uint8_t *",
    "meters": "sf_meter *",
    "events": "sf_event *",
    "expert": "const sf_pool_expert *",
    "key": "const uint8_t *",
    "resident": "const uint8_t *",
    "bias": "const float *",
}


def _c_type(name: str, kind: type) -> str:
    if kind is ctypes.c_void_p:
        return _POINTERS[name]
    return "float" if kind is ctypes.c_float else f"uint{ctypes.sizeof(kind) * 8}_t"


def _struct(name: str, ctype: type[ctypes.Structure]) -> CStruct:
    fields = tuple(CField(field[0], _c_type(field[0], field[1])) for field in ctype._fields_)
    return CStruct(name, ctype, fields)


C_STRUCTS: Final = (
    _struct("sf_section", SfSection),
    _struct("sf_size_report", SfSizeReport),
    _struct("sf_setup", SfSetup),
    _struct("sf_args", SfArgs),
    _struct("sf_meter", SfMeter),
    _struct("sf_policy", SfPolicy),
    _struct("sf_steering", SfSteering),
    _struct("sf_steered", SfSteered),
    _struct("sf_event", SfEvent),
    _struct("sf_trace", SfTrace),
    _struct("sf_pool_expert", SfPoolExpert),
    _struct("sf_pool_setup", SfPoolSetup),
    _struct("sf_pool_counts", SfPoolCounts),
    _struct("sf_buddy_counts", SfBuddyCounts),
)
