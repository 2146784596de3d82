"""The buttons of a rollout: each is one POST that works without JavaScript; Halt asks nothing."""

from collections.abc import Callable, Mapping
from typing import Final

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponseBase
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from builds.common.auth import Actor
from builds.common.errors import ConflictError, InvalidInputError
from dashboards.pages import page, sentence
from fleet.services import rollouts as services
from fleet.services.retries import rollout_retry

MAX_REASON: Final = 500
SERVICES: Final[Mapping[str, Callable[..., object]]] = {
    "approve": services.rollout_approve,
    "start": services.rollout_start,
    "pause": services.rollout_pause,
    "resume": services.rollout_resume,
    "rollback": services.rollout_rollback,
    "cancel": services.rollout_cancel,
    "halt": services.rollout_halt,
    "retry": rollout_retry,
}
DONE: Final[Mapping[str, str]] = {
    "approve": "Approved.",
    "start": "Started: the first stage opens at the next look.",
    "pause": "Paused: nobody new gets an offer.",
    "resume": "Resumed.",
    "rollback": "Rolling back: devices return to what they ran before.",
    "cancel": "Cancelled.",
    "halt": "Halted: offers stopped, open downloads are cancelled.",
    "retry": "Offered once more to every device on which it failed.",
}


def _act(request: HttpRequest, actor: Actor, rollout_id: int, name: str) -> HttpResponseBase:
    if name not in SERVICES:
        raise Http404(name)
    return _run(
        request, rollout_id, DONE[name], lambda: SERVICES[name](actor=actor, rollout_id=rollout_id)
    )


def _promote(request: HttpRequest, actor: Actor, rollout_id: int) -> HttpResponseBase:
    reason = request.POST.get("reason", "")[:MAX_REASON]
    return _run(
        request,
        rollout_id,
        "Passed by hand; the reason is in the record.",
        lambda: services.rollout_promote(actor=actor, rollout_id=rollout_id, reason=reason),
    )


def _run(
    request: HttpRequest, rollout_id: int, done: str, action: Callable[[], object]
) -> HttpResponseBase:
    try:
        action()
    except (ConflictError, InvalidInputError) as error:
        # Often the page was older than the state: show the new one, and say what happened.
        messages.error(request, sentence(error))
    else:
        messages.success(request, done)
    return redirect("rollout-detail", rollout_id=rollout_id)


rollout_action = require_POST(page(_act))
rollout_promote = require_POST(page(_promote))
