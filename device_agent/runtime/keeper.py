"""Keeps the policy of a running plan: tries other variants now and then, moves to what is faster.

    answers -> the VM's meters -> a window of latencies -> `adapt`, per cell -> next table

Every `TRIAL_EVERY`th answer runs under a table that differs from the present one in every cell that
has a choice; the bits are the same. The answering thread calls `answered` between two answers, so
the meters stand still while they are read.
"""

from collections.abc import Callable, Mapping
from typing import Final

from compiler.contract.native_policy import (
    PolicySeat,
    PublishedPolicy,
    Readings,
    readings_since,
)
from compiler.contract.policy import Cell, Variant
from device_agent.runtime.adaptation import CellState, adapt
from device_agent.runtime.cells import Choices, tables

TRIAL_EVERY: Final = 8
WINDOW_ANSWERS: Final = 32


class PolicyKeeper:
    """The policy of one plan; used by the thread that answers."""

    def __init__(
        self,
        seat: PolicySeat,
        variants: bytes,
        choices: Choices,
        monotonic: Callable[[], float],
    ) -> None:
        """Publish the first table.

        Args:
            seat: Of the plan.
            variants: The table to begin with.
            choices: By index of a cell that the plan uses, what it may run as.
            monotonic: Clock in seconds.
        """
        self._seat, self._choices, self._monotonic = seat, choices, monotonic
        self._variants = variants
        self._states = {at: CellState(Variant(variants[at])) for at in choices}
        self._window: dict[int, dict[int, list[float]]] = {at: {} for at in choices}
        self._answers = self._trials_made = 0
        self.switches = 0
        self._publish()

    def _publish(self) -> None:
        """Publish the present table and those that differ from it; the meters begin anew."""
        others = {
            at: tuple(v for v in each if v is not self._states[at].variant)
            for at, each in self._choices.items()
        }
        self._trials = tuple(self._seat.publish(table) for table in tables(self._variants, others))
        self._base = self._seat.publish(self._variants)
        self._present: PublishedPolicy = self._base
        self._read: dict[int, Readings] = {}

    def answered(self) -> None:
        """Take in what the last answer took, and say how the next one runs."""
        if not self._choices:
            return
        self._collect()
        self._answers += 1
        if self._answers % WINDOW_ANSWERS == 0:
            self._end_window()
        self._turn()

    def _collect(self) -> None:
        present = self._present
        now = present.readings()
        for at, (ticks, runs) in readings_since(self._read.get(present.epoch, {}), now).items():
            if at in self._window:
                sums = self._window[at].setdefault(present.variants[at], [0.0, 0.0])
                sums[0] += ticks
                sums[1] += runs
        self._read[present.epoch] = now

    def _end_window(self) -> None:
        at_s = self._monotonic()
        table = bytearray(self._variants)
        for at, sums in self._window.items():
            seen = {Variant(variant): ticks / runs for variant, (ticks, runs) in sums.items()}
            self._states[at] = adapt(self._states[at], seen, at_s)
            table[at] = self._states[at].variant
            sums.clear()
        if bytes(table) != self._variants:
            changed = zip(table, self._variants, strict=True)
            self.switches += sum(new != old for new, old in changed)
            self._variants = bytes(table)
            self._publish()

    def _turn(self) -> None:
        wanted = self._base
        if self._trials and self._answers % TRIAL_EVERY == TRIAL_EVERY - 1:
            wanted = self._trials[self._trials_made % len(self._trials)]
            self._trials_made += 1
        if wanted is not self._present:
            self._seat.use(wanted)
            self._present = wanted

    @property
    def variants(self) -> bytes:
        """The table that most answers follow."""
        return self._variants

    def facts(self) -> Mapping[str, object]:
        """Return what `status` shows: how each cell with a choice runs, how often it changed."""
        cells = {Cell.at(at).name: state.variant.name for at, state in self._states.items()}
        return {"cells": cells, "switches": self.switches}
