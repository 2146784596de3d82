"""The weight sections of a plan in memory: loaded once, shared by every plan that reads the same.

    sections -> one anonymous mapping, 2 MB aligned, huge pages advised -> any number of plans

A plan's tape and its kernels can so be replaced while the weights stay where they are, and so can
single experts: sections that are in memory already are lent, only the others are copied. Kernels
only read them. A mapping goes when the last plan goes that reads anything in it.
"""

import ctypes
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from compiler.contract.native_abi import SfSection
from compiler.contract.native_errors import NativeError
from compiler.contract.native_library import KernelLibrary
from compiler.contract.native_memory import Memory
from compiler.contract.plan_format import align

Buffer = bytes | bytearray | memoryview | mmap.mmap


class SectionEntry(Protocol):
    """A section that a plan names."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def length(self) -> int:
        """Bytes of it."""


@dataclass(frozen=True, slots=True)
class Held:
    """A section in memory, which stays while this is kept.

    Attributes:
        memory: The mapping.
        at: Where the section begins in it.
        length: Bytes.
    """

    memory: Memory
    at: int
    length: int

    @property
    def view(self) -> memoryview:
        """Its bytes."""
        return self.memory.view[self.at : self.at + self.length]


NOTHING_LENT: Final[Mapping[str, Held]] = MappingProxyType({})


class LoadedWeights:
    """Sections copied into one mapping, but for those that are lent."""

    def __init__(
        self,
        entries: tuple[SectionEntry, ...],
        sections: Mapping[str, Buffer],
        lent: Mapping[str, Held] = NOTHING_LENT,
    ) -> None:
        """Copy the sections that a plan names.

        Args:
            entries: Those of the plan.
            sections: Their bytes.
            lent: Sections with the same bytes that are in memory.

        Raises:
            NativeError: One is missing or has another length, or there is no memory.
        """
        lent = {entry.name: lent[entry.name] for entry in entries if entry.name in lent}
        own = [entry for entry in entries if entry.name not in lent]
        self.memory: Final = Memory(sum(align(entry.length) for entry in own))
        self.damaged: Final[set[str]] = set()
        """Sections found changed and not mended; known to every plan that shares them all."""
        held: dict[str, Held] = {}
        at = 0
        for entry in own:
            if entry.name not in sections:
                raise NativeError(f"section {entry.name!r} is missing")
            data = memoryview(sections[entry.name]).cast("B")
            require_length(entry, len(data))
            held[entry.name] = Held(self.memory, at, entry.length)
            held[entry.name].view[:] = data
            at += align(entry.length)
        self._held: Final = {e.name: lent.get(e.name) or held[e.name] for e in entries}

    def table(self, entries: tuple[SectionEntry, ...]) -> "ctypes.Array[SfSection]":
        """Return what `sf_init` reads, for a plan that names these sections.

        Raises:
            NativeError: One is not here, or has another length.
        """
        places = {name: (h.memory.address + h.at, h.length) for name, h in self._held.items()}
        return fill_table(entries, places)

    @property
    def names(self) -> tuple[str, ...]:
        """Sections that are here, in order."""
        return tuple(self._held)

    def section(self, name: str) -> memoryview:
        """Return the bytes of a section as they are in memory now; writing them repairs it."""
        return self._held[name].view

    def held(self, name: str) -> Held:
        """Return a section to lend."""
        return self._held[name]

    def check_experts(self, most_bytes: int) -> Mapping[str, bool]:  # noqa: ARG002
        """Return nothing: every section is among `names`."""
        return {}

    @property
    def size(self) -> int:
        """Bytes of memory that are kept for them, with what else lies where they were lent from."""
        return kept_bytes(self._held.values())

    @property
    def lent_bytes(self) -> int:
        """Bytes of sections that were lent."""
        return sum(h.length for h in self._held.values() if h.memory is not self.memory)

    def huge_bytes(self) -> int | None:
        """Return how much of that lies on huge pages; None if the system does not say."""
        found = [memory.huge_bytes() for memory in _memories(self._held.values())]
        return None if None in found else sum(bytes_ for bytes_ in found if bytes_ is not None)

    def fits(self, kernels: bytes) -> bool:  # noqa: ARG002 - sections are the same for all
        """Return whether a plan with these kernels can use them."""
        return True

    def init(self, library: KernelLibrary, setup: int) -> int:
        """Build a context over the sections; return its status."""
        return int(library.init(setup))

    def seat(self, library: KernelLibrary, context: int, keeps: object) -> None:
        """Do nothing: everything is there."""


def kept_bytes(held: Iterable[Held]) -> int:
    """Return the bytes of the mappings that sections lie in, each once."""
    return sum(len(memory.view) for memory in _memories(held))


def _memories(held: Iterable[Held]) -> Iterable[Memory]:
    return {id(item.memory): item.memory for item in held}.values()


def fill_table(
    entries: tuple[SectionEntry, ...], places: Mapping[str, tuple[int, int]]
) -> "ctypes.Array[SfSection]":
    """Return the table of sections that a plan names, from their addresses and lengths.

    Raises:
        NativeError: One is not there, or has another length.
    """
    table = (SfSection * max(1, len(entries)))()
    for row, entry in zip(table, entries, strict=False):
        if entry.name not in places:
            raise NativeError(f"section {entry.name!r} is missing")
        address, length = places[entry.name]
        require_length(entry, length)
        row.data, row.bytes = address, length
    return table


def require_length(entry: SectionEntry, found: int) -> None:
    """Refuse a section of another length than the plan says.

    Raises:
        NativeError: It has.
    """
    if found != entry.length:
        raise NativeError(f"section {entry.name!r} has {found} bytes, not {entry.length}")
