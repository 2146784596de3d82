"""The second signature of a release: a person says yes, and the key that approves signs.

    worker: bundle is built -> person: approved -(approve key, wherever it is)-> draft of the bin
        -(build key, in a worker)-> published

Which machine holds which key does not matter here: this one signs with what it has, and what waits
is signed by the next machine that comes by (`metadata_refresh`). A renewal of what is published
already needs no person.
"""

from collections.abc import Iterable

from django.conf import settings
from django.db import transaction

from builds.common.audit import audit
from builds.common.auth import Actor, require
from builds.common.clock import Clock, SystemClock
from builds.common.errors import ForbiddenError
from builds.common.roles import Permission
from builds.keys import IMAGE, INDEX_NAME, KeyRing
from builds.models import Bundle, ModelVersion
from builds.services.metadata_files import repository_locked
from builds.services.publishing import publisher_advance
from builds.services.signing import key_ring


@transaction.atomic
def release_approve(
    *, actor: Actor, bundles: Iterable[Bundle], clock: Clock | None = None
) -> list[Bundle]:
    """Approve built bundles, and sign and publish as far as the keys of this machine go.

    Args:
        actor: Who says yes; the audit chain keeps it.
        bundles: Which; approved ones are passed over.
        clock: The time of signing; this machine's by default.

    Returns:
        The same bundles, as they are now.

    Raises:
        ForbiddenError: The actor may not approve, or submitted the version.
        SigningKeysError: The repository was never set up, or a signer failed.
    """
    require(actor, Permission.RELEASE_APPROVE)
    now = (clock or SystemClock()).now()
    image = repository_locked(IMAGE)
    ids = [bundle.pk for bundle in bundles]
    rows = Bundle.objects.select_for_update().filter(pk__in=ids, approved_at=None)
    waiting = list(rows.order_by("pk").defer("manifest"))
    for bundle in waiting:
        if bundle.version.submitted_by == actor.name:
            raise ForbiddenError(
                f"{actor.name} submitted {bundle.version}",
                hint="whoever submitted a version may not approve it",
            )
    Bundle.objects.filter(pk__in=[bundle.pk for bundle in waiting]).update(
        approved_at=now, approved_by=actor.name
    )
    publisher_advance(image, ring_here(), now)
    for bundle in waiting:
        audit(
            actor=actor.name,
            action="bundle.approve",
            obj=bundle,
            manifest_sha256=bundle.manifest_sha256,
        )
    return list(Bundle.objects.filter(pk__in=ids).order_by("pk"))


def version_approve(
    *, actor: Actor, version: ModelVersion, clock: Clock | None = None
) -> list[Bundle]:
    """Approve every built bundle of a version that nobody approved yet; see `release_approve`."""
    bundles = Bundle.objects.filter(version=version, approved_at=None, published_at=None)
    return release_approve(actor=actor, bundles=bundles.defer("manifest"), clock=clock)


@transaction.atomic
def drafts_sign(*, clock: Clock | None = None) -> list[str]:
    """Sign what waits for keys of this machine; return the roles published.

    Raises:
        SigningKeysError: The repository was never set up, or a signer failed.
    """
    now = (clock or SystemClock()).now()
    return publisher_advance(repository_locked(IMAGE), key_ring(), now)


def ring_here() -> KeyRing:
    """Return the keys of this machine; a machine without any may note approvals all the same."""
    folder = settings.SPARSEFLEET.key_path
    return key_ring() if (folder / INDEX_NAME).exists() else KeyRing(folder, {})
