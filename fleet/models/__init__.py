"""Rows of this app: who runs what."""

from fleet.models.devices import (
    ClaimToken,
    Device,
    DeviceNonce,
    DeviceStats,
    DeviceTransition,
    Fingerprint,
    Heartbeat,
)
from fleet.models.identity import IdentityAlert, Preauthorisation, ReplacedKey
from fleet.models.rollouts import (
    Enrolment,
    EnrolmentStats,
    FleetVersion,
    GateLook,
    Group,
    Rollout,
    RolloutTransition,
    Stage,
    StageTransition,
    Update,
    UpdateReportRow,
    UpdateTransition,
)
from fleet.models.rules import DegradeRules
from fleet.models.telemetry import TelemetryBatchKey, TelemetryRollup

__all__ = [
    "ClaimToken",
    "DegradeRules",
    "Device",
    "DeviceNonce",
    "DeviceStats",
    "DeviceTransition",
    "Enrolment",
    "EnrolmentStats",
    "Fingerprint",
    "FleetVersion",
    "GateLook",
    "Group",
    "Heartbeat",
    "IdentityAlert",
    "Preauthorisation",
    "ReplacedKey",
    "Rollout",
    "RolloutTransition",
    "Stage",
    "StageTransition",
    "TelemetryBatchKey",
    "TelemetryRollup",
    "Update",
    "UpdateReportRow",
    "UpdateTransition",
]
