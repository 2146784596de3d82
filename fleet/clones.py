"""Is one identity used by two machines at once? Pure: what polls show, counted.

A poll carries the boot of the agent, a random number made at its start, and the number of the poll
in that boot. One machine shows boot after boot and counts up in each:

    a1 a2 a3 | b1 b2 | c1 c2 ...            reboots, restored backups of the disk: new boots only
    a1 a2 b1 a3 b2 a4 ...                   two machines: boots that were left come back
    a7 a7' a8 a8' ...                       two copies of one running machine: the count goes back

A return is a poll of a boot that another one had followed, or one whose number is not above that of
the poll before. A machine whose running memory was restored returns once. `RETURNS_OF_A_CLONE`
within `WINDOW_S` is a clone. Two machines of which each restarts before every poll of its own are
not told apart.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

RETURNS_OF_A_CLONE: Final = 3
WINDOW_S: Final = 24 * 3_600
MAX_BOOTS: Final = 8
# A proxy that got no answer may send the same poll again; later than this it does not.
SAME_POLL_S: Final = 120
_BOOT: Final = re.compile(r"([0-9a-f]{8,32})\.(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Sighting:
    """One poll: boot of the agent, number of the poll in it, server time in Unix seconds."""

    boot_id: str
    number: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Trail:
    """What is remembered of a device: its boots, the newest last, and when one came back."""

    boots: tuple[Sighting, ...] = ()
    returns: tuple[float, ...] = ()

    @property
    def is_of_a_clone(self) -> bool:
        """Return whether two machines must have polled."""
        return len(self.returns) >= RETURNS_OF_A_CLONE

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        boots = [[boot.boot_id, boot.number, boot.at_s] for boot in self.boots]
        return {"boots": boots, "returns": list(self.returns)}


def trail_of(document: dict[str, Any]) -> Trail:
    """Return the trail of `Trail.to_json`; an empty object is an empty trail."""
    boots = tuple(Sighting(*row) for row in document.get("boots", ()))
    return Trail(boots, tuple(document.get("returns", ())))


def parse_boot(header: str) -> tuple[str, int] | None:
    """Return boot and number of a `Sparsefleet-Boot` header, or None when it is malformed."""
    match = _BOOT.fullmatch(header)
    return None if match is None else (match[1], int(match[2]))


def observed(trail: Trail, sightings: Iterable[Sighting]) -> Trail:
    """Return the trail after more polls, in the order in which they came."""
    for sighting in sightings:
        trail = _after(trail, sighting)
    return trail


def _after(trail: Trail, seen: Sighting) -> Trail:
    newest = trail.boots[-1] if trail.boots else None
    if newest is not None and seen.at_s < newest.at_s:
        return trail  # another process wrote a later poll first
    known = {boot.boot_id: boot for boot in trail.boots}
    last = known.pop(seen.boot_id, None)
    returns = tuple(at for at in trail.returns if seen.at_s - at < WINDOW_S)
    if last is not None and _came_back(last, seen, is_newest=last is newest):
        returns = (*returns, seen.at_s)[-RETURNS_OF_A_CLONE:]
    kept = [*known.values(), seen]
    return Trail(tuple(kept[-MAX_BOOTS:]), returns)


def _came_back(last: Sighting, seen: Sighting, *, is_newest: bool) -> bool:
    if not is_newest or seen.number < last.number:
        return True
    return seen.number == last.number and seen.at_s - last.at_s > SAME_POLL_S
