"""Leases, failures and retries of build jobs, against a clock that we move."""

import pytest

from builds.common.auth import Actor
from builds.common.errors import ForbiddenError, IllegalTransitionError
from builds.errors import CompileFailure, LeaseLostError
from builds.models import AuditEvent, BuildJob, BuildTransition
from builds.services.jobs import (
    LogEntry,
    backoff,
    build_advance,
    build_fail,
    build_heartbeat,
    build_lease_next,
    build_retry,
)
from builds.services.leases import jobs_ring, leases_expire
from builds.services.targets import build_request, target_activate
from builds.states import BuildEvent, BuildState, VersionState
from tests.conftest import FakeClock
from tests.factories.builds import (
    make_bundle,
    make_job,
    make_model,
    make_target,
    make_version,
)

pytestmark = pytest.mark.django_db
USER = CompileFailure(
    "node n1: Foo", failure_code="build.user.unsupported_op", hint="use Bar", can_retry=False
)
APP = CompileFailure("cc crashed", failure_code="build.app.toolchain", can_retry=True)
FATAL = CompileFailure("bits differ", failure_code="build.app.self_test", can_retry=False)


def lease(clock: FakeClock, owner: str = "w1", job: BuildJob | None = None) -> BuildJob:
    leased = build_lease_next(owner=owner, job_id=job.pk if job else None, clock=clock)
    assert leased is not None
    return leased


def test_it_leases_the_oldest_job_once(clock: FakeClock) -> None:
    first, second = make_job(), make_job()
    assert lease(clock, "w1").pk == first.pk
    assert lease(clock, "w2").pk == second.pk
    assert build_lease_next(owner="w3", clock=clock) is None
    first.refresh_from_db()
    assert (first.state, first.lease_owner, first.attempt) == ("leased", "w1", 1)
    [row] = BuildTransition.objects.filter(subject=first)
    assert (row.old, row.event, row.new, row.actor) == ("queued", "lease", "leased", "w1")


def test_it_makes_a_job_wait_for_older_versions_of_its_model(clock: FakeClock) -> None:
    model, target = make_model(), make_target()
    older = make_job(make_version(model), target)
    newer = make_job(make_version(model), target)
    other_target = make_job(newer.version, make_target("x86-64-v1"))
    assert build_lease_next(owner="w", job_id=newer.pk, clock=clock) is None
    assert lease(clock, job=other_target).pk == other_target.pk
    job = lease(clock, job=older)
    build_fail(job=job, owner="w1", failure=FATAL, clock=clock)
    assert lease(clock, job=newer).base_bundle is None


def test_it_takes_the_base_version_or_the_newest_older_bundle_as_base(clock: FakeClock) -> None:
    model, target = make_model(), make_target()
    first, second = (
        make_bundle(make_version(model), target),
        make_bundle(make_version(model), target),
    )
    implied = make_job(make_version(model), target)
    assert lease(clock, job=implied).base_bundle == second
    build_fail(job=lease_again(implied), owner="w1", failure=FATAL, clock=clock)
    named = make_job(make_version(model, base_version=first.version), target)
    assert lease(clock, job=named).base_bundle == first


def lease_again(job: BuildJob) -> BuildJob:
    job.refresh_from_db()
    return job


def test_it_keeps_the_base_of_the_first_run(clock: FakeClock) -> None:
    model, target = make_model(), make_target()
    job = make_job(make_version(model), target)
    leased = lease(clock, job=job)
    build_fail(job=leased, owner="w1", failure=APP, clock=clock)
    make_bundle(make_version(model), target)
    clock.advance(3600)
    assert lease(clock, job=job).base_bundle is None


def test_it_ends_a_submission_that_is_at_fault_with_all_its_jobs(clock: FakeClock) -> None:
    version = make_version(state=VersionState.SUBMITTED)
    first = make_job(version, make_target("x86-64-v1"))
    second = make_job(version, make_target("x86-64-v3"))
    assert build_fail(job=lease(clock), owner="w1", failure=USER, clock=clock) == "failed_user"
    for row in (first, second, version):
        row.refresh_from_db()
        assert (row.error_code, row.error_message, row.error_hint) == (
            "build.user.unsupported_op",
            "node n1: Foo",
            "use Bar",
        )
    assert (first.state, second.state, version.state) == ("failed_user", "failed_user", "invalid")
    actions = set(AuditEvent.objects.values_list("action", flat=True))
    assert {"version.refuse", "build.fail"} <= actions


def test_it_tries_our_faults_again_later_and_later(clock: FakeClock) -> None:
    job = make_job()
    for attempt in (1, 2):
        state = build_fail(job=lease(clock), owner="w1", failure=APP, clock=clock)
        assert state is BuildState.QUEUED
        assert build_lease_next(owner="w", clock=clock) is None
        clock.advance(backoff(attempt).total_seconds())
    assert build_fail(job=lease(clock), owner="w1", failure=APP, clock=clock) == "failed_app"
    job.refresh_from_db()
    assert (job.attempt, job.error_code, job.lease_owner) == (3, "build.app.toolchain", "")
    assert backoff(1) < backoff(2) < backoff(3)
    job.version.refresh_from_db()
    assert job.version.state == "validated"


