"""A pool over memory that must be contiguous: a carve-out, where page tables cannot be moved.

    BuddyPool.put(bytes) -> handle -(place)-> offset;  step() at step boundaries compacts, in slices

The native allocator is buddy.c.in. `ExpertPool` and this one answer the same questions in the same
terms (`fragmentation`, `dump`, `restore`, `counts`); what differs is that a run of pages serves any
slot, while here a request may have to wait until enough is moved. Standard library only.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from compiler.contract.native_errors import NativeError, UnsupportedPlanError
from compiler.contract.native_library import KernelLibrary
from compiler.contract.native_memory import Memory
from compiler.contract.pool_abi import BUDDY_COUNTERS, BuddyStatus, SfBuddyCounts
from compiler.contract.pool_plan import external, internal

_U32, _U64, _P, _I32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int32
_CALLS: Final[Mapping[str, tuple[type, tuple[type, ...]]]] = {
    "bytes": (_U64, (_U32, _U32)),
    "open": (_I32, (_P, _U64, _P, _U64, _U32, _U32)),
    "alloc": (_I32, (_P, _U64, _P)),
    "free": (_I32, (_P, _U32)),
    "place": (_I32, (_P, _U32, _P, _P)),
    "pin": (_I32, (_P, _U32, _U32)),
    "compact": (_I32, (_P, _U64, _U32, _P)),
    "read_counts": (_I32, (_P, _P)),
    "dump": (_I32, (_P, _P, _U64, _P)),
    "restore": (_I32, (_P, _P, _U64)),
}
SLICE_BYTES: Final = 4 << 20
"""Copied between two steps: 2 ms at 2 GB/s, the slowest memory that we know of."""
DEFRAG_ABOVE: Final = 0.3
"""External fragmentation from which a pending request that does not fit has memory moved."""
ALARM_ABOVE: Final = 0.4


class NoRoomError(NativeError):
    """Fewer bytes are free than asked for: evict something."""

    code: ClassVar[str] = "contract.native.no_room"


class ScatteredError(NativeError):
    """Enough bytes are free, but not in one piece: compact, then ask again."""

    code: ClassVar[str] = "contract.native.scattered"


class HiddenError(NativeError):
    """The allocation is being slid over itself: it can be read when that is done."""

    code: ClassVar[str] = "contract.native.hidden"


_ERRORS: Final[Mapping[BuddyStatus, tuple[type[NativeError], str]]] = {
    BuddyStatus.NO_ROOM: (NoRoomError, "fewer bytes are free than asked for"),
    BuddyStatus.SCATTERED: (ScatteredError, "enough bytes are free, but not in one piece"),
    BuddyStatus.HIDDEN: (HiddenError, "the allocation is being moved"),
    BuddyStatus.BAD: (NativeError, "the buddy pool refuses an argument"),
}


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Shares of 1; see `pool_plan.external` and `internal`."""

    external: float
    internal: float

    @property
    def is_alarming(self) -> bool:
        """Whether it is worth a report."""
        return self.external > ALARM_ABOVE


