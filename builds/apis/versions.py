"""Models and versions: what CI submits."""

from http import HTTPStatus
from typing import Annotated

from django.http import HttpRequest, HttpResponse, JsonResponse
from ninja import Header, Query, Router, Status

from builds.apis.schemas import (
    BundleOut,
    ModelChange,
    ModelIn,
    ModelOut,
    ModelPage,
    VersionIn,
    VersionOut,
    VersionPage,
)
from builds.common.auth import request_actor, require
from builds.common.errors import NotFoundError
from builds.common.idempotency import answer_once
from builds.common.paging import DEFAULT_LIMIT, Page, page_of
from builds.common.roles import Permission
from builds.models import Bundle, Model, ModelVersion
from builds.pipeline import FileRef, Submission
from builds.selectors.catalogue import bundle_get, model_list, version_get, version_list
from builds.services.approvals import version_approve
from builds.services.versions import model_confidential_set, model_create, version_submit

router = Router()
Limit = Annotated[int, Query(DEFAULT_LIMIT)]
Cursor = Annotated[str, Query("")]


@router.post("/models", response={200: ModelOut, 201: ModelOut}, operation_id="model_create")
def model_post(request: HttpRequest, body: ModelIn) -> Status[Model]:
    """Make a model; making it again returns the same one."""
    model, created = model_create(actor=request_actor(request), name=body.name, title=body.title)
    return Status(HTTPStatus.CREATED if created else HTTPStatus.OK, model)


@router.patch("/models/{model}", response=ModelOut, operation_id="model_change")
def model_patch(request: HttpRequest, model: str, body: ModelChange) -> Model:
    """Say whether the bundles of a model travel sealed."""
    return model_confidential_set(
        actor=request_actor(request), name=model, confidential=body.confidential
    )


@router.get("/models", response=ModelPage, operation_id="model_list")
def models_get(request: HttpRequest, limit: Limit, cursor: Cursor) -> Page[Model]:
    """List models, newest first."""
    require(request_actor(request), Permission.VIEW)
    return page_of(model_list(), limit=limit, cursor=cursor)


@router.post(
    "/models/{model}/versions",
    response={200: VersionOut, 201: VersionOut},
    operation_id="version_submit",
)
def version_post(
    request: HttpRequest,
    model: str,
    body: VersionIn,
    idempotency_key: Annotated[str, Header("", alias="Idempotency-Key")],  # noqa: ARG001 -- for the schema
) -> HttpResponse:
    """Submit an immutable version whose files were uploaded before."""
    actor = request_actor(request)
    submission = Submission(
        version=body.version,
        base_version=body.base_version,
        files=tuple(FileRef(item.name, item.sha256, item.size_bytes) for item in body.files),
        claim=body.claim,
        notes=body.notes,
        security_epoch=body.security_epoch,
        constant_time=body.constant_time,
    )

    def answer() -> HttpResponse:
        version, created = version_submit(actor=actor, model_name=model, submission=submission)
        shape = VersionOut.from_orm(version_get(model, version.version))
        status = HTTPStatus.CREATED if created else HTTPStatus.OK
        return JsonResponse(shape.model_dump(mode="json"), status=status)

    return answer_once(request, actor, answer)


@router.get("/models/{model}/versions", response=VersionPage, operation_id="version_list")
def versions_get(
    request: HttpRequest, model: str, limit: Limit, cursor: Cursor
) -> Page[ModelVersion]:
    """List the versions of a model, newest first."""
    require(request_actor(request), Permission.VIEW)
    if not Model.objects.filter(name=model).exists():
        raise NotFoundError(f"no model {model!r}")
    return page_of(version_list(model), limit=limit, cursor=cursor)


@router.get("/models/{model}/versions/{version}", response=VersionOut, operation_id="version_get")
def one_version_get(request: HttpRequest, model: str, version: str) -> ModelVersion:
    """Return one version, with its builds and, if it is invalid, why."""
    require(request_actor(request), Permission.VIEW)
    return version_get(model, version)


@router.post(
    "/models/{model}/versions/{version}/approve",
    response=list[BundleOut],
    operation_id="version_approve",
)
def version_approve_post(request: HttpRequest, model: str, version: str) -> list[Bundle]:
    """Approve every built bundle of a version that nobody approved yet; return those approved."""
    found = version_get(model, version)
    approved = version_approve(actor=request_actor(request), version=found)
    return [bundle_get(bundle.manifest_sha256) for bundle in approved]
