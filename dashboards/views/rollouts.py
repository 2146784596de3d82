"""The list of rollouts, and one rollout with its stages, evidence and decisions."""

from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_safe

from builds.common.auth import Actor
from dashboards.actions import rollout_buttons
from dashboards.evidence import evidence_strip, gate_rows, latency_comparison, look_of, odds_of
from dashboards.kpis import rollout_kpis
from dashboards.pages import page, show
from dashboards.paging import slice_below
from dashboards.templatetags.sparsefleet import plain
from fleet.gates import PROFILES, spec_from_stored
from fleet.selectors.poll import INSTALL_STATES
from fleet.selectors.rollout_lists import rollout_lines, rollout_rows, rollout_state_counts
from fleet.selectors.rollout_page import RolloutDetail, rollout_page
from fleet.states import RolloutState, StageState

FINAL_STATES = frozenset(
    (
        RolloutState.SUCCEEDED,
        RolloutState.STOPPED,
        RolloutState.ROLLED_BACK,
        RolloutState.FAILED,
    )
)


@dataclass(frozen=True, slots=True)
class Headline:
    """One sentence above the stages that says where the rollout stands."""

    tone: str
    title: str
    text: str


def _list(request: HttpRequest, actor: Actor) -> HttpResponse:
    state = request.GET.get("state", "")
    text = request.GET.get("text", "").strip()
    counts = rollout_state_counts()
    found = slice_below(rollout_rows(state=state, text=text), request.GET.get("below"))
    context = {
        "slice": found,
        "rows": rollout_lines(found.rows),
        "counts": counts,
        "state": state,
        "text": text,
    }
    is_final = all(count == 0 for name, count in counts.items() if name not in FINAL_STATES)
    return show(request, actor, "rollout_list", context, fragment="_rollout_rows", final=is_final)


def _detail(request: HttpRequest, actor: Actor, rollout_id: int) -> HttpResponse:
    detail = rollout_page(rollout_id=rollout_id)
    rollout = detail.rollout
    spec = spec_from_stored(rollout.gate, PROFILES)
    look = look_of(detail.last_look) if detail.last_look else None
    context = {
        "detail": detail,
        "spec": spec,
        "headline": headline_of(detail),
        "actions": rollout_buttons(rollout, actor, reverse("rollout-detail", args=[rollout_id])),
        "held": any(card.stage.state == StageState.HELD for card in detail.stages)
        and rollout.state == RolloutState.RUNNING,
        "can_retry": rollout.state in INSTALL_STATES and bool(detail.totals.failed),
        "is_over": rollout.state in FINAL_STATES,
        "kpis": rollout_kpis(detail),
        "strip": evidence_strip(detail.points, spec),
        "evidence_odds": odds_of(detail.points[-1].log_evidence) if detail.points else None,
        "fail_odds": 1 / spec.alpha,
        "fail_share": f"{spec.alpha:.1%}".replace(".0%", " %"),
        "look": look,
        "gate_rows": gate_rows(look) if look else (),
        "latency": latency_comparison(
            treatment=detail.arms["treatment"].latency,
            control=detail.arms["control"].latency,
            slow_ms=detail.slow_ms,
        ),
    }
    is_final = rollout.state in FINAL_STATES and not detail.totals.returning
    return show(request, actor, "rollout_detail", context, fragment="_rollout_live", final=is_final)


def headline_of(detail: RolloutDetail) -> Headline | None:
    """Return where the rollout stands in one sentence, or None while it simply runs."""
    rollout, totals = detail.rollout, detail.totals
    state = RolloutState(rollout.state)
    base = rollout.base_version.version if rollout.base_version else "the previous version"
    sentences = {
        RolloutState.COMPILING: ("live", "Waits for its bundles", "Every target needs one."),
        RolloutState.AWAITING_APPROVAL: (
            "warn",
            "Waits for approval",
            "Somebody else than its author has to approve.",
        ),
        RolloutState.READY: (
            "live",
            "Ready to start",
            "Bundles are there, nothing was offered yet.",
        ),
        RolloutState.PAUSED: ("warn", "Paused", "Nobody new gets an offer."),
        RolloutState.ROLLING_BACK: (
            "bad",
            "Rolling back",
            f"{_devices(totals.returning)} on the way back to {base}. {plain(rollout.end_reason)}",
        ),
        RolloutState.ROLLED_BACK: (
            "bad",
            "Rolled back",
            f"{_devices(totals.exposed)} exposed, {totals.returned} returned to {base}. "
            f"{plain(rollout.end_reason)}",
        ),
        RolloutState.STOPPED: (
            "warn",
            "Halted" if rollout.halted_at else "Cancelled",
            plain(rollout.end_reason),
        ),
        RolloutState.FAILED: ("bad", "Failed", plain(rollout.end_reason)),
        RolloutState.SUCCEEDED: (
            "good",
            "Delivered",
            f"{rollout.version.version} was installed on {_devices(totals.succeeded)}.",
        ),
    }
    if state in sentences:
        return Headline(*sentences[state])
    held = next((card for card in detail.stages if card.stage.state == StageState.HELD), None)
    if held is not None:
        return Headline("warn", f"Stage {held.stage.index + 1} is held", plain(held.stage.reason))
    return None


def _devices(count: int) -> str:
    return f"{count:,} device{'' if count == 1 else 's'}"


rollout_list = require_safe(page(_list))
rollout_detail = require_safe(page(_detail))
