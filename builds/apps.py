"""Django app `builds`: what exists."""

from django.apps import AppConfig


class BuildsConfig(AppConfig):
    """Models, versions, targets, build jobs, bundles, deltas, update metadata, blobs."""

    name = "builds"
    default_auto_field = "django.db.models.BigAutoField"
