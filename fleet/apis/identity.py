"""Who may join without a claim token, and alerts about identities."""

from http import HTTPStatus
from typing import Annotated

from django.http import HttpRequest
from ninja import Query, Router, Status

from builds.common.auth import request_actor, require
from builds.common.paging import DEFAULT_LIMIT, Page, page_of
from builds.common.roles import Permission
from fleet.apis.identity_schemas import (
    AlertOut,
    AlertPage,
    PreauthorisationIn,
    PreauthorisationOut,
    PreauthorisationPage,
)
from fleet.apis.schemas import ReasonIn
from fleet.models import IdentityAlert, Preauthorisation
from fleet.selectors.identity import alert_list, preauthorisation_list
from fleet.services.alerts import alert_settle
from fleet.services.preauthorisation import preauthorisation_create, preauthorisation_revoke

router = Router()
Limit = Annotated[int, Query(DEFAULT_LIMIT)]
Cursor = Annotated[str, Query("")]
IsOpen = Annotated[bool, Query(False)]


@router.get(
    "/preauthorisations", response=PreauthorisationPage, operation_id="preauthorisation_list"
)
def preauthorisations_get(
    request: HttpRequest, limit: Limit, cursor: Cursor
) -> Page[Preauthorisation]:
    """List pre-authorisations, used ones too, newest first."""
    require(request_actor(request), Permission.CLAIM_EDIT)
    return page_of(preauthorisation_list(), limit=limit, cursor=cursor)


@router.post(
    "/preauthorisations",
    response={201: PreauthorisationOut},
    operation_id="preauthorisation_create",
)
def preauthorisation_post(
    request: HttpRequest, body: PreauthorisationIn
) -> Status[Preauthorisation]:
    """Let one device join with one key, without a claim token."""
    row = preauthorisation_create(actor=request_actor(request), **body.model_dump())
    return Status(HTTPStatus.CREATED, row)


@router.delete(
    "/preauthorisations/{preauthorisation_id}",
    response={204: None},
    operation_id="preauthorisation_revoke",
)
def preauthorisation_delete(request: HttpRequest, preauthorisation_id: int) -> Status[None]:
    """Take back a pre-authorisation that was not used."""
    preauthorisation_revoke(actor=request_actor(request), preauthorisation_id=preauthorisation_id)
    return Status(HTTPStatus.NO_CONTENT, None)


@router.get("/identity-alerts", response=AlertPage, operation_id="identity_alert_list")
def alerts_get(
    request: HttpRequest, limit: Limit, cursor: Cursor, open_only: IsOpen
) -> Page[IdentityAlert]:
    """List alerts about identities, newest first: second keys and clones."""
    require(request_actor(request), Permission.VIEW)
    return page_of(alert_list(open_only=open_only), limit=limit, cursor=cursor)


@router.post(
    "/identity-alerts/{alert_id}/settle", response=AlertOut, operation_id="identity_alert_settle"
)
def alert_settle_post(request: HttpRequest, alert_id: int, body: ReasonIn) -> IdentityAlert:
    """Close an alert; the same once more opens a new one."""
    return alert_settle(actor=request_actor(request), alert_id=alert_id, note=body.reason)
