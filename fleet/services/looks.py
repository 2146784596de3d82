"""One look of the gate at the open stage of a rollout: count, decide, store, act; one transaction.

A look is stored with all its inputs and outputs, so that `manage.py gate_replay` decides it again.
What a verdict leads to is a table; a pass moves nothing while the rollout is paused.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.db.models import F, Q, QuerySet

from builds.common.audit import audit
from compiler.contract.protocol import OfferKind, UpdateState
from fleet.gates import (
    ArmCounts,
    Decision,
    Evidence,
    GateSpec,
    Increment,
    InstallCounts,
    Verdict,
    decide,
)
from fleet.gates.evidence import Mode, ledger_from_json, ledger_to_json
from fleet.gates.spec import Metric
from fleet.models import Enrolment, GateLook, Rollout, Stage, Update
from fleet.services.endings import rollback_begin, rollout_move
from fleet.services.ledgers import (
    Counts,
    StageLedger,
    all_strata,
    ledger_of,
    since_opening,
    stage_sums,
    take_increments,
)
from fleet.services.stages import next_stage_open, stage_move
from fleet.states import (
    STAGE_OPEN_STATES,
    Arm,
    RolloutEvent,
    RolloutState,
    StageEvent,
    StageState,
)

SYSTEM: Final = "system"
FAILED_STATES: Final = (
    UpdateState.FAILED.value,
    UpdateState.ROLLED_BACK.value,
    UpdateState.REJECTED.value,
    UpdateState.TIMED_OUT.value,
)
WITHDRAWN_STATES: Final = (
    UpdateState.CANCELLED.value,
    UpdateState.SUPERSEDED.value,
    UpdateState.REMOVED.value,
    UpdateState.SKIPPED.value,
)
RUNNING_NEW_STATES: Final = (
    UpdateState.ACTIVATING.value,
    UpdateState.PROBATION.value,
    UpdateState.SUCCEEDED.value,
)
_OPEN_STAGES: Final = [state.value for state in STAGE_OPEN_STATES]


@dataclass(frozen=True, slots=True)
class Hearing:
    """How many devices of one arm are there, were heard, are silent, and fell silent just now."""

    devices: int
    heard: int
    silent: int
    newly_silent: int
    at_risk: int


def open_stage(rollout: Rollout) -> Stage | None:
    """Return the stage that is open, or None."""
    return rollout.stages.filter(state__in=_OPEN_STAGES).order_by("index").first()


def stage_look(rollout: Rollout, stage: Stage, spec: GateSpec, *, now: datetime) -> GateLook:
    """Look once and act. Inside the caller's transaction, which holds the rollout's row."""
    ledger = ledger_of(stage)
    evidence = collect(rollout, stage, ledger, spec, now=now)
    verdict = decide(spec, evidence)
    _note(stage, ledger, verdict, spec, now)
    action = _action(rollout, stage, spec, evidence, verdict)
    look = GateLook.objects.create(
        rollout=rollout,
        stage=stage,
        at=now,
        spec=spec.to_json(),
        evidence=evidence.to_json(),
        verdict=verdict.to_json(),
        decision=verdict.decision.value,
        log_evidence=verdict.log_evidence,
        action=action,
    )
    _ACTIONS[action](rollout, stage, evidence, "; ".join(verdict.reasons), now)
    return look


def collect(
    rollout: Rollout, stage: Stage, ledger: StageLedger, spec: GateSpec, *, now: datetime
) -> Evidence:
    """Return what the gate sees now, and mark in `ledger` what became evidence. Nine queries."""
    sums = stage_sums(stage)
    treatment = since_opening(ledger, sums[Arm.TREATMENT.value])
    control = all_strata(sums[Arm.CONTROL.value])
    mode = _mode(rollout, stage)
    hearing = _hear(rollout, stage, spec.silence_s, now)
    taken: list[Increment] = []
    if mode == Mode.COMPARE:
        taken += take_increments(ledger, sums)
        taken += _silence(hearing)
    fresh, answering = _fresh(stage)
    return Evidence(
        mode=mode,
        stage=stage.index,
        stage_age_s=(now - (stage.opened_at or now)).total_seconds(),
        holding_s=_holding_s(ledger, now),
        treatment=_arm(treatment, hearing[Arm.TREATMENT]),
        control=_arm(control, hearing[Arm.CONTROL]),
        fresh_answers=fresh,
        installs=_installs(Q(stage=stage), rollout, answering),
        installs_total=_installs(Q(), rollout, answering),
        increments=tuple(taken),
        harm_ledger=ledger_from_json(ledger.harm),
        safe_ledger=ledger_from_json(ledger.safe),
    )


def _mode(rollout: Rollout, stage: Stage) -> Mode:
    if rollout.is_first_install:
        return Mode.FIRST_INSTALL
    return Mode.RELEASE if stage.is_release else Mode.COMPARE


def _arm(counts: Counts, hearing: Hearing) -> ArmCounts:
    return ArmCounts(devices=hearing.devices, heard=hearing.heard, silent=hearing.silent, **counts)


def _hear(rollout: Rollout, stage: Stage, silence_s: float, now: datetime) -> dict[Arm, Hearing]:
    installed = Update.objects.filter(
        rollout=rollout, kind=OfferKind.INSTALL.value, state__in=RUNNING_NEW_STATES
    )
    rows = Enrolment.objects.filter(rollout=rollout)
    treated = rows.filter(arm=Arm.TREATMENT.value, device_id__in=installed.values("device_id"))
    compared = rows.filter(arm=Arm.CONTROL.value, stage=stage)
    limit = now - timedelta(seconds=silence_s)
    return {
        Arm.TREATMENT: _hearing(treated, limit, now),
        Arm.CONTROL: _hearing(compared, limit, now),
    }


def _hearing(rows: QuerySet[Enrolment], limit: datetime, now: datetime) -> Hearing:
    since = Q(device__heartbeat__at__gte=F("at")) | Q(device__last_seen_at__gte=F("at"))
    lately = Q(device__heartbeat__at__gte=limit) | Q(device__last_seen_at__gte=limit)
    heard = rows.filter(since)
    silent = heard.exclude(lately)
    at_risk = heard.filter(silent_at=None).count()
    new = list(silent.filter(silent_at=None).values_list("pk", flat=True))
    if new:
        Enrolment.objects.filter(pk__in=new).update(silent_at=now)
    return Hearing(rows.count(), heard.count(), silent.count(), len(new), at_risk)


def _silence(hearing: Mapping[Arm, Hearing]) -> list[Increment]:
    new, old = hearing[Arm.TREATMENT], hearing[Arm.CONTROL]
    if not (new.newly_silent or old.newly_silent) or not (new.at_risk and old.at_risk):
        return []
    return [
        Increment(
            Metric.SILENCE, "all", new.newly_silent, old.newly_silent, new.at_risk, old.at_risk
        )
    ]


def _fresh(stage: Stage) -> tuple[int, int]:
    """Return answers by the stage's own new devices, and how many of them answered."""
    rows = Enrolment.objects.filter(stage=stage, arm=Arm.TREATMENT.value, stats__answers__gt=0)
    answers = list(rows.values_list("stats__answers", flat=True))
    return sum(answers), len(answers)


