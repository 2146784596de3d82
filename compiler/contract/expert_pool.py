"""A pool of experts as Python holds it: opened, filled and verified, read ahead by a lent thread.

    library + PoolPlan + files -> ExpertPool -(bring, SHA-256 in the slot, trust)-> ready
    contexts are seated in it (`pooled_weights`); one `ReadAhead` reads what is likely

All decisions while a plan runs are native (residency.c.in, predict.c.in); this module opens, asks
and counts. How to drive a pool by hand, for a measurement:

- with a plan: `plan_pool` it, open a `PooledWeights`, give that to `NativePlan` as its sections;
- with a trace: open an `ExpertPool`, `fill` it, start a `ReadAhead`; then per token `begin_pass`,
  and per layer `choose` its experts, `touch` each, compute, `settle`.

`Eviction.LRU` and `PoolKnob.PREFETCH` 0 switch policies off, no `ReadAhead` means loads on demand,
`PoolKnob.DELAY_US` makes storage slow, `counts` has what is to be reported. Standard library only.
"""

import contextlib
import ctypes
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from compiler.contract.native_errors import NativeError, UnsupportedPlanError
from compiler.contract.native_fork import finalize_here, require_opened_here
from compiler.contract.native_library import KernelLibrary
from compiler.contract.native_memory import huge_bytes_of
from compiler.contract.plan_format import Status
from compiler.contract.pool_abi import (
    COUNTERS,
    NO_GROUP,
    TAG_KEY_BYTES,
    ExpertState,
    PoolKnob,
    SfPoolCounts,
    SfPoolExpert,
    SfPoolSetup,
)

READ_AHEAD: Final = 4
"""Files that the system is told of while a pool is filled."""
_GLANCE_SECONDS: Final = 0.0001
_U32, _U64, _P = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
_CALLS: Final[Mapping[str, tuple[type, tuple[type, ...]]]] = {
    "open": (ctypes.c_int32, (_P, _P)),
    "close": (ctypes.c_int32, (_P,)),
    "extent": (_P, (_P,)),
    "slot": (_P, (_P, _U32)),
    "bring": (ctypes.c_int32, (_P, _U32)),
    "trust": (ctypes.c_int32, (_P, _U32, _U32)),
    "io": (ctypes.c_int32, (_P,)),
    "check": (ctypes.c_int32, (_P, _U32)),
    "reads_ahead": (ctypes.c_int32, (_P,)),
    "stop": (ctypes.c_int32, (_P, _U32)),
    "set": (ctypes.c_int32, (_P, _U32, _U32)),
    "want": (ctypes.c_int32, (_P, _U32)),
    "pass": (ctypes.c_int32, (_P,)),
    "chose": (ctypes.c_int32, (_P, _P, _U32)),
    "told": (ctypes.c_int32, (_P, _P, _U32)),
    "touch": (ctypes.c_int32, (_P, _U32)),
    "settle": (ctypes.c_int32, (_P,)),
    "dump": (ctypes.c_int32, (_P, _P, _U64, _P)),
    "restore": (ctypes.c_int32, (_P, _P, _U64)),
    "read_counts": (ctypes.c_int32, (_P, _P)),
    "look": (ctypes.c_int32, (_P, _P, _P)),
}


class ExpertDamagedError(NativeError):
    """A file holds other bytes than were signed for; `number` says which expert's."""

    code: ClassVar[str] = "contract.native.expert_damaged"

    def __init__(self, number: int) -> None:
        """Blame an expert by its number."""
        super().__init__(f"expert {number} of the pool is not what was signed for")
        self.number: Final = number


@dataclass(frozen=True, slots=True)
class ExpertFile:
    """Where an expert is read from.

    Attributes:
        fd: An open file that holds the section and nothing else; closed after the pool.
        length: Bytes of the section.
        sha256: Digest that was signed; empty if the caller verified the file by itself.
        layer: Number of its layer, from 0; layers ascend.
        group: Number of its group.
        heat: How likely it is used, of `HEAT_ONE`.
    """

    fd: int
    length: int
    sha256: str
    layer: int
    group: int = NO_GROUP
    heat: int = 0


