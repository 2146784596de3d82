"""Devices join, get session tokens, and leave.

    claim token, or pre-authorisation of the key -(lets join)-> device key
    device key -(signs)-> token request -> session token (HMAC)

The same key again is the same device. Another key for a known serial number is refused and raises
an alert, so that nobody takes over a device by knowing its label; an operator may pre-authorise it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.conf import settings
from django.db import IntegrityError
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
from fleet.errors import ClaimError, DeviceStateError, KeyTakenError, SerialTakenError
from fleet.models import (
    ClaimToken,
    Device,
    DeviceTransition,
    Fingerprint,
    Heartbeat,
    Preauthorisation,
    ReplacedKey,
    Update,
    UpdateTransition,
)
from fleet.services.alerts import alert_raise, alerts_close
from fleet.services.claims import claim_check, claim_use
from fleet.services.device_keys import key_replace
from fleet.services.labels import require_class, require_label
from fleet.services.preauthorisation import preauthorisation_of, preauthorisation_use
from fleet.services.versions import fleet_atomic, fleet_version_bump
from fleet.states import (
    DEVICE_TRANSITIONS,
    OPEN_STATES,
    UPDATE_TRANSITIONS,
    AlertKind,
    DeviceEvent,
    DeviceState,
    UpdateEvent,
)

DEVICE_ID_DIGITS: Final = 32
KEY_BYTES: Final = 32
DEFAULT_CLASS: Final = "device"
_OPEN: Final = [state.value for state in OPEN_STATES]
_LEAVING: Final[Mapping[DeviceEvent, str]] = {
    DeviceEvent.QUARANTINE: "the device was quarantined",
    DeviceEvent.RETIRE: "the device was retired",
}


@dataclass(frozen=True, slots=True)
class EnrolmentRequest:
    """What a device says about itself.

    `public_key` is raw Ed25519, 32 bytes; `seal_key` raw X25519, or empty.
    """

    claim: str
    serial: str
    name: str
    public_key: bytes
    model: str
    fingerprint: FingerprintFacts
    seal_key: bytes = b""


def device_enrol(*, request: EnrolmentRequest, clock: Clock | None = None) -> tuple[Device, bool]:
    """Take a device into the fleet. The caller has checked that it holds the key.

    Returns:
        The device and whether it is new; the same key again returns the same device, whatever
        claim it shows, and keeps its capability facts up to date.

    Raises:
        ClaimError: Neither a pre-authorisation nor the claim token lets it join.
        SerialTakenError: Another key is enrolled or pre-authorised under this serial number;
            there is an alert about it.
        KeyTakenError: A device had this key before; there is an alert about it.
        ContractError: No target fits the fingerprint.
        NotFoundError: No such model.
        InvalidInputError: A field is empty, too long or not printable.
    """
    _require_labels(request)
    clock = clock or SystemClock()
    try:
        with fleet_atomic():
            return _enrol(request, clock.now())
    except (SerialTakenError, KeyTakenError):
        _alert_second_key(request, "It holds that key, and its claim token is good.", clock)
        raise
    except IntegrityError:
        known = _known(request)  # a twin of this request was faster
        if known is None:
            raise
        return known, False


def enrolment_require(*, request: EnrolmentRequest, clock: Clock | None = None) -> None:
    """Check that enrolling would be allowed, before anything is stored for a stranger.

    Raises:
        ClaimError: The key is unknown and nothing lets it join.
    """
    clock = clock or SystemClock()
    thumbprint = sha256_hex(request.public_key)
    if _known(request) is not None or _preauthorised(request.serial, thumbprint) is not None:
        return
    try:
        claim_check(text=request.claim, now=clock.now())
    except ClaimError:
        _require_labels(request)
        if _is_taken(request.serial):
            _alert_second_key(request, "It showed no good claim token.", clock)
        raise


def device_token(
    *,
    device_id: str,
    thumbprint: str,
    clock_skew_s: int = 0,
    seal_key: bytes = b"",
    clock: Clock | None = None,
) -> str:
    """Return a session token for a device that has just proved its key.

    Args:
        device_id: Who it is.
        thumbprint: Of the key that it proved.
        clock_skew_s: How far its clock is ahead of ours, seconds; kept for people.
        seal_key: Its X25519 key, kept for confidential bundles; empty: it did not say.
        clock: This machine's by default.

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
    Device.objects.filter(pk=device.pk).update(last_seen_at=now, clock_skew_s=clock_skew_s)
    if seal_key:
        _keep_seal_key(device, seal_key)
    expires_at = int(now.timestamp()) + settings.SPARSEFLEET.session_token_s
    return issue(
        token_key(settings.SECRET_KEY),
        SessionToken(device.pk, device.token_generation, expires_at),
    )


