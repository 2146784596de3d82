"""Which experts are in memory while a program runs, and what a pager is told about them.

The simulator keeps one `Pages` and asks it as the kernels ask the caller's pager: the same events
in the same order. In a program that loads experts, one that is used without its load step is an
error here, whatever the pager says.
"""

from collections.abc import Iterable

from compiler.contract.expert_pages import Expert
from compiler.contract.native_errors import ExpertAbsentError
from compiler.contract.operations import ExpertEvent
from compiler.contract.pager import Pager


class Pages:
    """Experts by the number of their first weight."""

    def __init__(self) -> None:
        self.pager: Pager | None = None
        self._is_scheduled = False
        self._loaded: set[int] = set()

    def begin(self, *, is_scheduled: bool) -> None:
        """Start a run: nothing is loaded yet, or everything is if the program loads nothing."""
        self._is_scheduled = is_scheduled
        self._loaded.clear()

    def prefetch(self, experts: Iterable[Expert]) -> None:
        """Say that experts will likely be needed."""
        for expert in experts:
            if self.pager is not None:
                self.pager(ExpertEvent.PREFETCH, expert[0])

    def load(self, experts: Iterable[Expert]) -> None:
        """Have experts in memory.

        Raises:
            ExpertAbsentError: The pager cannot.
        """
        for expert in experts:
            self._tell(ExpertEvent.LOAD, expert[0])
            self._loaded.add(expert[0])

    def use(self, first_weight: int) -> None:
        """Note that a row chose an expert.

        Raises:
            ExpertAbsentError: Its load step did not come yet, or the pager does not have it.
        """
        if self._is_scheduled and first_weight not in self._loaded:
            raise ExpertAbsentError(f"expert of weight {first_weight} used before its load step")
        self._tell(ExpertEvent.USE, first_weight)

    def release(self, experts: Iterable[Expert]) -> None:
        """End what a load step was for."""
        self._loaded -= {expert[0] for expert in experts}

    def _tell(self, event: ExpertEvent, first_weight: int) -> None:
        if self.pager is not None and not self.pager(event, first_weight):
            raise ExpertAbsentError(f"expert of weight {first_weight}: the pager has no such page")
