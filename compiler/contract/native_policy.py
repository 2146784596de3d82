"""Policy tables as the plan VM reads them: published by pointer, freed when no run holds them.

    publish(table) -(sf_set_policy: one pointer)-> runs from now on
    the table before -(sf_policy_busy says no)-> freed

At most one run of a context goes on at a time, so at most one retired table is kept beside the
present one. Standard library only.
"""

import ctypes
import threading
from typing import Final

from compiler.contract.native_abi import SfMeter, SfPolicy
from compiler.contract.native_errors import NativeError, UnsupportedPlanError, raise_status
from compiler.contract.native_library import KernelLibrary
from compiler.contract.policy import CELLS, require_variants

MAX_EPOCH: Final = (1 << 32) - 1
Readings = dict[int, tuple[int, int]]
"""Ticks and runs by index of the cell."""


class PublishedPolicy:
    """One table in native memory, with the meters of the runs that followed it."""

    def __init__(self, variants: bytes, epoch: int) -> None:
        """Copy a table.

        Raises:
            PolicyError: It is no table.
        """
        require_variants(variants)
        self.epoch: Final = epoch
        self.variants: Final = variants
        self._variants = ctypes.create_string_buffer(variants, CELLS)
        self._meters = (SfMeter * CELLS)()
        self._record = SfPolicy(
            struct_bytes=ctypes.sizeof(SfPolicy),
            epoch=epoch,
            cells=CELLS,
            variants=ctypes.addressof(self._variants),
            meters=ctypes.addressof(self._meters),
        )
        self.address: Final = ctypes.addressof(self._record)

    def readings(self) -> Readings:
        """Return ticks and runs of the cells that ran; exact while no run goes on."""
        numbers = memoryview(self._meters).cast("B").cast("Q").tolist()
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return {at: (ticks, runs) for at, (ticks, runs) in enumerate(pairs) if runs}


class PolicySeat:
    """Where one context's table is swapped; for any thread, also while the plan runs."""

    def __init__(self, library: KernelLibrary, context: int, keeps: object) -> None:
        """Sit beside a context that follows no table yet; `keeps` owns its memory."""
        self._library, self._context, self._keeps = library, context, keeps
        self._lock = threading.Lock()
        self._present: PublishedPolicy | None = None
        self._retired: list[PublishedPolicy] = []
        self._epoch = 0
        self._is_open = True

    @property
    def is_supported(self) -> bool:
        """Whether the kernels follow policies; those built before there were any do not."""
        return self._library.set_policy is not None and self._library.policy_busy is not None

    def publish(self, variants: bytes) -> PublishedPolicy:
        """Have the next runs follow a table; the run that goes on keeps its own.

        Raises:
            PolicyError: It is no table.
            UnsupportedPlanError: The kernels follow no policy.
            NativeError: The plan is closed.
        """
        with self._lock:
            self._epoch = self._epoch % MAX_EPOCH + 1
            fresh = PublishedPolicy(variants, self._epoch)
            self._use(fresh)
        return fresh

    def use(self, published: PublishedPolicy) -> None:
        """Go back to a table that was published here; its meters go on. Raises as `publish`."""
        with self._lock:
            self._use(published)

    def _use(self, published: PublishedPolicy) -> None:
        set_policy, busy = self._library.set_policy, self._library.policy_busy
        if set_policy is None or busy is None:
            raise UnsupportedPlanError("these kernels follow no policy: build them again")
        if not self._is_open:
            raise NativeError("the plan is closed")
        status = set_policy(self._context, published.address)
        if status:
            raise_status(status, "policy")
        if self._present is not None:
            self._retired.append(self._present)
        self._present = published
        held = {old.address: old for old in self._retired if busy(self._context, old.address)}
        held.pop(published.address, None)
        self._retired = list(held.values())

    @property
    def present(self) -> PublishedPolicy | None:
        """The table that the next run follows."""
        return self._present

    @property
    def held(self) -> int:
        """Tables in memory, the present one among them."""
        return len(self._retired) + (self._present is not None)

    def close(self) -> None:
        """Publish nothing more; nothing is called in the library afterwards."""
        with self._lock:
            self._is_open = False


def readings_since(before: Readings, after: Readings) -> Readings:
    """Return ticks and runs between two readings of one table, of the cells that ran between."""
    found = {}
    for cell, (ticks, runs) in after.items():
        old_ticks, old_runs = before.get(cell, (0, 0))
        if runs > old_runs:
            found[cell] = (ticks - old_ticks, runs - old_runs)
    return found
