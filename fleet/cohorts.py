"""Who is in which stage, and who stays behind as control. Pure.

Devices are ordered once per rollout: inside each stratum (target x device class) by a salted hash,
`u = SHA-256(salt, device) / 2^64`, across strata by fractional position, so that every prefix of
the order is a stratified random sample. Stage k is a prefix; a larger stage only ever adds devices.
The control slice is taken from the other end of the same order, so the two are disjoint and both
random. A new rollout has a new salt: nobody is always the canary.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from builds.common.errors import InvalidInputError

HOLDBACK_SHARE: Final = 0.05
HOLDBACK_MAX: Final = 10_000
MAX_STAGES: Final = 32


class EmptyStageError(InvalidInputError):
    """A stage would get no device; it must never count as passed."""

    code = "fleet.empty_stage"


class NoControlError(InvalidInputError):
    """Nobody could stay on the old version, so nothing could be compared."""

    code = "fleet.no_control"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One device that the rollout may reach.

    Attributes:
        device: Stable public id of the device (never a row number).
        stratum: Target and device class.
        can_control: It runs an older version of the model, so it can be compared with.
    """

    device: str
    stratum: str
    can_control: bool = True


@dataclass(frozen=True, slots=True)
class Goal:
    """How much of the group a stage covers: exactly one of the two is set."""

    percent: float | None = None
    count: int | None = None

    def size(self, devices: int) -> int:
        """Return the number of devices that this goal means, at least 1 and at most all."""
        wanted = self.count if self.count is not None else _share(self.percent or 0.0, devices)
        return max(1, min(devices, wanted))

    @property
    def is_everyone(self) -> bool:
        """Return whether the goal is the whole group."""
        return self.percent == 100


@dataclass(frozen=True, slots=True)
class StageSize:
    """Devices of one stage.

    Attributes:
        total: Treatment devices up to and including this stage.
        is_release: The control slice gets the proven version; nothing is compared any more.
    """

    total: int
    is_release: bool


@dataclass(frozen=True, slots=True)
class Cohort:
    """Devices of one stage: `treatment` are the new ones; `strata` says where each is compared."""

    treatment: tuple[str, ...]
    control: tuple[str, ...]
    strata: Mapping[str, str]


