"""Degrade rules of the fleet and of groups."""

from http import HTTPStatus
from typing import Annotated

from django.http import HttpRequest
from ninja import Query, Router, Status

from builds.common.auth import request_actor, require
from builds.common.paging import DEFAULT_LIMIT, Page, page_of
from builds.common.roles import Permission
from fleet.apis.schemas import RulesIn, RulesOut, RulesPage, RulesPreviewOut
from fleet.models import DegradeRules
from fleet.selectors.rules import rules_list
from fleet.services.rules import rules_preview, rules_set

router = Router()
Limit = Annotated[int, Query(DEFAULT_LIMIT)]
Cursor = Annotated[str, Query("")]


@router.get("/degrade-rules", response=RulesPage, operation_id="rules_list")
def rules_get(request: HttpRequest, limit: Limit, cursor: Cursor) -> Page[DegradeRules]:
    """List every setting of rules, newest first; the newest of a scope is in effect."""
    require(request_actor(request), Permission.VIEW)
    return page_of(rules_list(), limit=limit, cursor=cursor)


@router.post("/degrade-rules/preview", response=RulesPreviewOut, operation_id="rules_preview")
def rules_preview_post(request: HttpRequest, body: RulesIn) -> RulesPreviewOut:
    """Check rules and say how many devices they would reach; changes nothing."""
    require(request_actor(request), Permission.VIEW)
    found = rules_preview(group=body.group, document=body.rules)
    fields = ("name", "priority", "rung", "when", "leave")
    rows = [dict(zip(fields, row, strict=True)) for row in found.rules]
    return RulesPreviewOut(devices=found.devices, rules=rows)


@router.post("/degrade-rules", response={201: RulesOut}, operation_id="rules_set")
def rules_post(request: HttpRequest, body: RulesIn) -> Status[DegradeRules]:
    """Set the rules of a group or of the fleet; null takes them back."""
    row = rules_set(
        actor=request_actor(request), group=body.group, document=body.rules, note=body.note
    )
    return Status(HTTPStatus.CREATED, row)
