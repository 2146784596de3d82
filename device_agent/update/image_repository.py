"""The image repository as a device sees it: python-tuf's ngclient, with what it leaves out.

Added here: byte caps and a deadline for each file, the time that is never before the floor, and the
floors themselves. ngclient does not sync its cache; when that is lost with the power it would take
a replayed old repository, and the floors do not.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tuf.api import exceptions
from tuf.api.metadata import Metadata, Root, Snapshot, TargetFile, Timestamp
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from compiler.contract.canonical import canonical_bytes, sha256_hex
from device_agent.config import AgentConfig
from device_agent.errors import (
    DiskError,
    ExpiredError,
    MetadataError,
    RefusedError,
    ReplayError,
    SignatureRefusedError,
    TrustError,
)
from device_agent.http import HttpClient

MAX_METADATA_BYTES: Final = 5_000_000
LIMITS: Final = UpdaterConfig(
    max_root_rotations=32,
    max_delegations=4,
    root_max_length=512_000,
    timestamp_max_length=16_384,
    snapshot_max_length=2_000_000,
    targets_max_length=MAX_METADATA_BYTES,
)


class MetadataFetcher(FetcherInterface):
    """Fetches metadata and manifests through the agent's client, so that its limits hold."""

    def __init__(self, http: HttpClient, config: AgentConfig, limit_bytes: int) -> None:
        self._http = http
        self._deadline_s = config.request_deadline_s
        self._limit_bytes = limit_bytes

    def _fetch(self, url: str) -> Iterator[bytes]:
        # Not a generator: ngclient stops reading at a length it does not like, and a response left
        # open is closed by the garbage collector, perhaps while httpcore holds its own lock.
        path = urlsplit(url).path
        try:
            with self._http.stream(
                path, headers={}, limit_bytes=self._limit_bytes, deadline_s=self._deadline_s
            ) as answer:
                return iter((b"".join(answer.chunks),))
        except RefusedError as error:
            raise exceptions.DownloadHTTPError(str(error), error.status) from error


class ImageRepository(Updater):
    """One look at the image repository; make a new one for every look."""

    def __init__(
        self, folder: Path, base_url: str, root: bytes, fetcher: MetadataFetcher, now: datetime
    ) -> None:
        """Start from the pinned root.

        Args:
            folder: ngclient's cache; nothing in it is believed beyond what the floors allow.
            base_url: Address that ends in `/tuf/image/`.
            root: Root of trust, pinned at enrolment.
            fetcher: Gets files.
            now: Time for expiry checks.

        Raises:
            TrustError: The pinned root itself is no valid root.
        """
        with trust_errors():
            super().__init__(
                str(folder),
                f"{base_url}metadata/",
                target_dir=str(folder),
                target_base_url=f"{base_url}targets/",
                fetcher=fetcher,
                config=LIMITS,
                bootstrap=root,
            )
        self._trusted_set.reference_time = now

    def look_up(self, path: str) -> TargetFile:
        """Refresh, and return what the repository says about a target.

        Raises:
            TrustError: The metadata cannot be trusted, or does not know the target.
        """
        with trust_errors():
            self.refresh()
            target = self.get_targetinfo(path)
        if target is None:
            raise MetadataError(f"the image repository has no target {path!r}")
        return target

    def fetch(self, target: TargetFile) -> bytes:
        """Return the bytes of a target, verified.

        Raises:
            TrustError: They are not those signed for.
        """
        with trust_errors():
            path = Path(self.download_target(target))
            data = path.read_bytes()
            path.unlink()
        return data

    def verified_root(self) -> bytes | None:
        """Return the newest root that the pinned one led to, or None if the cache lost it since.

        Kept as the next pin, so that a device that misses no more than `LIMITS.max_root_rotations`
        roots at a time follows the chain for ever.
        """
        trusted = self._trusted_set.root
        path = Path(self._dir) / "root_history" / f"{trusted.version}.root.json"
        try:
            data = path.read_bytes()
            document = Metadata[Root].from_bytes(data)
            trusted.verify_delegate(Root.type, document.signed_bytes, document.signatures)
        except (OSError, exceptions.RepositoryError, ValueError):
            return None
        return data if document.signed == trusted else None

    @property
    def versions(self) -> dict[str, int]:
        """Return the version of every role that was verified in this look."""
        return {role: self._trusted_set[role].version for role in self._trusted_set._trusted_set}

    @property
    def online_keys(self) -> str:
        """Return the identity of the keys behind timestamp and snapshot."""
        root: Root = self._trusted_set.root
        keys = [sorted(root.roles[role].keyids) for role in (Timestamp.type, Snapshot.type)]
        return sha256_hex(canonical_bytes(keys))


# Most special first: ngclient's errors are subclasses of each other.
_MEANINGS: Final[tuple[tuple[type[Exception], type[TrustError]], ...]] = (
    (exceptions.ExpiredMetadataError, ExpiredError),
    (exceptions.BadVersionNumberError, ReplayError),
    (exceptions.UnsignedMetadataError, SignatureRefusedError),
)


@contextmanager
def trust_errors() -> Generator[None, None, None]:
    """Turn errors of python-tuf into ours.

    Raises:
        TrustError: The subclass says why.
        DiskError: ngclient could not write its cache.
    """
    try:
        yield
    except (exceptions.RepositoryError, exceptions.DownloadError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        for kind, meaning in _MEANINGS:
            if isinstance(error, kind):
                raise meaning(reason) from error
        raise MetadataError(reason) from error
    except OSError as error:
        raise DiskError(f"metadata cache: {error}") from error
