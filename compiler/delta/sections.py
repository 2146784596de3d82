"""Ports of the codec and the sections it works on.

The codec owns no file: it reads old bytes through `Base` and hands new bytes to `Sink`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from compiler.contract.canonical import sha256_hex
from compiler.contract.planes import Plane, require_component, require_cover


class Base(Protocol):
    """Where existing sections are read."""

    def pread(self, component: str, length: int, offset: int) -> bytes:
        """Return `length` bytes of a section from `offset`, fewer only at its end."""
        ...


class Sink(Protocol):
    """Where new sections are written; never the place that `Base` reads."""

    def pwrite(self, component: str, data: bytes, offset: int) -> None:
        """Write all of `data` into a section at `offset`."""
        ...


@dataclass(frozen=True, slots=True)
class SectionBytes:
    """A section in memory, for the encoder.

    Attributes:
        data: The bytes.
        planes: Layout covering `data` exactly; empty for a section without weights.

    Raises:
        ContractError: The planes do not cover the data.
    """

    data: bytes
    planes: tuple[Plane, ...] = ()

    def __post_init__(self) -> None:
        if self.planes:
            require_cover(self.planes, len(self.data))

    @property
    def sha256(self) -> str:
        """Digest of the bytes."""
        return sha256_hex(self.data)


class MemorySections:
    """`Base` and `Sink` in memory."""

    def __init__(self, sections: Mapping[str, bytes] | None = None) -> None:
        self._sections = {name: bytearray(data) for name, data in (sections or {}).items()}

    def pread(self, component: str, length: int, offset: int) -> bytes:
        """Return a range of a section; a section that was never written is empty."""
        return bytes(self._sections.get(component, b"")[offset : offset + length])

    def pwrite(self, component: str, data: bytes, offset: int) -> None:
        """Write a range, growing the section with zeros where needed."""
        section = self._sections.setdefault(require_component(component), bytearray())
        section.extend(bytes(max(0, offset + len(data) - len(section))))
        section[offset : offset + len(data)] = data

    def section(self, component: str) -> bytes:
        """Return the bytes of a section, empty if it was never written."""
        return bytes(self._sections.get(component, b""))