def test_it_does_not_repeat_what_cannot_succeed(clock: FakeClock) -> None:
    make_job()
    assert build_fail(job=lease(clock), owner="w1", failure=FATAL, clock=clock) == "failed_app"


def test_it_gives_a_silent_workers_job_to_another(clock: FakeClock) -> None:
    job = make_job()
    lost = lease(clock, "w1")
    build_advance(job=lost, owner="w1", event=BuildEvent.COMPILE, stage="compile")
    clock.advance(119)
    build_heartbeat(job=lost, owner="w1", stage="plan", progress=0.4, clock=clock)
    clock.advance(119)
    assert leases_expire(clock=clock) == 0
    clock.advance(2)
    assert leases_expire(clock=clock) == 1
    assert leases_expire(clock=clock) == 0
    again = lease(clock, "w2")
    assert (again.pk, again.attempt) == (job.pk, 2)
    build_advance(job=again, owner="w2", event=BuildEvent.COMPILE, stage="compile")
    for action in (
        lambda: build_heartbeat(job=lost, owner="w1", stage="x", progress=1.0, clock=clock),
        lambda: build_advance(job=lost, owner="w1", event=BuildEvent.VERIFY, stage="x"),
        lambda: build_fail(job=lost, owner="w1", failure=USER, clock=clock),
    ):
        with pytest.raises(LeaseLostError):
            action()
    job.refresh_from_db()
    assert (job.state, job.lease_owner) == ("compiling", "w2")


def test_it_gives_a_job_up_that_kills_every_worker(clock: FakeClock) -> None:
    job = make_job()
    for _ in range(3):
        lease(clock)
        clock.advance(121)
        leases_expire(clock=clock)
    job.refresh_from_db()
    assert (job.state, job.error_code) == ("failed_app", "build.app.worker_lost")
    assert build_lease_next(owner="w", clock=clock) is None


def test_it_keeps_progress_and_log_lines(clock: FakeClock) -> None:
    job = lease(clock, job=make_job())
    lines = [LogEntry(clock.now(), "info", "a"), LogEntry(clock.now(), "error", "b" * 5_000)]
    build_heartbeat(job=job, owner="w1", stage="plan", progress=0.5, lines=lines, clock=clock)
    job.refresh_from_db()
    assert (job.stage, job.progress) == ("plan", 0.5)
    assert [(line.level, len(line.text)) for line in job.log.all()] == [
        ("info", 1),
        ("error", 2_000),
    ]


def test_it_queues_a_failed_build_again(
    clock: FakeClock, release_manager: Actor, ci_bot: Actor, stranger: Actor
) -> None:
    job = make_job(make_version(state=VersionState.SUBMITTED))
    with pytest.raises(IllegalTransitionError):
        build_retry(actor=ci_bot, job=job)
    build_fail(job=lease(clock), owner="w1", failure=USER, clock=clock)
    job.refresh_from_db()
    with pytest.raises(ForbiddenError):
        build_retry(actor=stranger, job=job)
    build_retry(actor=release_manager, job=job)
    job.refresh_from_db()
    job.version.refresh_from_db()
    assert (job.state, job.attempt, job.error_code) == ("queued", 0, "")
    assert (job.version.state, job.version.error_code) == ("submitted", "")


def test_it_rings_once_and_notices_that_nobody_hears(clock: FakeClock) -> None:
    job = make_job()
    assert jobs_ring(clock=clock) == []
    assert jobs_ring(clock=clock) == []
    clock.advance(16)
    assert jobs_ring(clock=clock) == [job.pk]
    busy = make_job()
    lease(clock, job=busy)
    clock.advance(16)
    assert jobs_ring(clock=clock) == []


def test_it_builds_recent_versions_for_a_target_that_becomes_active(release_manager: Actor) -> None:
    model = make_model()
    versions = [make_version(model) for _ in range(7)]
    make_version(model, state=VersionState.INVALID)
    target, jobs = target_activate(name="x86-64-v2", actor=release_manager)
    assert target.active
    assert [job.version for job in jobs] == versions[2:]
    assert target_activate(name="x86-64-v2") == (target, [])
    assert build_request(version=versions[0], target=target).state == "queued"
    assert build_request(version=versions[6], target=target) in jobs


def test_it_lets_only_release_managers_activate_targets(ci_bot: Actor, stranger: Actor) -> None:
    for actor in (ci_bot, stranger):
        with pytest.raises(ForbiddenError):
            target_activate(name="x86-64-v2", actor=actor)
