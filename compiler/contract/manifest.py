"""The release manifest: what one bundle is, signed by its SHA-256 through TUF.

A bundle is a model version compiled for one target. Its manifest names content-addressed sections;
a section is loadable only if its bytes hash to the digest given here, whatever way (whole file,
delta, reuse) they came by.

Schema `sparsefleet.release/1`, canonical JSON (`compiler.contract.canonical`), unknown fields
refused. In a confidential bundle every section also names its sealed form, which is what travels
(`compiler.contract.sealing`); its schema is `sparsefleet.release/2`, which older agents refuse.
"""

import re
from dataclasses import dataclass
from typing import Final

from compiler.contract.canonical import (
    Json,
    canonical_bytes,
    parse_object,
    require_sha256,
    sha256_hex,
)
from compiler.contract.errors import ContractError
from compiler.contract.fields import require_fields, require_integer, require_list
from compiler.contract.planes import (
    MAX_SECTION_BYTES,
    Plane,
    require_component,
    require_cover,
    sealed_size,
)

SCHEMA: Final = "sparsefleet.release/1"
SEALED_SCHEMA: Final = "sparsefleet.release/2"
MAX_MANIFEST_BYTES: Final = 8 * 1024 * 1024
MAX_SECTIONS: Final = 65_536
MAX_PLANES: Final = 65_536
MAX_RELEASE_SEQ: Final = 1 << 53
MAX_SECURITY_EPOCH: Final = 1 << 31
NAME_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
VERIFIED_ON: Final = (
    "device",
    "host",
    "qemu",
    "simulator",
    "assembled",
    "structural",
    "unverified",
)
_FIELDS: Final = frozenset(
    (
        *("schema", "model", "version", "release_seq", "security_epoch", "target", "plan_abi"),
        *("requires", "verified_on", "sections", "provenance_sha256"),
    )
)
_REQUIREMENT_FIELDS: Final = frozenset(("ram_bytes", "free_bytes", "agent_min"))
_SECTION_FIELDS: Final = frozenset(("id", "size_bytes", "sha256", "planes"))
_SEALED_FIELDS: Final = frozenset(("size_bytes", "sha256"))


@dataclass(frozen=True, slots=True)
class Sealed:
    """The sealed form of a section: the bytes that travel."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Section:
    """One content-addressed file of a bundle; `sealed` in a confidential one."""

    component: str
    size_bytes: int
    sha256: str
    planes: tuple[Plane, ...] = ()
    sealed: Sealed | None = None

    @property
    def travels(self) -> Sealed:
        """Return size and digest of the bytes that are downloaded."""
        return self.sealed or Sealed(self.size_bytes, self.sha256)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a device must have before it may install the bundle. Sizes in bytes."""

    ram_bytes: int
    free_bytes: int
    agent_min: int = 1


