"""Virtual streams: all planes of one kind, over all sections of unchanged layout, end to end.

An expert of a small model has a few kilobytes of codes; joined, hundreds of experts share one
record and one pair of hashes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from compiler.contract.delta import DeltaBaseError, DeltaSection
from compiler.delta.sections import Base, Sink


class Extent(NamedTuple):
    """A range of a section, in bytes."""

    component: str
    offset: int
    length: int


class StreamCursor:
    """Walks one virtual stream once, in order, without holding its extents."""

    def __init__(self, sections: Sequence[DeltaSection], kind: str) -> None:
        self._extents = self._walk(sections, kind)
        self._rest: Extent | None = None

    def take(self, length: int) -> list[Extent]:
        """Return the extents of the next `length` bytes.

        Raises:
            ValueError: The stream is shorter; `read_records` never asks for that.
        """
        taken: list[Extent] = []
        while length:
            extent = self._rest or next(self._extents, None)
            if extent is None:
                raise ValueError("virtual stream exhausted")
            head = min(length, extent.length)
            taken.append(extent._replace(length=head))
            length -= head
            left = extent.length - head
            self._rest = Extent(extent.component, extent.offset + head, left) if left else None
        return taken

    @staticmethod
    def _walk(sections: Sequence[DeltaSection], kind: str) -> Iterator[Extent]:
        for section in sections:
            for plane in section.planes:
                if plane.kind == kind:
                    yield Extent(section.component, plane.offset, plane.length)


def gather(base: Base, extents: Sequence[Extent]) -> bytes:
    """Return the bytes of `extents`, joined.

    Raises:
        DeltaBaseError: A section of the base is too short.
    """
    return b"".join(read_range(base, *extent) for extent in extents)


def read_range(base: Base, component: str, offset: int, length: int) -> bytes:
    """Return exactly `length` bytes of a section.

    Raises:
        DeltaBaseError: The section is too short.
    """
    data = base.pread(component, length, offset)
    if len(data) != length:
        raise DeltaBaseError(f"{component}: {len(data)} of {length} bytes at {offset}")
    return data


def scatter(sink: Sink, extents: Sequence[Extent], data: bytes) -> None:
    """Write `data`, as long as all `extents` together, to where they say."""
    position = 0
    for extent in extents:
        sink.pwrite(extent.component, data[position : position + extent.length], extent.offset)
        position += extent.length
