"""The engine of rollouts: one function per state, called by the tick and by the doorbell alike.

The database is the truth, so a call more or less changes nothing: every step holds the rollout's
row and asks what is due. Losing every message costs at most one tick.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from builds.common.clock import Clock, SystemClock
from builds.common.errors import ApplicationError, NotFoundError
from fleet.models import Rollout
from fleet.services.endings import (
    rollback_continue,
    rollbacks_send,
    rolled_back_lately,
    updates_time_out,
    updates_withdraw,
)
from fleet.services.looks import open_stage, stage_look
from fleet.services.plans import begin_if_wanted, bundles_check
from fleet.services.rollouts import gate_of, locked
from fleet.services.signatures import nonces_forget
from fleet.services.stages import deltas_prefer, offers_release, rollouts_waiting
from fleet.services.telemetry import batches_forget
from fleet.services.versions import fleet_atomic
from fleet.states import RolloutState

logger = logging.getLogger(__name__)

KEEP_BATCH_KEYS: Final = timedelta(days=30)
RECENT: Final = timedelta(hours=1)


def fleet_tick(*, clock: Clock | None = None) -> int:
    """Drive every rollout that may have something due; return how many were looked at.

    One rollout's trouble is logged and does not stop the others.
    """
    now = (clock or SystemClock()).now()
    pks = _due(now)
    for pk in pks:
        _isolated(f"rollout {pk}", partial(rollout_look, rollout_id=pk, clock=clock))
    _isolated("deltas", deltas_prefer)
    _isolated("nonces", partial(nonces_forget, clock=clock))
    _isolated("batch keys", partial(batches_forget, before=now - KEEP_BATCH_KEYS))
    return len(pks)


def _isolated(what: str, step: Callable[[], object]) -> None:
    """Do one step of the tick; its trouble is logged and ends here. Each is a transaction."""
    try:
        step()
    except ApplicationError as error:
        logger.warning("%s: %s (%s)", what, error, error.code)
    except Exception:  # whatever is wrong with one rollout must not stop the others
        logger.exception("%s: the step failed and is tried again with the next tick", what)


@fleet_atomic()
def rollout_look(*, rollout_id: int, clock: Clock | None = None) -> RolloutState:
    """Do what is due for one rollout now, and return its state.

    Raises:
        NotFoundError: No such rollout.
    """
    now = (clock or SystemClock()).now()
    rollout = locked(rollout_id)
    step = _STEPS.get(RolloutState(rollout.state))
    if step is not None:
        step(rollout, now)
    return RolloutState(rollout.state)


def _due(now: datetime) -> list[int]:
    states = [state.value for state in _STEPS if state not in _ENDED]
    active = list(Rollout.objects.filter(state__in=states).values_list("pk", flat=True))
    ended = Rollout.objects.filter(
        state__in=[state.value for state in _ENDED], finished_at__gte=now - RECENT
    )
    recent = ended.values_list("pk", flat=True)
    return sorted({*active, *recent, *rolled_back_lately(now), *rollouts_waiting()})


def _prepare(rollout: Rollout, now: datetime) -> None:
    bundles_check(rollout, now=now)
    begin_if_wanted(rollout, now=now)


def _drive(rollout: Rollout, now: datetime) -> None:
    spec = gate_of(rollout)
    updates_time_out(rollout=rollout, timeout_s=spec.step_timeout_s, now=now)
    offers_release(rollout, wait_s=spec.delta_wait_s, now=now)
    looked = rollout.looked_at
    if looked is not None and now - looked < timedelta(seconds=spec.look_every_s):
        return
    Rollout.objects.filter(pk=rollout.pk).update(looked_at=now)
    stage = open_stage(rollout)
    if stage is None:
        raise NotFoundError(f"rollout {rollout.pk} is {rollout.state} without an open stage")
    stage_look(rollout, stage, spec, now=now)


def _release(rollout: Rollout, now: datetime) -> None:
    offers_release(rollout, wait_s=gate_of(rollout).delta_wait_s, now=now)


def _return(rollout: Rollout, now: datetime) -> None:
    spec = gate_of(rollout)
    updates_time_out(rollout=rollout, timeout_s=spec.step_timeout_s, now=now)
    rollback_continue(rollout, now=now)


def _find_stragglers(rollout: Rollout, now: datetime) -> None:
    rollbacks_send(rollout, now=now)


def _withdraw(rollout: Rollout, now: datetime) -> None:
    updates_withdraw(rollout=rollout, reason=f"the rollout is {rollout.state}", now=now)


_STEPS: Final[Mapping[RolloutState, Callable[[Rollout, datetime], None]]] = {
    RolloutState.COMPILING: _prepare,
    RolloutState.READY: _prepare,
    RolloutState.RUNNING: _drive,
    RolloutState.PAUSED: _drive,
    RolloutState.SUCCEEDED: _release,
    RolloutState.ROLLING_BACK: _return,
    RolloutState.ROLLED_BACK: _find_stragglers,
    RolloutState.STOPPED: _withdraw,
    RolloutState.FAILED: _withdraw,
}
_ENDED: Final = frozenset(
    (
        RolloutState.SUCCEEDED,
        RolloutState.ROLLED_BACK,
        RolloutState.STOPPED,
        RolloutState.FAILED,
    )
)