@fleet_atomic()
def device_admit(*, actor: Actor, device_pk: int, event: DeviceEvent, reason: str = "") -> Device:
    """Accept, reject, quarantine, release or retire a device.

    One that is quarantined or retired loses its tokens and its open update. Either decision about a
    quarantined one answers the alert about it.

    Raises:
        ForbiddenError: The actor may not.
        NotFoundError: No such device.
        IllegalTransitionError: Not possible in its state.
    """
    require(actor, Permission.DEVICE_ADMIT)
    device = Device.objects.select_for_update().filter(pk=device_pk).first()
    if device is None:
        raise NotFoundError(f"no device {device_pk}")
    was = device.state
    _move(device, event, actor.name, reason)
    if event in _LEAVING:
        Device.objects.filter(pk=device.pk).update(token_generation=F("token_generation") + 1)
        for update in Update.objects.filter(device=device, state__in=_OPEN):
            apply_transition(
                update,
                table=UPDATE_TRANSITIONS,
                event=UpdateEvent.REMOVE,
                log=UpdateTransition,
                actor=actor.name,
                reason=_LEAVING[event],
            )
    if was == DeviceState.QUARANTINED:
        alerts_close(actor=actor, device=device, kind=AlertKind.CLONE, note=f"{event}: {reason}")
        Heartbeat.objects.filter(device=device).update(trail={})
    fleet_version_bump()
    audit(actor=actor.name, action=f"device.{event.value}", obj=device, reason=reason)
    return device


def _enrol(request: EnrolmentRequest, now: datetime) -> tuple[Device, bool]:
    target_name = target_of(request.fingerprint)
    known = _known(request)
    if known is not None:
        _refresh(known, request, target_name)
        return known, False
    thumbprint = sha256_hex(request.public_key)
    allowed = _preauthorised(request.serial, thumbprint)
    if allowed is not None and allowed.replaces:
        return _take_over(request, allowed, target_name, now), False
    claim = None
    if allowed is None:
        claim = claim_check(text=request.claim, now=now)
        if _was_replaced(thumbprint):
            raise KeyTakenError(
                "this key was replaced by another one", hint="the device has to make a new one"
            )
        if _is_taken(request.serial):
            raise SerialTakenError(
                f"serial number {request.serial!r} belongs to another key",
                hint="if the device lost its key, pre-authorise the new one for this serial number",
            )
        claim_use(claim=claim, now=now)
    device = _insert(request, claim, allowed, Target.objects.get(name=target_name), now)
    if allowed is not None:
        preauthorisation_use(row=allowed, device=device, now=now)
        _move(device, DeviceEvent.ACCEPT, "system", f"pre-authorised by {allowed.created_by}")
    elif claim is not None and claim.accepts:
        _move(device, DeviceEvent.ACCEPT, "system", f"claim token {claim.pk}")
    target_activate(name=target_name)
    audit(
        actor=f"device:{device.pk}",
        action="device.enrol",
        obj=device,
        serial=device.serial,
        claim=claim.pk if claim else None,
        preauthorisation=allowed.pk if allowed else None,
        target=target_name,
    )
    return device, True


