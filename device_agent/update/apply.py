"""Apply a delta: read the objects of the base, write new objects, check every digest.

The base is only read, so the running bundle works all the time and a device that is killed here
still has it; running again from the start makes the same objects. Called in a process of its own,
see `patching`.
"""

import contextlib
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO, Final

from compiler.contract.delta import DeltaError, DeltaHeader, parse_header
from compiler.contract.manifest import ReleaseManifest, Section
from compiler.contract.protocol import DeltaOffer
from compiler.delta import apply_delta
from device_agent.errors import BundleError, ContentError, DeltaUnusableError, OversizedError
from device_agent.storage.objects import ObjectStore, PartialObject, ReadObject

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_OPEN: Final = 64
"""Sections of the base that are open at a time."""
UNUSABLE: Final = (DeltaError, ContentError, OversizedError, BundleError)


class BaseObjects:
    """`compiler.delta.Base` over the object store: every section is hashed before it is read.

    A section that is closed to make room is not hashed again: the delta names the hash of whatever
    it needs.
    """

    def __init__(self, store: ObjectStore, manifest: ReleaseManifest) -> None:
        self._store = store
        self._sections = {section.component: section for section in manifest.sections}
        self._verified: set[str] = set()
        self._open: dict[str, ReadObject] = {}

    def pread(self, component: str, length: int, offset: int) -> bytes:
        """Return a range of a section; a section that the base does not have is empty."""
        section = self._sections.get(component)
        if section is None:
            return b""
        if component not in self._open:
            if len(self._open) >= MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[component] = self._opened(section)
        return self._open[component].read(length, offset)

    def close(self) -> None:
        """Close what is open."""
        for item in self._open.values():
            item.close()
        self._open.clear()

    def _opened(self, section: Section) -> ReadObject:
        if section.sha256 in self._verified:
            return ReadObject(self._store.open(section.sha256, section.size_bytes), section.sha256)
        self._verified.add(section.sha256)
        return self._store.verify(section.sha256, section.size_bytes)


class NewObjects:
    """`compiler.delta.Sink` over the object store; sections that are here already are left out."""

    def __init__(self, store: ObjectStore, sections: Mapping[str, Section]) -> None:
        self._store = store
        self._sections = sections
        self._partials: dict[str, PartialObject] = {}

    def pwrite(self, component: str, data: bytes, offset: int) -> None:
        """Write a range of a section."""
        section = self._sections[component]
        if not self._store.has(section.sha256, section.size_bytes):
            self._open(section).write(offset, data)

    def finish(self) -> None:
        """Check and name every section that the delta makes.

        Raises:
            ContentError: A section has another digest than the release manifest says.
        """
        for section in self._sections.values():
            if not self._store.has(section.sha256, section.size_bytes):
                self._open(section).finish()
        self._store.sync()

    def close(self) -> None:
        """Drop what was not finished."""
        for partial in self._partials.values():
            partial.discard()
        self._partials.clear()

    def _open(self, section: Section) -> PartialObject:
        # By content: two components may be made of the same bytes.
        if section.sha256 not in self._partials:
            self._partials[section.sha256] = self._store.begin(
                section.sha256, section.size_bytes, resume=False
            )
        return self._partials[section.sha256]


def apply_offer(
    store: ObjectStore, offer: DeltaOffer, base: ReleaseManifest, new: ReleaseManifest
) -> None:
    """Make the sections of `new` that `base` does not have.

    Args:
        store: Holds the delta file and the base.
        offer: Signed offer of the delta.
        base: Bundle that the delta starts from.
        new: Bundle that it leads to.

    Raises:
        DeltaUnusableError: The delta, its base or its result is not what it should be.
        DiskFullError: No space is left.
    """
    try:
        with open_delta(store, offer) as patch:
            header = checked_header(patch, base, new)
            named = {section.component for section in header.sections}
            make_sections(store, patch, base, new, named)
    except UNUSABLE as error:
        raise DeltaUnusableError(f"{error} [{error.code}]") from error


def open_delta(store: ObjectStore, offer: DeltaOffer) -> BinaryIO:
    """Return a delta file whose digest was checked, from its first byte.

    Raises:
        DamagedError: It is not what was signed for.
    """
    return io.BufferedReader(_ObjectFile(store.verify(offer.sha256, offer.size_bytes)))


def checked_header(patch: BinaryIO, base: ReleaseManifest, new: ReleaseManifest) -> DeltaHeader:
    """Return the header of a delta that leads from `base` to `new`; the file is at its start again.

    Raises:
        DeltaError: It is malformed, or leads from or to something else.
    """
    header = parse_header(patch.read)
    header.require_bundles(_digests(base), _digests(new))
    patch.seek(0)
    return header


def make_sections(
    store: ObjectStore,
    patch: BinaryIO,
    base: ReleaseManifest,
    new: ReleaseManifest,
    components: set[str],
    *,
    start_record: int = 0,
) -> None:
    """Make new objects of the sections named; records before `start_record` are passed over."""
    wanted = {item.component: item for item in new.sections if item.component in components}
    source, sink = BaseObjects(store, base), NewObjects(store, wanted)
    with contextlib.closing(source), contextlib.closing(sink):
        apply_delta(source, patch, sink, start_record=start_record)
        sink.finish()


class _ObjectFile(io.RawIOBase):
    """An object as a file."""

    def __init__(self, source: ReadObject) -> None:
        super().__init__()
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation("only from the beginning")
        self._position = offset
        return offset

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()

    def readinto(self, buffer: "WriteableBuffer") -> int:
        target = memoryview(buffer).cast("B")
        data = self._source.read(len(target), self._position)
        target[: len(data)] = data
        self._position += len(data)
        return len(data)


def _digests(manifest: ReleaseManifest) -> dict[str, str]:
    return {section.component: section.sha256 for section in manifest.sections}