def unit(salt: str, device: str) -> float:
    """Return the place of a device in [0, 1), uniform and independent between salts."""
    digest = hashlib.sha256(f"{salt}\0{device}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def exposure_order(candidates: Iterable[Candidate], salt: str) -> tuple[Candidate, ...]:
    """Return the candidates in the order in which they get the new version.

    The first device of every stratum comes before all second ones (larger strata first); after that
    the fractional position inside the stratum decides.
    """
    strata: dict[str, list[tuple[float, Candidate]]] = {}
    for candidate in candidates:
        strata.setdefault(candidate.stratum, []).append((unit(salt, candidate.device), candidate))
    keyed = []
    for members in strata.values():
        members.sort(key=lambda item: (item[0], item[1].device))
        for rank, (place, candidate) in enumerate(members):
            fraction = (rank + 0.5) / len(members)
            keyed.append(((rank > 0, fraction, place, candidate.device), candidate))
    keyed.sort(key=lambda item: item[0])
    return tuple(candidate for _, candidate in keyed)


def holdback_size(candidates: Sequence[Candidate]) -> int:
    """Return how many devices stay on the old version until the last stage has passed.

    One per stratum where that is at most a fifth of the group, else 5 %; at least 1.
    """
    able = sum(candidate.can_control for candidate in candidates)
    strata = len({candidate.stratum for candidate in candidates if candidate.can_control})
    share = _share(100 * HOLDBACK_SHARE, len(candidates))
    wanted = max(1, min(strata, len(candidates) // 5), share)
    return min(wanted, able, HOLDBACK_MAX)


def stage_sizes(
    goals: Sequence[Goal], candidates: Sequence[Candidate], *, compare: bool
) -> tuple[StageSize, ...]:
    """Return the stages that the goals mean for these devices.

    With a comparison, a last stage of 100 % is split: all but the held-back control slice first,
    and the slice itself when the stage has passed.

    Raises:
        EmptyStageError: A stage would add no device.
        NoControlError: A comparison is wanted and no device can stay behind.
    """
    devices = len(candidates)
    if not goals or len(goals) > MAX_STAGES:
        raise EmptyStageError(f"a rollout needs 1..{MAX_STAGES} stages")
    if devices == 0:
        raise EmptyStageError("no device of the group can take this version")
    totals = [goal.size(devices) for goal in goals]
    if not compare:
        return tuple(StageSize(total, is_release=False) for total in _growing(totals, goals))
    limit = devices - holdback_size(candidates)
    if limit in (0, devices):
        raise NoControlError(
            "the gate needs a device that stays on the old version",
            hint="at least two devices, one of which runs an older version",
        )
    sizes = [StageSize(min(total, limit), is_release=False) for total in totals]
    if goals[-1].is_everyone:
        if len(sizes) > 1 and sizes[-1].total <= sizes[-2].total:
            sizes.pop()
        sizes.append(StageSize(devices, is_release=True))
    _growing([size.total for size in sizes], goals)
    return tuple(sizes)


def form_stage(
    order: Sequence[Candidate],
    size: StageSize,
    *,
    treated: Collection[str],
    control_max: int,
    compare: bool,
) -> Cohort:
    """Return the new treatment devices and the control slice of one stage.

    Args:
        order: Exposure order of all devices, those of earlier stages included.
        size: How far this stage goes.
        treated: Devices of earlier stages.
        control_max: Most devices in the control slice.
        compare: Whether the stage has a control slice.

    Raises:
        EmptyStageError: No new device is left for the stage.
    """
    slice_kept = holdback_size(order) if compare and not size.is_release else 0
    held = {
        candidate.device
        for candidate in [item for item in reversed(order) if item.can_control][:slice_kept]
    }
    room = size.total - sum(candidate.device in treated for candidate in order)
    free = [item for item in order if item.device not in treated and item.device not in held]
    treatment = free[: max(0, room)]
    if not treatment:
        raise EmptyStageError("no new device is left for this stage")
    taken = {candidate.device for candidate in treatment}
    control: list[Candidate] = []
    if compare and not size.is_release:
        control = [
            candidate
            for candidate in reversed(order)
            if candidate.can_control
            and candidate.device not in taken
            and candidate.device not in treated
        ][:control_max]
    return Cohort(
        treatment=tuple(candidate.device for candidate in treatment),
        control=tuple(candidate.device for candidate in control),
        strata=_comparable(order, control),
    )


def _comparable(order: Sequence[Candidate], control: Sequence[Candidate]) -> dict[str, str]:
    """Return device -> stratum to compare in; a stratum without control joins the best served one.

    Best served: same target if possible (the part before the slash), then most control devices.
    """
    sizes = Counter(candidate.stratum for candidate in control)
    if not sizes:
        return {candidate.device: candidate.stratum for candidate in order}
    homes = {}
    for stratum in {candidate.stratum for candidate in order}:
        target = stratum.partition("/")[0]
        homes[stratum] = (
            stratum
            if stratum in sizes
            else max(sizes, key=lambda s: (s.partition("/")[0] == target, sizes[s], s))
        )
    return {candidate.device: homes[candidate.stratum] for candidate in order}


def _growing(totals: Sequence[int], goals: Sequence[Goal]) -> Sequence[int]:
    previous = 0
    for index, total in enumerate(totals):
        if total <= previous:
            goal = goals[min(index, len(goals) - 1)]
            wanted = f"{goal.percent:g} %" if goal.percent is not None else f"{goal.count} devices"
            raise EmptyStageError(
                f"stage {index + 1} ({wanted}) would add no device to the {previous} before it",
                hint="leave the stage out, or make it larger",
            )
        previous = total
    return totals


def _share(percent: float, devices: int) -> int:
    return math.ceil(percent * devices / 100 - 1e-9)
