"""Verify an offer: from an unsigned hint to a release manifest that may be installed.

Order (each step fails closed, nothing is parsed before its signature or digest is known): floors;
assignment by the director; image repository; floors again; both name the same bytes; manifest;
fits this device. Floors are written before anything is used.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urljoin

from tuf.api.metadata import TargetFile

from compiler.contract.canonical import sha256_hex
from compiler.contract.fingerprint import TARGET_LADDER, Fingerprint
from compiler.contract.manifest import ReleaseManifest, parse_manifest, target_path
from compiler.contract.plan_format import ABI_VERSION
from compiler.contract.protocol import NONCE_BYTES
from compiler.contract.rules_order import RulesOrder
from device_agent.api import MAX_ROOT_BYTES, DeviceApi
from device_agent.clock import Clock
from device_agent.config import AgentConfig
from device_agent.errors import (
    DisagreementError,
    EpochError,
    IncompatibleError,
    RefusedError,
    ReplayError,
)
from device_agent.http import HttpClient
from device_agent.storage.disk import Disk
from device_agent.storage.floors import Floors, FloorStore, effective_time
from device_agent.update.context import UpdateContext
from device_agent.update.director import Directive, Expected, verify_assignment, verify_rules
from device_agent.update.image_repository import (
    MAX_METADATA_BYTES,
    ImageRepository,
    MetadataFetcher,
)

AGENT_VERSION: Final = 2  # opens confidential bundles
IMAGE_ROOT: Final = "image_root.json"
DIRECTOR_ROOT: Final = "director_root.json"
_NOT_FOUND: Final = (403, 404)


@dataclass(frozen=True, slots=True)
class VerifiedRelease:
    """What may be installed, and how the director wants it."""

    manifest: ReleaseManifest
    manifest_bytes: bytes
    directive: Directive


@dataclass(frozen=True, slots=True)
class TrustFolder:
    """Pinned roots and ngclient's cache."""

    disk: Disk
    folder: Path

    @property
    def is_pinned(self) -> bool:
        """Return whether roots of trust were pinned before."""
        return all((self.folder / name).exists() for name in (IMAGE_ROOT, DIRECTOR_ROOT))

    def pin(self, image_root: bytes, director_root: bytes) -> None:
        """Keep the roots of trust that enrolment handed out."""
        self.disk.make_dir(self.folder)
        self.disk.write_atomic(self.folder / IMAGE_ROOT, image_root)
        self.disk.write_atomic(self.folder / DIRECTOR_ROOT, director_root)

    def root(self, name: str) -> bytes:
        """Return a pinned root."""
        return self.disk.read_bytes(self.folder / name, MAX_ROOT_BYTES)

    def raise_root(self, name: str, root: bytes | None) -> None:
        """Keep a newer root that the pinned one leads to; None leaves it."""
        if root is not None and root != self.root(name):
            self.disk.write_atomic(self.folder / name, root)

    @property
    def cache(self) -> Path:
        """Return the folder of ngclient, made if needed."""
        path = self.folder / "image"
        self.disk.make_dir(path)
        return path


