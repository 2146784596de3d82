"""Devices of the fleet."""

from typing import Annotated

from django.http import HttpRequest
from ninja import Query, Router
from pydantic import BeforeValidator

from builds.common.auth import request_actor, require
from builds.common.filters import any_if_empty, word
from builds.common.paging import DEFAULT_LIMIT, Page, page_of
from builds.common.roles import Permission
from fleet.apis.schemas import AdmitIn, DeviceDetailOut, DeviceOut, DevicePage
from fleet.models import Device
from fleet.selectors.listing import device_get, device_list
from fleet.services.enrolment import device_admit
from fleet.states import DeviceEvent, DeviceState

router = Router()
Limit = Annotated[int, Query(DEFAULT_LIMIT)]
Cursor = Annotated[str, Query("")]
Filter = Annotated[str, Query("")]
State = Annotated[DeviceState | None, BeforeValidator(any_if_empty), Query(None)]


@router.get("/devices", response=DevicePage, operation_id="device_list")
def devices_get(
    request: HttpRequest,
    limit: Limit,
    cursor: Cursor,
    state: State,
    target: Filter,
    model: Filter,
    version: Filter,
) -> Page[Device]:
    """List devices, newest first; every filter is optional."""
    require(request_actor(request), Permission.VIEW)
    rows = device_list(state=word(state), target=target, model=model, version=version)
    return page_of(rows, limit=limit, cursor=cursor)


@router.get("/devices/{device_pk}", response=DeviceDetailOut, operation_id="device_get")
def one_device_get(request: HttpRequest, device_pk: int) -> Device:
    """Return one device: facts, what it is told now and why, its updates and measurements."""
    require(request_actor(request), Permission.VIEW)
    return device_get(device_pk)


@router.post("/devices/{device_pk}/admit", response=DeviceOut, operation_id="device_admit")
def device_admit_post(request: HttpRequest, device_pk: int, body: AdmitIn) -> Device:
    """Accept, reject, quarantine, release or retire a device."""
    device_admit(
        actor=request_actor(request),
        device_pk=device_pk,
        event=DeviceEvent(body.action),
        reason=body.reason,
    )
    return device_get(device_pk)
