"""Records that a run follows, swapped by pointer, freed when no run holds them.

    publish(record) -(one pointer)-> runs from now on
    the record before -(the busy call says no)-> freed

At most one run of a context goes on at a time, so at most one retired record is kept beside the
present one. `PolicySeat` and `SteeringSeat` are such seats. Standard library only.
"""

import ctypes
import os
import threading
from typing import Final, Generic, Protocol, TypeVar

from compiler.contract.native_errors import NativeError, UnsupportedPlanError, raise_status
from compiler.contract.native_library import KernelLibrary

MAX_EPOCH: Final = (1 << 32) - 1


class Published(Protocol):
    """A record in native memory."""

    @property
    def address(self) -> int:
        """Where it is."""


Record = TypeVar("Record", bound=Published)


class SwapSeat(Generic[Record]):
    """Where one kind of record of one context is swapped; for any thread, also while it runs."""

    def __init__(self, library: KernelLibrary, context: int, keeps: object, what: str) -> None:
        """Sit beside a context that follows nothing yet.

        Args:
            library: The kernels, with `sf_set_<what>` and `sf_<what>_busy`.
            context: Address of a context of theirs.
            keeps: Owner of the context's memory.
            what: Name of the kind.
        """
        self._library, self._context, self._keeps, self._what = library, context, keeps, what
        self._mutex, self._pid = threading.Lock(), os.getpid()
        self._present: Record | None = None
        self._retired: list[Record] = []
        self._epoch = 0
        self._is_open = True

    @property
    def _lock(self) -> threading.Lock:
        """Taken by every call. A fork takes one of its own: who held this one is not in it."""
        if os.getpid() != self._pid:
            self._mutex, self._pid = threading.Lock(), os.getpid()
        return self._mutex

    def _functions(self) -> "tuple[ctypes._FuncPointer | None, ctypes._FuncPointer | None]":
        return (
            getattr(self._library, f"set_{self._what}"),
            getattr(self._library, f"{self._what}_busy"),
        )

    @property
    def is_supported(self) -> bool:
        """Whether the kernels follow such records; those built before there were any do not."""
        return None not in self._functions()

    def _next_epoch(self) -> int:
        self._epoch = self._epoch % MAX_EPOCH + 1
        return self._epoch

    def use(self, published: Record) -> None:
        """Have the next runs follow a record that was published here; see `publish`.

        Raises:
            UnsupportedPlanError: The kernels follow none.
            NativeError: The plan is closed.
        """
        with self._lock:
            self._use(published)

    def clear(self) -> None:
        """Have the next runs follow none. Raises as `use`."""
        with self._lock:
            self._use(None)

    def _use(self, published: Record | None) -> None:
        set_record, busy = self._functions()
        if set_record is None or busy is None:
            raise UnsupportedPlanError(f"these kernels follow no {self._what}: build them again")
        if not self._is_open:
            raise NativeError("the plan is closed")
        status = set_record(self._context, None if published is None else published.address)
        if status:
            raise_status(status, self._what)
        if self._present is not None:
            self._retired.append(self._present)
        self._present = published
        held = {old.address: old for old in self._retired if busy(self._context, old.address)}
        if published is not None:
            held.pop(published.address, None)
        self._retired = list(held.values())

    @property
    def present(self) -> Record | None:
        """The record that the next run follows."""
        return self._present

    @property
    def held(self) -> int:
        """Records in memory, the present one among them."""
        return len(self._retired) + (self._present is not None)

    def close(self) -> None:
        """Publish nothing more; nothing is called in the library afterwards."""
        with self._lock:
            self._is_open = False
