"""Rows of this app: what exists."""

from builds.common.access_models import ApiToken, AuditEvent, AuditHead, IdempotencyKey, Membership
from builds.models.jobs import (
    BuildJob,
    BuildLogLine,
    BuildTransition,
    Bundle,
    BundleSection,
    Delta,
    DeltaTransition,
    LeasedModel,
    VersionCheck,
)
from builds.models.metadata import MetadataDraft, MetadataFile, Repository
from builds.models.versions import Blob, ContentKey, Model, ModelVersion, Target, VersionTransition

__all__ = [
    "ApiToken",
    "AuditEvent",
    "AuditHead",
    "Blob",
    "BuildJob",
    "BuildLogLine",
    "BuildTransition",
    "Bundle",
    "BundleSection",
    "ContentKey",
    "Delta",
    "DeltaTransition",
    "IdempotencyKey",
    "LeasedModel",
    "Membership",
    "MetadataDraft",
    "MetadataFile",
    "Model",
    "ModelVersion",
    "Repository",
    "Target",
    "VersionCheck",
    "VersionTransition",
]
