"""Submissions: models and their immutable versions."""

from collections.abc import Sequence

from django.db import transaction
from django.db.models import Max

from builds.common.audit import audit
from builds.common.auth import Actor, require
from builds.common.errors import ConflictError, InvalidInputError, NotFoundError
from builds.common.roles import Permission
from builds.errors import BlobMissingError, VersionConflictError
from builds.models import Blob, Model, ModelVersion, Target
from builds.onnx_outline import require_onnx
from builds.pipeline import FileRef, Submission, require_name, require_pipeline, require_submission
from builds.services.jobs import jobs_create
from builds.services.version_checks import check_create
from builds.storage import blob_store
from compiler.contract.canonical import canonical_bytes, sha256_hex

MAX_TITLE = 200
ONNX_SUFFIX = ".onnx"


@transaction.atomic
def model_create(*, actor: Actor, name: str, title: str = "") -> tuple[Model, bool]:
    """Make a model; the same name again returns the same row.

    Returns:
        The model and whether it is new.

    Raises:
        ConflictError: It exists with another title.
        InvalidInputError: The name may not name a model.
    """
    require(actor, Permission.SUBMIT)
    require_name(name, "model")
    if len(title) > MAX_TITLE:
        raise InvalidInputError(f"title is longer than {MAX_TITLE} characters")
    model, created = Model.objects.get_or_create(name=name, defaults={"title": title})
    if created:
        audit(actor=actor.name, action="model.create", obj=model, name=name)
    elif title and model.title != title:
        raise ConflictError(f"model {name!r} exists with another title")
    return model, created


@transaction.atomic
def model_confidential_set(*, actor: Actor, name: str, confidential: bool) -> Model:
    """Say whether the bundles of a model travel sealed; it holds for versions built from now on.

    Raises:
        ForbiddenError: The actor may not.
        NotFoundError: No such model.
    """
    require(actor, Permission.MODEL_EDIT)
    model = Model.objects.select_for_update().filter(name=name).first()
    if model is None:
        raise NotFoundError(f"no model {name!r}")
    if model.confidential != confidential:
        model.confidential = confidential
        model.save(update_fields=["confidential"])
        audit(actor=actor.name, action="model.confidential", obj=model, confidential=confidential)
    return model


def version_submit(
    *, actor: Actor, model_name: str, submission: Submission
) -> tuple[ModelVersion, bool]:
    """Take a version in: cheap checks now, then a first look and build jobs.

    Returns:
        The version and whether it is new; the same submission again returns the same version.

    Raises:
        NotFoundError: No such model, or no such base version.
        BlobMissingError: A file was not uploaded, or has another size.
        PipelineInvalidError: `pipeline.json` is missing or wrong, or files it needs are missing.
        MalformedUploadError: A `.onnx` file is of another kind or cut off.
        VersionConflictError: The version exists with other content.
    """
    require(actor, Permission.SUBMIT)
    pipeline = require_submission(submission)
    document = submission.to_json()
    digest = sha256_hex(canonical_bytes(document))
    existing = _existing(model_name, submission.version, digest)
    if existing is not None:
        return existing, False
    _require_blobs(submission.files)
    with blob_store().open(pipeline.sha256) as stream:
        data = stream.read(pipeline.size_bytes)
    require_pipeline(data, [item.name for item in submission.files])
    for item in submission.files:
        if item.name.endswith(ONNX_SUFFIX):
            with blob_store().open(item.sha256) as stream:
                require_onnx(stream, item.name)
    return _insert(actor, model_name, submission, digest)


@transaction.atomic
def _insert(
    actor: Actor, model_name: str, submission: Submission, digest: str
) -> tuple[ModelVersion, bool]:
    # The model's row serialises submissions: release_seq has no gaps and no twins.
    model = Model.objects.select_for_update().filter(name=model_name).first()
    if model is None:
        raise NotFoundError(f"no model {model_name!r}", hint="create it with POST /api/v1/models")
    existing = _existing(model_name, submission.version, digest)
    if existing is not None:
        return existing, False
    last = model.versions.aggregate(last=Max("release_seq"))["last"] or 0
    version = ModelVersion.objects.create(
        model=model,
        version=submission.version,
        release_seq=last + 1,
        security_epoch=submission.security_epoch,
        constant_time=submission.constant_time,
        files=submission.to_json()["files"],
        base_version=_base(model, submission.base_version),
        claim=dict(submission.claim or {}),
        notes=submission.notes,
        submission_sha256=digest,
        submitted_by=actor.name,
    )
    check_create(version=version)
    jobs_create(version=version, targets=list(Target.objects.filter(active=True)))
    audit(
        actor=actor.name,
        action="version.submit",
        obj=version,
        model=model_name,
        version=submission.version,
        submission_sha256=digest,
    )
    return version, True


def _existing(model_name: str, version: str, digest: str) -> ModelVersion | None:
    found = (
        ModelVersion.objects.select_related("model", "base_version")
        .filter(model__name=model_name, version=version)
        .first()
    )
    if found is not None and found.submission_sha256 != digest:
        raise VersionConflictError(
            f"{model_name} {version} was submitted before with other content",
            hint="versions are immutable: choose another version string",
        )
    return found


def _base(model: Model, name: str | None) -> ModelVersion | None:
    if name is None:
        return None
    base = model.versions.filter(version=name).first()
    if base is None:
        raise NotFoundError(f"{model.name} has no version {name!r} to be the base")
    return base


def _require_blobs(files: Sequence[FileRef]) -> None:
    known = dict(
        Blob.objects.filter(pk__in={item.sha256 for item in files}).values_list(
            "sha256", "size_bytes"
        )
    )
    missing = [item.name for item in files if item.sha256 not in known]
    if missing:
        raise BlobMissingError(
            f"not uploaded: {', '.join(missing)}",
            hint="PUT /api/v1/blobs/<sha256> each file first",
        )
    odd = [item.name for item in files if known[item.sha256] != item.size_bytes]
    if odd:
        raise BlobMissingError(f"size differs from the upload: {', '.join(odd)}")
