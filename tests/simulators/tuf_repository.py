"""An image repository and a director in memory, with real keys, signatures and layout.

The same layout as the platform's: root 2 of 3, offline targets 2 of 2, succinct bins signed by two
keys, snapshot, timestamp; a director with its own root (2 of 2) and one online key.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from securesystemslib.signer import CryptoSigner, Signer
from tuf.api.metadata import (
    Delegations,
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    SuccinctRoles,
    TargetFile,
    Targets,
    Timestamp,
)
from tuf.api.serialization.json import JSONSerializer

from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import Assignment
from compiler.contract.rules_order import RULES_PATH, RulesOrder

BIN_BITS = 2
SERIALIZER = JSONSerializer(compact=True)


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def keys(count: int) -> list[CryptoSigner]:
    return [CryptoSigner.generate_ed25519() for _ in range(count)]


def signed(document: Metadata, signers: list[CryptoSigner] | list[Signer]) -> bytes:
    document.signatures.clear()
    for signer in signers:
        document.sign(signer, append=True)
    return document.to_bytes(SERIALIZER)


def target_file(path: str, data: bytes, custom: object = None) -> TargetFile:
    extra = {} if custom is None else {"custom": custom}
    return TargetFile(len(data), {"sha256": sha256_hex(data)}, path, extra)


class ImageRepository:
    """Release manifests under TUF; `files` is what is served below `/tuf/image/`."""

    def __init__(self, bin_bits: int = BIN_BITS) -> None:
        self.root_keys = keys(3)
        self.targets_keys = keys(2)
        self.bin_keys = keys(2)
        self.snapshot_key, self.timestamp_key = keys(2)
        self.files: dict[str, bytes] = {}
        self.root = Metadata(Root(expires=now() + timedelta(days=365), consistent_snapshot=True))
        self._fill_root()
        self.roles = SuccinctRoles(
            [key.public_key.keyid for key in self.bin_keys], 2, bin_bits, "bin"
        )
        self.targets = Metadata(Targets(expires=now() + timedelta(days=180)))
        self.targets.signed.delegations = Delegations(
            {key.public_key.keyid: key.public_key for key in self.bin_keys}, None, self.roles
        )
        self.bins = {
            name: Metadata(Targets(expires=now() + timedelta(days=30)))
            for name in self.roles.get_roles()
        }
        self.snapshot = Metadata(Snapshot(expires=now() + timedelta(days=7)))
        self.snapshot.signed.meta = {}
        self.timestamp = Metadata(Timestamp(expires=now() + timedelta(days=1)))
        self.sign_root()
        self._put("targets", self.targets, self.targets_keys)
        for name in self.bins:
            self._put(name, self.bins[name], self.bin_keys)
        self.sign_heads()

    def add(self, path: str, data: bytes) -> None:
        """Publish one more release manifest."""
        name = self.roles.get_role_for_target(path)
        document = self.bins[name]
        document.signed.targets[path] = target_file(path, data)
        document.signed.version += 1
        self._put(name, document, self.bin_keys)
        folder, _, base = path.rpartition("/")
        self.files[f"targets/{folder}/{sha256_hex(data)}.{base}"] = data
        self.next_heads()

    def next_heads(self) -> None:
        self.snapshot.signed.version += 1
        self.timestamp.signed.version += 1
        self.sign_heads()

    def sign_root(self) -> None:
        self.files[f"metadata/{self.root.signed.version}.root.json"] = signed(
            self.root, self.root_keys[:2]
        )

    def sign_heads(self, snapshot_key: CryptoSigner | None = None) -> None:
        data = signed(self.snapshot, [snapshot_key or self.snapshot_key])
        self.files[f"metadata/{self.snapshot.signed.version}.snapshot.json"] = data
        self.timestamp.signed.snapshot_meta = MetaFile(
            self.snapshot.signed.version, len(data), {"sha256": sha256_hex(data)}
        )
        self.sign_timestamp()

    def sign_timestamp(self, key: CryptoSigner | None = None) -> None:
        self.files["metadata/timestamp.json"] = signed(self.timestamp, [key or self.timestamp_key])

    def rotate_online_keys(self) -> None:
        """Replace the keys of snapshot and timestamp, and begin their versions anew."""
        for role, old in (("snapshot", self.snapshot_key), ("timestamp", self.timestamp_key)):
            self.root.signed.revoke_key(old.public_key.keyid, role)
        self.snapshot_key, self.timestamp_key = keys(2)
        self.root.signed.add_key(self.snapshot_key.public_key, "snapshot")
        self.root.signed.add_key(self.timestamp_key.public_key, "timestamp")
        self.root.signed.version += 1
        self.sign_root()
        self.snapshot.signed.version = self.timestamp.signed.version = 1
        self.sign_heads()

    @property
    def trust_anchor(self) -> bytes:
        return self.files["metadata/1.root.json"]

    def _fill_root(self) -> None:
        root = self.root.signed
        for key in self.root_keys:
            root.add_key(key.public_key, "root")
        for key in self.targets_keys:
            root.add_key(key.public_key, "targets")
        root.add_key(self.snapshot_key.public_key, "snapshot")
        root.add_key(self.timestamp_key.public_key, "timestamp")
        root.roles["root"].threshold = root.roles["targets"].threshold = 2

    def _put(self, name: str, document: Metadata, signers: list[CryptoSigner]) -> None:
        version = document.signed.version
        self.files[f"metadata/{version}.{name}.json"] = signed(document, signers)
        self.snapshot.signed.meta[f"{name}.json"] = MetaFile(version)


@dataclass
class Director:
    """Signs assignments; `files` is what is served below `/tuf/director/`."""

    root_keys: list[CryptoSigner] = field(default_factory=lambda: keys(2))
    online_key: CryptoSigner = field(default_factory=lambda: keys(1)[0])
    files: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = Metadata(Root(expires=now() + timedelta(days=365), consistent_snapshot=True))
        for key in self.root_keys:
            self.root.signed.add_key(key.public_key, "root")
        self.root.signed.roles["root"].threshold = 2
        for role in ("targets", "snapshot", "timestamp"):
            self.root.signed.add_key(self.online_key.public_key, role)
        self.sign_root()

    def sign_root(self) -> None:
        data = signed(self.root, self.root_keys)
        self.files["root.json"] = self.files[f"{self.root.signed.version}.root.json"] = data

    def rotate_online_key(self) -> None:
        for role in ("targets", "snapshot", "timestamp"):
            self.root.signed.revoke_key(self.online_key.public_key.keyid, role)
        self.online_key = keys(1)[0]
        for role in ("targets", "snapshot", "timestamp"):
            self.root.signed.add_key(self.online_key.public_key, role)
        self.root.signed.version += 1
        self.sign_root()

    def assign(
        self,
        assignment: Assignment,
        path: str,
        manifest: bytes,
        *,
        expires: datetime | None = None,
        key: CryptoSigner | None = None,
    ) -> bytes:
        document = Metadata(
            Targets(version=assignment.assignment_seq, expires=expires or now() + timedelta(days=7))
        )
        document.signed.targets = {path: target_file(path, manifest, assignment.to_json())}
        return signed(document, [key or self.online_key])

    def order(
        self,
        order: RulesOrder,
        *,
        expires: datetime | None = None,
        key: CryptoSigner | None = None,
        version: int | None = None,
        body: bytes | None = None,
    ) -> bytes:
        document = Metadata(
            Targets(version=version or order.revision, expires=expires or now() + timedelta(days=7))
        )
        data = order.body() if body is None else body
        document.signed.targets = {RULES_PATH: target_file(RULES_PATH, data, order.to_json())}
        return signed(document, [key or self.online_key])

    @property
    def trust_anchor(self) -> bytes:
        return self.files["1.root.json"]
