"""Rollouts: make, start, watch, stop, turn around."""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from django.http import HttpRequest, HttpResponse, JsonResponse
from ninja import Query, Router
from pydantic import BeforeValidator

from builds.common.auth import Actor, request_actor, require
from builds.common.filters import any_if_empty, word
from builds.common.idempotency import answer_once
from builds.common.paging import DEFAULT_LIMIT, Page, page_of
from builds.common.roles import Permission
from compiler.contract.protocol import OfferKind
from fleet.apis.schemas import (
    EvidenceOut,
    GoalIn,
    PreviewOut,
    ReasonIn,
    RolloutDetailOut,
    RolloutIn,
    RolloutOut,
    RolloutPage,
    UpdatePage,
)
from fleet.cohorts import Goal
from fleet.gates.decision import Decision
from fleet.models import Rollout, Update
from fleet.selectors.listing import (
    last_look,
    look_list,
    rollout_arms,
    rollout_counts,
    rollout_get,
    rollout_list,
    rollout_updates,
)
from fleet.services import rollouts as services
from fleet.services.plans import RolloutRequest, rollout_preview
from fleet.services.retries import rollout_retry
from fleet.states import RolloutState, UpdateState

router = Router()
Limit = Annotated[int, Query(DEFAULT_LIMIT)]
Cursor = Annotated[str, Query("")]
Filter = Annotated[str, Query("")]
State = Annotated[RolloutState | None, BeforeValidator(any_if_empty), Query(None)]
Kind = Annotated[OfferKind | None, BeforeValidator(any_if_empty), Query(None)]
OfUpdate = Annotated[UpdateState | None, BeforeValidator(any_if_empty), Query(None)]
Looked = Annotated[Decision | None, BeforeValidator(any_if_empty), Query(None)]
ActionName = Literal[
    "approve", "start", "pause", "resume", "halt", "cancel", "rollback", "promote", "retry"
]
_ACTIONS: Final[Mapping[str, Callable[[Actor, int, str], Rollout]]] = {
    "approve": lambda actor, pk, _: services.rollout_approve(actor=actor, rollout_id=pk),
    "start": lambda actor, pk, _: services.rollout_start(actor=actor, rollout_id=pk),
    "pause": lambda actor, pk, reason: services.rollout_pause(
        actor=actor, rollout_id=pk, reason=reason
    ),
    "resume": lambda actor, pk, reason: services.rollout_resume(
        actor=actor, rollout_id=pk, reason=reason
    ),
    "halt": lambda actor, pk, reason: services.rollout_halt(
        actor=actor, rollout_id=pk, reason=reason
    ),
    "cancel": lambda actor, pk, reason: services.rollout_cancel(
        actor=actor, rollout_id=pk, reason=reason
    ),
    "rollback": lambda actor, pk, reason: services.rollout_rollback(
        actor=actor, rollout_id=pk, reason=reason
    ),
    "promote": lambda actor, pk, reason: services.rollout_promote(
        actor=actor, rollout_id=pk, reason=reason
    ),
    "retry": lambda actor, pk, reason: rollout_retry(actor=actor, rollout_id=pk, reason=reason),
}


@router.get("/rollouts", response=RolloutPage, operation_id="rollout_list")
def rollouts_get(
    request: HttpRequest, limit: Limit, cursor: Cursor, model: Filter, state: State
) -> Page[Rollout]:
    """List rollouts, newest first; every filter is optional."""
    require(request_actor(request), Permission.VIEW)
    return page_of(rollout_list(model=model, state=word(state)), limit=limit, cursor=cursor)


@router.post("/rollouts", response={201: RolloutOut}, operation_id="rollout_create")
def rollout_post(request: HttpRequest, body: RolloutIn) -> HttpResponse:
    """Make a rollout: missing bundles are asked for at once, nothing is offered before `start`."""
    actor = request_actor(request)
    wanted = RolloutRequest(
        model=body.model,
        version=body.version,
        group=body.group,
        goals=_goals(body.stages),
        gate=body.gate,
        name=body.name,
        needs_approval=body.needs_approval,
        network_policy=body.network_policy,
        unmetered_wait_s=body.unmetered_wait_s,
    )

    def answer() -> HttpResponse:
        rollout = services.rollout_create(actor=actor, request=wanted)
        shape = RolloutOut.from_orm(rollout_get(rollout.pk))
        return JsonResponse(shape.model_dump(mode="json"), status=HTTPStatus.CREATED)

    return answer_once(request, actor, answer)


@router.post("/rollouts/preview", response=PreviewOut, operation_id="rollout_preview")
def rollout_preview_post(request: HttpRequest, body: RolloutIn) -> dict[str, Any]:
    """Return the stages that a rollout would have if it started now; changes nothing."""
    require(request_actor(request), Permission.VIEW)
    stages, members = rollout_preview(
        model=body.model,
        version=body.version,
        group=body.group,
        goals=_goals(body.stages),
        gate=body.gate,
    )
    return {"stages": stages, "devices": len(members.by_id), "left_out": members.left_out}


@router.get("/rollouts/{rollout_id}", response=RolloutDetailOut, operation_id="rollout_get")
def one_rollout_get(request: HttpRequest, rollout_id: int) -> Rollout:
    """Return one rollout with its stages, counts and the newest look of its gate."""
    require(request_actor(request), Permission.VIEW)
    return rollout_get(rollout_id)


@router.get("/rollouts/{rollout_id}/updates", response=UpdatePage, operation_id="rollout_updates")
def updates_get(
    request: HttpRequest, rollout_id: int, limit: Limit, cursor: Cursor, kind: Kind, state: OfUpdate
) -> Page[Update]:
    """List the updates of a rollout, newest first; every filter is optional."""
    require(request_actor(request), Permission.VIEW)
    rollout_get(rollout_id)
    rows = rollout_updates(rollout_id, kind=word(kind), state=word(state))
    return page_of(rows, limit=limit, cursor=cursor)


@router.get(
    "/rollouts/{rollout_id}/evidence", response=EvidenceOut, operation_id="rollout_evidence"
)
def evidence_get(
    request: HttpRequest, rollout_id: int, limit: Limit, cursor: Cursor, decision: Looked
) -> dict[str, Any]:
    """Return what both arms measured and the looks of the gate, newest first."""
    require(request_actor(request), Permission.VIEW)
    rollout_get(rollout_id)
    page = page_of(look_list(rollout_id, decision=word(decision)), limit=limit, cursor=cursor)
    return {
        "arms": rollout_arms(rollout_id),
        "counts": rollout_counts(rollout_id),
        "last_look": last_look(rollout_id),
        "looks": page.items,
        "next": page.next,
    }


@router.post(
    "/rollouts/{rollout_id}/{action}", response=RolloutDetailOut, operation_id="rollout_action"
)
def action_post(
    request: HttpRequest, rollout_id: int, action: ActionName, body: ReasonIn | None = None
) -> Rollout:
    """Act on a rollout. `start` before it is ready means: as soon as it is ready."""
    reason = body.reason if body is not None else ""
    _ACTIONS[action](request_actor(request), rollout_id, reason)
    return rollout_get(rollout_id)


def _goals(stages: list[GoalIn]) -> list[Goal]:
    return [Goal(percent=stage.percent, count=stage.count) for stage in stages]
