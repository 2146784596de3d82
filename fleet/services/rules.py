"""Degrade rules: set by a release manager, signed by the director for each device that asks."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from django.db import transaction

from builds.common.audit import audit
from builds.common.auth import Actor, require
from builds.common.clock import Clock
from builds.common.errors import InvalidInputError, NotFoundError
from builds.common.roles import Permission
from builds.services.signing import rules_sign
from compiler.contract.canonical import canonical_bytes, sha256_hex
from compiler.contract.degrade import parse_rules
from compiler.contract.errors import ContractError
from compiler.contract.protocol import NONCE_BYTES
from compiler.contract.rules_order import RulesOrder
from fleet.models import DegradeRules, Device, Group
from fleet.models.rules import MAX_NOTE
from fleet.selectors.rules import rules_of
from fleet.services.members import group_devices
from fleet.states import DeviceState

_NONCE: Final = re.compile(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}")


@dataclass(frozen=True, slots=True)
class RulesPreview:
    """What setting rules would do: the rules by urgency, and how many devices are in their scope.

    Each rule is told as (name, priority, rung, when, leave).
    """

    rules: tuple[tuple[str, int, str, str, str], ...]
    devices: int


def rules_preview(*, group: str, document: Mapping[str, object] | None) -> RulesPreview:
    """Check rules and say what they would reach; changes nothing.

    Raises:
        InvalidInputError: The language refuses them; the message says at which character.
        NotFoundError: No such group.
    """
    found = _group(group)
    rows = _checked(document)
    if found is None:
        devices = Device.objects.filter(state=DeviceState.ACCEPTED.value).count()
    else:
        devices = len(group_devices(found))
    told = sorted(rows, key=lambda row: -int(str(row["priority"])))
    fields = ("name", "priority", "rung", "when", "leave")
    return RulesPreview(tuple(tuple(row[name] for name in fields) for row in told), devices)  # type: ignore[misc]


@transaction.atomic
def rules_set(
    *, actor: Actor, group: str, document: Mapping[str, object] | None, note: str = ""
) -> DegradeRules:
    """Set the rules of a group or of the fleet; devices follow when they ask next.

    Args:
        actor: Who sets them.
        group: Name; empty for the whole fleet.
        document: `sparsefleet.degrade/1`; None takes the rules of that scope back.
        note: Why, for the audit.

    Raises:
        InvalidInputError: The language refuses them; the message says at which character.
        NotFoundError: No such group.
    """
    require(actor, Permission.RULES_EDIT)
    found = _group(group)
    _checked(document)
    if len(note) > MAX_NOTE:
        raise InvalidInputError("the note is too long", hint=f"at most {MAX_NOTE} characters")
    row = DegradeRules.objects.create(
        group=found,
        document=None if document is None else dict(document),
        note=note,
        created_by=actor.name,
    )
    digest = "" if document is None else sha256_hex(_text(document).encode())
    audit(actor=actor.name, action="rules.set", obj=row, group=group, sha256=digest, note=note)
    return row


def device_rules_order(*, device_pk: int, nonce: str, clock: Clock | None = None) -> bytes:
    """Sign which degrade rules a device shall follow. Three queries.

    Args:
        device_pk: Who asks.
        nonce: 16 bytes in lower-case hexadecimal, made by the device for this question.
        clock: The time of signing; this machine's by default.

    Raises:
        InvalidInputError: The nonce is not one.
        NotFoundError: No rules were ever set.
    """
    if _NONCE.fullmatch(nonce) is None:
        raise InvalidInputError(f"nonce must be {2 * NONCE_BYTES} lower-case hexadecimal digits")
    device = Device.objects.select_related("target").get(pk=device_pk)
    choice = rules_of(device)
    if not choice.revision:
        raise NotFoundError("no degrade rules were ever set")
    order = RulesOrder(
        device_id=device.device_id,
        key_thumbprint=device.key_thumbprint,
        nonce=nonce,
        revision=choice.revision,
        text=None if choice.document is None else _text(choice.document),
    )
    return rules_sign(order=order, clock=clock)


def _group(name: str) -> Group | None:
    if not name:
        return None
    found = Group.objects.filter(name=name).first()
    if found is None:
        raise NotFoundError(f"no group {name!r}")
    return found


def _checked(document: Mapping[str, object] | None) -> list[Mapping[str, object]]:
    """Return the rows of a rules document that devices will parse."""
    if document is None:
        return []
    try:
        parse_rules(_text(document).encode())
    except ContractError as error:
        raise InvalidInputError(str(error), hint=error.hint) from error
    rows = document["rules"]
    assert isinstance(rows, list)
    return rows


def _text(document: Mapping[str, object]) -> str:
    return canonical_bytes(dict(document)).decode()  # type: ignore[arg-type]
