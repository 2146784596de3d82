"""Celery tasks of this app: each says "look at rollout N" or "look at everything"."""

from celery import shared_task

from builds.common.enqueue import Task


@shared_task(name=Task.FLEET_TICK.value)
def fleet_tick() -> None:
    """Drive every rollout that may have something due."""
    from fleet.services.tick import fleet_tick as drive

    drive()


@shared_task(name=Task.ROLLOUT_LOOK.value)
def rollout_look(rollout_id: int) -> None:
    """Do what is due for one rollout now."""
    from fleet.services.tick import rollout_look as look

    look(rollout_id=rollout_id)
