"""Rows of the builds app for tests: real manifests, real blobs, no compiler."""

import hashlib
import io
import itertools
import json

from django.contrib.auth.models import User
from django.utils import timezone

from builds.common.roles import Role
from builds.models import (
    Blob,
    BuildJob,
    Bundle,
    BundleSection,
    Model,
    ModelVersion,
    Target,
)
from builds.services.access import user_create
from builds.states import BuildState, VersionState
from builds.storage import blob_store
from compiler.contract.manifest import ReleaseManifest, Requirements, Section

_numbers = itertools.count(1)
PIPELINE = {
    "schema": "sparsefleet.pipeline/1",
    "family": "graph",
    "components": {"model": {"file": "model.onnx", "inputs": {}, "outputs": {}}},
}
# ir_version 8, an empty graph, opset 17: no more than what every ONNX file has.
MINIMAL_ONNX = b"\x08\x08\x3a\x00\x42\x02\x10\x11"


def make_blob(data: bytes) -> Blob:
    """Store `data` and return its row."""
    digest = hashlib.sha256(data).hexdigest()
    blob_store().put(io.BytesIO(data), digest, limit_bytes=len(data))
    blob, _ = Blob.objects.get_or_create(sha256=digest, defaults={"size_bytes": len(data)})
    return blob


def make_model(name: str = "") -> Model:
    """Return a model, a new one unless it exists."""
    model, _ = Model.objects.get_or_create(name=name or f"model-{next(_numbers)}")
    return model


def make_target(name: str = "x86-64-v3", *, active: bool = True) -> Target:
    """Return a target of the ladder, active unless said otherwise."""
    target, _ = Target.objects.get_or_create(name=name)
    if target.active != active:
        target.active = active
        target.save()
    return target


def make_files(**contents: bytes) -> list[dict[str, object]]:
    """Store the files of a submission; `pipeline.json` and `model.onnx` unless given."""
    files = {"pipeline.json": json.dumps(PIPELINE).encode(), "model.onnx": MINIMAL_ONNX}
    files |= {name.replace("__", "."): data for name, data in contents.items()}
    rows = []
    for name, data in sorted(files.items()):
        blob = make_blob(data)
        rows.append({"name": name, "sha256": blob.sha256, "size_bytes": blob.size_bytes})
    return rows


def make_version(
    model: Model | None = None,
    version: str = "",
    *,
    state: VersionState = VersionState.VALIDATED,
    base_version: ModelVersion | None = None,
    security_epoch: int = 0,
) -> ModelVersion:
    """Return a new version of `model`, with its files in the blob store."""
    model = model or make_model()
    number = model.versions.count() + 1
    return ModelVersion.objects.create(
        model=model,
        version=version or f"{number}.0.0",
        release_seq=number,
        state=state.value,
        files=make_files(),
        base_version=base_version,
        security_epoch=security_epoch,
        submission_sha256=hashlib.sha256(f"{model.pk}-{number}".encode()).hexdigest(),
        submitted_by="token:1",
    )


def make_job(
    version: ModelVersion | None = None,
    target: Target | None = None,
    *,
    state: BuildState = BuildState.QUEUED,
) -> BuildJob:
    """Return a build job."""
    return BuildJob.objects.create(
        version=version or make_version(), target=target or make_target(), state=state.value
    )


def make_manifest(version: ModelVersion, target: Target, sections: dict[str, bytes]) -> bytes:
    """Return the canonical manifest of these sections, which are put into the blob store."""
    rows = []
    for component, data in sorted(sections.items()):
        blob = make_blob(data)
        rows.append(Section(component, blob.size_bytes, blob.sha256))
    return ReleaseManifest(
        model=version.model.name,
        version=version.version,
        release_seq=version.release_seq,
        security_epoch=version.security_epoch,
        target=target.name,
        plan_abi=1,
        requires=Requirements(ram_bytes=1 << 20, free_bytes=1 << 20),
        verified_on="host",
        sections=tuple(rows),
        provenance_sha256="0" * 64,
    ).to_bytes()


def make_bundle(
    version: ModelVersion | None = None,
    target: Target | None = None,
    sections: dict[str, bytes] | None = None,
    *,
    published: bool = True,
) -> Bundle:
    """Return a ready bundle with real sections in the blob store; its manifest is not signed."""
    version = version or make_version()
    target = target or make_target()
    sections = sections or {
        "plan": f"plan of {version.version}".encode(),
        "weights.shared": f"weights of {version.version} {version.pk}".encode() * 50,
        "expert.L0.E0": b"expert" * 100,
    }
    manifest = make_manifest(version, target, sections)
    bundle = Bundle.objects.create(
        job=make_job(version, target, state=BuildState.READY),
        version=version,
        target=target,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        manifest=manifest,
        total_bytes=sum(len(data) for data in sections.values()),
        verified_on="host",
        published_at=timezone.now() if published else None,
    )
    for component, data in sections.items():
        BundleSection.objects.create(
            bundle=bundle,
            component=component,
            sha256=hashlib.sha256(data).hexdigest(),
            size_bytes=len(data),
        )
    return bundle


def make_user(role: Role, name: str = "") -> User:
    """Return a user with this role and the password `secret`."""
    return user_create(name=name or f"user-{next(_numbers)}", role=role, password="secret")