def _take_over(
    request: EnrolmentRequest, allowed: Preauthorisation, target_name: str, now: datetime
) -> Device:
    """Give the device of a serial number the key that an operator pre-authorised for it."""
    device = Device.objects.select_for_update().filter(serial=request.serial).first()
    if device is None or device.state in (DeviceState.REJECTED, DeviceState.RETIRED):
        raise DeviceStateError(f"the device is {device.state if device else 'gone'}")
    preauthorisation_use(row=allowed, device=device, now=now)
    key_replace(
        device=device,
        public_key=request.public_key,
        actor=f"device:{device.pk}",
        reason=f"pre-authorised by {allowed.created_by}",
        now=now,
    )
    _refresh(device, request, target_name)
    return device


def _keep_seal_key(device: Device, seal_key: bytes) -> None:
    """Note the X25519 key of a device that has just proved who it is."""
    if bytes(device.seal_key) == seal_key:
        return
    Device.objects.filter(pk=device.pk).update(seal_key=seal_key)
    audit(
        actor=f"device:{device.pk}",
        action="device.seal_key",
        obj=device,
        sha256=sha256_hex(seal_key),
    )


def _known(request: EnrolmentRequest) -> Device | None:
    return Device.objects.filter(key_thumbprint=sha256_hex(request.public_key)).first()


def _preauthorised(serial: str, thumbprint: str) -> Preauthorisation | None:
    row = preauthorisation_of(serial=serial)
    return row if row is not None and row.key_thumbprint == thumbprint else None


def _is_taken(serial: str) -> bool:
    """Return whether a serial number is enrolled, or kept for a key that is to come."""
    is_enrolled = Device.objects.filter(serial=serial).exists()
    return is_enrolled or preauthorisation_of(serial=serial) is not None


def _was_replaced(thumbprint: str) -> bool:
    return ReplacedKey.objects.filter(key_thumbprint=thumbprint).exists()


def _alert_second_key(request: EnrolmentRequest, how: str, clock: Clock) -> None:
    thumbprint = sha256_hex(request.public_key)
    what = "A key that was replaced" if _was_replaced(thumbprint) else "Another key"
    alert_raise(
        kind=AlertKind.SECOND_KEY,
        serial=request.serial,
        key_thumbprint=thumbprint,
        text=f"{what} asked to join under this serial number and was refused. {how}",
        clock=clock,
    )


def _refresh(device: Device, request: EnrolmentRequest, target_name: str) -> None:
    if request.seal_key:
        _keep_seal_key(device, request.seal_key)
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


def _insert(
    request: EnrolmentRequest,
    claim: ClaimToken | None,
    allowed: Preauthorisation | None,
    target: Target,
    now: datetime,
) -> Device:
    thumbprint = sha256_hex(request.public_key)
    model = Model.objects.filter(name=request.model).first()
    if model is None:
        raise NotFoundError(f"no model {request.model!r}", hint="CI creates models")
    given = allowed or claim
    device_class = given.device_class if given else ""
    device_class = device_class or request.fingerprint.device_class or DEFAULT_CLASS
    require_class(device_class)
    return Device.objects.create(
        device_id=thumbprint[:DEVICE_ID_DIGITS],
        serial=request.serial,
        name=request.name,
        key_thumbprint=thumbprint,
        public_key=request.public_key,
        seal_key=request.seal_key,
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


def require_seal_key(key: bytes) -> None:
    """Check the X25519 key of a device; empty is none.

    Raises:
        InvalidInputError: It has another length.
    """
    if len(key) not in (0, KEY_BYTES):
        raise InvalidInputError(f"seal_key must be {KEY_BYTES} bytes")


def _require_labels(request: EnrolmentRequest) -> None:
    if len(request.public_key) != KEY_BYTES:
        raise InvalidInputError(f"public_key must be {KEY_BYTES} bytes")
    require_seal_key(request.seal_key)
    require_label("serial", request.serial)
    require_label("name", request.name)
