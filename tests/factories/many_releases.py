"""A fleet's worth of releases: bundles of many models and versions with manifests of true size."""

from collections.abc import Iterator

from builds.models import BuildJob, Bundle, Model, ModelVersion, Target
from builds.services.signing import release_publish
from builds.states import BuildState, VersionState
from compiler.contract.canonical import sha256_hex
from compiler.contract.fingerprint import TARGET_LADDER
from compiler.contract.manifest import ReleaseManifest, Requirements, Section

BATCH = 10_000
SECTION = Section("plan", 4096, "a" * 64)


def make_releases(count: int, *, model: str) -> list[Bundle]:
    """Return new bundles of one model, over all targets of the ladder; none is published."""
    row, _ = Model.objects.get_or_create(name=model)
    targets = [Target.objects.get_or_create(name=name)[0] for name, _, _ in TARGET_LADDER]
    first = row.versions.count() + 1
    versions = ModelVersion.objects.bulk_create(
        [
            ModelVersion(
                model=row,
                version=f"{number}.0.0",
                release_seq=number,
                state=VersionState.VALIDATED.value,
                files=[],
                submission_sha256=sha256_hex(f"{model} {number}".encode()),
                submitted_by="ci",
            )
            for number in range(first, first + -(-count // len(targets)))
        ]
    )
    pairs = [(version, target) for version in versions for target in targets][:count]
    jobs = BuildJob.objects.bulk_create(
        [
            BuildJob(version=version, target=target, state=BuildState.READY.value)
            for version, target in pairs
        ],
        batch_size=BATCH,
    )
    return Bundle.objects.bulk_create(
        [
            bundle_of(job, version, target, model)
            for job, (version, target) in zip(jobs, pairs, strict=True)
        ],
        batch_size=BATCH,
    )


def bundle_of(job: BuildJob, version: ModelVersion, target: Target, model: str) -> Bundle:
    """Return the bundle of one job, not yet saved."""
    manifest = ReleaseManifest(
        model=model,
        version=version.version,
        release_seq=version.release_seq,
        security_epoch=0,
        target=target.name,
        plan_abi=1,
        requires=Requirements(ram_bytes=1 << 20, free_bytes=1 << 20),
        verified_on="host",
        sections=(SECTION,),
        provenance_sha256="0" * 64,
    ).to_bytes()
    return Bundle(
        job=job,
        version=version,
        target=target,
        manifest=manifest,
        manifest_sha256=sha256_hex(manifest),
        total_bytes=len(manifest),
        verified_on="host",
    )


def publish_many(count: int, *, models: int = 5) -> Iterator[Bundle]:
    """Publish `count` releases of several models, in large batches; yield one of each."""
    for number in range(models):
        bundles = make_releases(count // models, model=f"model-{number}")
        release_publish(bundles=bundles)
        yield bundles[len(bundles) // 2]
