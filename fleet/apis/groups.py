"""Groups of devices."""

from http import HTTPStatus
from typing import Annotated

from django.http import HttpRequest
from ninja import Query, Router, Status

from builds.common.auth import request_actor, require
from builds.common.paging import DEFAULT_LIMIT, Page, page_of
from builds.common.roles import Permission
from fleet.apis.schemas import GroupIn, GroupOut, GroupPage
from fleet.models import Group
from fleet.selectors.listing import group_list
from fleet.services.groups import group_create

router = Router()
Limit = Annotated[int, Query(DEFAULT_LIMIT)]
Cursor = Annotated[str, Query("")]


@router.get("/groups", response=GroupPage, operation_id="group_list")
def groups_get(request: HttpRequest, limit: Limit, cursor: Cursor) -> Page[Group]:
    """List groups, newest first."""
    require(request_actor(request), Permission.VIEW)
    return page_of(group_list(), limit=limit, cursor=cursor)


@router.post("/groups", response={200: GroupOut, 201: GroupOut}, operation_id="group_create")
def group_post(request: HttpRequest, body: GroupIn) -> Status[Group]:
    """Make a group; the same group again is the same group."""
    group, created = group_create(
        actor=request_actor(request), name=body.name, model=body.model, device_filter=body.filter
    )
    return Status(HTTPStatus.CREATED if created else HTTPStatus.OK, group)
