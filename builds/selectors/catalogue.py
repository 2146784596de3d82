"""Models, versions, builds, bundles, targets and deltas, as the API shows them."""

from django.db.models import QuerySet

from builds.common.errors import NotFoundError
from builds.models import BuildJob, Bundle, Delta, Model, ModelVersion, Target


def model_list() -> QuerySet[Model]:
    """Return all models (1 query)."""
    return Model.objects.all()


def version_list(model_name: str) -> QuerySet[ModelVersion]:
    """Return the versions of a model with their builds (2 queries)."""
    rows = ModelVersion.objects.select_related("model", "base_version").prefetch_related("jobs")
    return rows.filter(model__name=model_name)


def version_get(model_name: str, version: str) -> ModelVersion:
    """Return one version with its builds (2 queries).

    Raises:
        NotFoundError: There is none.
    """
    found = version_list(model_name).filter(version=version).first()
    if found is None:
        raise NotFoundError(f"no version {version!r} of model {model_name!r}")
    return found


def build_list(
    *, model: str = "", version: str = "", target: str = "", state: str = ""
) -> QuerySet[BuildJob]:
    """Return builds, filtered by what is not empty (1 query)."""
    wanted = {
        "version__model__name": model,
        "version__version": version,
        "target__name": target,
        "state": state,
    }
    filters = {field: value for field, value in wanted.items() if value}
    rows = BuildJob.objects.select_related(
        "version__model", "target", "bundle", "base_bundle"
    ).defer("bundle__manifest", "base_bundle__manifest")
    return rows.filter(**filters)


def build_get(build_id: int) -> BuildJob:
    """Return one build with its log and history (3 queries).

    Raises:
        NotFoundError: There is none.
    """
    found = build_list().prefetch_related("log", "transitions").filter(pk=build_id).first()
    if found is None:
        raise NotFoundError(f"no build {build_id}")
    return found


def bundle_get(manifest_sha256: str) -> Bundle:
    """Return one bundle with its sections (2 queries).

    Raises:
        NotFoundError: There is none.
    """
    rows = Bundle.objects.select_related("version__model", "target").prefetch_related("sections")
    found = rows.filter(manifest_sha256=manifest_sha256).first()
    if found is None:
        raise NotFoundError(f"no bundle {manifest_sha256}")
    return found


def target_list() -> QuerySet[Target]:
    """Return all targets, active ones first (1 query)."""
    return Target.objects.order_by("-active", "name")


def delta_list() -> QuerySet[Delta]:
    """Return deltas with both ends (1 query)."""
    return Delta.objects.select_related("base", "new").defer("base__manifest", "new__manifest")
