"""The director's answer to one device: which bundle, for whom, signed, with the device's nonce."""

import re
from datetime import datetime
from typing import Final

from django.db import transaction
from django.db.models import F

from builds.common.clock import Clock, SystemClock
from builds.common.errors import InvalidInputError, NotFoundError
from builds.common.transitions import apply_transition
from builds.models import Delta
from builds.services.signing import assignment_sign
from builds.states import DeltaState
from compiler.contract.protocol import NONCE_BYTES, OfferKind, UpdateState
from fleet.errors import UpdateCancelledError
from fleet.models import Device, Update, UpdateTransition
from fleet.selectors.poll import is_offered
from fleet.states import UPDATE_TRANSITIONS, UpdateEvent

_NONCE: Final = re.compile(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}")


@transaction.atomic
def update_assignment(
    *, device_pk: int, update_id: int, nonce: str, clock: Clock | None = None
) -> bytes:
    """Sign what the device shall run; from now on the update is offered.

    Args:
        device_pk: Who asks.
        update_id: For which of its updates.
        nonce: 16 bytes in lower-case hexadecimal, made by the device for this question.
        clock: The time of signing; this machine's by default.

    Raises:
        InvalidInputError: The nonce is not one.
        NotFoundError: The device has no such update.
        UpdateCancelledError: The update may not proceed.
    """
    if _NONCE.fullmatch(nonce) is None:
        raise InvalidInputError(f"nonce must be {2 * NONCE_BYTES} lower-case hexadecimal digits")
    update = _locked(device_pk, update_id)
    if not is_offered(update):
        raise UpdateCancelledError(f"update {update_id} is {update.state} and may not proceed")
    delta = _usable_delta(update)
    if update.state == UpdateState.QUEUED:
        _note_offer(update, delta, (clock or SystemClock()).now())
    Device.objects.filter(pk=device_pk).update(assignment_seq=F("assignment_seq") + 1)
    device = Device.objects.only("device_id", "key_thumbprint", "assignment_seq").get(pk=device_pk)
    return assignment_sign(
        device_id=device.device_id,
        key_thumbprint=device.key_thumbprint,
        assignment_seq=device.assignment_seq,
        nonce=nonce,
        kind=OfferKind(update.kind),
        bundle=update.bundle,
        delta=delta,
        security_floor=_security_floor(update),
        clock=clock,
    )


def _locked(device_pk: int, update_id: int) -> Update:
    update = (
        Update.objects.select_for_update(of=("self",))
        .select_related(
            "bundle__version__model",
            "bundle__target",
            "device__running_bundle__version",
            "delta",
            "rollout",
        )
        .filter(pk=update_id, device_id=device_pk)
        .first()
    )
    if update is None:
        raise NotFoundError(f"this device has no update {update_id}")
    return update


def _note_offer(update: Update, delta: Delta | None, now: datetime) -> None:
    apply_transition(
        update,
        table=UPDATE_TRANSITIONS,
        event=UpdateEvent.OFFER,
        log=UpdateTransition,
        actor=f"device:{update.device_id}",
        changes={"offered_at": now, "reported_at": now, "used_delta": delta is not None},
    )


def _usable_delta(update: Update) -> Delta | None:
    """Return the delta if it leads from what the device runs now; otherwise it fetches all."""
    delta = update.delta
    if delta is None or delta.state != DeltaState.READY or update.kind != OfferKind.INSTALL:
        return None
    return delta if delta.base_id == update.device.running_bundle_id else None


def _security_floor(update: Update) -> int:
    """Return the least security epoch that the device may run from now on.

    It follows what the device has proven to run, so that the way back stays open: a new bundle
    raises the floor only when the next one is assigned.
    """
    epochs = [update.bundle.version.security_epoch]
    if update.device.running_bundle is not None:
        epochs.append(update.device.running_bundle.version.security_epoch)
    return min(epochs)
