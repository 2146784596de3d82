"""JSON shapes of the fleet's part of the management API."""

from datetime import datetime
from typing import Any, Final, Literal

from django.core.exceptions import ObjectDoesNotExist
from ninja import Field, Schema

from builds.apis.schemas import Asked
from compiler.contract.canonical import parse_object
from compiler.contract.protocol import Network, NetworkPolicy, OfferKind
from fleet.gates import PROFILES
from fleet.models import ClaimToken, DegradeRules, Device, GateLook, Group, Rollout, Stage, Update
from fleet.networks import DEFAULT_WAIT_S, MAX_WAIT_S
from fleet.selectors.listing import (
    RolloutCounts,
    answers_summary,
    device_answers,
    device_updates,
    last_look,
    rollout_counts,
)
from fleet.selectors.poll import Explanation, device_explain
from fleet.states import DeviceState, RolloutState, StageState, UpdateState

Action = Literal["accept", "reject", "quarantine", "release", "retire"]
UPDATES_SHOWN: Final = 20


class ReasonIn(Asked):
    reason: str = Field("", max_length=500)


class AdmitIn(Asked):
    action: Action
    reason: str = Field("", max_length=500)


class ClaimIn(Asked):
    name: str = Field(..., max_length=100)
    uses: int = Field(1, ge=1)
    expires_at: datetime | None = None
    device_class: str = Field("", max_length=32)
    accepts: bool = True


class ClaimOut(Schema):
    id: int
    name: str
    uses_left: int
    devices: int
    expires_at: datetime | None
    device_class: str
    accepts: bool
    created_by: str
    created_at: datetime

    @staticmethod
    def resolve_devices(row: ClaimToken) -> int:
        return int(getattr(row, "device_count", 0))


class NewClaimOut(ClaimOut):
    token: str = Field(..., description="Shown once.")


class GroupIn(Asked):
    name: str = Field(..., max_length=64)
    model: str = Field(..., max_length=64)
    filter: dict[str, Any] = Field(
        default_factory=dict,
        description="`target`, `device_class`, `tags` (a device must have all); empty: all.",
    )


class GroupOut(Schema):
    name: str
    model: str
    filter: dict[str, Any]
    created_at: datetime

    @staticmethod
    def resolve_model(row: Group) -> str:
        return row.model.name


class DeviceOut(Schema):
    id: int
    device_id: str
    serial: str
    name: str
    state: DeviceState
    target: str
    device_class: str
    network: Network
    tags: list[str]
    model: str | None
    running_version: str | None
    running_manifest_sha256: str
    enrolled_at: datetime
    seen_at: datetime | None
    clock_skew_s: int | None = Field(
        None, description="How far its clock was ahead at the last token exchange, seconds."
    )

    @staticmethod
    def resolve_target(row: Device) -> str:
        return row.target.name

    @staticmethod
    def resolve_model(row: Device) -> str | None:
        return row.model.name if row.model else None

    @staticmethod
    def resolve_running_version(row: Device) -> str | None:
        return row.running_bundle.version.version if row.running_bundle else None

    @staticmethod
    def resolve_seen_at(row: Device) -> datetime | None:
        try:
            polled: datetime | None = row.heartbeat.at
        except ObjectDoesNotExist:
            polled = None
        return max((at for at in (polled, row.last_seen_at) if at is not None), default=None)


class UpdateOut(Schema):
    id: int
    device_id: int = Field(..., description="Row of the device, its `id`.")
    rollout_id: int
    kind: OfferKind
    version: str
    state: UpdateState
    attempt: int
    waits_for: str = Field(..., description="Why the device was told to wait; empty if it was not.")
    used_delta: bool
    downloaded_bytes: int
    code: str
    message: str
    queued_at: datetime
    offered_at: datetime | None
    activated_at: datetime | None
    finished_at: datetime | None
    retry_failed: bool = Field(..., description="The device was told to try again what failed.")
    denied_at: datetime | None = Field(..., description="It will not try the bundle by itself.")
    unconfirmed_at: datetime | None = Field(..., description="Not committed by the deadline.")
    too_late_at: datetime | None = Field(..., description="It ran when it was withdrawn.")
    regressed_at: datetime | None = Field(..., description="It left the bundle after success.")

    @staticmethod
    def resolve_version(row: Update) -> str:
        return row.bundle.version.version


class UpdatePage(Schema):
    items: list[UpdateOut]
    next: str | None


class ExplanationOut(Schema):
    answer: dict[str, Any] | None
    reasons: list[str]

    @staticmethod
    def resolve_answer(row: Explanation) -> dict[str, Any] | None:
        return None if row.answer is None else dict(parse_object(row.answer.to_bytes()))


class DeviceDetailOut(DeviceOut):
    fingerprint: dict[str, Any]
    why: ExplanationOut
    updates: list[UpdateOut]
    answers: list[dict[str, Any]]

    @staticmethod
    def resolve_fingerprint(row: Device) -> dict[str, Any]:
        return dict(row.fingerprint.document)

    @staticmethod
    def resolve_why(row: Device) -> Explanation:
        return device_explain(device_pk=row.pk)

    @staticmethod
    def resolve_updates(row: Device) -> list[Update]:
        return device_updates(row.pk, limit=UPDATES_SHOWN)

    @staticmethod
    def resolve_answers(row: Device) -> list[dict[str, Any]]:
        return [answers_summary(stats) for stats in device_answers(row.pk)]


