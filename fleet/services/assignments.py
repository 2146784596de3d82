"""The director's answer to one device: which bundle, for whom, signed, with the device's nonce.

The device says what network it is on; the rollout's policy (`fleet.networks`) may make it wait.
"""

import re
from datetime import datetime
from typing import Final

from django.conf import settings
from django.db import transaction
from django.db.models import F

from builds.common.clock import Clock, SystemClock
from builds.common.errors import InvalidInputError, NotFoundError
from builds.common.transitions import apply_transition
from builds.models import Delta
from builds.services.content_keys import content_key_wrap
from builds.services.signing import assignment_sign
from builds.states import DeltaState
from compiler.contract.protocol import (
    NONCE_BYTES,
    Network,
    NetworkPolicy,
    OfferKind,
    UpdateState,
)
from fleet.errors import DeviceStateError, UpdateCancelledError, UpdateWaitsError
from fleet.models import Device, Update, UpdateTransition
from fleet.networks import policy_now, wait_reason
from fleet.selectors.poll import is_offered
from fleet.states import UPDATE_TRANSITIONS, DeviceState, UpdateEvent

_NONCE: Final = re.compile(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}")


def update_assignment(
    *,
    device_pk: int,
    update_id: int,
    nonce: str,
    network: str = Network.UNKNOWN.value,
    clock: Clock | None = None,
) -> bytes:
    """Sign what the device shall run; from now on the update is offered.

    Args:
        device_pk: Who asks.
        update_id: For which of its updates.
        nonce: 16 bytes in lower-case hexadecimal, made by the device for this question.
        network: What the device says about its network, a `Network`.
        clock: The time of signing; this machine's by default.

    Raises:
        InvalidInputError: The nonce is not one, or the network is none that is known.
        NotFoundError: The device has no such update.
        UpdateCancelledError: The update may not proceed.
        UpdateWaitsError: It may, on another network or later; both are noted.
        DeviceStateError: The device left the fleet a moment ago; it gets no key any more.
    """
    if _NONCE.fullmatch(nonce) is None:
        raise InvalidInputError(f"nonce must be {2 * NONCE_BYTES} lower-case hexadecimal digits")
    if network not in {item.value for item in Network}:
        raise InvalidInputError(
            f"network {network[:32]!r}", hint="one of: " + ", ".join(item.value for item in Network)
        )
    with transaction.atomic():
        update = _locked(device_pk, update_id)
        if not is_offered(update):
            raise UpdateCancelledError(f"update {update_id} is {update.state} and may not proceed")
        now = (clock or SystemClock()).now()
        delta = _usable_delta(update)
        policy = _policy(update, now)
        reason = wait_reason(policy, Network(network), has_delta=delta is not None)
        _note_network(update, network, reason)
        if not reason:
            return _signed(update, nonce, delta, policy, now, clock)
    raise UpdateWaitsError(
        f"update {update_id} waits: {reason}", hint="ask again later, or on another network"
    )


def _policy(update: Update, now: datetime) -> NetworkPolicy:
    rollout = update.rollout
    return policy_now(
        NetworkPolicy(rollout.network_policy),
        OfferKind(update.kind),
        waited_s=(now - update.queued_at).total_seconds(),
        deadline_s=rollout.unmetered_wait_s,
    )


def _note_network(update: Update, network: str, reason: str) -> None:
    """Keep what was said and answered; nothing is written where nothing changed."""
    if update.waits_for != reason:
        Update.objects.filter(pk=update.pk).update(waits_for=reason)
    if update.device.network != network:
        Device.objects.filter(pk=update.device_id).update(network=network)


def _signed(
    update: Update,
    nonce: str,
    delta: Delta | None,
    policy: NetworkPolicy,
    now: datetime,
    clock: Clock | None,
) -> bytes:
    if update.state == UpdateState.QUEUED:
        _note_offer(update, delta, now)
    device_pk = update.device_id
    Device.objects.filter(pk=device_pk).update(assignment_seq=F("assignment_seq") + 1)
    device = Device.objects.only(
        "device_id", "key_thumbprint", "assignment_seq", "seal_key", "state"
    ).get(pk=device_pk)
    if device.state != DeviceState.ACCEPTED:
        raise DeviceStateError(f"the device is {device.state}")
    return assignment_sign(
        device_id=device.device_id,
        key_thumbprint=device.key_thumbprint,
        assignment_seq=device.assignment_seq,
        nonce=nonce,
        kind=OfferKind(update.kind),
        bundle=update.bundle,
        delta=delta,
        security_floor=_security_floor(update),
        network_policy=policy,
        content_key=content_key_wrap(
            bundle=update.bundle, device_id=device.device_id, seal_key=bytes(device.seal_key)
        ),
        retry_failed=update.retry_failed,
        confirm_deadline=_confirm_deadline(update, now),
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
    if delta is None or delta.state != DeltaState.READY:
        return None
    return delta if delta.base_id == update.device.running_bundle_id else None


def _confirm_deadline(update: Update, now: datetime) -> int:
    """Return when the device should have committed: the same for every question, Unix time."""
    within_s = settings.SPARSEFLEET.confirm_s
    begun = update.offered_at or now
    return int(begun.timestamp() + within_s) if within_s else 0


def _security_floor(update: Update) -> int:
    """Return the least security epoch that the device may run from now on.

    It follows what the device has proven to run, so that the way back stays open: a new bundle
    raises the floor only when the next one is assigned.
    """
    epochs = [update.bundle.version.security_epoch]
    if update.device.running_bundle is not None:
        epochs.append(update.device.running_bundle.version.security_epoch)
    return min(epochs)
