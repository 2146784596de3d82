"""Policy tables as the plan VM reads them, and their meters; see `compiler.contract.native_swap`.

Standard library only.
"""

import ctypes
from typing import Final

from compiler.contract.native_abi import SfMeter, SfPolicy
from compiler.contract.native_library import KernelLibrary
from compiler.contract.native_swap import SwapSeat
from compiler.contract.policy import CELLS, require_variants

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


class PolicySeat(SwapSeat[PublishedPolicy]):
    """Where one context's table is swapped; for any thread, also while the plan runs."""

    def __init__(self, library: KernelLibrary, context: int, keeps: object) -> None:
        """Sit beside a context that follows no table yet; `keeps` owns its memory."""
        super().__init__(library, context, keeps, "policy")

    def publish(self, variants: bytes) -> PublishedPolicy:
        """Have the next runs follow a table; the run that goes on keeps its own.

        Raises:
            PolicyError: It is no table.
            UnsupportedPlanError: The kernels follow no policy.
            NativeError: The plan is closed.
        """
        with self._lock:
            fresh = PublishedPolicy(variants, self._next_epoch())
            self._use(fresh)
        return fresh


def readings_since(before: Readings, after: Readings) -> Readings:
    """Return ticks and runs between two readings of one table, of the cells that ran between."""
    found = {}
    for cell, (ticks, runs) in after.items():
        old_ticks, old_runs = before.get(cell, (0, 0))
        if runs > old_runs:
            found[cell] = (ticks - old_ticks, runs - old_runs)
    return found
