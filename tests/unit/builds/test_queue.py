"""The doorbell: after commit, by name, and never a reason to fail."""

import contextlib
from typing import Any

import pytest
from celery import current_app
from celery.exceptions import NotRegistered
from django.db import transaction
from kombu.exceptions import OperationalError

from builds.common.enqueue import Task, enqueue
from builds.models import Model
from builds.services.jobs import jobs_create
from tests.factories.builds import make_target, make_version

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module", autouse=True)
def _tasks() -> None:
    current_app.loader.import_default_modules()


def received() -> list[dict[str, int]]:
    """Take all messages out of the in-memory queue and return what they say."""
    found = []
    with current_app.connection_for_read() as link, link.SimpleQueue("celery") as queue:
        while len(queue):
            message = queue.get(block=False)
            found.append(message.payload[1])
            message.ack()
    return found


def test_it_rings_only_after_commit(django_capture_on_commit_callbacks: Any) -> None:
    received()
    with django_capture_on_commit_callbacks(execute=True) as callbacks:
        [job] = jobs_create(version=make_version(), targets=[make_target()])
        assert received() == []
        assert jobs_create(version=job.version, targets=[job.target]) == []
    assert len(callbacks) == 1
    assert received() == [{"job_id": job.pk}]


def test_it_does_not_ring_for_what_was_rolled_back(django_capture_on_commit_callbacks: Any) -> None:
    received()
    capture = django_capture_on_commit_callbacks(execute=True)
    with capture, contextlib.suppress(RuntimeError), transaction.atomic():
        jobs_create(version=make_version(), targets=[make_target()])
        raise RuntimeError("changed my mind")
    assert received() == []
    assert not Model.objects.exists()


def test_it_carries_on_when_the_broker_is_down(
    django_capture_on_commit_callbacks: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(**_options: Any) -> None:
        raise OperationalError("connection refused")

    monkeypatch.setattr(current_app.tasks[Task.BUILD_RUN.value], "apply_async", refuse)
    with django_capture_on_commit_callbacks(execute=True):
        jobs_create(version=make_version(), targets=[make_target()])
    assert "the tick will do" in caplog.text


def test_it_refuses_an_unknown_task_at_once() -> None:
    class Other:
        value = "builds.no_such_task"

    with pytest.raises(NotRegistered):
        enqueue(Other(), job_id=1)  # type: ignore[arg-type]
