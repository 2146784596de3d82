"""Records that replay a plane of codes: factors, the codes that clipping lost, and their hashes.

    payload   factors (`compiler.delta.lowrank`) | gaps of clipped codes | blob of those codes

A record makes one plane of `codes4` whole, a panel at a time, from the codes of the other side and
from the scales that follow the plane in the layout: `scales8`, then `f32`. Those must be the same
in both sections; the streams that hold them check that.
"""

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from compiler.contract.delta import HASH_BYTES, DeltaFormatError, DeltaSection
from compiler.contract.planes import Plane
from compiler.delta.blobs import BlobReader, pack_blob
from compiler.delta.gaps import pack_gaps, read_gaps
from compiler.delta.lowrank import PANEL, Factors, Stripes, read_factors
from compiler.delta.sections import Base, Sink
from compiler.delta.streams import read_range

MAX_CLIPPED: Final = 1 << 16
_ROW_BYTES: Final = 4 * PANEL
_TOP_CODE: Final = 15


class WeightPlanes(NamedTuple):
    """Where one W4 weight stands in a section."""

    codes: Plane
    scales: Plane
    rows: Plane


class Hashes(NamedTuple):
    """BLAKE2b-128 of the codes that were read and of those that were written."""

    before: bytes
    after: bytes


def weight_planes(planes: Sequence[Plane], number: int) -> WeightPlanes:
    """Return the planes of the weight whose codes are plane `number`.

    Raises:
        DeltaFormatError: Other planes follow than group and row scales.
    """
    found = [plane for plane in planes[number : number + 5] if plane.kind != "raw"][:3]
    if [plane.kind for plane in found] != ["codes4", "scales8", "f32"]:
        raise DeltaFormatError("codes without scales cannot be replayed")
    return WeightPlanes(*found)


class SectionReplay:
    """One record: a plane of codes made again."""

    def __init__(
        self, section: DeltaSection, number: int, payload: bytes, *, reverse: bool
    ) -> None:
        """Read the payload.

        Raises:
            DeltaLimitError: A size is above its limit.
            DeltaFormatError: The payload is malformed, or does not fit the planes.
        """
        reader = BlobReader(payload)
        factors = read_factors(reader)
        self._component = section.component
        self._reverse = reverse
        self._stripes = Stripes(factors)
        self._planes = weight_planes(section.planes, number)
        require_fit(self._stripes, self._planes)
        codes = 2 * self._planes.codes.length
        self._places = read_gaps(reader, limit=codes, most=min(codes, MAX_CLIPPED))
        self._values = np.frombuffer(reader.blob(self._places.size, exact=True), np.uint8)
        reader.finish()
        if self._values.size and int(self._values.max()) > _TOP_CODE:
            raise DeltaFormatError("a code above 15")

    def run(self, source: Base, sink: Sink) -> Hashes:
        """Make the plane; whether it is the right one, the hashes say.

        Raises:
            DeltaBaseError: The section is too short.
        """
        before, after = (hashlib.blake2b(digest_size=HASH_BYTES) for _ in range(2))
        size = self._stripes.codes_bytes
        for panel in range(self._stripes.panels):
            codes, scales, rows = read_panel(source, self._component, self._planes, panel)
            made, _ = self._stripes.replay(panel, codes, scales, rows, reverse=self._reverse)
            if self._reverse:
                made = self._restored(made, panel)
            data = made.tobytes()
            before.update(codes)
            after.update(data)
            sink.pwrite(self._component, data, self._planes.codes.offset + panel * size)
        return Hashes(before.digest(), after.digest())

    def _restored(self, codes: npt.NDArray[np.uint8], panel: int) -> npt.NDArray[np.uint8]:
        """Put back what clipping lost in one panel."""
        nibbles = 2 * self._stripes.codes_bytes
        low, high = np.searchsorted(self._places, (panel * nibbles, (panel + 1) * nibbles))
        places, values = self._places[low:high] - panel * nibbles, self._values[low:high]
        shift = 4 * (places & 1).astype(np.uint8)
        np.bitwise_and.at(codes, places >> 1, np.uint8(240) >> shift)
        np.bitwise_or.at(codes, places >> 1, values << shift)
        return codes


def encode_replay(
    old: Base, new: Base, component: str, planes: WeightPlanes, factors: Factors
) -> bytes | None:
    """Return the payload that leads from the codes of `old` to those of `new`, if one does.

    None means that the release was not made by this replay: its codes or its scales differ, or too
    many codes were clipped to list them.

    Raises:
        DeltaFormatError: The factors have another shape than the weight.
    """
    stripes = Stripes(factors)
    require_fit(stripes, planes)
    places: list[int] = []
    values = bytearray()
    for panel in range(stripes.panels):
        before = read_panel(old, component, planes, panel)
        after = read_panel(new, component, planes, panel)
        made, lost = stripes.replay(panel, *before)
        if made.tobytes() != after[0] or before[1:] != after[1:]:
            return None
        if len(places) + lost.size > MAX_CLIPPED:
            return None
        codes = np.frombuffer(before[0], np.uint8)[lost >> 1] >> 4 * (lost & 1)
        places += (lost + 2 * panel * stripes.codes_bytes).tolist()
        values += (codes & _TOP_CODE).astype(np.uint8).tobytes()
    clipped = np.array(places, np.int64)
    return factors.to_bytes() + pack_gaps(clipped) + pack_blob(bytes(values))


def require_fit(stripes: Stripes, planes: WeightPlanes) -> None:
    """Check that factors have the shape of a weight.

    Raises:
        DeltaFormatError: They have another.
    """
    sizes = (stripes.codes_bytes, stripes.scales_bytes, _ROW_BYTES)
    if any(p.length != n * stripes.panels for p, n in zip(planes, sizes, strict=True)):
        raise DeltaFormatError("factors of another shape than the weight")


def read_panel(
    base: Base, component: str, planes: WeightPlanes, panel: int
) -> tuple[bytes, bytes, bytes]:
    """Return codes, group scales and row scales of one panel.

    Raises:
        DeltaBaseError: The section is too short.
    """
    panels = planes.rows.length // _ROW_BYTES
    sizes = [plane.length // panels for plane in planes]
    codes, scales, rows = (
        read_range(base, component, plane.offset + panel * size, size)
        for plane, size in zip(planes, sizes, strict=True)
    )
    return codes, scales, rows
