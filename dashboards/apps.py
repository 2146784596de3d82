"""Django app `dashboards`: what people see."""

from django.apps import AppConfig


class DashboardsConfig(AppConfig):
    """Pages for release managers; no models of its own."""

    name = "dashboards"
