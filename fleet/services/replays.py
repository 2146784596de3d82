"""Decide stored looks again: the same inputs must give the same verdict, bit for bit."""

from collections.abc import Iterator
from dataclasses import dataclass

from builds.common.errors import NotFoundError
from fleet.gates import PROFILES, decide, evidence_from_json, spec_from_stored
from fleet.models import GateLook, Rollout


@dataclass(frozen=True, slots=True)
class Replay:
    """One look decided again.

    Attributes:
        look_id: Row of the look.
        stored, replayed: Decisions.
        differences: Fields of the verdict that differ, and breaks of the chain of ledgers.
    """

    look_id: int
    stored: str
    replayed: str
    differences: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """Return whether nothing differs."""
        return not self.differences


def look_replay(*, look_id: int) -> Replay:
    """Decide one stored look again. One query.

    Raises:
        NotFoundError: No such look.
    """
    look = GateLook.objects.filter(pk=look_id).first()
    if look is None:
        raise NotFoundError(f"no look {look_id}")
    return _replay(look, None)


def rollout_replay(*, rollout_id: int) -> Iterator[Replay]:
    """Decide all looks of a rollout again, and check that each begins where the one before ended.

    Raises:
        NotFoundError: No such rollout.
    """
    if not Rollout.objects.filter(pk=rollout_id).exists():
        raise NotFoundError(f"no rollout {rollout_id}")
    previous: GateLook | None = None
    for look in GateLook.objects.filter(rollout_id=rollout_id).order_by("pk").iterator():
        yield _replay(look, previous)
        previous = look


def _replay(look: GateLook, previous: GateLook | None) -> Replay:
    spec = spec_from_stored(look.spec, PROFILES)
    again = decide(spec, evidence_from_json(look.evidence)).to_json()
    differences = [name for name, value in again.items() if look.verdict.get(name) != value]
    if previous is not None:
        ended = previous.verdict["harm_ledger"]
        if look.evidence["harm_ledger"] != ended:
            differences.append(f"harm_ledger does not follow look {previous.pk}")
    return Replay(look.pk, look.decision, str(again["decision"]), tuple(differences))
