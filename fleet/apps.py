"""Django app `fleet`: who runs what."""

from django.apps import AppConfig


class FleetConfig(AppConfig):
    """Devices, enrolment, groups, rollouts, updates, gates, telemetry."""

    name = "fleet"
    default_auto_field = "django.db.models.BigAutoField"