class BuddyPool:
    """One pool; for one thread at a time."""

    def __init__(
        self,
        library: KernelLibrary,
        *,
        block_bytes: int,
        blocks: int,
        handles: int,
        base: int | None = None,
        keeps: object = None,
    ) -> None:
        """Open an empty pool.

        Args:
            library: Kernels with the native allocator.
            block_bytes: A power of two of at least 64; what each allocation is rounded up to.
            blocks: How many there are.
            handles: The most allocations.
            base: Address of the memory that is managed; None = its owner copies by itself.
            keeps: Held as long as the pool: who owns that memory.

        Raises:
            UnsupportedPlanError: The kernels were built before there was an allocator.
            NativeError: The numbers make no pool.
        """
        bound = {name: library.bind(f"sf_buddy_{name}", *call) for name, call in _CALLS.items()}
        self._calls = {name: call for name, call in bound.items() if call is not None}
        if len(self._calls) < len(_CALLS):
            raise UnsupportedPlanError("these kernels have no buddy pools: build them again")
        self._held = (library, keeps)
        size = int(self._calls["bytes"](blocks, handles))
        self._memory = Memory(max(1, size))
        self._at = self._memory.address
        self._require(self._calls["open"](self._at, size, base, block_bytes, blocks, handles))
        self.block_bytes: Final = block_bytes

    def put(self, size: int) -> int:
        """Allocate `size` bytes; return the handle.

        Raises:
            NoRoomError: Fewer are free.
            ScatteredError: They are not in one piece: call `step`, or `make_room`.
            NativeError: The size is not above 0.
        """
        handle = ctypes.c_uint32()
        self._require(self._calls["alloc"](self._at, size, ctypes.addressof(handle)))
        return handle.value

    def make_room(self, size: int) -> int:
        """Allocate, moving what is in the way however long it takes; for a start, not for a run.

        Raises:
            NoRoomError: Fewer bytes are free.
            ScatteredError: Pinned allocations are in the way.
        """
        while True:
            try:
                return self.put(size)
            except ScatteredError:
                if self.step(SLICE_BYTES) is None:
                    return self.put(size)

    def drop(self, handle: int) -> None:
        """Free an allocation.

        Raises:
            NativeError: There is none, or it is pinned.
        """
        self._require(self._calls["free"](self._at, handle))

    def place(self, handle: int) -> tuple[int, int]:
        """Return offset and bytes of an allocation; they hold until the next `step`.

        Raises:
            HiddenError: It cannot be read just now.
            NativeError: There is none.
        """
        offset, size = ctypes.c_uint64(), ctypes.c_uint64()
        found = (ctypes.addressof(offset), ctypes.addressof(size))
        self._require(self._calls["place"](self._at, handle, *found))
        return offset.value, size.value

    def pin(self, handle: int, *, pinned: bool = True) -> None:
        """Keep an allocation where it is, or let it move again.

        Raises:
            HiddenError: It is on its way.
            NativeError: There is none, or it is not pinned.
        """
        self._require(self._calls["pin"](self._at, handle, pinned))

    def step(self, budget_bytes: int = SLICE_BYTES, *, hide: bool = True) -> int | None:
        """Move allocations down, copying at most `budget_bytes`, rounded to blocks.

        Args:
            budget_bytes: The most that is copied now.
            hide: Whether an allocation may be slid over itself, unreadable meanwhile.

        Returns:
            Bytes copied; None if nothing can go lower.
        """
        moved = ctypes.c_uint64()
        budget, at = max(0, budget_bytes), ctypes.addressof(moved)
        status = self._calls["compact"](self._at, budget, hide, at)
        if status == BuddyStatus.DONE:
            return moved.value or None
        self._require(status)
        return moved.value

    def fragmentation(self) -> Fragmentation:
        """Return how scattered what is free is, and how much of what is given nobody asked for."""
        found = self.counts()
        return Fragmentation(
            external(found["largest_bytes"], found["free_bytes"]),
            internal(found["asked_bytes"], found["given_bytes"]),
        )

    def counts(self) -> dict[str, int]:
        """Return what was counted and what there is.

        allocations; splits and merges of free blocks; moves begun, slides among them, bytes copied.
        asked, given: bytes allocated, and of their blocks. free, largest: bytes that are free, and
        the longest piece of them.
        """
        counts = SfBuddyCounts(struct_bytes=ctypes.sizeof(SfBuddyCounts))
        self._require(self._calls["read_counts"](self._at, ctypes.addressof(counts)))
        return {name: int(getattr(counts, name)) for name in BUDDY_COUNTERS}

    def dump(self) -> bytes:
        """Return what is allocated where, canonical bytes.

        Raises:
            HiddenError: A move goes on.
        """
        size = ctypes.c_uint64()
        self._require(self._calls["dump"](self._at, None, 0, ctypes.addressof(size)))
        data = ctypes.create_string_buffer(size.value)
        at = ctypes.addressof(data)
        self._require(self._calls["dump"](self._at, at, size, ctypes.addressof(size)))
        return data.raw

    def restore(self, data: bytes) -> None:
        """Have an empty pool of the same shape hold what was dumped.

        Raises:
            NativeError: It is no dump of such a pool.
        """
        words = ctypes.create_string_buffer(data, max(1, len(data)))
        self._require(self._calls["restore"](self._at, ctypes.addressof(words), len(data)))

    @staticmethod
    def _require(status: int) -> None:
        if status:
            kind, message = _ERRORS[BuddyStatus(status)]
            raise kind(message)
