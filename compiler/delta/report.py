"""What an encoding cost, section by section."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compiler.contract.delta import RECORD_BYTES, DeltaRecord, DeltaSection, RecordKind
from compiler.delta.streams import Extent


@dataclass(frozen=True, slots=True)
class SectionReport:
    """One changed section.

    Attributes:
        component: Its name.
        codec: `planes` or `aligned`, with `+lowrank` if planes are replayed; of a section coded
            whole the modes of its pieces in lower case, joined by `+`, or `empty`.
        old_length: Bytes before.
        new_length: Bytes after, what a full download would take.
        delta_bytes: Its part of the file. Records shared by sections are divided by the number of
            bytes that changed in each.
    """

    component: str
    codec: str
    old_length: int
    new_length: int
    delta_bytes: int


@dataclass(frozen=True, slots=True)
class DeltaReport:
    """The sum.

    Attributes:
        sections: Changed sections in component order.
        overhead_bytes: Header and unchanged chunks; with all `delta_bytes` it is the whole file.
        changed_codes: 4-bit codes that differ, in sections coded by planes.
        total_codes: 4-bit codes in those sections.
    """

    sections: tuple[SectionReport, ...]
    overhead_bytes: int
    changed_codes: int
    total_codes: int


class ReportBuilder:
    """Collects costs while records are made."""

    def __init__(self, sections: Sequence[DeltaSection]) -> None:
        self._sections = sections
        self._bytes: Counter[str] = Counter()
        self._modes: defaultdict[str, set[str]] = defaultdict(set)
        self._changed_codes = 0
        self._total_codes = 0

    def add_chunk(
        self, record: DeltaRecord, extents: Sequence[Extent], old: bytes, new: bytes
    ) -> None:
        """Divide a stream record among the sections of `extents`."""
        size = RECORD_BYTES + record.payload_length
        difference = np.frombuffer(old, np.uint8) ^ np.frombuffer(new, np.uint8)
        if record.kind is RecordKind.CODES4:
            self._total_codes += 2 * len(new)
            self._changed_codes += int(np.count_nonzero(difference & 15))
            self._changed_codes += int(np.count_nonzero(difference >> 4))
        changed: Counter[str] = Counter()
        position = 0
        for extent in extents:
            part = difference[position : position + extent.length]
            changed[extent.component] += int(np.count_nonzero(part))
            position += extent.length
        self._bytes.update(dict(_shares(changed, size)))

    def add_piece(self, record: DeltaRecord) -> None:
        """Add a piece or a replay to its section."""
        component = self._sections[record.section].component
        self._bytes[component] += RECORD_BYTES + record.payload_length
        self._modes[component].add(record.mode.name.lower())

    def build(self, file_length: int) -> DeltaReport:
        """Return the report for a file of `file_length` bytes."""
        rows = tuple(
            SectionReport(
                section.component,
                self._codec(section),
                section.old_length,
                section.new_length,
                self._bytes[section.component],
            )
            for section in self._sections
        )
        return DeltaReport(
            rows, file_length - self._bytes.total(), self._changed_codes, self._total_codes
        )

    def _codec(self, section: DeltaSection) -> str:
        modes = sorted(self._modes[section.component])
        if section.planes:
            kind = "aligned" if section.alignment is not None else "planes"
            return "+".join((kind, *modes))
        return "+".join(modes) or "empty"


def _shares(weights: Mapping[str, int], size: int) -> Iterator[tuple[str, int]]:
    """Divide `size` by `weights` into integers with the same sum; no weight, no share."""
    total = sum(weights.values())
    seen = given = 0
    for name, weight in weights.items():
        if weight:
            seen += weight
            upto = size * seen // total
            yield name, upto - given
            given = upto
