"""Weights of which only a part is in memory: persistent sections and a pool of experts.

    PoolPlan + persistent sections + files -> PooledWeights -> NativePlan, in place of LoadedWeights

Two plans over the same sections share one, as they share loaded ones: each is seated by itself, and
the budget holds for both together.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Final

from compiler.contract.expert_pool import ExpertFile, ExpertPool, ReadAhead
from compiler.contract.native_abi import SfSection
from compiler.contract.native_errors import NativeError, UnsupportedPlanError
from compiler.contract.native_fork import finalize_here
from compiler.contract.native_library import KernelLibrary
from compiler.contract.native_memory import Memory
from compiler.contract.native_weights import Buffer, SectionEntry, fill_table
from compiler.contract.plan_format import align
from compiler.contract.pool_abi import ExpertState
from compiler.contract.pool_plan import PoolPlan

_GIVEN_UP: Final[list[tuple[object, ...]]] = []
"""What seats refer to that did not come off: the pool still writes there."""
_P, _U64, _I32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32


class PooledWeights:
    """Sections of a plan in a pool; the experts are verified when this returns."""

    def __init__(
        self,
        library: KernelLibrary,
        layout: PoolPlan,
        persistent: Mapping[str, Buffer],
        files: Sequence[ExpertFile],
        *,
        keeps: object = None,
        reads_ahead: bool = True,
    ) -> None:
        """Open the pool, copy what stays, read and verify every expert once.

        Args:
            library: Kernels of any plan over these sections; held as long as the pool.
            layout: Of the plan.
            persistent: At least the sections that stay, verified.
            files: One per expert of the layout, in its order; open as long as this.
            keeps: Held until the pool is closed: who owns the files.
            reads_ahead: Start a thread that reads experts ahead.

        Raises:
            UnsupportedPlanError: The kernels have no pools.
            NativeError: A section is missing, has another length or other bytes, or there is no
                address space.
        """
        self.layout: Final = layout
        self.damaged: Final[set[str]] = set()
        """Sections found changed and not mended; known to every plan that shares them."""
        self.pool: Final = ExpertPool(
            library,
            files,
            run_bytes=layout.run_bytes,
            runs=layout.runs,
            persistent_bytes=layout.persistent_bytes,
            keeps=keeps,
        )
        self._places = {
            expert.name: (self.pool.slot(number), expert.length)
            for number, expert in enumerate(layout.experts)
        }
        self._copy(persistent)
        self.pool.fill()
        self._next = 0
        self._reader = ReadAhead(self.pool) if reads_ahead else None

    def _copy(self, persistent: Mapping[str, Buffer]) -> None:
        """Copy what stays to the extent, one section after the other."""
        at = self.pool.extent
        for name in self.layout.persistent:
            if name not in persistent:
                raise NativeError(f"section {name!r} is missing")
            data = memoryview(persistent[name]).cast("B")
            room = (ctypes.c_char * len(data)).from_address(at)
            memoryview(room).cast("B")[:] = data
            self._places[name] = at, len(data)
            at += align(len(data))

    @property
    def names(self) -> tuple[str, ...]:
        """Sections that stay in memory, in order; experts come and go, see `check_experts`."""
        return self.layout.persistent

    def section(self, name: str) -> memoryview:
        """Return the bytes of a persistent section as they are in memory now."""
        at, length = self._places[name]
        return memoryview((ctypes.c_char * length).from_address(at)).cast("B")

    def check_experts(self, most_bytes: int) -> Mapping[str, bool]:
        """Look at the next experts that are in memory, up to `most_bytes` and one at least.

        Returns:
            By section, whether it has the bytes that were verified; what has not is dropped and
            read again when it is needed.
        """
        found: dict[str, bool] = {}
        states = self.pool.states()
        for _ in states:
            number, self._next = self._next, (self._next + 1) % len(states)
            if states[number] is ExpertState.PRESENT:
                expert = self.layout.experts[number]
                found[expert.name] = self.pool.check(number)
                most_bytes -= expert.length
            if most_bytes <= 0:
                break
        return found

    @property
    def size(self) -> int:
        """The most bytes of weights in memory."""
        return self.layout.most_bytes

    def huge_bytes(self) -> int | None:
        """Return how many of them lie on huge pages; None if the system does not say."""
        return self.pool.huge_bytes()

    def table(self, entries: tuple[SectionEntry, ...]) -> "ctypes.Array[SfSection]":
        """Return what `sf_init_pooled` reads; see `LoadedWeights.table`."""
        return fill_table(entries, self._places)

    def fits(self, kernels: bytes) -> bool:
        """Return whether a plan with these kernels can be seated here."""
        library = KernelLibrary(kernels)
        extent = library.bind("sf_pool_extent", _P, (_P,))
        fits = extent is not None and extent(self.pool.address) is not None
        library.close()
        return fits

    def init(self, library: KernelLibrary, setup: int) -> int:
        """Build a context over the slots; return its status.

        Raises:
            UnsupportedPlanError: These kernels have no pools, or another kind of them.
        """
        init = library.bind("sf_init_pooled", _I32, (_P, _P))
        if init is None:
            raise UnsupportedPlanError("these kernels have no expert pools: build them again")
        return int(init(setup, self.pool.address))

    def seat(self, library: KernelLibrary, context: int, keeps: object) -> "Seat":
        """Seat a context, whose memory `keeps` owns: its runs load what they need.

        Raises:
            NativeError: There is no seat left.
        """
        return Seat(library, self, context, keeps)


class Seat:
    """A context in a pool; ends before either does."""

    def __init__(
        self, library: KernelLibrary, weights: PooledWeights, context: int, keeps: object
    ) -> None:
        """Take a seat.

        Raises:
            NativeError: There is none left.
        """
        size = library.bind("sf_pool_seat_bytes", _U64, (_P, _P))
        attach = library.bind("sf_pool_attach", _I32, (_P, _P, _P, _U64))
        self._resident = library.bind("sf_pool_resident", _I32, (_P, ctypes.c_uint32))
        detach = library.bind("sf_pool_detach", _I32, (_P,))
        if size is None or attach is None or detach is None:
            raise UnsupportedPlanError("these kernels have no expert pools: build them again")
        self._context = context
        need = int(size(weights.pool.address, context))
        memory = Memory(need)
        if attach(weights.pool.address, context, memory.address, need):
            raise NativeError("the pool has no seat left")
        held = (library, weights, keeps, memory)
        self._leave = finalize_here(self, _leave, detach, context, held)

    def is_resident(self, weight: int) -> bool:
        """Return whether a weight of the context's plan lies in memory now."""
        return self._resident is None or self._resident(self._context, weight) == 1

    def close(self) -> None:
        """Leave; the context cannot run any more."""
        self._leave()


def _leave(detach: "ctypes._FuncPointer", context: int, held: tuple[object, ...]) -> None:
    if detach(context):
        _GIVEN_UP.append(held)
