"""JSON shapes of the management API."""

from datetime import datetime
from typing import Any

from ninja import Field, Schema
from pydantic import ValidationInfo, field_validator

from builds.models import BuildJob, Bundle, Delta, ModelVersion
from builds.pipeline import (
    MAX_CLAIM_BYTES,
    MAX_CLAIM_DEPTH,
    MAX_FILES,
    MAX_NOTES,
    require_texts,
)
from builds.states import BuildState, DeltaState, VersionState


class Asked(Schema):
    """What a request's body may say: no text in it, however deep, is one that no database keeps."""

    @field_validator("*")
    @classmethod
    def require_keepable(cls, value: object, info: ValidationInfo) -> object:
        """Return the value of a field.

        Raises:
            InvalidInputError: A text in it has a character that no database keeps.
        """
        require_texts(value, info.field_name or "a field")
        return value


class BlobOut(Schema):
    sha256: str
    size_bytes: int
    created_at: datetime


class ModelIn(Asked):
    name: str = Field(..., max_length=64)
    title: str = Field("", max_length=200)


class ModelChange(Asked):
    confidential: bool = Field(
        ..., description="Bundles of versions built from now on travel sealed."
    )


class ModelOut(Schema):
    name: str
    title: str
    confidential: bool
    created_at: datetime


class FileIn(Asked):
    name: str = Field(..., max_length=120, description="As `pipeline.json` names it.")
    sha256: str = Field(
        ..., min_length=64, max_length=64, description="Uploaded before to `/blobs/{sha256}`."
    )
    size_bytes: int = Field(..., ge=0)


class VersionIn(Asked):
    version: str = Field(..., max_length=64, description="[a-z0-9][a-z0-9._-]*; final once sent.")
    base_version: str | None = Field(
        None, max_length=64, description="Whose grids are kept, so that the update is small."
    )
    files: list[FileIn] = Field(
        ...,
        max_length=MAX_FILES,
        description="A submission directory: `pipeline.json` and the files it names.",
    )
    claim: dict[str, Any] = Field(
        default_factory=dict,
        description=f"JSON, at most {MAX_CLAIM_DEPTH} levels and {MAX_CLAIM_BYTES} bytes.",
    )
    notes: str = Field("", max_length=MAX_NOTES)
    security_epoch: int = Field(
        0, ge=0, description="Devices that ran a higher one refuse this version."
    )
    constant_time: bool = Field(
        False,
        description="Let no activation and no weight decide time or accesses. A model that prunes "
        "tokens or has operators without such a kernel becomes `invalid`, and `error` names them.",
    )


class ErrorOut(Schema):
    code: str
    message: str
    hint: str


class VersionOut(Schema):
    model: str
    version: str
    release_seq: int
    security_epoch: int
    constant_time: bool
    state: VersionState
    base_version: str | None
    files: list[dict[str, Any]]
    claim: dict[str, Any]
    notes: str
    submission_sha256: str
    submitted_by: str
    created_at: datetime
    error: ErrorOut | None
    builds: list[int]

    @staticmethod
    def resolve_model(row: ModelVersion) -> str:
        return row.model.name

    @staticmethod
    def resolve_base_version(row: ModelVersion) -> str | None:
        return row.base_version.version if row.base_version else None

    @staticmethod
    def resolve_error(row: ModelVersion) -> dict[str, str] | None:
        return _error(row)

    @staticmethod
    def resolve_builds(row: ModelVersion) -> list[int]:
        return sorted(job.pk for job in row.jobs.all())


class BuildOut(Schema):
    id: int
    model: str
    version: str
    target: str
    state: BuildState
    stage: str
    progress: float
    attempt: int
    error: ErrorOut | None
    manifest_sha256: str | None
    base_manifest_sha256: str | None
    report: dict[str, Any]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None

    @staticmethod
    def resolve_model(row: BuildJob) -> str:
        return row.version.model.name

    @staticmethod
    def resolve_version(row: BuildJob) -> str:
        return row.version.version

    @staticmethod
    def resolve_target(row: BuildJob) -> str:
        return row.target.name

    @staticmethod
    def resolve_error(row: BuildJob) -> dict[str, str] | None:
        return _error(row)

    @staticmethod
    def resolve_manifest_sha256(row: BuildJob) -> str | None:
        bundle = getattr(row, "bundle", None)
        return bundle.manifest_sha256 if bundle is not None else None

    @staticmethod
    def resolve_base_manifest_sha256(row: BuildJob) -> str | None:
        return row.base_bundle.manifest_sha256 if row.base_bundle else None


class LogLineOut(Schema):
    at: datetime
    level: str
    text: str


class TransitionOut(Schema):
    at: datetime
    old: str
    event: str
    new: str
    actor: str
    reason: str


class BuildDetailOut(BuildOut):
    log: list[LogLineOut]
    transitions: list[TransitionOut]

    @staticmethod
    def resolve_log(row: BuildJob) -> list[Any]:
        return list(row.log.all())

    @staticmethod
    def resolve_transitions(row: BuildJob) -> list[Any]:
        return list(row.transitions.all())


class SectionOut(Schema):
    component: str
    sha256: str
    size_bytes: int


class BundleOut(Schema):
    manifest_sha256: str
    model: str
    version: str
    target: str
    build: int
    total_bytes: int
    verified_on: str
    is_sealed: bool = Field(..., description="Confidential: its sections travel sealed.")
    created_at: datetime
    approved_at: datetime | None
    approved_by: str
    published_at: datetime | None
    sections: list[SectionOut]

    @staticmethod
    def resolve_model(row: Bundle) -> str:
        return row.version.model.name

    @staticmethod
    def resolve_version(row: Bundle) -> str:
        return row.version.version

    @staticmethod
    def resolve_target(row: Bundle) -> str:
        return row.target.name

    @staticmethod
    def resolve_build(row: Bundle) -> int:
        return row.job_id

    @staticmethod
    def resolve_sections(row: Bundle) -> list[Any]:
        return list(row.sections.all())


class TargetOut(Schema):
    name: str
    title: str
    active: bool
    verified_on: str


class DeltaOut(Schema):
    id: int
    base_manifest_sha256: str
    manifest_sha256: str
    state: DeltaState
    is_urgent: bool
    sha256: str
    size_bytes: int
    full_bytes: int
    bsdiff4_bytes: int | None
    report: dict[str, Any]
    error: ErrorOut | None

    @staticmethod
    def resolve_base_manifest_sha256(row: Delta) -> str:
        return row.base.manifest_sha256

    @staticmethod
    def resolve_manifest_sha256(row: Delta) -> str:
        return row.new.manifest_sha256

    @staticmethod
    def resolve_full_bytes(row: Delta) -> int:
        return row.new.total_bytes

    @staticmethod
    def resolve_error(row: Delta) -> dict[str, str] | None:
        return _error(row)


class ModelPage(Schema):
    items: list[ModelOut]
    next: str | None


class VersionPage(Schema):
    items: list[VersionOut]
    next: str | None


class BuildPage(Schema):
    items: list[BuildOut]
    next: str | None


class DeltaPage(Schema):
    items: list[DeltaOut]
    next: str | None


class ProblemOut(Schema):
    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str


def _error(row: ModelVersion | BuildJob | Delta) -> dict[str, str] | None:
    if not row.error_code:
        return None
    return {"code": row.error_code, "message": row.error_message, "hint": row.error_hint}
