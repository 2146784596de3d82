"""The audit chain: who did what, and whether the chain is whole."""

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from builds.common.audit import first_broken_line
from builds.common.auth import Actor
from builds.common.roles import Permission
from builds.selectors.pages import audit_list
from dashboards.pages import page, show
from dashboards.paging import slice_below


def _list(request: HttpRequest, actor: Actor) -> HttpResponse:
    text = request.GET.get("text", "").strip()
    rows = slice_below(audit_list(text=text), request.GET.get("below"))
    context = {"slice": rows, "text": text, "checked": False}
    if "check" in request.GET:
        broken = first_broken_line(audit_list().order_by("pk").iterator())
        context |= {"checked": True, "broken": broken}
    return show(request, actor, "audit", context)


audit = require_safe(page(_list, needs=Permission.AUDIT_VIEW))
