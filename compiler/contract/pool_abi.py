"""The C structs and numbers of expert pools; `native_abi` renders them, `expert_pool` uses them."""

import ctypes
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final

TAG_BLOCK: Final = 1024
"""Bytes of a block of the keyed tag; see tag.c.in."""
TAG_WORDS: Final = TAG_BLOCK // 4 + 8
TAG_KEY_BYTES: Final = 4 * TAG_WORDS + 16
"""Bytes of the key, drawn by the host for each pool."""
LEAST_RUN_BYTES: Final = 4096
MOST_RUN_BYTES: Final = 1 << 29
COUNTERS: Final = (
    "steps",
    "hits",
    "hidden",
    "late",
    "misses",
    "timeouts",
    "ahead",
    "unused",
    "refused",
    "dropped",
    "evictions",
    "overshot",
    "failed",
    "corrupt",
    "loaded_bytes",
    "stall_ns",
    "moved",
    "fresh",
    "returned",
    "asked_bytes",
    "given_bytes",
    "free_bytes",
    "committed_bytes",
    "predicted",
    "foreseen",
    "chosen",
    "cached",
    "read_ns",
)
"""Of `SfPoolCounts`; `ExpertPool.counts` says what each one is."""
HEAT_ONE: Final = 1 << 16
"""Heat of an expert that every step uses."""


NO_GROUP: Final = (1 << 32) - 1
PREDICT: Final[Mapping[str, int]] = MappingProxyType(
    {"ahead": 3, "after": 16, "before": 1, "heat": 1, "group": 1}
)
"""Layers that are foreseen, and the weights of what speaks for an expert; see predict.c.in."""


class ExpertState(IntEnum):
    """Where an expert of a pool is."""

    ABSENT = 0
    QUEUED = 1
    """Asked for; no memory is taken yet."""
    LOADING = 2
    PRESENT = 3
    FAILED = 4
    """The last load was cut short or read other bytes than those that were verified."""


class PoolKnob(IntEnum):
    """What a host may turn while a pool is used."""

    PRESSURE = 0
    """Memory pressure of the machine, per mille: above 700 only what a row chose is loaded, above
    900 free memory is given back."""
    RUNS = 1
    """The most runs of memory."""
    PREFETCH = 2
    """0 = nothing is loaded that no row chose."""
    STRICT = 3
    """1 = above a pressure of 700 not even that: the run ends with EXPERT_ABSENT."""
    DELAY_US = 4
    """Fault injection: the I/O thread sleeps so long before each load, microseconds."""
    EVICTION = 5
    """`Eviction`."""
    GROUPS = 6
    """0 = groups of experts are ignored."""
    CACHE_KB = 7
    """Size of the largest cache of the processor; 0 = unknown, and nothing is counted as in it."""


class Eviction(IntEnum):
    """Who goes first."""

    LEAST_STALE = 0
    LRU = 1
    """For comparison."""


class TracePoint(IntEnum):
    """What an event of a trace is about; see trace.c.in."""

    RUN = 0
    """A run, one of its calls or a piece of one."""
    LOAD = 1
    """A run reads an expert that it needs."""
    AHEAD = 2
    """The reading thread reads an expert that is likely to be needed."""
    CHOSEN = 3
    """The reading thread reads an expert that a row chose, while the run is at others."""
    WAIT = 4
    """A run waits for another thread's read of the expert that it needs."""
    STALL = 5
    """A run has nothing to do until it has an expert: loads and waits lie within."""
    EVICT = 6
    """An expert goes; takes no time."""


class TraceOutcome(IntEnum):
    """How it ended, or for a stall why it came about."""

    DONE = 0
    FAILED = 1
    """The read was cut short, or read other bytes than those that were verified."""
    TAKEN = 2
    """A run took the read over from the reading thread, or took its room."""
    LATE = 3
    """A stall: the expert was asked for or being read, but not there yet."""
    MISSED = 4
    """A stall: nobody had asked for the expert."""
    UNUSED = 5
    """An eviction: the expert was read ahead in vain."""


class SfPoolExpert(ctypes.Structure):
    """One expert of a pool: a whole section in a file of its own."""

    _fields_ = (
        ("bytes", ctypes.c_uint64),
        ("file", ctypes.c_uint32),
        ("layer", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("heat", ctypes.c_uint32),
    )


class SfPoolSetup(ctypes.Structure):
    """What `sf_pool_open` takes."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("experts", ctypes.c_uint32),
        ("run_bytes", ctypes.c_uint64),
        ("runs", ctypes.c_uint64),
        ("persistent_bytes", ctypes.c_uint64),
        ("expert", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
    )


class SfPoolCounts(ctypes.Structure):
    """What a pool counted since it was opened, and what it holds now."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in COUNTERS),
    )


class BuddyStatus(IntEnum):
    """What the calls of a buddy pool return."""

    OK = 0
    NO_ROOM = 1
    """Fewer bytes are free than asked for, or no handle is."""
    SCATTERED = 2
    """Enough bytes are free, but not in one piece."""
    HIDDEN = 3
    """It is slid over itself: not readable until that is done."""
    DONE = 4
    """Nothing can go lower."""
    BAD = 5
    """The arguments make no sense."""


BUDDY_COUNTERS: Final = (
    "allocations",
    "splits",
    "merges",
    "moves",
    "slides",
    "moved_bytes",
    "asked_bytes",
    "given_bytes",
    "free_bytes",
    "largest_bytes",
)
"""Of `SfBuddyCounts`; `BuddyPool.counts` says what each one is."""


class SfBuddyCounts(ctypes.Structure):
    """What a buddy pool counted, and what it holds now."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in BUDDY_COUNTERS),
    )
