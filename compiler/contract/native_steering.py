"""Steering records as the plan VM reads them, swapped as `compiler.contract.native_swap` says.

Standard library only.
"""

import ctypes
from typing import Final

from compiler.contract.native_abi import SfSteered, SfSteering
from compiler.contract.native_errors import NativeError
from compiler.contract.native_library import KernelLibrary
from compiler.contract.native_swap import SwapSeat
from compiler.contract.steering import Counts, Residency, Steering, SteeringError


class PublishedSteering:
    """One record in native memory, with the tables that it points to."""

    def __init__(
        self, steering: Steering, residency: Residency | None, weights: int, epoch: int
    ) -> None:
        """Copy a record; the residency table stays the caller's, to be written at any time.

        Raises:
            SteeringError: The record or the table does not fit a plan of so many weights.
        """
        self.steering: Final = steering
        self.residency: Final = residency
        self._record = steering_record(steering, weights, epoch)
        if residency is not None and len(residency) != weights:
            raise SteeringError(f"a residency table of {len(residency)} for {weights} weights")
        self._bias = (ctypes.c_float * len(steering.bias))(*steering.bias)
        if steering.bias:
            self._record.bias = ctypes.addressof(self._bias)
        if residency is not None:
            self._record.resident = residency.address
        self.address: Final = ctypes.addressof(self._record)


def steering_record(steering: Steering, weights: int, epoch: int = 0) -> SfSteering:
    """Return a record without its tables.

    Raises:
        SteeringError: It does not fit a plan of so many weights.
    """
    steering.check(weights)
    return SfSteering(
        struct_bytes=ctypes.sizeof(SfSteering),
        epoch=epoch,
        weights=weights,
        may_load=steering.may_load,
        protect=steering.protect,
        max_k=steering.max_k,
        pull=steering.pull,
        margin=steering.margin,
        modality=steering.modality,
    )


class SteeringSeat(SwapSeat[PublishedSteering]):
    """Where one context's steering is swapped; for any thread, also while the plan runs."""

    def __init__(self, library: KernelLibrary, context: int, keeps: object, weights: int) -> None:
        """Sit beside a context of a plan of so many weights that steers nothing yet."""
        super().__init__(library, context, keeps, "steering")
        self.weights: Final = weights

    def publish(self, steering: Steering, residency: Residency | None = None) -> PublishedSteering:
        """Have the next runs follow a record; the run that goes on keeps its own.

        Args:
            steering: The record.
            residency: Which experts are in memory. Kept, not copied; None = as the plan's expert
                pool says, or all of them without one.

        Raises:
            SteeringError: It does not fit the plan.
            UnsupportedPlanError: The kernels steer nothing.
            NativeError: The plan is closed.
        """
        with self._lock:
            fresh = PublishedSteering(steering, residency, self.weights, self._next_epoch())
            self._use(fresh)
        return fresh

    def counts(self) -> Counts:
        """Return what steering did since the plan was loaded; exact while no run goes on.

        Raises:
            NativeError: The plan is closed.
        """
        with self._lock:
            if not self._is_open:
                raise NativeError("the plan is closed")
            found = SfSteered()
            if self._library.steering_counts is not None:
                self._library.steering_counts(self._context, ctypes.addressof(found))
        return Counts(*(int(getattr(found, name)) for name, _ in SfSteered._fields_))
