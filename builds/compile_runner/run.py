"""Run one build job from lease to end."""

import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from django.conf import settings
from django.db import OperationalError
from django.utils import timezone

from builds.common.errors import ApplicationError
from builds.compile_runner.folders import (
    cache_folder,
    lay_out_bundle,
    lay_out_submission,
    run_folder,
)
from builds.compile_runner.output import output_read
from builds.compile_runner.process import listen
from builds.compile_runner.protocol import Event, Failure, Log, Progress
from builds.errors import BuildOutputError, CompileFailure, LeaseLostError
from builds.models import BuildJob
from builds.services.bundles import build_finish
from builds.services.jobs import (
    LogEntry,
    build_advance,
    build_fail,
    build_heartbeat,
    build_lease_next,
    log_append,
    new_owner,
    version_read,
)
from builds.states import BuildEvent

logger = logging.getLogger(__name__)

MAX_LOG_LINES: Final = 5_000
ANSWERS: Final = "answers"
"""What a report says about the scores of a version; the next version is compared with them."""
READING_STAGES: Final = frozenset({"leased", "compile", "import", "raise"})
HEARTBEATS_PER_LEASE: Final = 5


def build_run_one(job_id: int | None = None) -> BuildJob | None:
    """Lease a job (this one, or any) and run it to an end; None when there was nothing to do.

    Never raises for a failed build: the failure is on the row.
    """
    owner = new_owner(socket.gethostname(), os.getpid())
    job = build_lease_next(owner=owner, job_id=job_id)
    if job is None:
        return None
    try:
        _run(job, owner)
    except LeaseLostError as error:
        logger.warning("%s; its work is dropped", error)
    except CompileFailure as error:
        _fail(job, owner, error)
    except (ApplicationError, OSError) as error:
        _fail(job, owner, as_failure(error))
    return job


def compile_command() -> list[str]:
    """Return the command of the child."""
    if settings.SPARSEFLEET.compile_command:
        return shlex.split(settings.SPARSEFLEET.compile_command)
    return [sys.executable, "-m", "builds.compile_runner.child"]


def _run(job: BuildJob, owner: str) -> None:
    with run_folder(f"build-{job.pk}") as folder:
        request = _request(job, folder)
        build_advance(job=job, owner=owner, event=BuildEvent.COMPILE, stage="compile")
        follower = Follower(job, owner)
        follower.follow(
            listen(
                compile_command(),
                job=json.dumps(request).encode(),
                folder=settings.BASE_DIR,
                time_limit_s=settings.SPARSEFLEET.build_time_limit_s,
            )
        )
        build_advance(job=job, owner=owner, event=BuildEvent.VERIFY, stage="verify")
        output = output_read(job, folder / "out")
        build_finish(job=job, owner=owner, output=output)


def _request(job: BuildJob, folder: Path) -> dict[str, object]:
    version = job.version
    base = job.base_bundle
    return {
        "do": "compile",
        "submission": str(lay_out_submission(version, folder / "submission")),
        "base": str(lay_out_bundle(base, folder / "base")) if base else "",
        "base_report": {ANSWERS: base.job.report.get(ANSWERS)} if base else {},
        "out": str(folder / "out"),
        "cache": str(cache_folder()),
        "target": job.target.name,
        "model": version.model.name,
        "version": version.version,
        "release_seq": version.release_seq,
        "security_epoch": version.security_epoch,
        "constant_time": version.constant_time,
    }


@dataclass(slots=True)
class Follower:
    """Turns a child's events into heartbeats, progress and log lines of a job."""

    job: BuildJob
    owner: str
    now: Callable[[], float] = time.monotonic
    stage: str = "compile"
    progress: float = 0.0
    lines: int = 0
    is_read: bool = False
    unsaved: list[LogEntry] = field(default_factory=list)
    beat_at: float = field(default=float("-inf"))

    def follow(self, batches: Iterable[Sequence[Event]]) -> None:
        """Listen until the child ends.

        Raises:
            LeaseLostError: Somebody else has the job; the child is stopped by leaving.
            CompileFailure: As `listen` says.
        """
        for batch in batches:
            self.unsaved += [entry for event in batch for entry in self._take(event)]
            patience = settings.SPARSEFLEET.build_lease_s / HEARTBEATS_PER_LEASE
            if batch or self.unsaved or self.now() - self.beat_at > patience:
                self._beat()

    def _take(self, event: Event) -> list[LogEntry]:
        if isinstance(event, Progress):
            changed = event.stage != self.stage
            self.stage, self.progress = event.stage, event.fraction
            return self._lines("info", f"stage {event.stage}") if changed else []
        if isinstance(event, Failure):
            return self._lines("error", f"{event.code}: {event.message}")
        assert isinstance(event, Log)
        return self._lines(event.level, event.text)

    def _lines(self, level: str, text: str) -> list[LogEntry]:
        self.lines += 1
        if self.lines > MAX_LOG_LINES:
            return []
        return [LogEntry(timezone.now(), level, text)]

    def _beat(self) -> None:
        try:
            build_heartbeat(
                job=self.job,
                owner=self.owner,
                stage=self.stage,
                progress=self.progress,
                lines=self.unsaved,
            )
        except OperationalError as error:  # busy or away for a moment: the lease outlives that
            logger.warning("%s: no heartbeat now: %s", self.job, error)
            return
        self.unsaved = []
        self.beat_at = self.now()
        if not self.is_read and self.stage not in READING_STAGES:
            self.is_read = True
            version_read(job=self.job)


def _fail(job: BuildJob, owner: str, failure: CompileFailure) -> None:
    try:
        state = build_fail(job=job, owner=owner, failure=failure)
    except LeaseLostError as error:
        logger.warning("%s; its failure is dropped", error)
        return
    entry = LogEntry(timezone.now(), "error", f"{failure.failure_code}: {failure} -> {state.value}")
    log_append(job=job, lines=[entry])


def as_failure(error: ApplicationError | OSError) -> CompileFailure:
    """Return an error of this platform, or of its disk, as the failure of a run."""
    if isinstance(error, OSError):
        return CompileFailure(
            f"this worker's disk: {error}", failure_code="build.app.disk", can_retry=True
        )
    can_retry = error.retryable or isinstance(error, BuildOutputError)
    code = f"build.app.{error.code.rpartition('.')[2]}"
    return CompileFailure(str(error), failure_code=code, hint=error.hint, can_retry=can_retry)