class DevicePage(Schema):
    items: list[DeviceOut]
    next: str | None


class RulesIn(Asked):
    group: str = Field("", max_length=64, description="Name of a group; empty: the whole fleet.")
    rules: dict[str, Any] | None = Field(
        ..., description="A document `sparsefleet.degrade/1`; null takes the rules back."
    )
    note: str = Field("", max_length=200)


class RulesOut(Schema):
    revision: int = Field(..., alias="pk")
    group: str
    rules: dict[str, Any] | None = Field(None, alias="document")
    note: str
    created_by: str
    created_at: datetime

    @staticmethod
    def resolve_group(row: DegradeRules) -> str:
        return row.group.name if row.group is not None else ""


class RulesPreviewOut(Schema):
    devices: int
    rules: list[dict[str, Any]]


class RulesPage(Schema):
    items: list[RulesOut]
    next: str | None


class GroupPage(Schema):
    items: list[GroupOut]
    next: str | None


class ClaimPage(Schema):
    items: list[ClaimOut]
    next: str | None


class GoalIn(Asked):
    percent: float | None = Field(None, description="Share of the group, this stage included.")
    count: int | None = Field(None, description="Instead of `percent`: so many devices.")


class RolloutIn(Asked):
    model: str = Field(..., max_length=64)
    version: str = Field(..., max_length=64)
    group: str = Field(..., max_length=64)
    stages: list[GoalIn] = Field(..., min_length=1, max_length=32)
    gate: dict[str, Any] = Field(
        default_factory=dict,
        description="`profile` (`default` if absent) and the fields that differ from it; "
        f"profiles: {', '.join(sorted(PROFILES))}.",
    )
    name: str = Field("", max_length=100)
    needs_approval: bool = False
    network_policy: NetworkPolicy = Field(
        NetworkPolicy.ANY, description="What devices on metered networks may fetch."
    )
    unmetered_wait_s: float = Field(
        DEFAULT_WAIT_S,
        ge=0,
        le=MAX_WAIT_S,
        description="How long `wait_unmetered` may keep an update waiting, seconds.",
    )


class StageOut(Schema):
    index: int
    percent: float | None
    count: int | None
    state: StageState
    is_release: bool
    treatment_target: int | None
    opened_at: datetime | None
    decided_at: datetime | None
    reason: str


class RolloutOut(Schema):
    id: int
    name: str
    model: str
    version: str
    base_version: str | None
    group: str
    state: RolloutState
    is_first_install: bool
    needs_approval: bool
    network_policy: NetworkPolicy
    unmetered_wait_s: float
    gate: dict[str, Any]
    stages: list[StageOut]
    created_by: str
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    halted_at: datetime | None
    end_reason: str

    @staticmethod
    def resolve_model(row: Rollout) -> str:
        return row.model.name

    @staticmethod
    def resolve_version(row: Rollout) -> str:
        return row.version.version

    @staticmethod
    def resolve_base_version(row: Rollout) -> str | None:
        return row.base_version.version if row.base_version else None

    @staticmethod
    def resolve_group(row: Rollout) -> str:
        return row.group.name

    @staticmethod
    def resolve_stages(row: Rollout) -> list[Stage]:
        return sorted(row.stages.all(), key=lambda stage: stage.index)


class LookOut(Schema):
    id: int
    at: datetime
    stage: int
    decision: str
    action: str
    evidence_ratio: float
    reasons: list[str]

    @staticmethod
    def resolve_stage(row: GateLook) -> int:
        return row.stage.index

    @staticmethod
    def resolve_evidence_ratio(row: GateLook) -> float:
        return float(10 ** min(300.0, row.log_evidence / 2.302585092994046))

    @staticmethod
    def resolve_reasons(row: GateLook) -> list[str]:
        return list(row.verdict["reasons"])


class CountsOut(Schema):
    devices_exposed: int
    installs: dict[str, int]
    rollbacks: dict[str, int]
    downloaded_bytes: int


class RolloutDetailOut(RolloutOut):
    counts: CountsOut
    last_look: LookOut | None

    @staticmethod
    def resolve_counts(row: Rollout) -> RolloutCounts:
        return rollout_counts(row.pk)

    @staticmethod
    def resolve_last_look(row: Rollout) -> GateLook | None:
        return last_look(row.pk)


class ArmOut(Schema):
    counts: dict[str, int]
    latency_ms: dict[str, float | None]


class FullLookOut(LookOut):
    spec: dict[str, Any]
    evidence: dict[str, Any]
    verdict: dict[str, Any]


class EvidenceOut(Schema):
    arms: dict[str, ArmOut]
    counts: CountsOut
    last_look: FullLookOut | None
    looks: list[LookOut]
    next: str | None


class RolloutPage(Schema):
    items: list[RolloutOut]
    next: str | None


class PreviewStageOut(Schema):
    total: int
    is_release: bool


class PreviewOut(Schema):
    stages: list[PreviewStageOut]
    devices: int
    left_out: dict[str, int]
