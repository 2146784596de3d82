"""Alerts about identities, and devices that may join without a claim token."""

from http import HTTPStatus

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods, require_POST

from builds.common.auth import Actor, require
from builds.common.errors import ApplicationError, ConflictError
from builds.common.roles import Permission
from dashboards.forms import PreauthorisationForm
from dashboards.pages import page, sentence, show
from dashboards.paging import slice_below
from fleet.selectors.identity import alert_list, preauthorisation_list
from fleet.services.alerts import alert_settle
from fleet.services.preauthorisation import preauthorisation_create, preauthorisation_revoke

SHOWN = 50


def _identity(request: HttpRequest, actor: Actor) -> HttpResponseBase:
    if request.method != "POST":
        return _page(request, actor, PreauthorisationForm(), HTTPStatus.OK)
    require(actor, Permission.CLAIM_EDIT)
    form = PreauthorisationForm(request.POST)
    if not form.is_valid():
        return _page(request, actor, form, HTTPStatus.UNPROCESSABLE_ENTITY)
    try:
        row = preauthorisation_create(actor=actor, **form.cleaned_data)
    except ApplicationError as error:
        form.add_error(None, sentence(error))
        return _page(request, actor, form, error.status)
    messages.success(request, f"{row.serial} may join with this key, without a claim token.")
    return redirect("identity")


def _page(
    request: HttpRequest, actor: Actor, form: PreauthorisationForm, status: int
) -> HttpResponse:
    context = {
        "form": form,
        "alerts": alert_list(open_only=True)[:SHOWN],
        "slice": slice_below(preauthorisation_list(), request.GET.get("below")),
    }
    return show(request, actor, "identity", context, status=status)


def _revoke(request: HttpRequest, actor: Actor, row_id: int) -> HttpResponseBase:
    try:
        preauthorisation_revoke(actor=actor, preauthorisation_id=row_id)
    except ConflictError as error:
        messages.error(request, sentence(error))
    return redirect("identity")


def _settle(request: HttpRequest, actor: Actor, row_id: int) -> HttpResponseBase:
    try:
        alert_settle(actor=actor, alert_id=row_id)
    except ConflictError as error:
        messages.error(request, sentence(error))
    return redirect("identity")


identity = require_http_methods(["GET", "HEAD", "POST"])(page(_identity))
revoke = require_POST(page(_revoke, needs=Permission.CLAIM_EDIT))
settle = require_POST(page(_settle, needs=Permission.DEVICE_ADMIT))
