"""The list of builds, one build with its live log, its whole report, the retry of a failed one."""

import json

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
from dashboards.plans import fate_tables, plan_picture, plan_tables, sparsity_tables
from dashboards.reports import Report
from dashboards.summaries import caveats_of, summary_of


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
        "summary": summary_of(
            build.job.report, verified_on=build.bundle.verified_on if build.bundle else ""
        ),
        "caveats": caveats_of(build.job.report),
        "can_retry": _can_retry(build.job),
        "is_users_fault": build.job.state == BuildState.FAILED_USER,
    }
    return show(
        request, actor, "build_detail", context, fragment="_build_live", final=build.is_final
    )


def _can_retry(job: BuildJob) -> bool:
    """Return whether the same bytes may succeed: not where the submission is at fault."""
    state = BuildState(job.state)
    return state is not BuildState.FAILED_USER and (state, BuildEvent.RETRY) in BUILD_TRANSITIONS


def _last_worker(job: BuildJob) -> str:
    """Return who took a build last: a finished one has given its lease back. One query."""
    taken = BuildTransition.objects.filter(subject=job, new=BuildState.LEASED.value)
    return taken.order_by("-pk").values_list("actor", flat=True).first() or ""


def _retry(request: HttpRequest, actor: Actor, build_id: int) -> HttpResponseBase:
    retry(actor=actor, job=find_build(build_id=build_id).job)
    messages.success(request, f"Build {build_id} is queued again.")
    return redirect("build-detail", build_id=build_id)


def _report(request: HttpRequest, actor: Actor, build_id: int) -> HttpResponse:  # noqa: ARG001
    job = find_build(build_id=build_id).job
    name = f"build-{job.pk}-report.json"
    return HttpResponse(
        json.dumps(job.report, indent=1, sort_keys=True) + "\n",
        content_type="application/json",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


build_list = require_safe(page(_list))
build_detail = require_safe(page(_detail))
build_report = require_safe(page(_report))
build_retry = require_POST(page(_retry, needs=Permission.BUILD_RETRY))
