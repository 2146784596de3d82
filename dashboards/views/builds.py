"""The list of builds, one build with its live log, and the retry of a failed one."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.views.decorators.http import require_POST, require_safe

from builds.common.auth import Actor
from builds.common.roles import Permission
from builds.models import BuildJob, BuildTransition
from builds.selectors.pages import build_detail as find_build
from builds.selectors.pages import build_list as find_builds
from builds.selectors.pages import build_state_counts
from builds.services.jobs import build_retry as retry
from builds.states import BUILD_FINAL, BUILD_TRANSITIONS, BuildEvent, BuildState
from dashboards.pages import page, show
from dashboards.paging import slice_below
from dashboards.plans import KEYS, fate_tables, plan_picture, plan_tables, sparsity_tables
from dashboards.reports import Report, report_of


def _list(request: HttpRequest, actor: Actor) -> HttpResponse:
    state = request.GET.get("state", "")
    text = request.GET.get("text", "").strip()
    counts = build_state_counts()
    rows = slice_below(find_builds(state=state, text=text), request.GET.get("below"))
    is_final = all(count == 0 for name, count in counts.items() if name not in BUILD_FINAL)
    context = {"slice": rows, "counts": counts, "state": state, "text": text}
    return show(request, actor, "build_list", context, fragment="_build_rows", final=is_final)


def _detail(request: HttpRequest, actor: Actor, build_id: int) -> HttpResponse:
    build = find_build(build_id=build_id)
    context = {
        "build": build,
        "worker": build.job.lease_owner or _last_worker(build.job),
        "plan": plan_picture(build.job.report),
        "plan_tables": Report(
            (),
            (
                *plan_tables(build.job.report),
                *fate_tables(build.job.report),
                *sparsity_tables(build.job.report),
            ),
        ),
        "report": report_of(build.job.report, without=KEYS),
        "can_retry": (BuildState(build.job.state), BuildEvent.RETRY) in BUILD_TRANSITIONS,
    }
    return show(
        request, actor, "build_detail", context, fragment="_build_live", final=build.is_final
    )


def _last_worker(job: BuildJob) -> str:
    """Return who took a build last: a finished one has given its lease back. One query."""
    taken = BuildTransition.objects.filter(subject=job, new=BuildState.LEASED.value)
    return taken.order_by("-pk").values_list("actor", flat=True).first() or ""


def _retry(request: HttpRequest, actor: Actor, build_id: int) -> HttpResponseBase:
    retry(actor=actor, job=find_build(build_id=build_id).job)
    messages.success(request, f"Build {build_id} is queued again.")
    return redirect("build-detail", build_id=build_id)


build_list = require_safe(page(_list))
build_detail = require_safe(page(_detail))
build_retry = require_POST(page(_retry, needs=Permission.BUILD_RETRY))
