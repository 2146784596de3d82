"""What the pages about models, builds, bundles, targets and the audit chain ask.

Every function states its query count, which does not grow with the number of rows shown.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Count, Prefetch, Q, QuerySet

from builds.common.access_models import AuditEvent
from builds.common.errors import NotFoundError
from builds.models import (
    BuildJob,
    BuildLogLine,
    BuildTransition,
    Bundle,
    BundleSection,
    Delta,
    Model,
    ModelVersion,
    Target,
)
from builds.states import BUILD_FINAL, BuildState
from compiler.contract.manifest import ReleaseManifest, parse_manifest
from compiler.contract.planes import Plane

LOG_TAIL_LINES = 400
VERSIONS_PER_MODEL = 50


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """One version for one target; `job` is None when nothing was asked for."""

    target: Target
    job: BuildJob | None
    bundle: Bundle | None


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One version with a cell per column of the matrix."""

    version: ModelVersion
    cells: tuple[MatrixCell, ...]

    @property
    def is_final(self) -> bool:
        """Return whether no cell can change by itself any more."""
        return self.version.state != "submitted" and all(
            cell.job is None or cell.job.state in BUILD_FINAL for cell in self.cells
        )


@dataclass(frozen=True, slots=True)
class ModelMatrix:
    """One model: its newest versions as rows, the targets that matter to it as columns."""

    model: Model
    targets: tuple[Target, ...]
    rows: tuple[MatrixRow, ...]


@dataclass(frozen=True, slots=True)
class StageSpan:
    """A state that a build was in, and how long; `took` is None while it still is."""

    name: str
    started_at: datetime
    took: timedelta | None
    reason: str


@dataclass(frozen=True, slots=True)
class BuildDetail:
    """One build: the job, its states with durations, and the end of its log."""

    job: BuildJob
    bundle: Bundle | None
    spans: tuple[StageSpan, ...]
    log: tuple[BuildLogLine, ...]
    log_lines_before: int

    @property
    def is_final(self) -> bool:
        """Return whether the build cannot change by itself any more."""
        return self.job.state in BUILD_FINAL


@dataclass(frozen=True, slots=True)
class SectionRow:
    """One section of a bundle, with what the signed manifest says about its planes."""

    section: BundleSection
    planes: tuple[Plane, ...]
    shared_with: int

    @property
    def plane_sums(self) -> tuple[tuple[str, int, int], ...]:
        """Return per kind of plane how many there are and their size together, bytes."""
        kinds = dict.fromkeys(plane.kind for plane in self.planes)
        lengths = {k: [plane.length for plane in self.planes if plane.kind == k] for k in kinds}
        return tuple((kind, len(rows), sum(rows)) for kind, rows in lengths.items())


@dataclass(frozen=True, slots=True)
class BundleDetail:
    """One bundle: its parsed manifest, sections, and the deltas that lead to and from it."""

    bundle: Bundle
    manifest: ReleaseManifest
    sections: tuple[SectionRow, ...]
    deltas_to: tuple[Delta, ...]
    deltas_from: tuple[Delta, ...]


def model_matrices() -> tuple[ModelMatrix, ...]:
    """Return every model with its newest versions and their builds. Four queries."""
    versions = ModelVersion.objects.select_related("base_version").order_by("-release_seq")
    models = list(Model.objects.prefetch_related(Prefetch("versions", queryset=versions)))
    shown = {model.pk: list(model.versions.all())[:VERSIONS_PER_MODEL] for model in models}
    cells = _jobs_of([version.pk for rows in shown.values() for version in rows])
    targets = list(Target.objects.all())
    return tuple(_matrix(model, shown[model.pk], targets, cells) for model in models)


def version_detail(*, model: str, version: str) -> tuple[ModelVersion, MatrixRow]:
    """Return one version and its row of the build matrix. Three queries.

    Raises:
        NotFoundError: No such model or version.
    """
    found = (
        ModelVersion.objects.select_related("model", "base_version")
        .filter(model__name=model, version=version)
        .first()
    )
    if found is None:
        raise NotFoundError(f"there is no version {version!r} of a model {model!r}")
    jobs = _jobs_of([found.pk])
    return found, _row(found, _columns(list(Target.objects.all()), jobs, [found.pk]), jobs)


