"""The runner with a real child process that misbehaves on order; every fault ends on the row."""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection

from builds.compile_runner import slot
from builds.compile_runner.checks import check_run_one
from builds.compile_runner.protocol import Log
from builds.compile_runner.run import Follower, build_run_one
from builds.errors import CompileFailure, LeaseLostError
from builds.models import Bundle, BundleSection, ModelVersion, VersionCheck
from builds.services.jobs import build_lease_next
from builds.services.signing import keys_generate, repositories_init
from builds.services.upkeep import everything_due
from builds.services.version_checks import (
    check_accept,
    check_create,
    check_fail,
    check_lease_next,
)
from builds.states import VersionState
from builds.storage import blob_store
from compiler.contract.manifest import parse_manifest
from tests.conftest import FakeClock
from tests.factories.builds import make_files, make_job, make_model, make_target, make_version

pytestmark = pytest.mark.django_db
FAULT = CompileFailure("crashed", failure_code="build.app.crash", can_retry=True)


@pytest.fixture(autouse=True)
def child(settings: Any, state_dir: Path) -> Any:
    environment = settings.SPARSEFLEET
    before = environment.compile_command, environment.build_time_limit_s
    environment.compile_command = f"{sys.executable} -m tests.simulators.compiler_child"
    keys_generate()
    repositories_init()
    yield environment
    environment.compile_command, environment.build_time_limit_s = before


def submitted(script: bytes, model: Any = None) -> ModelVersion:
    version = make_version(model, state=VersionState.SUBMITTED)
    version.files = make_files(model__onnx=script)
    version.save()
    return version


def run(script: bytes) -> Any:
    job = make_job(submitted(script))
    build_run_one(job.pk)
    job.refresh_from_db()
    job.version.refresh_from_db()
    return job


def test_it_turns_a_submission_into_a_published_bundle(state_dir: Path) -> None:
    job = run(b"ok")
    assert (job.state, job.stage, job.progress, job.lease_owner) == ("ready", "ready", 1.0, "")
    assert job.version.state == "validated"
    bundle = Bundle.objects.get(job=job)
    manifest = parse_manifest(bundle.manifest_bytes)
    assert manifest.sha256 == bundle.manifest_sha256
    assert bundle.total_bytes == manifest.total_bytes
    for section in BundleSection.objects.filter(bundle=bundle):
        assert blob_store().size(section.sha256) == section.size_bytes
    events = list(job.transitions.values_list("event", flat=True))
    assert events == ["lease", "compile", "verify", "sign", "publish"]
    assert [line.text for line in job.log.all()] == ["stage import", "stage quantise"]
    assert blob_store().has(job.report["artifacts"]["ir"])
    assert list((state_dir / "work").iterdir()) == []


def test_it_does_nothing_for_a_job_that_is_done_or_absent() -> None:
    job = run(b"ok")
    assert build_run_one(job.pk) is None
    assert build_run_one(job.pk + 1) is None
    assert Bundle.objects.count() == 1


def test_it_gives_the_base_bundle_to_the_compiler() -> None:
    model, target = make_model(), make_target()
    first = make_job(submitted(b"ok", model), target)
    second = make_job(submitted(b"ok", model), target)
    assert build_run_one(second.pk) is None
    for job in (first, second):
        build_run_one(job.pk)
    second.refresh_from_db()
    assert second.base_bundle == Bundle.objects.get(job=first)
    plans = {row.sha256 for row in BundleSection.objects.filter(component="plan")}
    assert len(plans) == 2


@pytest.mark.parametrize(
    ("script", "state", "code"),
    [
        (b"user", "failed_user", "build.user.unsupported_op"),
        (b"app", "failed_app", "build.app.toolchain"),
        (b"retry", "queued", "build.app.toolchain"),
        (b"crash", "queued", "build.app.crash"),
        (b"kill", "queued", "build.app.killed"),
        (b"silent", "queued", "build.app.crash"),
        (b"flip", "queued", "build.app.output"),
        (b"other", "queued", "build.app.output"),
        (b"empty", "queued", "build.app.output"),
    ],
)
def test_it_says_what_went_wrong_and_publishes_nothing(
    script: bytes, state: str, code: str, state_dir: Path
) -> None:
    job = run(script)
    assert (job.state, job.error_code, job.lease_owner) == (state, code, "")
    assert job.error_message
    assert code in job.log.last().text
    assert Bundle.objects.count() == 0
    assert list((state_dir / "work").iterdir()) == []
    assert job.version.state == ("invalid" if state == "failed_user" else job.version.state)


def test_it_shows_the_compilers_error_on_version_and_build() -> None:
    job = run(b"user")
    for row in (job, job.version):
        assert row.error_message == "node n1: Foo has no kernel"
        assert row.error_hint == "supported: Add, Mul"


def test_it_survives_noise_on_the_childs_output() -> None:
    job = run(b"noise")
    assert job.state == "ready"
    assert max(len(line.text) for line in job.log.all()) == 2_000


