"""Bundles that failed on this device: kept outside the slots and the caches.

    failed in a way that speaks against the bundle -> denied until the entry expires, or until an
    assignment of a higher sequence says `retry_failed`

Otherwise a release that fails here is offered, fetched and tried for ever. The list is bounded: it
forgets what expires first. Losing it costs a try, no safety, so damage begins a new one.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json, require_sha256
from compiler.contract.errors import ContractError
from compiler.contract.protocol import integer, text
from device_agent.storage.disk import Disk
from device_agent.storage.twin import TwinDocument

log = logging.getLogger("device_agent.update")

MAX_DENIED: Final = 64
MAX_DOUBLINGS: Final = 5
MAX_TEXT: Final = 300


@dataclass(frozen=True, slots=True)
class Denial:
    """One bundle that is not tried.

    Attributes:
        code, message: Why it failed the last time.
        count: How often it failed.
        assignment_seq: Of the assignment under which it failed the last time.
        since_s, until_s: Unix time, seconds.
        event: Names the last failure, so that writing it down twice counts once.
    """

    manifest_sha256: str
    version: str
    code: str
    message: str
    count: int
    assignment_seq: int
    since_s: int
    until_s: int
    event: str

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return dict(asdict(self))


@dataclass(frozen=True, slots=True)
class Failure:
    """What a bundle did wrong."""

    manifest_sha256: str
    version: str
    code: str
    message: str
    assignment_seq: int
    event: str


class DenyList:
    """The durable list; every change is one write."""

    def __init__(self, disk: Disk, folder: Path, denied_s: float, now: Callable[[], int]) -> None:
        """Read the list.

        Args:
            disk: Where to.
            folder: Not that of the slots or of a cache.
            denied_s: How long a first failure counts; each further one twice as long as the last.
            now: Unix time, seconds.
        """
        self._document = TwinDocument(disk, folder, "denied")
        self._denied_s = denied_s
        self._now = now
        self._entries = self._load()

    @property
    def entries(self) -> tuple[Denial, ...]:
        """Return what is denied now, the newest failure last."""
        now = self._now()
        return tuple(entry for entry in self._entries.values() if entry.until_s > now)

    def find(self, manifest_sha256: str) -> Denial | None:
        """Return why a bundle is not tried, or None if it may be.

        A clock that went back does not lengthen an entry: it then counts from now.
        """
        entry, now = self._entries.get(manifest_sha256), self._now()
        if entry is None or entry.until_s <= now:
            return None
        if entry.since_s > now:
            entry = replace(entry, since_s=now, until_s=now + entry.until_s - entry.since_s)
            self._save({**self._entries, manifest_sha256: entry})
        return entry

    def add(self, failure: Failure) -> Denial:
        """Deny a bundle; the same failure again changes nothing. Durable when this returns."""
        known = self._entries.get(failure.manifest_sha256)
        if known is not None and known.event == failure.event:
            return known
        now, count = self._now(), 1 if known is None else known.count + 1
        wait_s = int(self._denied_s * 2 ** min(count - 1, MAX_DOUBLINGS))
        entry = Denial(
            failure.manifest_sha256,
            failure.version,
            failure.code,
            failure.message[:MAX_TEXT],
            count,
            failure.assignment_seq,
            now,
            now + wait_s,
            failure.event,
        )
        others = {sha: one for sha, one in self._entries.items() if sha != entry.manifest_sha256}
        while len(others) >= MAX_DENIED:
            del others[min(others.values(), key=lambda one: one.until_s).manifest_sha256]
        self._save({**others, entry.manifest_sha256: entry})
        return entry

    def lift(self, manifest_sha256: str) -> None:
        """Forget the failures of a bundle: it was committed."""
        if manifest_sha256 in self._entries:
            rest = {sha: one for sha, one in self._entries.items() if sha != manifest_sha256}
            self._save(rest)

    def _load(self) -> dict[str, Denial]:
        try:
            document = self._document.load()
            return {} if document is None else _denials(document.get("denied"))
        except ContractError as error:
            log.warning("the list of denied bundles cannot be read: %s", error)
            return {}

    def _save(self, entries: dict[str, Denial]) -> None:
        self._document.save({"denied": [entry.to_json() for entry in entries.values()]})
        self._entries = entries


def _denials(value: Json) -> dict[str, Denial]:
    if not isinstance(value, list):
        raise ContractError("denied must be a list")
    return {entry.manifest_sha256: entry for entry in map(_denial, value)}


def _denial(value: Json) -> Denial:
    if not isinstance(value, Mapping):
        raise ContractError("a denial is an object")
    return Denial(
        manifest_sha256=require_sha256(value.get("manifest_sha256"), "manifest_sha256"),
        version=text(value, "version"),
        code=text(value, "code"),
        message=text(value, "message"),
        count=integer(value, "count"),
        assignment_seq=integer(value, "assignment_seq"),
        since_s=integer(value, "since_s"),
        until_s=integer(value, "until_s"),
        event=text(value, "event"),
    )
