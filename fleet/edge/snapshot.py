"""Everything the hot paths know: immutable, built from the rows, good for one fleet version."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from django.conf import settings

from builds.models import BundleSection
from builds.states import DeltaState
from compiler.contract.protocol import Offer, OfferKind, PollAnswer
from fleet.models import Device, Enrolment, FleetVersion, Stage, Update
from fleet.selectors.poll import busy_poll_s, is_offered
from fleet.services.versions import ROW_ID
from fleet.states import OPEN_STATES, Arm, DeviceState, RolloutState, StageState

_OPEN: Final = sorted(state.value for state in OPEN_STATES)
_TAGGED: Final = (RolloutState.RUNNING.value, RolloutState.PAUSED.value)


@dataclass(frozen=True, slots=True)
class Answer:
    """A rendered poll answer and its entity tag."""

    etag: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Download:
    """Blobs of one update: sections of its bundle (one set per bundle), and its delta or "".

    Of a confidential bundle only the sealed sections.
    """

    sections: frozenset[str]
    delta_sha256: str

    def allows(self, sha256: str) -> bool:
        """Return whether this blob belongs to the update."""
        return sha256 in self.sections or sha256 == self.delta_sha256


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of the fleet as the hot paths see it; devices by primary key.

    Attributes:
        number: Fleet version that it was built for.
        idle: Answer to every device that is not in `answers`.
        answers: Devices with an offer or in a running rollout.
        live: Update id -> device, for updates that may proceed.
        downloads: Update id -> what may be fetched for it; same updates as in `live`.
        denied: Devices that are not members.
        generations: Token generation of devices where it is above 0.
    """

    number: int
    idle: Answer
    answers: Mapping[int, Answer]
    live: Mapping[int, int]
    downloads: Mapping[int, Download]
    denied: frozenset[int]
    generations: Mapping[int, int]

    def admits(self, device_pk: int, generation: int) -> bool:
        """Return whether a token of this device and generation is still good."""
        return self.generations.get(device_pk, 0) == generation


def version_read() -> int:
    """Return the fleet version now. One query."""
    row = FleetVersion.objects.filter(pk=ROW_ID).values_list("number", flat=True).first()
    return 0 if row is None else row


def snapshot_build() -> Snapshot:
    """Return a new snapshot. Seven queries.

    The version is read first: rows that change while the others are read belong to a later version,
    so the next look at the version builds again.
    """
    number = version_read()
    offers = {update.device_id: update for update in _open_updates() if is_offered(update)}
    tags = _tags()
    answers = {
        device_pk: _render(number, offers.get(device_pk), tags.get(device_pk))
        for device_pk in offers.keys() | tags.keys()
    }
    members = Device.objects.order_by()
    return Snapshot(
        number=number,
        idle=_render(number, None, None),
        answers=answers,
        live={update.pk: device_pk for device_pk, update in offers.items()},
        downloads=_downloads(offers.values()),
        denied=frozenset(
            members.exclude(state=DeviceState.ACCEPTED.value).values_list("pk", flat=True)
        ),
        generations=dict(
            members.filter(token_generation__gt=0).values_list("pk", "token_generation")
        ),
    )


def _open_updates() -> list[Update]:
    rows = Update.objects.select_related("rollout", "bundle__version", "delta").defer(
        "bundle__manifest", "rollout__gate", "message", "delta__report"
    )
    return list(rows.filter(state__in=_OPEN).order_by())


def _downloads(updates: Iterable[Update]) -> dict[int, Download]:
    """Return update id -> its blobs; updates to one bundle share its set. One query."""
    updates = list(updates)
    digests: dict[int, set[str]] = {}
    sections = BundleSection.objects.filter(bundle__in={update.bundle_id for update in updates})
    names = sections.order_by().values_list("bundle_id", "sha256", "sealed_sha256")
    for bundle_id, sha256, sealed_sha256 in names:
        digests.setdefault(bundle_id, set()).add(sealed_sha256 or sha256)
    shared = {bundle_id: frozenset(found) for bundle_id, found in digests.items()}
    return {
        update.pk: Download(
            sections=shared.get(update.bundle_id, frozenset()),
            delta_sha256=_delta_sha256(update),
        )
        for update in updates
    }


def _delta_sha256(update: Update) -> str:
    delta = update.delta
    if delta is None or delta.state != DeltaState.READY:
        return ""
    return delta.sha256


def _tags() -> dict[int, tuple[int, int, str]]:
    """Return device -> (rollout, stage, arm) of the newest rollout under way that it is in."""
    current: dict[int, int] = {}
    stages = Stage.objects.filter(rollout__state__in=_TAGGED)
    for rollout_id, index in stages.exclude(state=StageState.PENDING.value).values_list(
        "rollout_id", "index"
    ):
        current[rollout_id] = max(index, current.get(rollout_id, 0))
    rows = Enrolment.objects.filter(rollout__state__in=_TAGGED).order_by(
        "rollout_id", "stage__index"
    )
    newest = {
        device_pk: (rollout_id, index, arm)
        for device_pk, rollout_id, index, arm in rows.values_list(
            "device_id", "rollout_id", "stage__index", "arm"
        )
    }
    return {
        device_pk: tag
        for device_pk, tag in newest.items()
        if tag[2] == Arm.TREATMENT or tag[1] >= current.get(tag[0], 0)
    }


def _render(number: int, update: Update | None, tag: tuple[int, int, str] | None) -> Answer:
    poll_after_s = settings.SPARSEFLEET.poll_after_s
    busy = update is not None or tag is not None
    rollout_id, stage, arm = tag if tag is not None else (None, None, "")
    offer = None
    if update is not None:
        offer = Offer(
            update_id=update.pk,
            attempt=update.attempt,
            kind=OfferKind(update.kind),
            version=update.bundle.version.version,
            manifest_sha256=update.bundle.manifest_sha256,
        )
    answer = PollAnswer(
        poll_after_s=busy_poll_s(poll_after_s) if busy else poll_after_s,
        offer=offer,
        rollout_id=rollout_id,
        stage=stage,
        arm=arm,
    )
    update_id = update.pk if update is not None else 0
    return Answer(etag=f'"g{number}-{update_id}"', body=answer.to_bytes())
