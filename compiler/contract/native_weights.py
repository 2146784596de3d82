"""The weight sections of a plan in memory: loaded once, shared by every plan that reads the same.

    sections -> one anonymous mapping, 2 MB aligned, huge pages advised -> any number of plans

A plan's tape and its kernels can so be replaced while the weights stay where they are. Kernels only
read them. The memory goes when the last plan goes that holds them.
"""

import ctypes
import mmap
from collections.abc import Mapping
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


class LoadedWeights:
    """Sections copied into one mapping."""

    def __init__(self, entries: tuple[SectionEntry, ...], sections: Mapping[str, Buffer]) -> None:
        """Copy the sections that a plan names.

        Raises:
            NativeError: One is missing or has another length, or there is no memory.
        """
        self.memory: Final = Memory(sum(align(entry.length) for entry in entries))
        self.damaged: Final[set[str]] = set()
        """Sections found changed and not mended; known to every plan that shares them."""
        self._places: dict[str, tuple[int, int]] = {}
        at = 0
        for entry in entries:
            if entry.name not in sections:
                raise NativeError(f"section {entry.name!r} is missing")
            data = memoryview(sections[entry.name]).cast("B")
            require_length(entry, len(data))
            self.memory.view[at : at + entry.length] = data
            self._places[entry.name] = self.memory.address + at, entry.length
            at += align(entry.length)

    def table(self, entries: tuple[SectionEntry, ...]) -> "ctypes.Array[SfSection]":
        """Return what `sf_init` reads, for a plan that names these sections.

        Raises:
            NativeError: One is not here, or has another length.
        """
        return fill_table(entries, self._places)

    @property
    def names(self) -> tuple[str, ...]:
        """Sections that are here, in order."""
        return tuple(self._places)

    def section(self, name: str) -> memoryview:
        """Return the bytes of a section as they are in memory now; writing them repairs it."""
        at, length = self._places[name]
        first = at - self.memory.address
        return self.memory.view[first : first + length]

    def check_experts(self, most_bytes: int) -> Mapping[str, bool]:  # noqa: ARG002
        """Return nothing: every section is among `names`."""
        return {}

    @property
    def size(self) -> int:
        """Bytes of weights in memory."""
        return len(self.memory.view)

    def huge_bytes(self) -> int | None:
        """Return how many of them lie on huge pages; None if the system does not say."""
        return self.memory.huge_bytes()

    def fits(self, kernels: bytes) -> bool:  # noqa: ARG002 - sections are the same for all
        """Return whether a plan with these kernels can use them."""
        return True

    def init(self, library: KernelLibrary, setup: int) -> int:
        """Build a context over the sections; return its status."""
        return int(library.init(setup))

    def seat(self, library: KernelLibrary, context: int, keeps: object) -> None:
        """Do nothing: everything is there."""


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
