"""From a checked compiler output to a bundle: published at once, or when a person approved it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction

from builds.common.audit import audit
from builds.common.clock import Clock, SystemClock
from builds.common.transitions import apply_transition
from builds.models import BuildJob, BuildTransition, Bundle, BundleSection, Target
from builds.services.blobs import blob_keep
from builds.services.content_keys import content_key_for_build, sections_seal
from builds.services.jobs import CLEARED, build_advance, build_owned
from builds.services.signing import release_publish
from builds.services.version_states import version_accept
from builds.states import BUILD_TRANSITIONS, BuildEvent
from compiler.contract.canonical import sha256_hex
from compiler.contract.manifest import ReleaseManifest


@dataclass(frozen=True, slots=True)
class BuildOutput:
    """What a compiler wrote, checked: every section file has the size and digest of the manifest.

    Attributes:
        manifest: The manifest, its canonical bytes not yet signed for.
        sections: Component -> file.
        artifacts: Name -> file for people (IR text, C source); kept as blobs, not shipped.
        report: Facts for people, JSON.
    """

    manifest: ReleaseManifest
    sections: Mapping[str, Path]
    artifacts: Mapping[str, Path]
    report: Mapping[str, Any]


def build_finish(
    *, job: BuildJob, owner: str, output: BuildOutput, clock: Clock | None = None
) -> Bundle:
    """Keep the sections, mark the job ready, and sign and publish unless a person has to approve.

    The sections of a confidential model are kept sealed as well, and the manifest names both forms.
    Blobs are stored before the transaction: they are content-addressed, so a run that dies in
    between leaves nothing wrong, and the next one stores nothing twice.

    Raises:
        LeaseLostError: The lease is somebody else's; nothing was published.
        SigningKeysError: Nothing can be signed now; nothing was published.
    """
    for section in output.manifest.sections:
        blob_keep(path=output.sections[section.component], sha256=section.sha256)
    content_key = content_key_for_build(job.version)
    if content_key is not None:
        sealed = sections_seal(content_key, output.manifest, output.sections)
        output = replace(output, manifest=sealed)
    artifacts = {}
    for name, path in output.artifacts.items():
        artifacts[name] = sha256_hex(path.read_bytes())
        blob_keep(path=path, sha256=artifacts[name])
    build_advance(job=job, owner=owner, event=BuildEvent.SIGN, stage="sign")
    return _publish(job, owner, output, artifacts, clock or SystemClock())


@transaction.atomic
def _publish(
    job: BuildJob, owner: str, output: BuildOutput, artifacts: Mapping[str, str], clock: Clock
) -> Bundle:
    build_owned(job=job, owner=owner)
    bundle = _bundle_create(job, output.manifest)
    is_automatic = settings.SPARSEFLEET.release_approval == "automatic"
    if is_automatic:
        release_publish(bundles=[bundle], clock=clock)
    now = clock.now()
    apply_transition(
        job,
        table=BUILD_TRANSITIONS,
        event=BuildEvent.PUBLISH,
        log=BuildTransition,
        actor=owner,
        changes={
            **CLEARED,
            "stage": "ready",
            "progress": 1.0,
            "finished_at": now,
            "report": {**output.report, "artifacts": dict(artifacts)},
            "error_code": "",
            "error_message": "",
            "error_hint": "",
        },
    )
    version_accept(version_id=job.version_id, actor=owner)
    Target.objects.filter(pk=job.target_id).update(verified_on=output.manifest.verified_on)
    audit(
        actor=owner,
        action="bundle.publish" if is_automatic else "bundle.build",
        obj=bundle,
        manifest_sha256=bundle.manifest_sha256,
        build=job.pk,
    )
    return bundle


def _bundle_create(job: BuildJob, manifest: ReleaseManifest) -> Bundle:
    data = manifest.to_bytes()
    bundle = Bundle.objects.create(
        job=job,
        version=job.version,
        target=job.target,
        manifest_sha256=sha256_hex(data),
        manifest=data,
        total_bytes=manifest.total_bytes,
        verified_on=manifest.verified_on,
        is_sealed=manifest.is_sealed,
    )
    BundleSection.objects.bulk_create(
        [
            BundleSection(
                bundle=bundle,
                component=section.component,
                sha256=section.sha256,
                size_bytes=section.size_bytes,
                sealed_sha256=section.sealed.sha256 if section.sealed else "",
            )
            for section in manifest.sections
        ]
    )
    return bundle
