"""Ports of the codec and the sections it works on.

The codec owns no file: it reads old bytes through `Base` and hands new bytes to `Sink`. The encoder
reads both bundles through `SectionSource`, a range at a time, so that neither need be in memory.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from compiler.contract.canonical import sha256_hex
from compiler.contract.manifest import Section
from compiler.contract.planes import Plane, require_component, require_cover

_HASHED_AT_ONCE: Final = 1 << 20


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


class SectionSource(Protocol):
    """A section that the encoder reads."""

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Layout covering the section exactly; empty for a section without weights."""
        ...

    @property
    def length(self) -> int:
        """Bytes of the section."""
        ...

    @property
    def sha256(self) -> str:
        """Digest of the section."""
        ...

    def read(self, length: int, offset: int) -> bytes:
        """Return `length` bytes from `offset`, fewer only at the end."""
        ...


@dataclass(frozen=True, slots=True)
class SectionBytes:
    """A section in memory, for the encoder.

    Attributes:
        data: The bytes.
        planes: Layout covering `data` exactly; empty for a section without weights.
        sha256: Digest of the bytes.

    Raises:
        ContractError: The planes do not cover the data.
    """

    data: bytes
    planes: tuple[Plane, ...] = ()
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        if self.planes:
            require_cover(self.planes, len(self.data))
        object.__setattr__(self, "sha256", sha256_hex(self.data))

    @property
    def length(self) -> int:
        """Bytes of the section."""
        return len(self.data)

    def read(self, length: int, offset: int) -> bytes:
        """Return `length` bytes from `offset`, fewer only at the end."""
        return self.data[offset : offset + length]


class SectionFile:
    """A section in a file, for the encoder; the file stays open until `close`."""

    def __init__(self, path: Path, planes: tuple[Plane, ...] = ()) -> None:
        """Open and hash a file.

        Raises:
            ContractError: The planes do not cover the file.
            OSError: It cannot be read.
        """
        self._file = path.open("rb", buffering=0)
        self.length: Final = os.fstat(self._file.fileno()).st_size
        self.planes: Final = planes
        if planes:
            require_cover(planes, self.length)
        digest = hashlib.sha256()
        for offset in range(0, self.length, _HASHED_AT_ONCE):
            digest.update(self.read(_HASHED_AT_ONCE, offset))
        self.sha256: Final = digest.hexdigest()

    def read(self, length: int, offset: int) -> bytes:
        """Return `length` bytes from `offset`, fewer only at the end."""
        return os.pread(self._file.fileno(), length, offset)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Sources:
    """`Base` over the sections of a bundle."""

    def __init__(self, sections: Mapping[str, SectionSource]) -> None:
        self._sections = sections

    def pread(self, component: str, length: int, offset: int) -> bytes:
        """Return a range of a section; a section that the bundle does not have is empty."""
        section = self._sections.get(component)
        return section.read(length, offset) if section is not None else b""


def with_planes(sections: Iterable[Section], data: Mapping[str, bytes]) -> dict[str, SectionBytes]:
    """Return the bytes of a bundle's sections with the layouts that its manifest gives.

    Args:
        sections: Of the manifest.
        data: Component to bytes, for each of them.

    Raises:
        ContractError: The planes do not cover the data.
    """
    return {item.component: SectionBytes(data[item.component], item.planes) for item in sections}


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