def _installs(where: Q, rollout: Rollout, answering: int) -> InstallCounts:
    rows = Update.objects.filter(where, rollout=rollout, kind=OfferKind.INSTALL.value)
    rows = rows.exclude(state__in=WITHDRAWN_STATES)
    ends = list(rows.values_list("state", "regressed_at"))
    left = sum(regressed_at is not None for _, regressed_at in ends)
    states = [state for state, _ in ends]
    return InstallCounts(
        enrolled=len(states),
        reached=sum(state != UpdateState.QUEUED for state in states),
        succeeded=states.count(UpdateState.SUCCEEDED.value) - left,
        failed=sum(state in FAILED_STATES for state in states) + left,
        answering=answering,
    )


def _holding_s(ledger: StageLedger, now: datetime) -> float:
    if ledger.holding_since is None:
        return 0.0
    return (now - datetime.fromisoformat(ledger.holding_since)).total_seconds()


def _note(
    stage: Stage, ledger: StageLedger, verdict: Verdict, spec: GateSpec, now: datetime
) -> None:
    ledger.harm = ledger_to_json(verdict.harm_ledger)
    ledger.safe = ledger_to_json(verdict.safe_ledger)
    if verdict.log_evidence < math.log(spec.hold_evidence):
        ledger.holding_since = None
    elif ledger.holding_since is None:
        ledger.holding_since = now.isoformat()
    stage.ledger = ledger.to_json()
    stage.save(update_fields=["ledger"])


def _action(
    rollout: Rollout, stage: Stage, spec: GateSpec, evidence: Evidence, verdict: Verdict
) -> str:
    if verdict.decision == Decision.FAIL:
        return "roll_back"
    if verdict.decision == Decision.PASS:
        return "wait" if rollout.state == RolloutState.PAUSED else "promote"
    if stage.state != StageState.HELD and evidence.stage_age_s > spec.max_wait_s:
        return "hold"
    is_settled = evidence.installs.settled >= max(1, evidence.installs.reached)
    return "soak" if stage.state == StageState.RUNNING and is_settled else "wait"


def _wait(_r: Rollout, _s: Stage, _e: Evidence, _reason: str, _now: datetime) -> None:
    """Leave everything as it is."""


def _soak(_r: Rollout, stage: Stage, _e: Evidence, _reason: str, _now: datetime) -> None:
    stage_move(stage, StageEvent.SOAK, reason="every installation came to an end")


def _hold(rollout: Rollout, stage: Stage, _e: Evidence, reason: str, _now: datetime) -> None:
    stage_move(stage, StageEvent.HOLD, reason=reason)
    audit(actor=SYSTEM, action="stage.hold", obj=rollout, stage=stage.index, reason=reason)


def _promote(rollout: Rollout, stage: Stage, _e: Evidence, reason: str, now: datetime) -> None:
    if stage.state != StageState.SOAKING:
        stage_move(stage, StageEvent.SOAK, reason="every installation came to an end")
    stage_move(stage, StageEvent.PASS, reason=reason, now=now)
    following = next_stage_open(rollout, now=now)
    if following is None:
        rollout_move(rollout, RolloutEvent.COMPLETE, actor=SYSTEM, reason=reason, now=now)
    audit(
        actor=SYSTEM,
        action="stage.pass",
        obj=rollout,
        stage=stage.index,
        following=following.index if following is not None else None,
    )


def _roll_back(rollout: Rollout, stage: Stage, _e: Evidence, reason: str, now: datetime) -> None:
    rollback_begin(
        rollout,
        event=RolloutEvent.GATE_FAILED,
        actor=SYSTEM,
        reason=reason,
        now=now,
        stage=stage,
    )


_Act = Callable[[Rollout, Stage, Evidence, str, datetime], None]
_ACTIONS: Final[Mapping[str, _Act]] = {
    "wait": _wait,
    "soak": _soak,
    "hold": _hold,
    "promote": _promote,
    "roll_back": _roll_back,
}
