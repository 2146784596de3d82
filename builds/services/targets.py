"""What we compile for."""

from typing import Final

from django.db import transaction

from builds.common.audit import audit
from builds.common.auth import SYSTEM, Actor, require
from builds.common.errors import NotFoundError
from builds.common.roles import Permission
from builds.models import BuildJob, Model, ModelVersion, Target
from builds.services.jobs import jobs_create
from builds.states import VersionState
from compiler.contract.fingerprint import TARGET_LADDER

BACKFILL_VERSIONS: Final = 5


def targets_seed() -> None:
    """Make a row for every target of the ladder; existing rows stay as they are."""
    known = set(Target.objects.values_list("name", flat=True))
    Target.objects.bulk_create(
        [
            Target(name=name, title=f"{machine}, {len(features)} required features")
            for name, machine, features in TARGET_LADDER
            if name not in known
        ],
        ignore_conflicts=True,
    )


@transaction.atomic
def target_activate(*, name: str, actor: Actor = SYSTEM) -> tuple[Target, list[BuildJob]]:
    """Compile for this target from now on, and the newest versions of every model at once.

    Returns:
        The target and the build jobs made; none when it was active already.

    Raises:
        NotFoundError: No such target.
    """
    require(actor, Permission.TARGET_ACTIVATE)
    target = Target.objects.select_for_update().filter(name=name).first()
    if target is None:
        raise NotFoundError(f"no target {name!r}")
    if target.active:
        return target, []
    target.active = True
    target.save(update_fields=["active"])
    jobs = [job for model in Model.objects.order_by("pk") for job in _backfill(model, target)]
    audit(actor=actor.name, action="target.activate", obj=target, name=name, builds=len(jobs))
    return target, jobs


@transaction.atomic
def build_request(*, version: ModelVersion, target: Target) -> BuildJob:
    """Return the build job of this pair, made now if there is none."""
    jobs_create(version=version, targets=[target])
    return BuildJob.objects.get(version=version, target=target)


def _backfill(model: Model, target: Target) -> list[BuildJob]:
    newest = model.versions.exclude(state=VersionState.INVALID.value).order_by("-release_seq")
    versions = sorted(newest[:BACKFILL_VERSIONS], key=lambda version: version.release_seq)
    return [job for version in versions for job in jobs_create(version=version, targets=[target])]
