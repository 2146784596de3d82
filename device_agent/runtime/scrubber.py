"""Finds weights that changed in memory: hashes them again, a slice between two answers.

    weights in memory -(SHA-256, slice by slice)-> the digest that the manifest signs for
    a section that differs -(verified sections of the store)-> written anew in place
    experts that come and go -(the tag made when they were verified)-> dropped, read when needed

The digest of a section is the signed one, so nothing is kept beside it and nothing is hashed twice
at the start. A change is found after at most one pass over all weights; `suspects` counts the
answers that were given since the changed section was last seen whole.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from compiler.contract.errors import ContractError
from device_agent.errors import AgentError

SLICE_BYTES: Final = 1 << 20
"""Hashed between two answers: well below a millisecond where the processor has SHA instructions."""
_ALL: Final = 1 << 62
Read = Callable[[str], memoryview]
"""Returns the verified bytes of a section on disk."""


class Weights(Protocol):
    """Sections in memory; those that are paged out are not among `names`."""

    @property
    def names(self) -> Sequence[str]:
        """Sections that are in memory."""

    @property
    def damaged(self) -> set[str]:
        """Those known to differ, for every plan that shares them."""

    def section(self, name: str) -> memoryview:
        """Return the present bytes of one."""

    def check_experts(self, most_bytes: int) -> Mapping[str, bool]:
        """Look at the next of those that come and go; return, by name, whether each is whole."""


@dataclass(slots=True)
class ScrubCounts:
    """What was hashed and found, over all plans of a bundle; see `Scrubber.facts`."""

    hashed_bytes: int = 0
    passes: int = 0
    repairs: int = 0
    suspects: int = 0


class Scrubber:
    """Watches the weights of one bundle; used by the thread that answers."""

    def __init__(
        self,
        weights: Weights,
        digests: Mapping[str, str],
        read: Read,
        counts: ScrubCounts | None = None,
    ) -> None:
        """Begin with the first section.

        Args:
            weights: In memory.
            digests: SHA-256 of every section, as the manifest has them.
            read: Where a changed section comes from.
            counts: Where to count; anew if None.
        """
        self._weights, self._digests, self._read = weights, digests, read
        self._hash = hashlib.sha256()
        self._name, self._at = "", 0
        self._left: list[str] = []
        self._whole_at: dict[str, int] = {}
        self._answers = 0
        self.counts = ScrubCounts() if counts is None else counts

    @property
    def damaged(self) -> set[str]:
        """Sections that differ and could not be loaded again: nothing may be answered with them."""
        return self._weights.damaged

    def answered(self) -> int:
        """Count an answer and hash a slice; return how many changed sections were found."""
        self._answers += 1
        return self._slice() + self._experts(SLICE_BYTES)

    def check_all(
        self, until: float = float("inf"), monotonic: Callable[[], float] = time.monotonic
    ) -> int:
        """Hash every section from the start; return how many changed ones were found.

        Args:
            until: When to stop; slices between answers go on from there.
            monotonic: Clock in seconds.
        """
        self._name, self._left = "", self._known()
        found = self._experts(_ALL)
        while self._left or self._name:
            found += self._slice()
            if monotonic() > until:
                break
        return found

    def repair(self) -> bool:
        """Load again what could not be before; return whether the weights are as signed."""
        for name in sorted(self.damaged):
            self._restore(name)
        return not self.damaged

    def facts(self) -> dict[str, int]:
        """Return what `status` shows."""
        return {
            "hashed_bytes": self.counts.hashed_bytes,
            "passes": self.counts.passes,
            "repairs": self.counts.repairs,
            "damaged": len(self.damaged),
            "suspect_answers": self.counts.suspects,
        }

    def _known(self) -> list[str]:
        return [name for name in self._weights.names if name in self._digests]

    def _slice(self) -> int:
        """Hash the next slice; return 1 if it ended a section that differs."""
        if not self._name:
            if not self._left:
                self._left = self._known()
            if not self._left:
                return 0
            self._name, self._at = self._left.pop(0), 0
            self._hash = hashlib.sha256()
        if self._name not in self._weights.names:  # paged out meanwhile
            self._name = ""
            return 0
        data = self._weights.section(self._name)
        piece = data[self._at : self._at + SLICE_BYTES]
        self._hash.update(piece)
        self._at += len(piece)
        self.counts.hashed_bytes += len(piece)
        if self._at < len(data):
            return 0
        name, self._name = self._name, ""
        self.counts.passes += not self._left
        if self._hash.hexdigest() == self._digests[name]:
            self._whole_at[name] = self._answers
            self.damaged.discard(name)
            return 0
        if name in self.damaged:
            return 0
        self.counts.suspects += self._answers - self._whole_at.get(name, 0)
        self._whole_at[name] = self._answers
        self._restore(name)
        return 1

    def _experts(self, most_bytes: int) -> int:
        """Look at experts that come and go; return how many had changed."""
        looked = self._weights.check_experts(most_bytes)
        for name, is_whole in looked.items():
            if not is_whole:
                self.counts.suspects += self._answers - self._whole_at.get(name, 0)
                self.counts.repairs += 1
            self._whole_at[name] = self._answers
        return sum(not is_whole for is_whole in looked.values())

    def _restore(self, name: str) -> None:
        try:
            self._weights.section(name)[:] = self._read(name)
        except (AgentError, ContractError, OSError, ValueError, MemoryError):
            self.damaged.add(name)
            return
        self.damaged.discard(name)
        self.counts.repairs += 1
