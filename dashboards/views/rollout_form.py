"""The form of a new rollout; a mistake comes back as the form with 422."""

from dataclasses import dataclass
from http import HTTPStatus

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from builds.common.auth import Actor
from builds.common.errors import ApplicationError
from builds.common.roles import Permission
from dashboards.forms import RolloutForm
from dashboards.pages import is_partial, page, show
from fleet.services.groups import group_create
from fleet.services.plans import RolloutRequest, rollout_preview
from fleet.services.rollouts import rollout_create as create


@dataclass(frozen=True, slots=True)
class Preview:
    """What the rollout would be if it started now."""

    stages: tuple[tuple[int, int, bool], ...]
    devices: int
    left_out: tuple[tuple[str, int], ...]


def _create(request: HttpRequest, actor: Actor) -> HttpResponseBase:
    if request.method != "POST":
        initial = {"version": request.GET.get("version"), "group": request.GET.get("group")}
        return _form(request, actor, RolloutForm(initial=initial), HTTPStatus.OK)
    form = RolloutForm(request.POST)
    if not form.is_valid():
        return _form(request, actor, form, HTTPStatus.UNPROCESSABLE_ENTITY)
    asked = form.request()
    try:
        if form.cleaned_data["group"] is None:
            group_create(actor=actor, name=asked.group, model=asked.model, device_filter={})
        if "preview" in request.POST:
            return _form(request, actor, form, HTTPStatus.OK, preview=_preview(asked))
        rollout = create(actor=actor, request=asked)
    except ApplicationError as error:
        form.add_error(None, str(error))
        return _form(request, actor, form, error.status, hint=error.hint)
    messages.success(request, "The rollout is made; start it from here when its bundles are ready.")
    url = reverse("rollout-detail", args=[rollout.pk])
    if is_partial(request):
        return HttpResponse(headers={"HX-Redirect": url})
    return redirect(url)


def _form(
    request: HttpRequest,
    actor: Actor,
    form: RolloutForm,
    status: int,
    *,
    hint: str = "",
    preview: Preview | None = None,
) -> HttpResponse:
    context = {"form": form, "error_hint": hint, "preview": preview}
    if status >= HTTPStatus.BAD_REQUEST:
        status = HTTPStatus.UNPROCESSABLE_ENTITY
    return show(request, actor, "rollout_create", context, fragment="_rollout_form", status=status)


def _preview(asked: RolloutRequest) -> Preview:
    stages, members = rollout_preview(
        model=asked.model,
        version=asked.version,
        group=asked.group,
        goals=asked.goals,
        gate=asked.gate,
    )
    before = (0, *(stage.total for stage in stages))
    return Preview(
        stages=tuple(
            (stage.total - earlier, stage.total, stage.is_release)
            for stage, earlier in zip(stages, before, strict=False)
        ),
        devices=len(members.by_id),
        left_out=tuple(sorted(members.left_out.items())),
    )


rollout_create = require_http_methods(["GET", "HEAD", "POST"])(
    page(_create, needs=Permission.ROLLOUT_EDIT)
)