class Verifier:
    """Turns offers into verified releases."""

    def __init__(
        self,
        *,
        api: DeviceApi,
        http: HttpClient,
        config: AgentConfig,
        tuf_path: str,
        trust: TrustFolder,
        floors: FloorStore,
        known_manifest: Callable[[str, int], bytes | None],
        fingerprint: Callable[[], Fingerprint],
        clock: Clock,
    ) -> None:
        self._api = api
        self._http = http
        self._config = config
        self._tuf_path = tuf_path
        self._trust = trust
        self._floors = floors
        self._known = known_manifest
        self._fingerprint = fingerprint
        self._clock = clock

    def verify(self, context: UpdateContext) -> VerifiedRelease:
        """Verify what was offered.

        Raises:
            TrustError: The subclass says which check failed.
            IncompatibleError: Genuine, and not for this device.
            StateLostError: This device does not know its floors any more.
            CancelledError: The server withdrew the update meanwhile.
            AgentError: Network or disk; retry if the class says so.
        """
        floors = self._floors.load()
        directive = self._directive(context, floors)
        manifest_bytes, floors = self._manifest_bytes(directive, floors)
        manifest = parse_manifest(manifest_bytes)
        if target_path(manifest.model, manifest.release_seq, manifest.target) != directive.path:
            raise DisagreementError("the manifest describes another release than its name")
        self._require_fit(manifest, directive, floors)
        now = effective_time(self._clock.now(), floors)
        raised = floors.raised(
            assignment_seq=directive.assignment.assignment_seq, clock_floor_s=int(now.timestamp())
        )
        self._floors.save(raised.with_assignment(directive.sha256))
        self._trust.raise_root(DIRECTOR_ROOT, directive.root)
        return VerifiedRelease(manifest, manifest_bytes, directive)

    def rules_order(self) -> RulesOrder | None:
        """Return the degrade rules that the director orders for this device; None for no order.

        Raises:
            TrustError: The subclass says which check failed.
            StateLostError: This device does not know its floors any more.
            AgentError: Network or disk.
        """
        nonce = secrets.token_hex(NONCE_BYTES)
        data = self._api.rules(nonce)
        if data is None:
            return None
        return verify_rules(
            data, self._trust.root(DIRECTOR_ROOT), self._newer_director_root, self._expected(nonce)
        )

    def _expected(self, nonce: str) -> Expected:
        key = self._api.key
        now = effective_time(self._clock.now(), self._floors.load())
        return Expected(self._api.device_id, key.thumbprint, nonce, now)

    def _directive(self, context: UpdateContext, floors: Floors) -> Directive:
        nonce = secrets.token_hex(NONCE_BYTES)
        data = self._api.assignment(context.update_id, nonce, self._config.network)
        directive = verify_assignment(
            data,
            self._trust.root(DIRECTOR_ROOT),
            self._newer_director_root,
            self._expected(nonce),
        )
        assignment = directive.assignment
        if not floors.accepts(assignment.assignment_seq, directive.sha256):
            raise ReplayError(
                f"assignment {assignment.assignment_seq}, this device has accepted "
                f"{floors.assignment_seq}"
            )
        if directive.sha256 != context.manifest_sha256 or assignment.kind != context.kind:
            raise DisagreementError("the assignment is not what was offered")
        return directive

    def _newer_director_root(self, version: int) -> bytes | None:
        path = f"{self._tuf_path}director/{version}.root.json"
        try:
            with self._http.stream(
                path,
                headers={},
                limit_bytes=MAX_ROOT_BYTES,
                deadline_s=self._config.request_deadline_s,
            ) as answer:
                return b"".join(answer.chunks)
        except RefusedError as error:
            if error.status in _NOT_FOUND:
                return None
            raise

    def _manifest_bytes(self, directive: Directive, floors: Floors) -> tuple[bytes, Floors]:
        repository = ImageRepository(
            self._trust.cache,
            urljoin(self._config.server_url, f"{self._tuf_path}image/"),
            self._trust.root(IMAGE_ROOT),
            MetadataFetcher(self._http, self._config, MAX_METADATA_BYTES),
            effective_time(self._clock.now(), floors),
        )
        try:
            target = repository.look_up(directive.path)
        finally:
            self._trust.raise_root(IMAGE_ROOT, repository.verified_root())
        seen = {**repository.versions, "director-root": directive.root_version}
        raised = floors.raised_metadata(seen, repository.online_keys)
        if raised != floors:
            self._floors.save(raised)
        _require_same(directive, target)
        data = self._known(directive.sha256, directive.length) or repository.fetch(target)
        if sha256_hex(data) != directive.sha256:
            raise DisagreementError("the manifest has another digest than the assignment")
        return data, raised

    def _require_fit(self, manifest: ReleaseManifest, directive: Directive, floors: Floors) -> None:
        fingerprint = self._fingerprint()
        lowest = max(floors.security_floor, directive.assignment.security_floor)
        if manifest.security_epoch < lowest:
            raise EpochError(f"security epoch {manifest.security_epoch}, the floor is {lowest}")
        if self._config.model and manifest.model != self._config.model:
            raise IncompatibleError(
                f"model {manifest.model!r}, this device runs {self._config.model!r}"
            )
        if manifest.target not in runnable_targets(fingerprint):
            raise IncompatibleError(f"target {manifest.target!r} does not run here")
        if manifest.plan_abi != ABI_VERSION or manifest.requires.agent_min > AGENT_VERSION:
            raise IncompatibleError(
                f"plan ABI {manifest.plan_abi}, agent {manifest.requires.agent_min} are needed; "
                f"this is ABI {ABI_VERSION}, agent {AGENT_VERSION}"
            )
        if manifest.requires.ram_bytes > fingerprint.ram_bucket_mb << 20:
            raise IncompatibleError(f"{manifest.requires.ram_bytes} bytes of memory are needed")


def runnable_targets(fingerprint: Fingerprint) -> frozenset[str]:
    """Return every target whose features this device has."""
    features = frozenset(fingerprint.isa_features)
    return frozenset(
        target
        for target, machine, needed in TARGET_LADDER
        if machine == fingerprint.machine and needed <= features
    )


def _require_same(directive: Directive, target: TargetFile) -> None:
    if target.hashes != {"sha256": directive.sha256} or target.length != directive.length:
        raise DisagreementError("director and image repository name different bytes")