class ExpertPool:
    """One native pool. Its calls take a lock for microseconds and may come from any thread.

    In a process that was forked after it was opened every one of them raises `NativeError`.
    """

    def __init__(
        self,
        library: KernelLibrary,
        files: Sequence[ExpertFile],
        *,
        run_bytes: int,
        runs: int,
        persistent_bytes: int = 0,
        keeps: object = None,
    ) -> None:
        """Reserve address space; everything is absent. `keeps` is held until the pool is closed.

        Raises:
            UnsupportedPlanError: The kernels were built before there were pools, or for a system
                without the calls that they need.
            NativeError: The numbers make no pool, or there is no address space.
        """
        bound = {name: library.bind(f"sf_pool_{name}", *call) for name, call in _CALLS.items()}
        self._bound = {name: call for name, call in bound.items() if call is not None}
        self._pid: Final = os.getpid()
        if len(self._calls) < len(_CALLS):
            raise UnsupportedPlanError("these kernels have no expert pools: build them again")
        self.files: Final = tuple(files)
        self._library = library
        rows = (SfPoolExpert * max(1, len(files)))(
            *(SfPoolExpert(f.length, f.fd, f.layer, f.group, f.heat) for f in files)
        )
        key = ctypes.create_string_buffer(os.urandom(TAG_KEY_BYTES), TAG_KEY_BYTES)
        setup = SfPoolSetup(
            struct_bytes=ctypes.sizeof(SfPoolSetup),
            experts=len(files),
            run_bytes=run_bytes,
            runs=runs,
            persistent_bytes=persistent_bytes,
            expert=ctypes.addressof(rows),
            key=ctypes.addressof(key),
        )
        found = ctypes.c_void_p()
        status = self._calls["open"](ctypes.addressof(setup), ctypes.addressof(found))
        if status or not found.value:
            raise NativeError(f"cannot open a pool of {len(files)} experts: status {status}")
        self.address: Final = int(found.value)
        self.run_bytes: Final = run_bytes
        self.persistent_bytes: Final = persistent_bytes
        self._close = finalize_here(
            self, _close, self._calls["close"], self.address, (library, keeps)
        )
        self._close.atexit = False

    @property
    def _calls(self) -> "Mapping[str, ctypes._FuncPointer]":
        """The pool's calls by name.

        Raises:
            NativeError: This process is a fork of the one that opened the pool.
        """
        require_opened_here(self._pid)
        return self._bound

    def fill(self) -> None:
        """Read every expert once, verify it in its slot, and keep those worth most that fit.

        Those that are likeliest to be used, by their heat, come last and stay.

        Raises:
            ExpertDamagedError: A file holds other bytes than were signed for.
            NativeError: One cannot be read.
        """
        order = sorted(range(len(self.files)), key=self._worth)
        for at, number in enumerate(order):
            for ahead in order[at + 1 : at + 1 + READ_AHEAD]:
                _will_need(self.files[ahead])
            if self._calls["bring"](self.address, number):
                raise NativeError(f"expert {number} of the pool cannot be read")
            wanted = self.files[number].sha256
            is_good = not wanted or hashlib.sha256(self.view(number)).hexdigest() == wanted
            self._calls["trust"](self.address, number, is_good)
            if not is_good:
                raise ExpertDamagedError(number)

    def _worth(self, number: int) -> tuple[int, int]:
        """Return what a place in memory is worth: by heat, then by how soon a run needs it."""
        return self.files[number].heat, -self.files[number].layer

    def slot(self, number: int) -> int:
        """Return the address of an expert, which never changes.

        Raises:
            NativeError: There is no such expert.
        """
        found = self._calls["slot"](self.address, number)
        if not found:
            raise NativeError(f"there is no expert {number}")
        return int(found)

    def view(self, number: int) -> memoryview:
        """Return the bytes of an expert that is in memory; reading one that is not is a crash."""
        data = (ctypes.c_char * self.files[number].length).from_address(self.slot(number))
        return memoryview(data).cast("B")

    def check(self, number: int) -> bool:
        """Look at an expert in memory again; one that changed is dropped, and read anew later.

        Call it where no run goes on. One that is not in memory, or in use, counts as unchanged.

        Raises:
            NativeError: There is no such expert.
        """
        status = int(self._calls["check"](self.address, number))
        if status not in (Status.OK, Status.EXPERT_ABSENT):
            raise NativeError(f"there is no expert {number}")
        return status == Status.OK

    @property
    def extent(self) -> int:
        """Address of the persistent extent."""
        return int(self._calls["extent"](self.address))

    def set(self, knob: PoolKnob, value: int) -> None:
        """Turn a knob.

        Raises:
            NativeError: The value is out of range.
        """
        if not 0 <= value < 1 << 32 or self._calls["set"](self.address, knob, value):
            raise NativeError(f"{knob.name} cannot be {value}")

    def want(self, number: int) -> None:
        """Ask for an expert ahead; nothing happens while no thread reads ahead.

        Raises:
            NativeError: There is no such expert.
        """
        if self._calls["want"](self.address, number):
            raise NativeError(f"there is no expert {number}")

    def begin_pass(self) -> None:
        """Begin a pass over the layers, as a run of a program does; for replaying a trace."""
        self._calls["pass"](self.address)

    def choose(self, experts: Sequence[int]) -> None:
        """Say which experts the rows of a layer chose, as a run does before it computes the layer.

        Raises:
            NativeError: There is no such expert.
        """
        self._say("chose", experts)

    def foretell(self, experts: Sequence[int]) -> None:
        """Say whom the router of a coming layer would choose, as a run does that asks it early.

        Raises:
            NativeError: There is no such expert.
        """
        self._say("told", experts)

    def _say(self, call: str, experts: Sequence[int]) -> None:
        numbers = (ctypes.c_uint32 * max(1, len(experts)))(*experts)
        if self._calls[call](self.address, ctypes.addressof(numbers), len(experts)):
            raise NativeError("there is no such expert")

    def touch(self, number: int) -> bool:
        """Use an expert: return whether it is in memory now, where it stays until `settle`."""
        return not self._calls["touch"](self.address, number)

    def settle(self) -> None:
        """End a batch: what was touched may go."""
        self._calls["settle"](self.address)

    def dump(self) -> bytes:
        """Return which runs lie where and what is known of each expert, canonical bytes.

        Raises:
            NativeError: A load goes on, or an expert is in use; ask again.
        """
        size = ctypes.c_uint64()
        self._calls["dump"](self.address, None, 0, ctypes.addressof(size))
        data = ctypes.create_string_buffer(max(1, size.value))
        if self._calls["dump"](self.address, ctypes.addressof(data), size, ctypes.addressof(size)):
            raise NativeError("the pool is busy")
        return data.raw

    def restore(self, data: bytes) -> None:
        """Bring a pool of the same files into a dumped state; what it holds goes.

        Raises:
            NativeError: The bytes are no dump of such a pool, or an expert cannot be read.
        """
        words = ctypes.create_string_buffer(data, len(data))
        if self._calls["restore"](self.address, ctypes.addressof(words), len(data)):
            raise NativeError("this is no state of such a pool")

    def counts(self) -> dict[str, int]:
        """Return what was counted and what the pool holds.

        steps: runs of programs. hits, late, misses: uses of an expert by a batch, by what it was
        then: in memory; asked for or being read; neither. hidden: hits on an expert that was read
        ahead and not used since. timeouts: reads of the lent thread that a run took over. ahead,
        unused: reads ahead, and those evicted unused. refused, dropped: asked for ahead in vain,
        for want of room, and too late. overshot: loads beyond the budget, while two contexts run.
        failed, corrupt: loads that were cut short, that read other bytes than were verified;
        `corrupt` also experts that were found changed in memory.
        stall_ns: time that runs waited. read_ns: time of reads, in whichever thread. moved, fresh,
        returned: runs that changed their place, that the system gave, that went back. asked, given:
        bytes of experts in memory, and of the runs that hold them. free: bytes of runs that any
        expert could have at once. predicted, foreseen: experts that were named ahead, by a router
        or by what was learned, and those that were then chosen, of `chosen`. cached: hits on
        experts that a cache of CACHE_KB holds together with all used since.
        """
        counts = SfPoolCounts(struct_bytes=ctypes.sizeof(SfPoolCounts))
        self._calls["read_counts"](self.address, ctypes.addressof(counts))
        return {name: int(getattr(counts, name)) for name in COUNTERS}

    def states(self) -> list[ExpertState]:
        """Return where each expert is."""
        states = (ctypes.c_uint8 * len(self.files))()
        self._calls["look"](self.address, ctypes.addressof(states), None)
        return [ExpertState(state) for state in states]

    def heats(self) -> list[int]:
        """Return how often each expert was used lately, of `HEAT_ONE`."""
        heats = (ctypes.c_uint32 * len(self.files))()
        self._calls["look"](self.address, None, ctypes.addressof(heats))
        return list(heats)

    def huge_bytes(self) -> int | None:
        """Return how many bytes lie on huge pages; None if the system does not say."""
        last = len(self.files) - 1
        return huge_bytes_of(self.extent, self.slot(last) + self.files[last].length)

    @property
    def is_read_ahead(self) -> bool:
        """Whether a thread is lent for reading ahead."""
        return bool(self._calls["reads_ahead"](self.address))

    def trace(self, address: int | None) -> None:
        """Have loads, waits, stalls and evictions written to the `SfTrace` at an address, or none.

        Kernels that were built before pools were traced write nothing. Any thread may call this
        at any time; nothing is written to the old trace when it returns.

        Raises:
            NativeError: Another trace is written already.
        """
        require_opened_here(self._pid)
        call = self._library.bind("sf_pool_set_trace", ctypes.c_int32, (_P, _P))
        if call is not None and call(self.address, address):
            raise NativeError("this pool of experts is traced already: end that trace first")

    def serve(self) -> None:
        """Lend the calling thread for reading ahead, until `dismiss`; one at most."""
        self._calls["io"](self.address)

    def dismiss(self, *, ends: bool = True) -> None:
        """Send the lent thread home after the load that it is at, or let one in again."""
        self._calls["stop"](self.address, ends)

    def close(self) -> None:
        """Give the memory back; no context may be seated and no thread lent."""
        self._close()


class ReadAhead:
    """The thread that reads experts ahead. It holds the pool until it is sent home."""

    def __init__(self, pool: ExpertPool) -> None:
        """Start it and see it at work; without one every expert is read by whoever needs it."""
        self._end: weakref.finalize[..., object] | None = None
        pool.dismiss(ends=False)
        thread = threading.Thread(target=pool.serve, name="sparsefleet-experts", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives no thread; slower, not wrong
            return
        self._end = finalize_here(self, _end, pool, thread)
        while thread.is_alive() and not pool.is_read_ahead:  # what is asked for earlier is not read
            time.sleep(_GLANCE_SECONDS)

    def close(self) -> None:
        """Send the thread home and wait for it."""
        if self._end is not None:
            self._end()


def _will_need(file: ExpertFile) -> None:
    """Have the system read a file ahead, where it can be told."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fd, 0, file.length, os.POSIX_FADV_WILLNEED)


def _end(pool: ExpertPool, thread: threading.Thread) -> None:
    pool.dismiss()
    thread.join()


def _close(close: "ctypes._FuncPointer", address: int, _keeps: object) -> None:
    close(address)
