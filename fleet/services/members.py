"""Which devices a rollout may reach, with which bundle, and why others are left out."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from builds.common.errors import InvalidInputError
from builds.models import Bundle
from fleet.cohorts import Candidate
from fleet.models import Device, Enrolment, Group, Rollout, Update
from fleet.states import OPEN_STATES, Arm, DeviceState

FILTER_FIELDS: Final = frozenset(("target", "device_class", "tags"))
_OPEN: Final = [state.value for state in OPEN_STATES]


@dataclass(frozen=True, slots=True)
class Member:
    """A device that the rollout may reach and the bundle that it would get."""

    device: Device
    bundle: Bundle
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Members:
    """Devices of a rollout by public id, the treated ones, and how many are left out, and why."""

    by_id: Mapping[str, Member]
    treated: frozenset[str]
    left_out: Mapping[str, int]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Return what the cohort functions need to know about them."""
        return tuple(member.candidate for member in self.by_id.values())


def filter_require(document: Mapping[str, object]) -> None:
    """Check the filter of a group.

    Raises:
        InvalidInputError: An unknown field, or one of the wrong type.
    """
    unknown = sorted(document.keys() - FILTER_FIELDS)
    if unknown:
        raise InvalidInputError(
            f"unknown filter fields {unknown}", hint="fields: " + ", ".join(sorted(FILTER_FIELDS))
        )
    for name in ("target", "device_class"):
        if not isinstance(document.get(name, ""), str):
            raise InvalidInputError(f"filter field {name} must be a string")
    tags = document.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise InvalidInputError("filter field tags must be a list of strings")


def group_devices(group: Group) -> list[Device]:
    """Return the member devices of a group now. One query."""
    rows = Device.objects.filter(model_id=group.model_id, state=DeviceState.ACCEPTED.value)
    rows = rows.select_related("target", "running_bundle__version").defer(
        "running_bundle__manifest", "public_key"
    )
    if group.filter.get("target"):
        rows = rows.filter(target__name=group.filter["target"])
    if group.filter.get("device_class"):
        rows = rows.filter(device_class=group.filter["device_class"])
    tags = set(group.filter.get("tags", ()))
    return [device for device in rows.order_by("pk") if tags <= set(device.tags)]


def rollout_members(rollout: Rollout) -> Members:
    """Return the devices that the rollout may reach now. Four queries."""
    bundles = {
        bundle.target_id: bundle
        for bundle in Bundle.objects.filter(
            version_id=rollout.version_id, published_at__isnull=False
        ).defer("manifest")
    }
    treated = frozenset(
        Enrolment.objects.filter(rollout_id=rollout.pk, arm=Arm.TREATMENT.value).values_list(
            "device__device_id", flat=True
        )
    )
    busy = set(
        Update.objects.filter(device__model_id=rollout.model_id, state__in=_OPEN).values_list(
            "device_id", flat=True
        )
    )
    members: dict[str, Member] = {}
    left_out: Counter[str] = Counter()
    for device in group_devices(rollout.group):
        bundle = bundles.get(device.target_id)
        reason = "" if device.device_id in treated else _left_out(device, bundle, rollout)
        if reason or bundle is None:
            left_out[reason or "no_bundle"] += 1
            continue
        can_control = device.running_bundle_id is not None and device.pk not in busy
        candidate = Candidate(device.device_id, device.stratum, can_control)
        members[device.device_id] = Member(device, bundle, candidate)
    return Members(members, treated, dict(left_out))


def _left_out(device: Device, bundle: Bundle | None, rollout: Rollout) -> str:
    if bundle is None:
        return "no_bundle"
    running = device.running_bundle
    if running is None:
        return ""
    if running.pk == bundle.pk:
        return "already_installed"
    newer = running.version.release_seq > rollout.version.release_seq
    return "runs_newer" if newer else ""
