"""What `benchmarks.runtime` compares with: an LRU cache of experts in memory from malloc.

    USE of an expert -(in memory?)-> pointers of its weights
                     -(no)-> free the least recently used until it fits, malloc, pread, set pointers

The kernels, the plan, the files and the budget are the product's; what differs is the memory
manager that one would write first: glibc's allocator, one block per expert, loaded when it is
needed and in the thread that needs it. It is C, as the pool is, so neither pays for Python. A plan
has no way to move a weight, on purpose; the baseline finds the pointers in the plan's own memory by
their values and rewrites them, which nobody but a benchmark may do.
"""

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.loaded_code import loaded_code
from benchmarks.synthetic import CACHE
from compiler.contract.native import NativePlan
from compiler.contract.operations import ExpertEvent
from compiler.contract.pager import C_PAGER
from compiler.contract.steering import Residency

EXPERT_SECTION: Final = "expert."
POINTERS: Final = 3
"""Pointers of a W4 weight: codes, scales of groups, scales of rows."""
CONSTANT_BYTES: Final = 56
"""Size of the runtime's record of a weight, which begins with the pointers."""
SOURCE: Final = """
#include <stdint.h>
#define EXPORT __attribute__((visibility("default")))
typedef struct entry {
  uint64_t *pointer[6];
  int64_t offset[6];
  int64_t bytes, file, tick, weight;
  uint8_t *at;
} entry;
typedef struct cache {
  void *(*malloc)(uint64_t);
  void (*free)(void *);
  int64_t (*pread)(int32_t, void *, uint64_t, int64_t);
  entry *entries;
  int32_t *entry_of;
  uint8_t *resident;
  int64_t n, budget, held, peak, clock, hits, misses;
} cache;

static int32_t make_room(cache *c, int64_t bytes) {
  while (c->held + bytes > c->budget) {
    entry *oldest = 0;
    for (int64_t i = 0; i < c->n; i++) {
      entry *e = &c->entries[i];
      if (e->at && (!oldest || e->tick < oldest->tick)) oldest = e;
    }
    if (!oldest) return 1;
    c->free(oldest->at);
    oldest->at = 0;
    c->resident[oldest->weight] = 0;
    c->held -= oldest->bytes;
  }
  return 0;
}

static int32_t load(cache *c, entry *e) {
  if (make_room(c, e->bytes)) return 1;
  e->at = c->malloc((uint64_t)e->bytes);
  if (!e->at) return 1;
  for (int64_t done = 0; done < e->bytes;) {
    const int64_t n = c->pread((int32_t)e->file, e->at + done, (uint64_t)(e->bytes - done), done);
    if (n <= 0) return 1;
    done += n;
  }
  c->held += e->bytes;
  if (c->held > c->peak) c->peak = c->held;
  c->resident[e->weight] = 1;
  for (int i = 0; i < 6; i++) *e->pointer[i] = (uint64_t)(uintptr_t)(e->at + e->offset[i]);
  return 0;
}

EXPORT int32_t lru_pager(void *user, uint32_t event, uint32_t weight) {
  cache *c = user;
  if (event != USE_EVENT) return 0;
  entry *e = &c->entries[c->entry_of[weight]];
  e->tick = ++c->clock;
  if (e->at) {
    c->hits++;
    return 0;
  }
  c->misses++;
  return load(c, e);
}
"""


class _Entry(ctypes.Structure):
    _fields_ = (
        ("pointer", ctypes.c_uint64 * (2 * POINTERS)),
        ("offset", ctypes.c_int64 * (2 * POINTERS)),
        ("bytes", ctypes.c_int64),
        ("file", ctypes.c_int64),
        ("tick", ctypes.c_int64),
        ("weight", ctypes.c_int64),
        ("at", ctypes.c_uint64),
    )


