"""One bundle, its approval, and the manifest that is signed for it, byte for byte."""

from collections.abc import Sequence
from typing import Final

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.views.decorators.http import require_POST, require_safe

from builds.common.auth import Actor
from builds.common.roles import Permission
from builds.models import Bundle
from builds.selectors.pages import SectionRow
from builds.selectors.pages import bundle_detail as find_bundle
from builds.services.approvals import release_approve
from compiler.contract.manifest import target_path
from dashboards.pages import page, show
from fleet.selectors.pages import devices_running

EXPERT_PREFIX: Final = "expert."


def _detail(request: HttpRequest, actor: Actor, manifest_sha256: str) -> HttpResponse:
    detail = find_bundle(manifest_sha256=manifest_sha256)
    manifest = detail.manifest
    context = {
        "detail": detail,
        "sections": [row for row in detail.sections if not _is_expert(row)],
        "experts": (experts := [row for row in detail.sections if _is_expert(row)]),
        "experts_bytes": sum(row.section.size_bytes for row in experts),
        "running_count": devices_running(bundle_id=detail.bundle.pk),
        "deltas": (*detail.deltas_to, *detail.deltas_from),
        "path": target_path(manifest.model, manifest.release_seq, manifest.target),
    }
    return show(request, actor, "bundle_detail", context)


def _approve(request: HttpRequest, actor: Actor, manifest_sha256: str) -> HttpResponseBase:
    bundle = find_bundle(manifest_sha256=manifest_sha256).bundle
    messages.success(request, approved_text(release_approve(actor=actor, bundles=[bundle])))
    return redirect("bundle-detail", manifest_sha256=manifest_sha256)


def approved_text(bundles: Sequence[Bundle]) -> str:
    """Return what a person reads after approving."""
    waiting = sum(1 for bundle in bundles if bundle.published_at is None)
    if waiting:
        return (
            f"Approved: {waiting} of {len(bundles)} published as soon as the machine with the other"
            " key has signed."
        )
    return "Approved, signed and published."


def _is_expert(row: SectionRow) -> bool:
    return row.section.component.startswith(EXPERT_PREFIX)


def _manifest(request: HttpRequest, actor: Actor, manifest_sha256: str) -> HttpResponse:  # noqa: ARG001
    bundle = find_bundle(manifest_sha256=manifest_sha256).bundle
    name = f"{bundle.version.model.name}-{bundle.version.version}-{bundle.target.name}.json"
    return HttpResponse(
        bundle.manifest_bytes,
        content_type="application/json",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


bundle_detail = require_safe(page(_detail))
bundle_manifest = require_safe(page(_manifest))
bundle_approve = require_POST(page(_approve, needs=Permission.RELEASE_APPROVE))
