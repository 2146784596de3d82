"""Weights in memory, by what they are: a bundle with the same ones as a running bundle shares them.

    bundle with new kernels or a new tape -(same digests of all weight sections)-> the memory of the
    bundle that runs -> nothing is copied, and only the tape, kernels and context are new

Weak: the memory goes with the last plan that uses it.
"""

from collections.abc import Mapping
from weakref import WeakValueDictionary

from compiler.contract.native_weights import LoadedWeights
from compiler.contract.plan import Plan


class WeightPool:
    """The weights of all bundles that are loaded now."""

    def __init__(self) -> None:
        """Know none."""
        self._known: WeakValueDictionary[tuple[tuple[str, str], ...], LoadedWeights] = (
            WeakValueDictionary()
        )

    def load(
        self, plan: Plan, digests: Mapping[str, str], views: Mapping[str, memoryview]
    ) -> LoadedWeights:
        """Return the weight sections of a plan: those in memory if they are the same, else copies.

        Args:
            plan: Names the sections.
            digests: SHA-256 of every section of the bundle.
            views: Their verified bytes.

        Raises:
            NativeError: A section is missing or has another length.
        """
        names = sorted(section.name for section in plan.sections if section.name in digests)
        key = tuple((name, digests[name]) for name in names)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = LoadedWeights(plan.sections, views)
        return found

    def __len__(self) -> int:
        """Return how many different sets of weights are in memory."""
        return len(self._known)