class _Cache(ctypes.Structure):
    _fields_ = (
        ("malloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("pread", ctypes.c_void_p),
        ("entries", ctypes.c_void_p),
        ("entry_of", ctypes.c_void_p),
        ("resident", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("budget", ctypes.c_int64),
        ("held", ctypes.c_int64),
        ("peak", ctypes.c_int64),
        ("clock", ctypes.c_int64),
        ("hits", ctypes.c_int64),
        ("misses", ctypes.c_int64),
    )


class LruExperts:
    """The cache of one plan; close it before the plan."""

    def __init__(self, plan: NativePlan, sections: Path, budget: int, target: str) -> None:
        """Take over the experts of a plan; `residency` tells a steered router what is in memory.

        Args:
            plan: Loaded, its sections in memory; its experts' pages are given back here.
            sections: Folder of the section files.
            budget: Bytes of experts that may be in memory.
            target: Whom the cache's code is for.
        """
        source = SOURCE.replace("USE_EVENT", str(int(ExpertEvent.USE)))
        self._code = loaded_code(source, target, CACHE)
        self._libc = ctypes.CDLL(None)
        self._plan = plan
        self._files: list[int] = []
        self.residency: Final = Residency(len(plan.plan.weights))
        self._entries, self._entry_of = self._tables(plan, sections)
        names = ("malloc", "free", "pread")
        functions = [ctypes.cast(getattr(self._libc, name), ctypes.c_void_p) for name in names]
        self._cache = _Cache(
            *functions,
            ctypes.addressof(self._entries),
            ctypes.addressof(self._entry_of),
            self.residency.address,
            len(self._entries),
            budget,
        )
        pager = ctypes.cast(self._code.lru_pager, C_PAGER)
        assert plan._library is not None
        assert plan._library.set_pager is not None
        plan._library.set_pager(plan._context, pager, ctypes.addressof(self._cache))

    def counts(self) -> tuple[int, int]:
        """Return hits and misses since the last call."""
        found = int(self._cache.hits), int(self._cache.misses)
        self._cache.hits = self._cache.misses = 0
        return found

    @property
    def peak_bytes(self) -> int:
        """The most bytes of experts held at once."""
        return int(self._cache.peak)

    def close(self) -> None:
        """Free all experts; the plan cannot run them any more."""
        for entry in self._entries:
            if entry.at:
                self._libc.free(ctypes.c_void_p(entry.at))
                entry.at = 0
        for file in self._files:
            os.close(file)

    def _tables(
        self, plan: NativePlan, folder: Path
    ) -> tuple["ctypes.Array[_Entry]", "ctypes.Array[ctypes.c_int32]"]:
        sections = plan.plan.sections
        starts = [int(row.data or 0) for row in plan.weights.table(sections)]
        members: dict[int, list[int]] = {}
        for number, weight in enumerate(plan.plan.weights):
            if sections[weight.section].name.startswith(EXPERT_SECTION):
                members.setdefault(weight.section, []).append(number)
        consts = _constants(plan, starts)
        entries = (_Entry * len(members))()
        entry_of = (ctypes.c_int32 * len(plan.plan.weights))()
        for at, (section, numbers) in enumerate(members.items()):
            entry, base = entries[at], starts[section]
            self._files.append(os.open(folder / sections[section].name, os.O_RDONLY))
            entry.file, entry.bytes = self._files[-1], sections[section].length
            places = [consts + CONSTANT_BYTES * n + 8 * i for n in numbers for i in range(POINTERS)]
            for i, place in enumerate(places):
                entry.pointer[i] = place
                entry.offset[i] = ctypes.c_uint64.from_address(place).value - base
            entry.weight = numbers[0]
            self.residency[numbers[0]] = False
            for number in numbers:
                entry_of[number] = at
            _give_back(base, entry.bytes)
        return entries, entry_of


def _constants(plan: NativePlan, starts: Sequence[int]) -> int:
    """Return where the plan's memory holds the pointers of its first weight, by their values."""
    memory, size = plan._memory, plan.context_bytes // 8 * 8
    words = struct.unpack(f"<{size // 8}Q", memory.view[:size])
    data = [starts[weight.section] + weight.offset for weight in plan.plan.weights]
    step = CONSTANT_BYTES // 8
    for at, word in enumerate(words):
        if word == data[0] and list(words[at : at + step * len(data) : step]) == data:
            return memory.address + 8 * at
    raise AssertionError("the plan's memory holds no table of weights")


def _give_back(address: int, length: int) -> None:
    """Return whole pages to the system: what was loaded with the plan is not the cache's."""
    page = os.sysconf("SC_PAGESIZE")
    first = -(-address // page) * page
    last = (address + length) // page * page
    dont_need = 4
    libc = ctypes.CDLL(None)
    libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), dont_need)
