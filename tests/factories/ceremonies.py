"""Ceremonies as people hold them, by the commands of the runbook; and clients that watch."""

import itertools
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from django.conf import settings
from django.core.management import call_command
from tuf.ngclient import Updater

from builds.keys import DIRECTOR, IMAGE, read_public
from builds.models import Bundle, MetadataFile
from builds.services.ceremony import documents_current
from builds.services.publishing import bundle_path
from builds.services.signing import assignment_sign, trust_anchors
from compiler.contract.protocol import OfferKind
from device_agent.clock import SystemClock
from device_agent.config import AgentConfig
from device_agent.http import HttpClient
from device_agent.storage.disk import Disk
from device_agent.update.director import Expected, verify_assignment
from device_agent.update.image_repository import (
    MAX_METADATA_BYTES,
    ImageRepository,
    MetadataFetcher,
)
from device_agent.update.verify import DIRECTOR_ROOT, IMAGE_ROOT, TrustFolder

NONCE = "0f" * 16
_numbers = itertools.count(1)


def holders(name: str) -> list[Path]:
    """Return the folders of the holders of a role, e.g. `image-root`."""
    return sorted(settings.SPARSEFLEET.offline_key_path.glob(f"{name}-*"))


def new_holder(folder: Path, repository: str, role: str) -> Path:
    """Make an offline key; return the holder's folder."""
    path = folder / f"{repository}-{role}-new-{next(_numbers)}"
    call_command("keys_make", repository, role, out=path)
    return path


def new_online(folder: Path, repository: str, role: str) -> Path:
    """Make an online key in this machine's ring; return its `public.json`."""
    path = folder / f"online-{next(_numbers)}"
    call_command("keys_make", repository, role, out=path, ring=True)
    return path / "public.json"


def keyid(folder: Path) -> str:
    """Return the identity of a holder's key."""
    return read_public(folder / "public.json").key.keyid


def keyids_of(repository: str, document: str, role: str) -> list[str]:
    """Return the keys of a role in a published root."""
    return sorted(documents_current()[repository, document].signed.roles[role].keyids)


def bin_keyids() -> list[str]:
    """Return the keys of the bins; in a new installation the one that builds comes first."""
    delegations = documents_current()[IMAGE, "targets"].signed.delegations
    return list(delegations.succinct_roles.keyids)


def prepare(folder: Path, **options: object) -> Path:
    """Prepare a ceremony; return its folder."""
    path = folder / f"ceremony-{next(_numbers)}"
    call_command("keys_prepare", path, **options)
    return path


def sign(ceremony: Path, *keys: Path) -> Path:
    """Let holders sign, each in turn."""
    for key in keys:
        call_command("keys_sign", ceremony, key=key, yes=True)
    return ceremony


def publish(ceremony: Path, **options: object) -> None:
    """Publish what was signed."""
    call_command("keys_publish", ceremony, yes=True, **options)


def hold(folder: Path, keys: Sequence[Path], **options: object) -> None:
    """Hold a whole ceremony."""
    publish(sign(prepare(folder, **options), *keys))


def stock_client(url: str, folder: Path, root: bytes | None = None) -> Updater:
    """Return python-tuf's own client, with a cache that outlives it."""
    for name in ("metadata", "targets"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return Updater(
        metadata_dir=str(folder / "metadata"),
        metadata_base_url=f"{url}/tuf/image/metadata/",
        target_dir=str(folder / "targets"),
        target_base_url=f"{url}/tuf/image/targets/",
        bootstrap=root or json.dumps(trust_anchors()["image_root"]).encode(),
    )


class WatchingDevice:
    """What a device of ours believes: pinned roots, ngclient's cache, and the agent's checks."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.config = AgentConfig(server_url=url, state_dir=folder)
        self.http = HttpClient(self.config, SystemClock())
        self.trust = TrustFolder(Disk(), folder / "trust")
        anchors = trust_anchors()
        self.trust.pin(
            json.dumps(anchors["image_root"]).encode(),
            json.dumps(anchors["director_root"]).encode(),
        )

    def look_up(self, bundle: Bundle) -> str:
        """Return the digest that the image repository says a bundle's manifest has."""
        repository = ImageRepository(
            self.trust.cache,
            f"{self.url}/tuf/image/",
            self.trust.root(IMAGE_ROOT),
            MetadataFetcher(self.http, self.config, MAX_METADATA_BYTES),
            datetime.now(UTC),
        )
        try:
            return repository.look_up(bundle_path(bundle)).hashes["sha256"]
        finally:
            self.trust.raise_root(IMAGE_ROOT, repository.verified_root())

    def root_version(self) -> int:
        """Return the version of the pinned image root."""
        return int(json.loads(self.trust.root(IMAGE_ROOT))["signed"]["version"])

    def director_root(self) -> bytes:
        """Return the pinned director root."""
        return self.trust.root(DIRECTOR_ROOT)


def assigned(bundle: Bundle, seq: int) -> bytes:
    """Return an assignment of a bundle to the device that `directed` plays."""
    return assignment_sign(
        device_id="ab" * 16,
        key_thumbprint="cd" * 32,
        assignment_seq=seq,
        nonce=NONCE,
        kind=OfferKind.INSTALL,
        bundle=bundle,
        delta=None,
        security_floor=0,
    )


def directed(pinned: bytes, data: bytes) -> int:
    """Verify an assignment as a device with this pinned root; return the newest root's version."""

    def newer(version: int) -> bytes | None:
        rows = MetadataFile.objects.filter(repository__name=DIRECTOR, name=f"{version}.root.json")
        row = rows.first()
        return None if row is None else bytes(row.data)

    expected = Expected("ab" * 16, "cd" * 32, NONCE, datetime.now(UTC))
    return verify_assignment(data, pinned, newer, expected).root_version
