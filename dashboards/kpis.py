"""Key figures above a page: name, value as text, note, and a tone when something is wrong. Pure."""

from dataclasses import dataclass
from typing import Final

from dashboards.templatetags.sparsefleet import figure, percent
from fleet.selectors.device_pages import DeviceDetail
from fleet.selectors.pages import FleetCounts, Measured
from fleet.selectors.rollout_page import RolloutDetail

FAILURE_ALARM: Final = 0.02


@dataclass(frozen=True, slots=True)
class Kpi:
    """One key figure."""

    name: str
    value: str
    note: str = ""
    tone: str = ""


def overview_kpis(counts: FleetCounts, measured: Measured, active: int) -> tuple[Kpi, ...]:
    """Return the key figures of the whole platform; `measured` is the last hour."""
    silent = counts.accepted - counts.online
    return (
        Kpi(
            "Devices online",
            figure(counts.online),
            f"of {figure(counts.accepted)}"
            + (f", {figure(counts.pending)} waiting" if counts.pending else ""),
            "warn" if silent else "",
        ),
        Kpi("Active rollouts", figure(active), "compiling, waiting or running"),
        Kpi(
            "Updates that failed",
            figure(counts.recent_bad),
            f"{figure(counts.recent_succeeded)} succeeded, last 24 h",
            "bad" if counts.recent_bad else "",
        ),
        Kpi(
            "Answers",
            figure(measured.answers),
            _hour_note(measured),
        ),
        Kpi(
            "Answers right",
            percent(measured.accuracy),
            f"of {figure(measured.scored)} scored, last hour",
        ),
    )


def rollout_kpis(detail: RolloutDetail) -> tuple[Kpi, ...]:
    """Return the key figures of a rollout: who was reached, who was hurt, who fell silent."""
    totals = detail.totals
    new, old = detail.arms["treatment"], detail.arms["control"]
    rows = [
        Kpi(
            "Exposed devices",
            figure(totals.exposed),
            f"ever ran {detail.rollout.version.version}, of {figure(detail.device_count)}",
        ),
        Kpi(
            "Updates that failed",
            figure(totals.failed),
            f"{figure(totals.succeeded)} succeeded, {figure(totals.open_count)} under way",
            "bad" if totals.failed else "",
        ),
        Kpi(
            "Failed answers",
            percent(new.measured.failure_ratio, 2),
            f"control {percent(old.measured.failure_ratio, 2)}",
            _worse(new.measured.failure_ratio, old.measured.failure_ratio),
        ),
        Kpi("Slow answers", percent(new.slow_ratio), f"control {percent(old.slow_ratio)}"),
        Kpi(
            "Answers right",
            percent(new.measured.accuracy),
            f"control {percent(old.measured.accuracy)}",
        ),
        Kpi(
            "Silent devices",
            figure(totals.silent),
            f"of {figure(totals.treatment)} in treatment",
            "bad" if totals.silent else "",
        ),
    ]
    if totals.returned or totals.returning:
        note = (
            f"{figure(totals.returning)} on their way"
            if totals.returning
            else "without downloading anything"
        )
        rows.insert(1, Kpi("Returned", f"{figure(totals.returned)}", note, "good"))
    return tuple(rows)


def device_kpis(detail: DeviceDetail) -> tuple[Kpi, ...]:
    """Return the key figures of one device, for the bundle that it runs."""
    now = next(
        (
            row
            for row in detail.answers
            if row.manifest_sha256 == detail.device.running_manifest_sha256
        ),
        None,
    )
    measured = now.measured if now else Measured()
    running = detail.device.running_bundle
    return (
        Kpi(
            "Runs", running.version.version if running else "nothing yet", detail.device.target.name
        ),
        Kpi("Answers", figure(measured.answers), "with this version"),
        Kpi("Answers right", percent(measured.accuracy), f"of {figure(measured.scored)} scored"),
        Kpi(
            "Failed answers",
            percent(measured.failure_ratio, 2),
            f"of {figure(measured.answers)} answers",
            "bad" if (measured.failure_ratio or 0) > FAILURE_ALARM else "",
        ),
    )


def _hour_note(measured: Measured) -> str:
    if not measured.answers:
        return "in the last hour"
    return f"last hour, {percent(measured.failure_ratio)} failed"


def _worse(new: float | None, old: float | None) -> str:
    return "bad" if new is not None and old is not None and new > 2 * old + 0.01 else ""
