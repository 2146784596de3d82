"""Degrade rules as the director signs them for one device.

    director root (pinned at enrolment) -(keys)-> TUF targets with exactly one target, the rules

The target's `custom` is `sparsefleet.rules/1`: for whom, the nonce of the question, the revision,
and the text of the rules document (`sparsefleet.degrade/1`; TUF's canonical JSON knows no
fractions, so it is one string) or null for "those of the device". The
revision only rises over all rules of a platform, also when rules are taken back; it is the
metadata's version too. It is another schema than an assignment: neither passes as the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from compiler.contract.canonical import Json, require_sha256
from compiler.contract.degrade import Rule, parse_rules
from compiler.contract.errors import ContractError
from compiler.contract.protocol import integer
from compiler.contract.protocol import text as text_of

SCHEMA: Final = "sparsefleet.rules/1"
RULES_PATH: Final = "degrade/rules.json"
PATH_RULES: Final = "/d/v1/rules"
MAX_REVISION: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class RulesOrder:
    """Which rules one device shall follow.

    Attributes:
        device_id, key_thumbprint: Whom it is for.
        nonce: Echo of the question.
        revision: Of the rules, from 1.
        text: Of the rules document, or None for those that the device has itself.
    """

    device_id: str
    key_thumbprint: str
    nonce: str
    revision: int
    text: str | None

    def rules(self) -> tuple[Rule, ...] | None:
        """Return the parsed rules; None for those that the device has itself.

        Raises:
            ContractError: They do not parse here: keep those before.
        """
        return None if self.text is None else parse_rules(self.body())

    def body(self) -> bytes:
        """Return the bytes that length and digest of the target are of."""
        return b"" if self.text is None else self.text.encode()

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form stored as `custom` of the one target."""
        return {
            "schema": SCHEMA,
            "device_id": self.device_id,
            "key_thumbprint": self.key_thumbprint,
            "nonce": self.nonce,
            "revision": self.revision,
            "rules": self.text,
        }


def rules_order_from_json(document: Mapping[str, Json]) -> RulesOrder:
    """Build an order from the verified `custom` object.

    Raises:
        ContractError: A field is missing or of the wrong type.
    """
    if document.get("schema") != SCHEMA:
        raise ContractError(f"rules schema must be {SCHEMA!r}")
    rules = document.get("rules")
    if rules is not None and not isinstance(rules, str):
        raise ContractError("rules must be text or null")
    revision = integer(document, "revision", MAX_REVISION)
    if not revision:
        raise ContractError("revisions begin at 1")
    return RulesOrder(
        device_id=text_of(document, "device_id"),
        key_thumbprint=require_sha256(document.get("key_thumbprint"), "key_thumbprint"),
        nonce=text_of(document, "nonce"),
        revision=revision,
        text=rules,
    )
