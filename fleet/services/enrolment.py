"""Devices join, get session tokens, and leave.

    claim token -(lets join)-> device key -(signs)-> token request -> session token (HMAC)

A device is its key: the same key again is the same device, another key for a known serial number is
refused, so that nobody takes over a device by knowing its label.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F

from builds.common.audit import audit
from builds.common.auth import Actor, require
from builds.common.clock import Clock, SystemClock
from builds.common.errors import InvalidInputError, NotFoundError
from builds.common.roles import Permission
from builds.common.transitions import apply_transition
from builds.models import Model, Target
from builds.services.targets import target_activate
from compiler.contract.canonical import sha256_hex
from compiler.contract.fingerprint import Fingerprint as FingerprintFacts
from compiler.contract.fingerprint import target_of
from fleet.common.tokens import SessionToken, issue, token_key
from fleet.errors import DeviceStateError, SerialTakenError
from fleet.models import ClaimToken, Device, DeviceTransition, Fingerprint, Update, UpdateTransition
from fleet.models.devices import CLASS_PATTERN
from fleet.services.claims import claim_check, claim_use
from fleet.services.versions import fleet_atomic, fleet_version_bump
from fleet.states import (
    DEVICE_TRANSITIONS,
    OPEN_STATES,
    UPDATE_TRANSITIONS,
    DeviceEvent,
    DeviceState,
    UpdateEvent,
)

DEVICE_ID_DIGITS: Final = 32
KEY_BYTES: Final = 32
MAX_LABEL: Final = 96
DEFAULT_CLASS: Final = "device"
_OPEN: Final = [state.value for state in OPEN_STATES]


@dataclass(frozen=True, slots=True)
class EnrolmentRequest:
    """What a device says about itself; `public_key` is raw Ed25519, 32 bytes."""

    claim: str
    serial: str
    name: str
    public_key: bytes
    model: str
    fingerprint: FingerprintFacts


def device_enrol(*, request: EnrolmentRequest, clock: Clock | None = None) -> tuple[Device, bool]:
    """Take a device into the fleet. The caller has checked that it holds the key.

    Returns:
        The device and whether it is new; the same key again returns the same device, whatever
        claim it shows, and keeps its capability facts up to date.

    Raises:
        ClaimError: The claim token does not let it join.
        SerialTakenError: Another key is enrolled under this serial number.
        ContractError: No target fits the fingerprint.
        NotFoundError: No such model.
        InvalidInputError: A field is empty, too long or not printable.
    """
    _require_labels(request)
    now = (clock or SystemClock()).now()
    target_name = target_of(request.fingerprint)
    try:
        with transaction.atomic():
            known = _known(request)
            if known is not None:
                _refresh(known, request, target_name)
                return known, False
            claim = claim_check(text=request.claim, now=now)
            claim_use(claim=claim, now=now)
            device = _insert(request, claim, Target.objects.get(name=target_name), now)
            if claim.accepts:
                _move(device, DeviceEvent.ACCEPT, "system", f"claim token {claim.pk}")
            target_activate(name=target_name)
            audit(
                actor=f"device:{device.pk}",
                action="device.enrol",
                obj=device,
                serial=device.serial,
                claim=claim.pk,
                target=target_name,
            )
            return device, True
    except IntegrityError:
        known = _known(request)  # a twin of this request was faster
        if known is None:
            raise
        return known, False


def enrolment_require(*, request: EnrolmentRequest, clock: Clock | None = None) -> None:
    """Check that enrolling would be allowed, before anything is stored for a stranger.

    Raises:
        ClaimError: The key is unknown and the claim token does not let it join.
    """
    if not Device.objects.filter(key_thumbprint=sha256_hex(request.public_key)).exists():
        claim_check(text=request.claim, now=(clock or SystemClock()).now())


def device_token(*, device_id: str, thumbprint: str, clock: Clock | None = None) -> str:
    """Return a session token for a device that has just proved its key.

    Raises:
        NotFoundError: No device with this id and key.
        DeviceStateError: It is not a member (yet, or any more).
    """
    now = (clock or SystemClock()).now()
    device = Device.objects.filter(device_id=device_id, key_thumbprint=thumbprint).first()
    if device is None:
        raise NotFoundError("no such device", hint="enrol first")
    if device.state != DeviceState.ACCEPTED:
        raise DeviceStateError(f"the device is {device.state}", hint="somebody has to accept it")
    Device.objects.filter(pk=device.pk).update(last_seen_at=now)
    expires_at = int(now.timestamp()) + settings.SPARSEFLEET.session_token_s
    return issue(
        token_key(settings.SECRET_KEY),
        SessionToken(device.pk, device.token_generation, expires_at),
    )


@fleet_atomic()
def device_admit(*, actor: Actor, device_pk: int, event: DeviceEvent, reason: str = "") -> Device:
    """Accept, reject or retire a device. A retired one loses its token and its open update.

    Raises:
        ForbiddenError: The actor may not.
        NotFoundError: No such device.
        IllegalTransitionError: Not possible in its state.
    """
    require(actor, Permission.DEVICE_ADMIT)
    device = Device.objects.select_for_update().filter(pk=device_pk).first()
    if device is None:
        raise NotFoundError(f"no device {device_pk}")
    _move(device, event, actor.name, reason)
    if event == DeviceEvent.RETIRE:
        Device.objects.filter(pk=device.pk).update(token_generation=F("token_generation") + 1)
        for update in Update.objects.filter(device=device, state__in=_OPEN):
            apply_transition(
                update,
                table=UPDATE_TRANSITIONS,
                event=UpdateEvent.REMOVE,
                log=UpdateTransition,
                actor=actor.name,
                reason="the device was retired",
            )
    fleet_version_bump()
    audit(actor=actor.name, action=f"device.{event.value}", obj=device, reason=reason)
    return device


def _known(request: EnrolmentRequest) -> Device | None:
    thumbprint = sha256_hex(request.public_key)
    device = Device.objects.filter(key_thumbprint=thumbprint).first()
    if device is not None:
        return device
    if Device.objects.filter(serial=request.serial).exists():
        raise SerialTakenError(
            f"serial number {request.serial!r} is enrolled with another key",
            hint="retire the old device and give the new one another serial number",
        )
    return None


def _refresh(device: Device, request: EnrolmentRequest, target_name: str) -> None:
    fingerprint = _fingerprint(request.fingerprint)
    if device.fingerprint_id == fingerprint.pk:
        return
    device.fingerprint = fingerprint
    device.target = Target.objects.get(name=target_name)
    device.save(update_fields=["fingerprint", "target"])
    target_activate(name=target_name)
    audit(
        actor=f"device:{device.pk}",
        action="device.fingerprint",
        obj=device,
        fingerprint=fingerprint.pk,
        target=target_name,
    )


def _insert(request: EnrolmentRequest, claim: ClaimToken, target: Target, now: datetime) -> Device:
    thumbprint = sha256_hex(request.public_key)
    model = Model.objects.filter(name=request.model).first()
    if model is None:
        raise NotFoundError(f"no model {request.model!r}", hint="CI creates models")
    device_class = claim.device_class or request.fingerprint.device_class or DEFAULT_CLASS
    if re.fullmatch(CLASS_PATTERN, device_class) is None:
        raise InvalidInputError(f"device_class must match {CLASS_PATTERN}")
    return Device.objects.create(
        device_id=thumbprint[:DEVICE_ID_DIGITS],
        serial=request.serial,
        name=request.name,
        key_thumbprint=thumbprint,
        public_key=request.public_key,
        fingerprint=_fingerprint(request.fingerprint),
        target=target,
        device_class=device_class,
        model=model,
        claim=claim,
        enrolled_at=now,
        last_seen_at=now,
    )


def _fingerprint(facts: FingerprintFacts) -> Fingerprint:
    row, _ = Fingerprint.objects.get_or_create(
        sha256=facts.sha256, defaults={"document": facts.to_json()}
    )
    return row


def _move(device: Device, event: DeviceEvent, actor: str, reason: str) -> None:
    apply_transition(
        device,
        table=DEVICE_TRANSITIONS,
        event=event,
        log=DeviceTransition,
        actor=actor,
        reason=reason,
    )


def _require_labels(request: EnrolmentRequest) -> None:
    if len(request.public_key) != KEY_BYTES:
        raise InvalidInputError(f"public_key must be {KEY_BYTES} bytes")
    for what, value in (("serial", request.serial), ("name", request.name)):
        if not 1 <= len(value) <= MAX_LABEL or not value.isprintable():
            raise InvalidInputError(f"{what} must be 1..{MAX_LABEL} printable characters")
