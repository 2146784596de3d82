"""Build jobs, bundles, targets and deltas."""

from typing import Annotated

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router
from pydantic import BeforeValidator

from builds.apis.schemas import (
    BuildDetailOut,
    BuildOut,
    BuildPage,
    BundleOut,
    DeltaPage,
    TargetOut,
)
from builds.common.auth import request_actor, require
from builds.common.filters import any_if_empty, word
from builds.common.paging import DEFAULT_LIMIT, Page, page_of
from builds.common.roles import Permission
from builds.models import BuildJob, Bundle, Delta, Target
from builds.selectors.catalogue import (
    build_get,
    build_list,
    bundle_get,
    delta_list,
    target_list,
)
from builds.services.approvals import release_approve
from builds.services.jobs import build_retry
from builds.services.targets import target_activate
from builds.states import BuildState

router = Router()
Limit = Annotated[int, Query(DEFAULT_LIMIT)]
Cursor = Annotated[str, Query("")]
Filter = Annotated[str, Query("")]
State = Annotated[BuildState | None, BeforeValidator(any_if_empty), Query(None)]


@router.get("/builds", response=BuildPage, operation_id="build_list")
def builds_get(
    request: HttpRequest,
    limit: Limit,
    cursor: Cursor,
    model: Filter,
    version: Filter,
    target: Filter,
    state: State,
) -> Page[BuildJob]:
    """List builds, newest first; every filter is optional."""
    require(request_actor(request), Permission.VIEW)
    rows = build_list(model=model, version=version, target=target, state=word(state))
    return page_of(rows, limit=limit, cursor=cursor)


@router.get("/builds/{build_id}", response=BuildDetailOut, operation_id="build_get")
def one_build_get(request: HttpRequest, build_id: int) -> BuildJob:
    """Return one build with its log and its history."""
    require(request_actor(request), Permission.VIEW)
    return build_get(build_id)


@router.post("/builds/{build_id}/retry", response=BuildOut, operation_id="build_retry")
def build_retry_post(request: HttpRequest, build_id: int) -> BuildJob:
    """Queue a failed build again."""
    return build_retry(actor=request_actor(request), job=build_get(build_id))


@router.get("/bundles/{manifest_sha256}", response=BundleOut, operation_id="bundle_get")
def one_bundle_get(request: HttpRequest, manifest_sha256: str) -> Bundle:
    """Return one bundle with its sections."""
    require(request_actor(request), Permission.VIEW)
    return bundle_get(manifest_sha256)


@router.get(
    "/bundles/{manifest_sha256}/manifest", response={200: None}, operation_id="manifest_get"
)
def manifest_get(request: HttpRequest, manifest_sha256: str) -> HttpResponse:
    """Return the release manifest itself, the bytes whose SHA-256 is in the address."""
    require(request_actor(request), Permission.VIEW)
    data = bundle_get(manifest_sha256).manifest_bytes
    return HttpResponse(data, content_type="application/json")


@router.post(
    "/bundles/{manifest_sha256}/approve", response=BundleOut, operation_id="bundle_approve"
)
def bundle_approve_post(request: HttpRequest, manifest_sha256: str) -> Bundle:
    """Approve a built bundle: the second signature. It is offered once it is published."""
    bundle = bundle_get(manifest_sha256)
    release_approve(actor=request_actor(request), bundles=[bundle])
    return bundle_get(manifest_sha256)


@router.get("/targets", response=list[TargetOut], operation_id="target_list")
def targets_get(request: HttpRequest) -> list[Target]:
    """List every target that we can compile for."""
    require(request_actor(request), Permission.VIEW)
    return list(target_list())


@router.post("/targets/{name}/activate", response=TargetOut, operation_id="target_activate")
def target_activate_post(request: HttpRequest, name: str) -> Target:
    """Compile for this target from now on."""
    target, _ = target_activate(name=name, actor=request_actor(request))
    return target


@router.get("/deltas", response=DeltaPage, operation_id="delta_list")
def deltas_get(request: HttpRequest, limit: Limit, cursor: Cursor) -> Page[Delta]:
    """List deltas, newest first."""
    require(request_actor(request), Permission.VIEW)
    return page_of(delta_list(), limit=limit, cursor=cursor)
