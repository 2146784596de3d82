"""The list of devices, one device, and its admission."""

from collections.abc import Mapping
from typing import Any, Final

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from builds.common.auth import Actor
from builds.common.errors import ConflictError
from builds.common.roles import Permission
from builds.selectors.pages import target_list
from compiler.contract.protocol import SIGNATURE_MAX_AGE_S
from dashboards.actions import DEVICE_ACTIONS, device_buttons
from dashboards.kpis import device_kpis
from dashboards.pages import page, sentence, show
from dashboards.paging import slice_below
from dashboards.reports import cell_text, title_of
from fleet.selectors.device_pages import (
    below_normal_count,
    device_page,
    device_rows,
    device_state_counts,
    seen_at,
)
from fleet.selectors.poll import device_explain
from fleet.services.enrolment import device_admit
from fleet.states import DeviceEvent

FACTS: Final[Mapping[str, str]] = {
    "soc": "SoC",
    "os": "System",
    "l1d_kb": "L1 data cache, KiB",
    "l2_kb": "L2 cache, KiB",
    "l3_kb": "L3 cache, KiB",
    "ram_bucket_mb": "Memory at least, MiB",
    "page_kb": "Page, KiB",
    "agent_abi": "Plan ABI",
    "isa_features": "Instruction set",
}


def _list(request: HttpRequest, actor: Actor) -> HttpResponse:
    filters = {
        "text": request.GET.get("text", "").strip(),
        "target": request.GET.get("target", ""),
        "state": request.GET.get("state", ""),
        "signal": request.GET.get("signal", ""),
    }
    rows = device_rows(**filters, now=timezone.now())
    found = slice_below(rows, request.GET.get("below"))
    context = {
        **filters,
        "slice": found,
        "rows": [(device, seen_at(device)) for device in found.rows],
        "counts": device_state_counts(),
        "below_normal": below_normal_count(),
        "targets": target_list(),
    }
    return show(request, actor, "device_list", context, fragment="_device_rows")


def _detail(request: HttpRequest, actor: Actor, device_id: int) -> HttpResponse:
    detail = device_page(device_pk=device_id)
    url = reverse("device-detail", args=[device_id])
    context = {
        "detail": detail,
        "kpis": device_kpis(detail),
        "actions": device_buttons(detail.device.state, actor, url),
        "why": device_explain(device_pk=device_id),
        "clock_is_wrong": abs(detail.device.clock_skew_s or 0) > SIGNATURE_MAX_AGE_S,
        "fingerprint": fingerprint_rows(detail.device.fingerprint.document),
    }
    return show(request, actor, "device_detail", context, fragment="_device_live")


def fingerprint_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a fingerprint as (title, text), the long ones last."""
    rows = [
        (
            FACTS.get(name, title_of(name)),
            " ".join(value) if isinstance(value, list) else cell_text(name, value),
        )
        for name, value in document.items()
        if name != "schema" and value != ""
    ]
    return sorted(rows, key=lambda row: len(row[1]) > 60)


def _admit(request: HttpRequest, actor: Actor, device_id: int, name: str) -> HttpResponseBase:
    row = DEVICE_ACTIONS.get(name)
    if row is None:
        raise Http404(name)
    try:
        device_admit(actor=actor, device_pk=device_id, event=DeviceEvent(row.event))
    except ConflictError as error:
        messages.error(request, sentence(error))
    return redirect("device-detail", device_id=device_id)


device_list = require_safe(page(_list))
device_detail = require_safe(page(_detail))
device_action = require_POST(page(_admit, needs=Permission.DEVICE_ADMIT))
