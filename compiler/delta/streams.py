"""Virtual streams: all planes of one kind, over all sections coded by planes, end to end.

An expert of a small model has a few kilobytes of codes; joined, hundreds of experts share one
record and one pair of hashes. A range of a stream may lie elsewhere in the old section than in the
new one; what an alignment leaves alone has streams of its own, ADDED and DROPPED.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from compiler.contract.delta import (
    STREAM_KINDS,
    STREAMS,
    DeltaBaseError,
    DeltaHeader,
    DeltaSection,
    RecordKind,
)
from compiler.contract.delta_alignment import NOTHING
from compiler.delta.sections import Base, Sink


class Extent(NamedTuple):
    """A range of a section, in bytes.

    Attributes:
        component: The section.
        old_offset: Where it was; of what stands alone, where the kept unit before it is in the
            other section, or `NOTHING`.
        new_offset: Where it is.
        length: Bytes.
        unit: Of what stands alone, bytes of that unit; else 0.
        phase: Where in a unit the range starts.
    """

    component: str
    old_offset: int
    new_offset: int
    length: int
    unit: int = 0
    phase: int = 0

    def behind(self, head: int) -> "Extent":
        """Return what follows the first `head` bytes."""
        left = self.length - head
        if self.unit:
            phase = (self.phase + head) % self.unit
            return self._replace(new_offset=self.new_offset + head, length=left, phase=phase)
        return Extent(self.component, self.old_offset + head, self.new_offset + head, left)


class StreamCursor:
    """Walks one virtual stream once, in order, without holding its extents."""

    def __init__(self, extents: Iterator[Extent]) -> None:
        self._extents = extents
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
            self._rest = extent.behind(head) if head < extent.length else None
        return taken


def cursors(header: DeltaHeader) -> dict[RecordKind, StreamCursor]:
    """Return a cursor for every stream of a file."""
    walks = {kind: _kept(header.sections, STREAM_KINDS[kind]) for kind in STREAMS}
    walks[RecordKind.ADDED] = _alone(header, dropped=False)
    walks[RecordKind.DROPPED] = _alone(header, dropped=True)
    return {kind: StreamCursor(walk) for kind, walk in walks.items()}


def _kept(sections: Sequence[DeltaSection], kind: str) -> Iterator[Extent]:
    for section in sections:
        for kept in section.kept(kind):
            yield Extent(section.component, *kept)


def _alone(header: DeltaHeader, *, dropped: bool) -> Iterator[Extent]:
    for component, alone in header.alone(dropped=dropped):
        yield Extent(component, alone.before, alone.offset, alone.length, alone.unit)


def gather_before(base: Base, extents: Sequence[Extent]) -> bytes:
    """Return what the ranges of `extents`, which stand alone, may be made from.

    That is the kept unit before each, in the other section, again and again; zeros where there is
    none.

    Raises:
        DeltaBaseError: A section of the base is too short.
    """
    return b"".join(_before(base, extent) for extent in extents)


def _before(base: Base, extent: Extent) -> bytes:
    if extent.old_offset == NOTHING:
        return bytes(extent.length)
    unit = read_range(base, extent.component, extent.old_offset, extent.unit)
    times = -(-(extent.phase + extent.length) // extent.unit)
    return (unit * times)[extent.phase : extent.phase + extent.length]


def gather(base: Base, extents: Sequence[Extent], *, new: bool = False) -> bytes:
    """Return the bytes of `extents`, joined; `new` says that the base holds the new sections.

    Raises:
        DeltaBaseError: A section of the base is too short.
    """
    return b"".join(
        read_range(base, extent.component, _place(extent, new=new), extent.length)
        for extent in extents
    )


def read_range(base: Base, component: str, offset: int, length: int) -> bytes:
    """Return exactly `length` bytes of a section.

    Raises:
        DeltaBaseError: The section is too short.
    """
    data = base.pread(component, length, offset)
    if len(data) != length:
        raise DeltaBaseError(f"{component}: {len(data)} of {length} bytes at {offset}")
    return data


def scatter(sink: Sink, extents: Sequence[Extent], data: bytes, *, new: bool = True) -> None:
    """Write `data`, as long as all `extents` together, to where they are, or were if not `new`."""
    position = 0
    for extent in extents:
        part = data[position : position + extent.length]
        sink.pwrite(extent.component, part, _place(extent, new=new))
        position += extent.length


def _place(extent: Extent, *, new: bool) -> int:
    return extent.new_offset if new else extent.old_offset
