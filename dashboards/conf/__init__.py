"""The Django project: settings, addresses, and the Celery application every process shares."""

from dashboards.conf.celery import app as celery_app

__all__ = ["celery_app"]
