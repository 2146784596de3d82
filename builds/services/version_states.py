"""What becomes of a version once a worker has looked at it."""

from django.db import transaction

from builds.common.audit import audit
from builds.common.transitions import apply_transition
from builds.models import ModelVersion, VersionTransition
from builds.states import VERSION_TRANSITIONS, VersionEvent, VersionState


@transaction.atomic
def version_accept(*, version_id: int, actor: str) -> None:
    """Note that the compiler could read the version; a second call changes nothing."""
    version = ModelVersion.objects.select_for_update().get(pk=version_id)
    if version.state != VersionState.SUBMITTED.value:
        return
    apply_transition(
        version,
        table=VERSION_TRANSITIONS,
        event=VersionEvent.ACCEPT,
        log=VersionTransition,
        actor=actor,
    )


@transaction.atomic
def version_refuse(
    *, version: ModelVersion, actor: str, code: str, message: str, hint: str
) -> None:
    """Note that the submission itself is at fault; a second call changes nothing."""
    if version.state == VersionState.INVALID.value:
        return
    apply_transition(
        version,
        table=VERSION_TRANSITIONS,
        event=VersionEvent.REFUSE,
        log=VersionTransition,
        actor=actor,
        reason=f"{code}: {message}",
        changes={"error_code": code, "error_message": message, "error_hint": hint},
    )
    audit(actor=actor, action="version.refuse", obj=version, code=code)


@transaction.atomic
def version_reconsider(*, version: ModelVersion, actor: str) -> None:
    """Take an invalid version in again, because a person asked for another try."""
    if version.state != VersionState.INVALID.value:
        return
    apply_transition(
        version,
        table=VERSION_TRANSITIONS,
        event=VersionEvent.RECONSIDER,
        log=VersionTransition,
        actor=actor,
        changes={"error_code": "", "error_message": "", "error_hint": ""},
    )
