"""Reports about updates: every one is kept, the newest by (attempt, seq) moves the state.

A report may come late, twice, out of order, or after the end; none of that may move a state back or
leave a terminal state. Facts beside the state are kept on the update whenever they come. What the
device runs is a fact of its own and is taken from the newest report of its newest update.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from builds.common.clock import Clock, SystemClock
from builds.common.enqueue import Task, enqueue
from builds.common.errors import IllegalTransitionError, InvalidInputError, NotFoundError
from builds.common.transitions import apply_transition
from compiler.contract.protocol import TERMINAL_STATES, ReportFact, UpdateReport, UpdateState
from fleet.errors import ReportContradictsError
from fleet.models import Device, Update, UpdateReportRow, UpdateTransition
from fleet.services.running import device_runs
from fleet.services.versions import fleet_atomic, fleet_version_bump
from fleet.states import ACTIVATED_STATES, REPORT_EVENTS, UPDATE_TRANSITIONS

MAX_CODE: Final = 64
# States in which the bundle of the update runs, so that it is too late to withdraw it.
RAN_STATES: Final = frozenset((UpdateState.PROBATION, UpdateState.SUCCEEDED))
# Column that keeps a fact; a fact without one is in the report only.
FACT_COLUMNS: Final[Mapping[ReportFact, str]] = MappingProxyType(
    {
        ReportFact.DENIED: "denied_at",
        ReportFact.UNCONFIRMED: "unconfirmed_at",
        ReportFact.TOO_LATE: "too_late_at",
    }
)


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """What became of a report, and where the update stands now."""

    state: UpdateState
    was_new: bool
    was_applied: bool


@fleet_atomic()
def update_report(
    *, device_pk: int, report: UpdateReport, clock: Clock | None = None
) -> ReportOutcome:
    """Take in one report of a device.

    Raises:
        NotFoundError: The device has no such update.
        InvalidInputError: A state that only the server may set, or an attempt that does not exist.
        ReportContradictsError: Success is claimed while another bundle runs.
    """
    now = (clock or SystemClock()).now()
    update = (
        Update.objects.select_for_update(of=("self",))
        .select_related("bundle")
        .filter(pk=report.update_id, device_id=device_pk)
        .first()
    )
    if update is None:
        raise NotFoundError(f"this device has no update {report.update_id}")
    _require_sense(update, report)
    row, is_new = UpdateReportRow.objects.get_or_create(
        update=update,
        attempt=report.attempt,
        seq=report.seq,
        defaults={
            "state": report.state.value,
            "running_manifest_sha256": report.running_manifest_sha256,
            "downloaded_bytes": report.downloaded_bytes,
            "code": report.code[:MAX_CODE],
            "message": report.message,
            "fact": report.fact.value,
            "was_applied": False,
            "at": now,
        },
    )
    if not is_new:
        return ReportOutcome(UpdateState(update.state), was_new=False, was_applied=row.was_applied)
    _note_facts(update, report, now)
    is_newest = (report.attempt, report.seq) > _last_place(update, row)
    if is_newest:
        _note_running(update, report, now)
    row.was_applied = is_newest and _apply(update, report, now)
    row.save(update_fields=["was_applied"])
    return ReportOutcome(UpdateState(update.state), was_new=True, was_applied=row.was_applied)


def _note_facts(update: Update, report: UpdateReport, now: datetime) -> None:
    """Keep what the report says beside its state; the first time counts."""
    column = FACT_COLUMNS.get(report.fact)
    columns = {} if column is None else {column: now}
    if update.state == UpdateState.CANCELLED and report.state in RAN_STATES:
        columns["too_late_at"] = now
    if update.activated_at is None and report.state in ACTIVATED_STATES:
        columns["activated_at"] = now
    for name, at in columns.items():
        if getattr(update, name) is None:
            setattr(update, name, at)
    if columns:
        update.save(update_fields=sorted(columns))


def _require_sense(update: Update, report: UpdateReport) -> None:
    if report.state not in REPORT_EVENTS:
        raise InvalidInputError(f"a device cannot report {report.state.value!r}")
    if report.attempt > update.attempt:
        raise InvalidInputError(f"attempt {report.attempt}, but only {update.attempt} were offered")
    runs_it = report.running_manifest_sha256 == update.bundle.manifest_sha256
    if report.state == UpdateState.SUCCEEDED and not runs_it:
        raise ReportContradictsError(
            "success was reported while another bundle runs",
            hint="report what runs; `succeeded` is for the bundle of the update only",
        )


def _last_place(update: Update, row: UpdateReportRow) -> tuple[int, int]:
    """Return (attempt, seq) of the newest report before this one; seqs count from 0 or 1."""
    others = update.reports.exclude(pk=row.pk).order_by("-attempt", "-seq")
    return others.values_list("attempt", "seq").first() or (0, -1)


def _note_running(update: Update, report: UpdateReport, now: datetime) -> None:
    Device.objects.filter(pk=update.device_id).update(last_seen_at=now)
    if not Update.objects.filter(device_id=update.device_id, pk__gt=update.pk).exists():
        device_runs(
            device_pk=update.device_id, manifest_sha256=report.running_manifest_sha256, at=now
        )


def _apply(update: Update, report: UpdateReport, now: datetime) -> bool:
    if UpdateState(update.state) in TERMINAL_STATES or report.attempt < update.attempt:
        return False
    changes: dict[str, Any] = {
        "seq": report.seq,
        "reported_at": now,
        "downloaded_bytes": max(update.downloaded_bytes, report.downloaded_bytes),
    }
    if report.state == update.state:
        Update.objects.filter(pk=update.pk).update(**changes)
        return True
    changes |= _end_columns(update, report, now)
    try:
        apply_transition(
            update,
            table=UPDATE_TRANSITIONS,
            event=REPORT_EVENTS[report.state],
            log=UpdateTransition,
            actor=f"device:{update.device_id}",
            reason=f"{report.code}: {report.message}".strip(": ")[:2_000],
            changes=changes,
        )
    except IllegalTransitionError:
        return False
    if UpdateState(update.state) in TERMINAL_STATES:
        fleet_version_bump()
        enqueue(Task.ROLLOUT_LOOK, rollout_id=update.rollout_id)
    return True


def _end_columns(update: Update, report: UpdateReport, now: datetime) -> dict[str, Any]:
    columns: dict[str, Any] = {"code": report.code[:MAX_CODE], "message": report.message}
    if update.offered_at is None:
        columns["offered_at"] = now
    if report.state in TERMINAL_STATES:
        columns["finished_at"] = now
    return columns
