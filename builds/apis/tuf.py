"""`/tuf/`: update metadata and release manifests, for any TUF client (consistent snapshots).

Everything but `timestamp.json` and the newest director root is immutable under its name.
"""

import re
from typing import Final

from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from builds.keys import DIRECTOR, IMAGE
from builds.models import Bundle, MetadataFile
from builds.services.publishing import bundle_path

IMMUTABLE: Final = "public, max-age=31536000, immutable"
ALWAYS_ASK: Final = "no-cache"
_TARGET: Final = re.compile(r"(?P<folder>[a-z0-9._/-]+)/(?P<sha256>[0-9a-f]{64})\.(?P<name>[^/]+)")


@require_safe
def image_metadata(_request: HttpRequest, name: str) -> HttpResponse:
    """Return `timestamp.json` or `<version>.<role>.json` of the image repository."""
    cache = ALWAYS_ASK if name == "timestamp.json" else IMMUTABLE
    return _json(_file(IMAGE, name), cache)


@require_safe
def image_target(_request: HttpRequest, path: str) -> HttpResponse:
    """Return a release manifest by `<folder>/<sha256>.<name>`."""
    match = _TARGET.fullmatch(path)
    if match is None:
        raise Http404
    rows = Bundle.objects.select_related("version__model", "target")
    rows = rows.exclude(published_at=None)
    bundle = rows.filter(manifest_sha256=match["sha256"]).first()
    if bundle is None or bundle_path(bundle) != f"{match['folder']}/{match['name']}":
        raise Http404
    return _json(bundle.manifest_bytes, IMMUTABLE)


@require_safe
def director_root(_request: HttpRequest) -> HttpResponse:
    """Return the newest root of the director."""
    rows = MetadataFile.objects.filter(repository__name=DIRECTOR, role="root")
    newest = rows.order_by("-version").first()
    if newest is None:
        raise Http404
    return _json(bytes(newest.data), ALWAYS_ASK)


@require_safe
def director_root_version(_request: HttpRequest, version: int) -> HttpResponse:
    """Return one version of the director's root, so that a device can follow a rotation."""
    return _json(_file(DIRECTOR, f"{version}.root.json"), IMMUTABLE)


def _file(repository: str, name: str) -> bytes:
    row = MetadataFile.objects.filter(repository__name=repository, name=name).first()
    if row is None:
        raise Http404
    return bytes(row.data)


def _json(data: bytes, cache: str) -> HttpResponse:
    return HttpResponse(data, content_type="application/json", headers={"Cache-Control": cache})
