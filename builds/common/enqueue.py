"""Ring the doorbell: enqueue a task by name, after commit.

The database is the truth; a task only says "look at row N". Looking the name up at once makes an
unknown task fail in the request and not in a worker. A broker that is down is logged and otherwise
ignored: the tick finds the row.
"""

import logging
from enum import StrEnum

from celery import Task as CeleryTask
from celery import current_app
from django.db import transaction
from kombu.exceptions import OperationalError

logger = logging.getLogger(__name__)


class Task(StrEnum):
    """Every task of the platform; `tests/arch` checks that each is registered."""

    BUILDS_TICK = "builds.tick"
    BUILD_RUN = "builds.build_run"
    DELTA_BUILD = "builds.delta_build"
    VERSION_CHECK = "builds.version_check"
    FLEET_TICK = "fleet.tick"
    ROLLOUT_LOOK = "fleet.rollout_look"


def enqueue(task: Task, **ids: int) -> None:
    """Send `task` with row ids once the surrounding transaction has committed."""
    signature = _registered(task)

    def send() -> None:
        try:
            signature.apply_async(kwargs=ids)
        except (OperationalError, OSError) as error:
            logger.warning(
                "queue is unreachable, the tick will do %s %s: %s", task.value, ids, error
            )

    transaction.on_commit(send)


def _registered(task: Task) -> CeleryTask:
    if task.value not in current_app.tasks:  # a web process has not imported any task module yet
        current_app.loader.import_default_modules()
    found: CeleryTask = current_app.tasks[task.value]
    return found
