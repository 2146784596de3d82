"""Races between real connections; on PostgreSQL, because in-memory SQLite has only one."""

import io
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
from django.db import connection

from builds.common.audit import audit, first_broken_line
from builds.common.auth import SYSTEM
from builds.errors import VersionConflictError
from builds.models import AuditEvent, BuildJob, MetadataFile, ModelVersion
from builds.pipeline import FileRef, Submission
from builds.services.jobs import build_lease_next
from builds.services.signing import keys_generate, release_publish, repositories_init
from builds.services.versions import version_submit
from builds.storage import blob_store
from tests.factories.builds import (
    make_bundle,
    make_files,
    make_job,
    make_model,
    make_target,
    make_version,
)

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(
        "connection.vendor == 'sqlite'", reason="needs PostgreSQL: run by test_postgres.py"
    ),
]
ResultT = TypeVar("ResultT")
THREADS = 6


def together(*actions: Callable[[], ResultT]) -> list[ResultT | Exception]:
    """Run the actions at the same moment, each on its own connection; return results or errors."""
    gate = threading.Barrier(len(actions))
    results: list[ResultT | Exception] = [RuntimeError("never ran")] * len(actions)

    def run(index: int) -> None:
        gate.wait()
        try:
            results[index] = actions[index]()
        except Exception as error:  # noqa: BLE001 -- the test looks at it
            results[index] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_it_leases_each_job_to_one_worker() -> None:
    for _ in range(3):
        make_job()
    leased = together(
        *[lambda n=n: build_lease_next(owner=f"w{n}") for n in range(THREADS)]  # type: ignore[misc]
    )
    jobs = [job for job in leased if isinstance(job, BuildJob)]
    assert sorted(job.pk for job in jobs) == sorted(BuildJob.objects.values_list("pk", flat=True))
    assert len(leased) - len(jobs) == sum(job is None for job in leased) == 3


def test_it_never_leases_a_newer_version_beside_an_older_one() -> None:
    model, target = make_model(), make_target()
    jobs = [make_job(make_version(model), target) for _ in range(THREADS)]
    leased = together(
        *[lambda n=n: build_lease_next(owner=f"w{n}") for n in range(THREADS)]  # type: ignore[misc]
    )
    assert [job.pk for job in leased if isinstance(job, BuildJob)] == [jobs[0].pk]


def test_it_publishes_every_release_of_many_workers() -> None:
    keys_generate()
    repositories_init()
    bundles = [make_bundle() for _ in range(THREADS)]
    results = together(
        *[lambda b=b: release_publish(bundles=[b]) for b in bundles]  # type: ignore[misc]
    )
    assert results == [1] * THREADS
    timestamp = MetadataFile.objects.get(name="timestamp.json")
    assert timestamp.version == 1 + THREADS
    assert MetadataFile.objects.filter(role="snapshot").count() == 1 + THREADS


def test_it_takes_a_repeated_submission_in_once() -> None:
    make_model("doc-reader")
    files = tuple(
        FileRef(str(row["name"]), str(row["sha256"]), int(str(row["size_bytes"])))
        for row in make_files()
    )
    same = Submission(version="1.0.0", files=files)
    other = Submission(version="1.0.0", files=files, notes="other")

    def submit(submission: Submission) -> bool:
        return version_submit(actor=SYSTEM, model_name="doc-reader", submission=submission)[1]

    results = together(*[lambda: submit(same)] * (THREADS - 1), lambda: submit(other))
    assert ModelVersion.objects.count() == 1
    assert sum(result is True for result in results) == 1
    refused = [result for result in results if isinstance(result, Exception)]
    assert all(isinstance(error, VersionConflictError) for error in refused)
    assert len(refused) in {1, THREADS - 1}


def test_it_numbers_versions_without_gaps() -> None:
    make_model("doc-reader")
    files = tuple(
        FileRef(str(row["name"]), str(row["sha256"]), int(str(row["size_bytes"])))
        for row in make_files()
    )

    def submit(number: int) -> int:
        submission = Submission(version=f"{number}.0.0", files=files)
        version, _ = version_submit(actor=SYSTEM, model_name="doc-reader", submission=submission)
        return version.release_seq

    results = together(*[lambda n=n: submit(n) for n in range(THREADS)])  # type: ignore[misc]
    assert sorted(str(result) for result in results) == [str(n) for n in range(1, THREADS + 1)]


def test_it_keeps_one_audit_chain() -> None:
    model = make_model()
    together(
        *[lambda n=n: audit(actor=f"a{n}", action="x", obj=model) for n in range(THREADS)]  # type: ignore[misc]
    )
    assert AuditEvent.objects.count() == THREADS
    assert first_broken_line(AuditEvent.objects.order_by("pk")) is None


def test_it_stores_one_upload_that_comes_twice() -> None:
    data = b"x" * 500_000
    import hashlib

    from builds.services.blobs import blob_put

    digest = hashlib.sha256(data).hexdigest()
    results = together(
        *[lambda: blob_put(actor=SYSTEM, sha256=digest, stream=io.BytesIO(data))] * THREADS
    )
    assert sum(isinstance(result, tuple) and result[1] for result in results) == 1
    assert blob_store().size(digest) == len(data)