def build_list(*, state: str = "", text: str = "") -> QuerySet[BuildJob]:
    """Return builds, newest first, for keyset paging by primary key. One query."""
    jobs = BuildJob.objects.select_related("version__model", "target").defer("report")
    jobs = jobs.order_by("-pk")
    if state:
        jobs = jobs.filter(state=state)
    if text:
        jobs = jobs.filter(
            Q(version__model__name__icontains=text)
            | Q(version__version__icontains=text)
            | Q(target__name__icontains=text)
            | Q(error_code__icontains=text)
        )
    return jobs


def build_state_counts() -> Mapping[str, int]:
    """Return how many builds are in each state. One query."""
    rows = BuildJob.objects.order_by().values_list("state").annotate(Count("pk"))
    counts = dict(rows)
    return {state.value: counts.get(state.value, 0) for state in BuildState}


def failed_builds(*, since: datetime, limit: int) -> Sequence[BuildJob]:
    """Return the newest builds that failed after `since`. One query."""
    states = (BuildState.FAILED_USER, BuildState.FAILED_APP)
    jobs = BuildJob.objects.select_related("version__model", "target").order_by("-pk")
    return list(jobs.filter(state__in=states, finished_at__gte=since)[:limit])


def bundles_waiting(*, limit: int) -> Sequence[Bundle]:
    """Return the newest bundles that nobody has approved yet. One query."""
    rows = Bundle.objects.filter(approved_at=None, published_at=None)
    return list(rows.select_related("version__model", "target").defer("manifest")[:limit])


def build_detail(*, build_id: int) -> BuildDetail:
    """Return one build with the end of its log. Four queries.

    Raises:
        NotFoundError: No such build.
    """
    jobs = BuildJob.objects.select_related("version__model", "target", "bundle").defer(
        "bundle__manifest"
    )
    job = jobs.filter(pk=build_id).first()
    if job is None:
        raise NotFoundError(f"there is no build {build_id}")
    log = BuildLogLine.objects.filter(job=job)
    lines = list(log.order_by("-pk")[:LOG_TAIL_LINES])[::-1]
    before = log.filter(pk__lt=lines[0].pk).count() if lines else 0
    transitions = list(BuildTransition.objects.filter(subject=job).order_by("pk"))
    return BuildDetail(
        job=job,
        bundle=getattr(job, "bundle", None),
        spans=state_spans(job, transitions),
        log=tuple(lines),
        log_lines_before=before,
    )


def state_spans(job: BuildJob, transitions: Sequence[BuildTransition]) -> tuple[StageSpan, ...]:
    """Return how long a build was in each state, from its transition rows. Pure."""
    spans: list[StageSpan] = []
    name, started, reason = BuildState.QUEUED.value, job.created_at, ""
    for row in transitions:
        spans.append(StageSpan(name, started, row.at - started, reason))
        name, started, reason = row.new, row.at, row.reason
    if name not in BUILD_FINAL:
        spans.append(StageSpan(name, started, None, reason))
    return tuple(spans)


def bundle_detail(*, manifest_sha256: str) -> BundleDetail:
    """Return one bundle with its sections and deltas. Five queries.

    Raises:
        NotFoundError: No such bundle.
    """
    bundle = (
        Bundle.objects.select_related("version__model", "target", "job")
        .filter(manifest_sha256=manifest_sha256)
        .first()
    )
    if bundle is None:
        raise NotFoundError(f"there is no bundle {manifest_sha256[:16]!r}")
    manifest = parse_manifest(bundle.manifest_bytes)
    planes = {section.component: section.planes for section in manifest.sections}
    sections = sorted(BundleSection.objects.filter(bundle=bundle), key=_largest_first)
    uses = _uses_of(section.sha256 for section in sections)
    pairs = (
        Delta.objects.select_related("base__version", "new__version", "new__target")
        .defer("base__manifest", "new__manifest")
        .order_by("-pk")
    )
    return BundleDetail(
        bundle=bundle,
        manifest=manifest,
        sections=tuple(
            SectionRow(section, planes.get(section.component, ()), uses.get(section.sha256, 1) - 1)
            for section in sections
        ),
        deltas_to=tuple(pairs.filter(new=bundle)),
        deltas_from=tuple(pairs.filter(base=bundle)),
    )


