"""Apply a delta: read the objects of the base, write new objects, check every digest.

The base is only read, so the running bundle works all the time and a device that is killed here
still has it; running again from the start makes the same objects.
"""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from compiler.contract.delta import DeltaError, parse_header
from compiler.contract.manifest import ReleaseManifest, Section
from compiler.contract.protocol import DeltaOffer
from compiler.delta import apply_delta
from device_agent.errors import BundleError, ContentError, DeltaUnusableError, OversizedError
from device_agent.storage.objects import ObjectStore, PartialObject

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_UNUSABLE: Final = (DeltaError, ContentError, OversizedError, BundleError)


class BaseObjects:
    """`compiler.delta.Base` over the object store: every section is hashed before it is read."""

    def __init__(self, store: ObjectStore, manifest: ReleaseManifest) -> None:
        self._store = store
        self._sections = {section.component: section for section in manifest.sections}
        self._views: dict[str, memoryview] = {}

    def pread(self, component: str, length: int, offset: int) -> bytes:
        """Return a range of a section; a section that the base does not have is empty."""
        section = self._sections.get(component)
        if section is None:
            return b""
        if component not in self._views:
            view = self._store.read_verified(section.sha256, section.size_bytes)
            self._views[component] = view
        return bytes(self._views[component][offset : offset + length])

    def close(self) -> None:
        """Let the mapped sections go."""
        for view in self._views.values():
            view.release()
        self._views.clear()


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
        patch = store.read_verified(offer.sha256, offer.size_bytes)
        header = parse_header(_reader(patch).read)
        header.require_bundles(_digests(base), _digests(new))
        named = {section.component for section in header.sections}
        wanted = {item.component: item for item in new.sections if item.component in named}
        source, sink = BaseObjects(store, base), NewObjects(store, wanted)
        try:
            apply_delta(source, _reader(patch), sink)
            sink.finish()
        finally:
            sink.close()
            source.close()
    except _UNUSABLE as error:
        raise DeltaUnusableError(f"{error} [{error.code}]") from error


class _ViewFile(io.RawIOBase):
    """A mapped object as a file, without a copy."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        target = memoryview(buffer).cast("B")
        data = self._view[self._position : self._position + len(target)]
        target[: len(data)] = data
        self._position += len(data)
        return len(data)


def _reader(view: memoryview) -> io.BufferedReader:
    return io.BufferedReader(_ViewFile(view))


def _digests(manifest: ReleaseManifest) -> dict[str, str]:
    return {section.component: section.sha256 for section in manifest.sections}
