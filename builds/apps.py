"""Django app `builds`: what exists."""

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class BuildsConfig(AppConfig):
    """Models, versions, targets, build jobs, bundles, deltas, update metadata, blobs."""

    name = "builds"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register checks; keep the rows of the target ladder in step after every migration."""
        import builds.checks  # noqa: F401 -- registers by being imported

        post_migrate.connect(_seed_targets, sender=self, dispatch_uid="builds.seed_targets")


def _seed_targets(**_kwargs: object) -> None:
    from builds.services.targets import targets_seed

    targets_seed()
