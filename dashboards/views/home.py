"""The overview: key figures, what needs attention, active rollouts, recent events."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_safe

from builds.common.auth import Actor
from builds.common.roles import Permission
from builds.selectors.expiry import expiries, is_near
from builds.selectors.pages import audit_list, bundles_waiting, failed_builds
from dashboards.kpis import overview_kpis
from dashboards.pages import page, show
from fleet.selectors import pages as fleet_pages
from fleet.selectors.device_pages import seen_at
from fleet.selectors.identity import alert_list
from fleet.selectors.rollout_lists import rollout_lines, rollouts_active

EVENTS = 12
ITEMS = 5
RECENT = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Attention:
    """One thing that somebody should look at."""

    state: str
    word: str
    title: str
    text: str
    url: str
    at: datetime | None


def _overview(request: HttpRequest, actor: Actor) -> HttpResponse:
    now = timezone.now()
    counts = fleet_pages.fleet_counts(now)
    active = rollout_lines(list(rollouts_active()[:20]))
    running = fleet_pages.running_versions(limit=8)
    context = {
        "kpis": overview_kpis(
            counts, fleet_pages.measured_since(now - timedelta(hours=1)), len(active)
        ),
        "attention": [
            *_signing(now),
            *_identities(),
            *_rollouts(now),
            *_builds(now),
            *_devices(now, counts),
        ],
        "rows": active,
        "running": [
            (f"{row.model} {row.version}" if row.version else "nothing yet", row.devices)
            for row in running
        ],
        "device_count": counts.accepted,
        "events": audit_list()[:EVENTS] if actor.may(Permission.AUDIT_VIEW) else (),
    }
    return show(request, actor, "overview", context, fragment="_overview_live")


def _identities() -> Iterator[Attention]:
    for alert in alert_list(open_only=True)[:ITEMS]:
        yield Attention(
            alert.kind, "", alert.serial, alert.text, reverse("identity"), alert.last_at
        )


def _signing(now: datetime) -> Iterator[Attention]:
    for row in expiries(now):
        if is_near(row):
            yield Attention(
                "expiring",
                "",
                str(row),
                "Devices refuse updates once it has expired; see the runbook about signing.",
                reverse("audit"),
                row.expires_at if row.expires_at < now else None,
            )
    for bundle in bundles_waiting(limit=ITEMS):
        yield Attention(
            "awaiting_approval",
            "",
            f"{bundle.version.model.name} {bundle.version.version} for {bundle.target.name}",
            "Built; no device is offered it before somebody approves.",
            reverse("bundle-detail", args=[bundle.manifest_sha256]),
            bundle.created_at,
        )


def _rollouts(now: datetime) -> Iterator[Attention]:
    for stage in fleet_pages.stages_held()[:ITEMS]:
        rollout = stage.rollout
        yield Attention(
            "held",
            "",
            f"{rollout.model.name} {rollout.version.version}: stage {stage.index + 1} is held",
            stage.reason or "The gate waits for a person.",
            reverse("rollout-detail", args=[rollout.pk]),
            stage.decided_at or stage.opened_at,
        )
    for rollout in fleet_pages.rollouts_waiting()[:ITEMS]:
        yield Attention(
            "awaiting_approval",
            "",
            f"{rollout.model.name} {rollout.version.version}",
            "Bundles are ready; somebody has to approve.",
            reverse("rollout-detail", args=[rollout.pk]),
            rollout.created_at,
        )
    for rollout in fleet_pages.rollouts_ended_badly(now - RECENT)[:ITEMS]:
        yield Attention(
            rollout.state,
            "",
            f"{rollout.model.name} {rollout.version.version}",
            rollout.end_reason or "See the decision log.",
            reverse("rollout-detail", args=[rollout.pk]),
            rollout.finished_at or rollout.halted_at,
        )


def _builds(now: datetime) -> Iterator[Attention]:
    for job in failed_builds(since=now - RECENT, limit=ITEMS):
        yield Attention(
            job.state,
            "",
            f"{job.version.model.name} {job.version.version} for {job.target.name}",
            job.error_message,
            reverse("build-detail", args=[job.pk]),
            job.finished_at,
        )


def _devices(now: datetime, counts: fleet_pages.FleetCounts) -> Iterator[Attention]:
    if counts.pending:
        yield Attention(
            "pending",
            "",
            f"{counts.pending} devices wait to be accepted",
            "They enrolled with a claim that does not accept by itself.",
            reverse("device-list") + "?state=pending",
            None,
        )
    if counts.accepted == counts.online:
        return
    silent = fleet_pages.silent_devices(now, limit=ITEMS)
    count = counts.accepted - counts.online
    names = ", ".join(device.name or device.serial for device in silent)
    yield Attention(
        "silent",
        "",
        f"{count} device{'' if count == 1 else 's'} not heard for {fleet_pages.MISSED_POLLS} polls",
        names + (" and others" if count > len(silent) else ""),
        reverse("device-list") + "?signal=silent",
        max((moment for moment in map(seen_at, silent) if moment), default=None),
    )


overview = require_safe(page(_overview))
