"""Weights in memory, by what they are: a bundle with the same ones as a running bundle shares them.

    bundle with new kernels or a new tape -(same digests of all weight sections)-> the memory of the
    bundle that runs -> nothing is copied, and only the tape, kernels and context are new
    bundle with some new experts -(same digests of the others)-> those are lent, the new ones copied

Weak: the memory goes with the last plan that uses it. Lent sections keep their whole mapping, so
after many updates of single experts everything is copied together once more (`MOST_KEPT`). With a
budget that a bundle exceeds, its experts come into memory as they are needed (`residency`), within
what is left of it.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Final
from weakref import WeakValueDictionary

from compiler.contract.native_weights import Held, LoadedWeights, kept_bytes
from compiler.contract.plan import Plan
from compiler.contract.plan_format import align
from compiler.contract.pool_plan import PoolPlan, plan_pool
from compiler.contract.pooled_weights import PooledWeights
from device_agent.runtime.hotset import HotSetFile

Weights = LoadedWeights | PooledWeights
Lent = Mapping[str, Held]
MOST_KEPT: Final = 1.5
"""Bytes of memory kept for a bundle's weights, in times of what they are, before all are copied."""


class WeightPool:
    """The weights of all bundles that are loaded now."""

    def __init__(self, budget_bytes: int = 0, hotset: HotSetFile | None = None) -> None:
        """Know none.

        Args:
            budget_bytes: The most bytes of weights of one bundle; 0 = all of them.
            hotset: Which experts were used before, for a bundle that exceeds the budget.
        """
        self.hotset: Final = hotset
        self.budget_bytes: Final = budget_bytes
        self._known: WeakValueDictionary[tuple[tuple[str, str], ...], Weights] = (
            WeakValueDictionary()
        )

    def layout(self, plan: Plan) -> PoolPlan | None:
        """Return how the weights of a plan fit the budget; None if all of them do.

        Raises:
            BudgetError: Not even what one call needs does.
        """
        if not self.budget_bytes:
            return None
        whole = sum(align(section.length) for section in plan.sections)
        return None if whole <= self.budget_bytes else plan_pool(plan, self.budget_bytes)

    def facts(self, plan: Plan) -> dict[str, int]:
        """Return the budget and the least that the plan runs in, bytes; nothing without one."""
        if not self.budget_bytes:
            return {}
        least = plan_pool(plan, sys.maxsize).least_bytes
        return {"max_weight_bytes": self.budget_bytes, "least_weight_bytes": least}

    def load(
        self,
        plan: Plan,
        digests: Mapping[str, str],
        kernels: bytes,
        make: Callable[[Lent], Weights],
    ) -> Weights:
        """Return the sections of a plan: those in memory if they are the same, else new ones.

        Args:
            plan: Names the sections.
            digests: SHA-256 of every section of the bundle.
            kernels: Of the bundle.
            make: Brings them into memory, but for those that it is given.

        Raises:
            NativeError: A section is missing or has another length, or there is no memory.
        """
        names = sorted(section.name for section in plan.sections if section.name in digests)
        key = tuple((name, digests[name]) for name in names)
        found = self._known.get(key)
        if found is None or not found.fits(kernels):
            found = self._known[key] = make(self._to_lend(plan, digests))
        return found

    def _to_lend(self, plan: Plan, digests: Mapping[str, str]) -> Lent:
        """Return sections of a plan that are in memory, unless too much else would be kept."""
        known: dict[str, Held] = {}
        for key, weights in self._known.items():
            if isinstance(weights, LoadedWeights):
                here = set(weights.names) - weights.damaged
                known.update({digest: weights.held(name) for name, digest in key if name in here})
        lengths = {item.name: item.length for item in plan.sections}
        lent = {name: known[digests[name]] for name in lengths if digests.get(name) in known}
        lent = {name: held for name, held in lent.items() if held.length == lengths[name]}
        copied = sum(align(length) for name, length in lengths.items() if name not in lent)
        whole = sum(align(length) for length in lengths.values())
        return lent if kept_bytes(lent.values()) + copied <= MOST_KEPT * whole else {}

    def __len__(self) -> int:
        """Return how many different sets of weights are in memory."""
        return len(self._known)
