"""The Celery application.

`celery -A dashboards.conf.celery worker -B` runs worker and tick in one process.
"""

import os

from celery import Celery
from celery.signals import worker_init

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboards.conf.settings")  # noqa: TID251 -- Django's own switch

app = Celery("sparsefleet")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["builds", "fleet"])


@worker_init.connect
def _refuse(**_kwargs: object) -> None:
    from django.core.exceptions import ImproperlyConfigured

    from builds.checks import refuse_to_start

    try:
        refuse_to_start()
    except ImproperlyConfigured as error:
        # Celery logs other exceptions of a receiver, and goes on.
        raise SystemExit(f"error: {error}") from error


@app.on_after_finalize.connect
def _schedule(sender: Celery, **_kwargs: object) -> None:
    from django.conf import settings

    for name in ("builds.tick", "fleet.tick"):
        sender.add_periodic_task(
            settings.SPARSEFLEET.tick_s,
            sender.signature(name),
            name=name,
            expires=5 * settings.SPARSEFLEET.tick_s,  # a busy worker need not catch up on ticks
        )
