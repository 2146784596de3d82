"""Floors: numbers that only rise, whatever happens to caches and clocks.

    metadata versions   a replayed old repository is refused even when ngclient's cache was lost
    assignment_seq      a replayed assignment is refused
    security_floor      rises when a bundle is committed, never when it is installed
    clock_floor_s       the earliest time it can be, from the last metadata that was in time

A floor is written before the data it protects is used. When both copies are damaged the device
does not start again from zero by itself: `StateLostError`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json
from compiler.contract.errors import ContractError
from compiler.contract.protocol import integer, text
from device_agent.errors import ReplayError, StateLostError
from device_agent.storage.disk import Disk
from device_agent.storage.twin import TwinDocument

# No agent of this format is older; a clock before it is wrong.
EARLIEST: Final = datetime(2025, 1, 1, tzinfo=UTC)
_NUMBERS: Final = ("assignment_seq", "security_floor", "release_seq_high", "clock_floor_s")


@dataclass(frozen=True, slots=True)
class Floors:
    """Everything that only rises.

    Attributes:
        versions: Version of each metadata role seen, e.g. `timestamp`, `director-root`.
        online_keys: Identity of the keys behind `timestamp` and `snapshot`: when an offline root
            replaces them, their versions may start anew (recovery from a fast-forward attack).
        assignment_seq: Highest assignment accepted.
        assignment_sha256: The manifest that it named.
        security_floor: Lowest `security_epoch` that may be installed.
        release_seq_high: Highest release committed.
        clock_floor_s: Unix time, seconds.
    """

    versions: Mapping[str, int] = field(default_factory=dict)
    online_keys: str = ""
    assignment_seq: int = 0
    assignment_sha256: str = ""
    security_floor: int = 0
    release_seq_high: int = 0
    clock_floor_s: int = int(EARLIEST.timestamp())

    def raised_metadata(self, seen: Mapping[str, int], online_keys: str) -> "Floors":
        """Return the floors after metadata of the versions `seen` was verified.

        Raises:
            ReplayError: A role is older than before, and its keys were not replaced.
        """
        known = dict(self.versions)
        if self.online_keys and online_keys != self.online_keys:
            if seen.get("root", 0) <= known.get("root", 0):
                raise ReplayError("the online keys changed without a new root")
            for role in ("timestamp", "snapshot"):
                known.pop(role, None)
        for role, version in seen.items():
            if version < known.get(role, 0):
                raise ReplayError(f"{role} version {version}, this device has seen {known[role]}")
            known[role] = version
        return replace(self, versions=known, online_keys=online_keys)

    def raised(
        self,
        *,
        assignment_seq: int = 0,
        security_floor: int = 0,
        release_seq: int = 0,
        clock_floor_s: int = 0,
    ) -> "Floors":
        """Return the floors, none lower than before."""
        return replace(
            self,
            assignment_seq=max(self.assignment_seq, assignment_seq),
            security_floor=max(self.security_floor, security_floor),
            release_seq_high=max(self.release_seq_high, release_seq),
            clock_floor_s=max(self.clock_floor_s, clock_floor_s),
        )

    def accepts(self, assignment_seq: int, manifest_sha256: str) -> bool:
        """Return whether an assignment is new, or the accepted one asked for once more.

        The nonce keeps a recording from being taken for either.
        """
        if assignment_seq == self.assignment_seq:
            return manifest_sha256 == self.assignment_sha256
        return assignment_seq > self.assignment_seq

    def with_assignment(self, manifest_sha256: str) -> "Floors":
        """Return the floors with the manifest that the highest assignment names."""
        return replace(self, assignment_sha256=manifest_sha256)

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        document: dict[str, Json] = {name: getattr(self, name) for name in _NUMBERS}
        document["online_keys"] = self.online_keys
        document["assignment_sha256"] = self.assignment_sha256
        document["versions"] = dict(self.versions)
        return document


class FloorStore:
    """The durable floors."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._document = TwinDocument(disk, folder, "floors")

    @property
    def exists(self) -> bool:
        """Return whether floors were ever written."""
        return self._document.exists

    def load(self) -> Floors:
        """Return the floors.

        Raises:
            StateLostError: Neither copy can be read.
        """
        try:
            document = self._document.load()
            if document is not None:
                return floors_from_json(document)
        except ContractError:
            pass
        raise StateLostError(
            "the anti-rollback state of this device cannot be read",
            hint="it keeps answering; to update again: enrol --accept-state-loss",
        )

    def time(self, now: datetime) -> datetime:
        """Return the later of a clock and its floor; the clock when the floors are lost."""
        try:
            return effective_time(now, self.load())
        except StateLostError:
            return now

    def save(self, floors: Floors) -> None:
        """Make `floors` durable."""
        self._document.save(floors.to_json())


def floors_from_json(document: Mapping[str, Json]) -> Floors:
    """Parse floors.

    Raises:
        ContractError: A field is missing or wrong.
    """
    versions = document.get("versions")
    if not isinstance(versions, Mapping):
        raise ContractError("versions must be an object")
    numbers = {name: integer(document, name) for name in _NUMBERS}
    return Floors(
        versions={role: integer(versions, role) for role in versions},
        online_keys=text(document, "online_keys"),
        assignment_sha256=text(document, "assignment_sha256"),
        **numbers,
    )


def effective_time(now: datetime, floors: Floors) -> datetime:
    """Return the later of the clock and its floor."""
    return max(now, datetime.fromtimestamp(floors.clock_floor_s, UTC))