@dataclass(frozen=True, slots=True)
class ReleaseManifest:
    """One bundle: identity, requirements and sections in ascending component order."""

    model: str
    version: str
    release_seq: int
    security_epoch: int
    target: str
    plan_abi: int
    requires: Requirements
    verified_on: str
    sections: tuple[Section, ...]
    provenance_sha256: str

    @property
    def total_bytes(self) -> int:
        """Return the size of all sections together, in bytes."""
        return sum(section.size_bytes for section in self.sections)

    @property
    def is_sealed(self) -> bool:
        """Return whether the bundle is confidential: its sections travel sealed."""
        return any(section.sealed is not None for section in self.sections)

    def section(self, component: str) -> Section:
        """Return the section called `component`.

        Raises:
            ContractError: The bundle has no such section.
        """
        for section in self.sections:
            if section.component == component:
                return section
        raise ContractError(f"the bundle has no section {component!r}")

    def to_bytes(self) -> bytes:
        """Return the canonical bytes; their SHA-256 is the identity of the bundle."""
        return canonical_bytes(
            {
                "schema": SEALED_SCHEMA if self.is_sealed else SCHEMA,
                "model": self.model,
                "version": self.version,
                "release_seq": self.release_seq,
                "security_epoch": self.security_epoch,
                "target": self.target,
                "plan_abi": self.plan_abi,
                "requires": {
                    "ram_bytes": self.requires.ram_bytes,
                    "free_bytes": self.requires.free_bytes,
                    "agent_min": self.requires.agent_min,
                },
                "verified_on": self.verified_on,
                "sections": [_section_json(section) for section in self.sections],
                "provenance_sha256": self.provenance_sha256,
            }
        )

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the canonical bytes."""
        return sha256_hex(self.to_bytes())


def target_path(model: str, release_seq: int, target: str) -> str:
    """Return the TUF target path of a release manifest: a name, never a file path on a device."""
    return f"releases/{model}/{release_seq}-{target}.json"


def parse_manifest(data: bytes) -> ReleaseManifest:
    """Parse and check a release manifest whose digest was verified before.

    Raises:
        LimitExceededError: Larger than `MAX_MANIFEST_BYTES`, or too many or too large sections.
        ContractError: Any field is missing, unknown, of the wrong type or out of range.
    """
    document = require_fields(
        parse_object(data, limit_bytes=MAX_MANIFEST_BYTES), _FIELDS, "manifest"
    )
    if document["schema"] not in (SCHEMA, SEALED_SCHEMA):
        raise ContractError(f"manifest schema {document['schema']!r}, expected {SCHEMA!r}")
    manifest = ReleaseManifest(
        model=_name(document["model"], "model"),
        version=_name(document["version"], "version"),
        release_seq=require_integer(document["release_seq"], "release_seq", 1, MAX_RELEASE_SEQ),
        security_epoch=require_integer(
            document["security_epoch"], "security_epoch", 0, MAX_SECURITY_EPOCH
        ),
        target=_name(document["target"], "target"),
        plan_abi=require_integer(document["plan_abi"], "plan_abi", 1, 1 << 16),
        requires=_requirements(document["requires"]),
        verified_on=_one_of(document["verified_on"], VERIFIED_ON),
        sections=_sections(document["sections"], is_sealed=document["schema"] == SEALED_SCHEMA),
        provenance_sha256=require_sha256(document["provenance_sha256"], "provenance_sha256"),
    )
    if manifest.to_bytes() != data:
        raise ContractError("manifest is not in canonical form")
    return manifest


def _section_json(section: Section) -> Json:
    document: dict[str, Json] = {
        "id": section.component,
        "size_bytes": section.size_bytes,
        "sha256": section.sha256,
        "planes": [[plane.kind, plane.offset, plane.length] for plane in section.planes],
    }
    sealed = section.sealed
    if sealed is not None:
        document["sealed"] = {"size_bytes": sealed.size_bytes, "sha256": sealed.sha256}
    return document


def _sections(value: Json, *, is_sealed: bool) -> tuple[Section, ...]:
    items = require_list(value, "sections", MAX_SECTIONS)
    sections = tuple(_section(item, is_sealed=is_sealed) for item in items)
    if not sections:
        raise ContractError("a bundle has at least one section")
    names = [section.component for section in sections]
    if names != sorted(set(names)):
        raise ContractError("sections must be unique and in ascending order")
    return sections


def _section(value: Json, *, is_sealed: bool) -> Section:
    fields = _SECTION_FIELDS | {"sealed"} if is_sealed else _SECTION_FIELDS
    value = require_fields(value, fields, "section")
    component = require_component(value["id"])
    size = require_integer(value["size_bytes"], "size_bytes", 0, MAX_SECTION_BYTES)
    planes = _planes(value["planes"], size)
    sealed = _sealed(value["sealed"], size) if is_sealed else None
    return Section(component, size, require_sha256(value["sha256"], "sha256"), planes, sealed)


def _sealed(value: Json, plain_bytes: int) -> Sealed:
    value = require_fields(value, _SEALED_FIELDS, "sealed")
    size = sealed_size(plain_bytes)
    require_integer(value["size_bytes"], "sealed size_bytes", size, size)
    return Sealed(size, require_sha256(value["sha256"], "sealed sha256"))


def _planes(value: Json, size: int) -> tuple[Plane, ...]:
    planes = tuple(_plane(item) for item in require_list(value, "planes", MAX_PLANES))
    if planes:
        require_cover(planes, size)
    return planes


def _plane(value: Json) -> Plane:
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[0], str):
        raise ContractError("a plane is [kind, offset, length]")
    return Plane(
        value[0],
        require_integer(value[1], "plane offset", 0, MAX_SECTION_BYTES),
        require_integer(value[2], "plane length", 1, MAX_SECTION_BYTES),
    )


def _requirements(value: Json) -> Requirements:
    value = require_fields(value, _REQUIREMENT_FIELDS, "requires")
    return Requirements(
        ram_bytes=require_integer(value["ram_bytes"], "ram_bytes", 0, 1 << 50),
        free_bytes=require_integer(value["free_bytes"], "free_bytes", 0, 1 << 50),
        agent_min=require_integer(value["agent_min"], "agent_min", 0, 1 << 16),
    )


def _name(value: Json, what: str) -> str:
    if not isinstance(value, str) or NAME_PATTERN.fullmatch(value) is None:
        raise ContractError(f"{what} must match {NAME_PATTERN.pattern}")
    return value


def _one_of(value: Json, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ContractError(f"{value!r} is not one of {', '.join(allowed)}")
    return value
