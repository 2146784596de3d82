"""Claim tokens: with one a device may join."""

from http import HTTPStatus
from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Query, Router, Status

from builds.common.auth import request_actor, require
from builds.common.paging import DEFAULT_LIMIT, Page, page_of
from builds.common.roles import Permission
from fleet.apis.schemas import ClaimIn, ClaimOut, ClaimPage, NewClaimOut
from fleet.models import ClaimToken
from fleet.selectors.listing import claim_list
from fleet.services.claims import claim_create

router = Router()
Limit = Annotated[int, Query(DEFAULT_LIMIT)]
Cursor = Annotated[str, Query("")]


@router.get("/claim-tokens", response=ClaimPage, operation_id="claim_list")
def claims_get(request: HttpRequest, limit: Limit, cursor: Cursor) -> Page[ClaimToken]:
    """List claim tokens, newest first; their secrets are not known any more."""
    require(request_actor(request), Permission.CLAIM_EDIT)
    return page_of(claim_list(), limit=limit, cursor=cursor)


@router.post("/claim-tokens", response={201: NewClaimOut}, operation_id="claim_create")
def claim_post(request: HttpRequest, body: ClaimIn) -> Status[dict[str, Any]]:
    """Make a claim token; its text is in this answer and nowhere else."""
    claim, text = claim_create(
        actor=request_actor(request),
        name=body.name,
        uses=body.uses,
        expires_at=body.expires_at,
        device_class=body.device_class,
        accepts=body.accepts,
    )
    return Status(HTTPStatus.CREATED, {**ClaimOut.from_orm(claim).model_dump(), "token": text})
