"""Fingerprints: the capability facts of one device, in one canonical form.

A fingerprint holds categorical or bucketed facts only, never a measured bandwidth or clock, so that
two devices of one kind have the same fingerprint on every boot. The *target* is the part of it that
changes compiled output; many fingerprints map to one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object, sha256_hex
from compiler.contract.errors import ContractError

SCHEMA: Final = "sparsefleet.fingerprint/1"
MAX_FINGERPRINT_BYTES: Final = 16 * 1024
MAX_FEATURES: Final = 256
MAX_TEXT: Final = 96
RAM_BUCKETS_MB: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_TEXT_FIELDS: Final = ("machine", "soc", "os", "accelerator", "driver", "device_class")
_INTEGER_FIELDS: Final = (
    "cores",
    "l1d_kb",
    "l2_kb",
    "l3_kb",
    "ram_bucket_mb",
    "page_kb",
    "agent_abi",
)
_FIELDS: Final = frozenset((*_TEXT_FIELDS, *_INTEGER_FIELDS, "schema", "isa_features"))

# Best first. A row applies when every feature in it was reported; names as in /proc/cpuinfo.
_X86_V2: Final = frozenset(("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"))
_X86_V3: Final = _X86_V2 | frozenset(
    ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")
)
_X86_V4: Final = _X86_V3 | frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))
TARGET_LADDER: Final[tuple[tuple[str, str, frozenset[str]], ...]] = (
    ("x86-64-v4-vnni", "x86_64", _X86_V4 | {"avx512_vnni"}),
    ("x86-64-v3", "x86_64", _X86_V3),
    ("x86-64-v2", "x86_64", _X86_V2),
    ("x86-64-v1", "x86_64", frozenset()),
    ("aarch64-sve2", "aarch64", frozenset({"asimddp", "i8mm", "sve", "sve2", "svei8mm"})),
    ("aarch64-i8mm", "aarch64", frozenset({"asimddp", "i8mm"})),
    ("aarch64-dotprod", "aarch64", frozenset({"asimddp"})),
    ("aarch64", "aarch64", frozenset()),
    ("riscv64-v", "riscv64", frozenset({"v"})),
    ("riscv64", "riscv64", frozenset()),
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Capability facts of one device.

    Attributes:
        machine: Instruction set family as `uname -m` prints it, e.g. `x86_64`.
        soc: Name of the processor or SoC.
        isa_features: Sorted feature names, those of `/proc/cpuinfo`.
        l1d_kb, l2_kb, l3_kb: Cache sizes per instance, KiB; 0 when unknown.
        ram_bucket_mb: RAM rounded down to a bucket of `RAM_BUCKETS_MB`.
        device_class: What the owner declared: `phone`, `pc`, `car` ...
        agent_abi: Plan ABI that the agent's loader speaks.
    """

    machine: str
    soc: str
    os: str
    isa_features: tuple[str, ...]
    cores: int
    l1d_kb: int
    l2_kb: int
    l3_kb: int
    ram_bucket_mb: int
    page_kb: int
    accelerator: str
    driver: str
    device_class: str
    agent_abi: int

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form, features sorted and unique."""
        document: dict[str, Json] = {"schema": SCHEMA}
        for name in (*_TEXT_FIELDS, *_INTEGER_FIELDS):
            document[name] = getattr(self, name)
        document["isa_features"] = sorted(set(self.isa_features))
        return document

    def to_bytes(self) -> bytes:
        """Return the canonical bytes."""
        return canonical_bytes(self.to_json())

    @property
    def sha256(self) -> str:
        """Return the identity of the fingerprint."""
        return sha256_hex(self.to_bytes())


def target_of(fingerprint: Fingerprint) -> str:
    """Return the id of the best target that the fingerprint can run.

    Raises:
        ContractError: No target covers this machine; tell the device instead of letting it wait.
    """
    features = frozenset(fingerprint.isa_features)
    for target, machine, needed in TARGET_LADDER:
        if machine == fingerprint.machine and needed <= features:
            return target
    raise ContractError(
        f"no target for machine {fingerprint.machine!r}",
        hint="supported: " + ", ".join(sorted({row[1] for row in TARGET_LADDER})),
    )


def ram_bucket_mb(total_mb: int) -> int:
    """Return the largest bucket that is not above `total_mb` (the smallest bucket at least)."""
    return max((size for size in RAM_BUCKETS_MB if size <= total_mb), default=RAM_BUCKETS_MB[0])


def parse_fingerprint(data: bytes) -> Fingerprint:
    """Parse a fingerprint sent by a device.

    Raises:
        ContractError: A field is missing, unknown, of the wrong type, or too long.
    """
    return fingerprint_from_json(parse_object(data, limit_bytes=MAX_FINGERPRINT_BYTES))


def fingerprint_from_json(document: Mapping[str, Json]) -> Fingerprint:
    """Build a fingerprint from its JSON object; see `parse_fingerprint`."""
    if document.keys() != _FIELDS:
        raise ContractError(
            f"fingerprint: missing or unknown fields {sorted(document.keys() ^ _FIELDS)}"
        )
    if document["schema"] != SCHEMA:
        raise ContractError(f"fingerprint schema {document['schema']!r}, expected {SCHEMA!r}")
    texts = {name: _text(document[name], name) for name in _TEXT_FIELDS}
    numbers = {name: _number(document[name], name) for name in _INTEGER_FIELDS}
    return Fingerprint(**texts, **numbers, isa_features=_features(document["isa_features"]))  # type: ignore[arg-type]


def _text(value: Json, what: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise ContractError(
            f"fingerprint: {what} must be printable text of at most {MAX_TEXT} characters"
        )
    return value


def _number(value: Json, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
        raise ContractError(f"fingerprint: {what} must be a non-negative integer")
    return value


def _features(value: Json) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_FEATURES:
        raise ContractError(f"fingerprint: isa_features must be a list of at most {MAX_FEATURES}")
    return tuple(sorted({_text(item, "isa_features") for item in value}))