def deltas_of(*, version_id: int) -> tuple[Delta, ...]:
    """Return the deltas that lead to bundles of a version. One query."""
    pairs = Delta.objects.select_related("base__version", "new__target", "new__version").defer(
        "base__manifest", "new__manifest"
    )
    return tuple(pairs.filter(new__version_id=version_id).order_by("new__target__name", "-pk"))


def gain_of(*, version_id: int) -> str:
    """Return what the newest build of a version says about its gain over its base. One query."""
    rows = BuildJob.objects.filter(version_id=version_id, report__has_key="gain").order_by("-pk")
    says: str | None = rows.values_list("report__gain__says", flat=True).first()
    return says or ""


def target_list() -> QuerySet[Target]:
    """Return the targets with counts of their bundles and failed builds. One query."""
    failed = Q(jobs__state__in=(BuildState.FAILED_USER, BuildState.FAILED_APP))
    return Target.objects.annotate(
        bundle_count=Count("bundles", distinct=True),
        failed_count=Count("jobs", filter=failed, distinct=True),
    ).order_by("-active", "name")


def audit_list(*, text: str = "") -> QuerySet[AuditEvent]:
    """Return audit events, newest first, for keyset paging by primary key. One query."""
    events = AuditEvent.objects.order_by("-pk")
    if text:
        events = events.filter(
            Q(actor__icontains=text)
            | Q(action__icontains=text)
            | Q(object_type__icontains=text)
            | Q(object_id=text)
        )
    return events


def _jobs_of(version_ids: Sequence[int]) -> dict[tuple[int, int], BuildJob]:
    jobs = BuildJob.objects.filter(version_id__in=version_ids)
    jobs = jobs.select_related("bundle").defer("bundle__manifest", "report")
    return {(job.version_id, job.target_id): job for job in jobs}


def _columns(
    targets: Sequence[Target], jobs: Mapping[tuple[int, int], BuildJob], version_ids: Sequence[int]
) -> tuple[Target, ...]:
    used = {target for version, target in jobs if version in set(version_ids)}
    return tuple(target for target in targets if target.active or target.pk in used)


def _matrix(
    model: Model,
    versions: Sequence[ModelVersion],
    targets: Sequence[Target],
    jobs: Mapping[tuple[int, int], BuildJob],
) -> ModelMatrix:
    columns = _columns(targets, jobs, [version.pk for version in versions])
    rows = tuple(_row(version, columns, jobs) for version in versions)
    return ModelMatrix(model=model, targets=columns, rows=rows)


def _row(
    version: ModelVersion, columns: Sequence[Target], jobs: Mapping[tuple[int, int], BuildJob]
) -> MatrixRow:
    found = [(target, jobs.get((version.pk, target.pk))) for target in columns]
    return MatrixRow(
        version=version,
        cells=tuple(MatrixCell(target, job, getattr(job, "bundle", None)) for target, job in found),
    )


def _largest_first(section: BundleSection) -> tuple[int, list[tuple[int, str]]]:
    # E2 comes before E10.
    parts = re.split(r"(\d+)", section.component)
    return -section.size_bytes, [(int(p) if p.isdecimal() else -1, p) for p in parts]


def _uses_of(digests: Iterable[str]) -> dict[str, int]:
    rows = BundleSection.objects.filter(sha256__in=list(digests)).order_by()
    return dict(rows.values_list("sha256").annotate(Count("bundle", distinct=True)))
