"""Celery tasks of this app: each says "look at row N" or "look at everything"."""

from celery import shared_task

from builds.common.enqueue import Task


@shared_task(name=Task.BUILD_RUN.value)
def build_run(job_id: int) -> None:
    """Run one build job, if nobody else does."""
    from builds.compile_runner import build_run_one

    build_run_one(job_id)
