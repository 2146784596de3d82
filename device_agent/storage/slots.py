"""Which bundle runs, which one ran before, and whether the running one is still on probation.

Two slots, A and B, hold pointers to release manifests; the sections are shared through the object
store. A bundle is staged into the slot that does not run, and one write of the table makes it the
running one: after a power cut the table is the old or the new one, never a mixture.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json, require_sha256
from compiler.contract.errors import ContractError
from compiler.contract.protocol import integer, text
from device_agent.errors import BundleError
from device_agent.storage.disk import Disk
from device_agent.storage.twin import TwinDocument

SLOTS: Final = ("a", "b")


@dataclass(frozen=True, slots=True)
class Pointer:
    """One installed bundle.

    Attributes:
        size_bytes: Of the release manifest.
        committed: Whether it passed probation on this device once.
    """

    manifest_sha256: str
    size_bytes: int
    version: str
    security_epoch: int
    release_seq: int = 0
    committed: bool = False

    def to_json(self) -> Json:
        """Return the JSON form."""
        return {
            "manifest_sha256": self.manifest_sha256,
            "size_bytes": self.size_bytes,
            "version": self.version,
            "security_epoch": self.security_epoch,
            "release_seq": self.release_seq,
            "committed": self.committed,
        }


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The whole table.

    Attributes:
        active: Slot that runs, `a` or `b`; empty before the first bundle.
        a, b: What the slots hold.
        trial_starts: None when the running bundle is committed; otherwise how often it was started
            while on probation.
    """

    active: str = ""
    a: Pointer | None = None
    b: Pointer | None = None
    trial_starts: int | None = None

    @property
    def current(self) -> Pointer | None:
        """Return the running bundle."""
        return self._get(self.active)

    def runs(self, manifest_sha256: str) -> bool:
        """Return whether this is the running bundle, or the one that should run."""
        return self.current is not None and self.current.manifest_sha256 == manifest_sha256

    @property
    def inactive(self) -> str:
        """Return the name of the slot that does not run."""
        return "b" if self.active == "a" else "a"

    @property
    def other(self) -> Pointer | None:
        """Return what the other slot holds: the bundle before, or the one staged."""
        return self._get(self.inactive)

    @property
    def on_trial(self) -> bool:
        """Return whether the running bundle is not committed yet."""
        return self.trial_starts is not None

    def _get(self, slot: str) -> Pointer | None:
        return {"a": self.a, "b": self.b}.get(slot)

    def with_slot(self, slot: str, pointer: Pointer | None) -> "SlotTable":
        """Return the table with one slot changed."""
        return replace(self, a=pointer) if slot == "a" else replace(self, b=pointer)

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "active": self.active,
            "a": None if self.a is None else self.a.to_json(),
            "b": None if self.b is None else self.b.to_json(),
            "trial_starts": self.trial_starts,
        }


class Slots:
    """The durable slot table; every change is one write."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._document = TwinDocument(disk, folder, "slots")
        self._table = SlotTable()
        self.was_damaged = False

    def load(self) -> SlotTable:
        """Read the table; `was_damaged` tells whether one was there and could not be read."""
        found = self._document.load()
        self._table = SlotTable()
        self.was_damaged = found is None and self._document.exists
        if found is not None:
            try:
                self._table = table_from_json(found)
            except ContractError:
                self.was_damaged = True
        return self._table

    @property
    def table(self) -> SlotTable:
        """Return the table as last read or written."""
        return self._table

    def stage(self, pointer: Pointer) -> None:
        """Put a complete bundle into the slot that does not run, unless it is there."""
        other = self._table.other
        if other is None or other.manifest_sha256 != pointer.manifest_sha256:
            self._save(self._table.with_slot(self._table.inactive, pointer))

    def unstage(self, manifest_sha256: str) -> None:
        """Forget a staged bundle that will not be activated; one that ran here before stays."""
        other = self._table.other
        if other is not None and other.manifest_sha256 == manifest_sha256 and not other.committed:
            self._save(self._table.with_slot(self._table.inactive, None))

    def drop_other(self) -> None:
        """Forget the bundle before the running one; there is no way back to it from here."""
        if self._table.other is not None:
            self._save(self._table.with_slot(self._table.inactive, None))

    def activate(self) -> None:
        """Make the staged bundle the running one, on trial.

        Raises:
            BundleError: Nothing is staged.
        """
        if self._table.other is None:
            raise BundleError("nothing is staged")
        self._save(replace(self._table, active=self._table.inactive, trial_starts=0))

    def count_start(self) -> int:
        """Count a start of the bundle on trial, before it is loaded; return how many there were."""
        starts = (self._table.trial_starts or 0) + 1
        self._save(replace(self._table, trial_starts=starts))
        return starts

    def commit(self) -> None:
        """End the trial: the running bundle stays."""
        table = self._table
        if table.current is not None and (table.on_trial or not table.current.committed):
            committed = replace(table.current, committed=True)
            self._save(replace(table.with_slot(table.active, committed), trial_starts=None))

    def revert(self) -> None:
        """Make the bundle before the running one again and forget the one on trial."""
        failed = self._table.active
        back = self._table.inactive if self._table.other is not None else ""
        table = replace(self._table, active=back, trial_starts=None)
        self._save(table.with_slot(failed, None))

    def _save(self, table: SlotTable) -> None:
        self._document.save(table.to_json())
        self._table = table


def table_from_json(document: Mapping[str, Json]) -> SlotTable:
    """Parse a table.

    Raises:
        ContractError: A field is missing or wrong.
    """
    active = text(document, "active")
    starts = document.get("trial_starts")
    table = SlotTable(
        active=active,
        a=_pointer(document.get("a")),
        b=_pointer(document.get("b")),
        trial_starts=None if starts is None else integer(document, "trial_starts"),
    )
    if active not in ("", *SLOTS) or (active and table.current is None):
        raise ContractError("the active slot is empty")
    return table


def _pointer(value: Json) -> Pointer | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ContractError("a slot is an object or null")
    return Pointer(
        manifest_sha256=require_sha256(value.get("manifest_sha256"), "manifest_sha256"),
        size_bytes=integer(value, "size_bytes"),
        version=text(value, "version"),
        security_epoch=integer(value, "security_epoch"),
        release_seq=integer(value, "release_seq"),
        committed=value.get("committed") is True,
    )