def test_it_stops_a_compiler_that_takes_too_long(
    child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time begins when it hangs, however long the child takes to start."""
    flag = child.state_dir / "cache" / "hanging"
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() if flag.exists() else 0.0)
    monkeypatch.setattr("builds.compile_runner.process.time", clock)
    child.build_time_limit_s = 1.0
    job = run(b"hang")
    assert (job.state, job.error_code) == ("queued", "build.app.timeout")
    pid = int(flag.read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_it_says_that_the_compiler_cannot_be_started(child: Any) -> None:
    child.compile_command = "/does/not/exist"
    job = run(b"ok")
    assert (job.state, job.error_code) == ("queued", "build.app.start")
    assert "SPARSEFLEET_COMPILE_COMMAND" in job.error_hint


def test_it_signs_nothing_without_keys_and_succeeds_once_they_are_back(
    child: Any, clock: FakeClock
) -> None:
    keys, hidden = child.key_path, child.state_dir / "hidden"
    keys.rename(hidden)
    job = run(b"ok")
    assert (job.state, job.error_code) == ("queued", "build.app.signing_keys")
    assert Bundle.objects.count() == 0
    hidden.rename(keys)
    type(job).objects.filter(pk=job.pk).update(not_before=None)
    build_run_one(job.pk)
    job.refresh_from_db()
    assert (job.state, job.error_code, job.attempt) == ("ready", "", 2)


def test_it_reports_a_blob_that_is_gone() -> None:
    version = submitted(b"ok")
    blob_store().path(version.files[0]["sha256"]).unlink()
    job = make_job(version)
    build_run_one(job.pk)
    job.refresh_from_db()
    assert (job.state, job.error_code) == ("failed_app", "build.app.not_found")


def test_it_does_everything_by_the_tick_when_every_message_is_lost(clock: FakeClock) -> None:
    """The queue of the tests has no consumer: no message ever arrives."""
    model, target = make_model(), make_target()
    jobs = [make_job(submitted(b"ok", model), target) for _ in range(3)]
    for _ in range(12):
        due = everything_due(clock=clock)
        if due.build_id is not None:
            build_run_one(due.build_id)
        clock.advance(16)
    states = {type(job).objects.get(pk=job.pk).state for job in jobs}
    assert states == {"ready"}
    assert Bundle.objects.count() == 3


def test_it_compiles_on_while_the_database_is_busy(clock: FakeClock) -> None:
    job = make_job(submitted(b"ok"))
    leased = build_lease_next(owner="w1", job_id=job.pk, clock=clock)
    assert leased is not None
    follower = Follower(leased, "w1")
    refusals = ["database is locked", "the server closed the connection"]

    def busy(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("UPDATE") and refusals:
            raise OperationalError(refusals.pop())
        return execute(sql, *rest)

    with connection.execute_wrapper(busy):
        follower.follow([[Log("info", "a")], [Log("info", "b")], [Log("info", "c")], []])
    assert [line.text for line in job.log.all()] == ["a", "b", "c"]


def checked(script: bytes) -> tuple[ModelVersion, VersionCheck]:
    version = submitted(script)
    check = check_create(version=version)
    assert check_run_one(check.pk) == check
    version.refresh_from_db()
    return version, check


@pytest.mark.parametrize(
    ("script", "state", "code", "is_waiting"),
    [
        (b"ok", "validated", "", False),
        (b"user", "invalid", "build.user.unsupported_op", False),
        (b"retry", "submitted", "", True),
        (b"app", "submitted", "build.app.toolchain", False),
    ],
)
def test_it_looks_at_a_version_that_no_target_is_active_for(
    script: bytes, state: str, code: str, is_waiting: bool
) -> None:
    version, check = checked(script)
    assert (version.state, version.error_code) == (state, code)
    assert VersionCheck.objects.filter(pk=check.pk).exists() is is_waiting
    assert check_run_one(check.pk) is None


def test_it_looks_again_after_a_fault_of_ours_and_after_a_silent_worker(clock: FakeClock) -> None:
    version, check = checked(b"retry")
    clock.at = datetime.now(UTC)  # the run above was told the time by this machine
    clock.advance(6)
    leased = check_lease_next(owner="w1", clock=clock)
    assert leased == check
    assert check_lease_next(owner="w2", clock=clock) is None
    clock.advance(121)
    again = check_lease_next(owner="w2", clock=clock)
    assert again is not None
    assert again.attempt == 3
    with pytest.raises(LeaseLostError):
        check_accept(check=leased, owner="w1")
    check_fail(check=again, owner="w2", failure=FAULT, clock=clock)
    version.refresh_from_db()
    assert (version.state, version.error_code) == ("submitted", "build.app.crash")
    assert not VersionCheck.objects.exists()


def test_it_looks_by_the_tick_when_messages_are_lost(clock: FakeClock) -> None:
    check = check_create(version=submitted(b"ok"))
    assert everything_due(clock=clock).check_id is None
    clock.advance(16)
    assert everything_due(clock=clock).check_id == check.pk


def test_it_runs_one_heavy_child_at_a_time_and_rings_for_the_next(clock: FakeClock) -> None:
    first, second = make_job(submitted(b"ok")), make_job(submitted(b"ok"))
    with slot._slot:
        assert slot.build_in_slot(first.pk) is False
    assert slot.build_in_slot(first.pk) is True
    for job in (first, second):
        job.refresh_from_db()
    assert (first.state, second.state) == ("ready", "queued")
    assert second.rung_at is not None
