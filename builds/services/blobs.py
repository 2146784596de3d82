"""Uploads by CI and outputs of builds, into the blob store and the table of blobs."""

from pathlib import Path

from django.conf import settings

from builds.common.auth import Actor, require
from builds.common.roles import Permission
from builds.models import Blob
from builds.storage import Readable, blob_store


def blob_put(*, actor: Actor, sha256: str, stream: Readable) -> tuple[Blob, bool]:
    """Store an upload; storing it again changes nothing.

    Returns:
        The blob and whether it is new.

    Raises:
        BlobDigestError: The bytes hash to something else; nothing was kept.
        BlobTooLargeError: More bytes than `max_upload_bytes`.
        StorageFullError: No room.
    """
    require(actor, Permission.SUBMIT)
    size = blob_store().put(stream, sha256, limit_bytes=settings.SPARSEFLEET.max_upload_bytes)
    return Blob.objects.get_or_create(sha256=sha256, defaults={"size_bytes": size})


def blob_keep(*, path: Path, sha256: str) -> Blob:
    """Store a file that this platform made, with its digest checked on the way."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        blob_store().put(stream, sha256, limit_bytes=size)
    blob, _ = Blob.objects.get_or_create(sha256=sha256, defaults={"size_bytes": size})
    return blob
