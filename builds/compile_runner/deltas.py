"""Run one delta job from lease to end."""

import json
import logging
import os
import socket
import time
from pathlib import Path

from django.conf import settings

from builds.common.errors import ApplicationError
from builds.compile_runner.folders import lay_out_bundle, run_folder
from builds.compile_runner.process import listen
from builds.compile_runner.protocol import DELTA_NAME, REPORT_NAME, Log
from builds.compile_runner.run import HEARTBEATS_PER_LEASE, as_failure, compile_command
from builds.errors import BuildOutputError, CompileFailure, LeaseLostError
from builds.models import Delta
from builds.services.deltas import (
    DeltaOutput,
    delta_fail,
    delta_finish,
    delta_heartbeat,
    delta_lease_next,
)
from builds.services.jobs import new_owner

logger = logging.getLogger(__name__)


def delta_run_one(delta_id: int | None = None) -> Delta | None:
    """Lease a delta (this one, or any) and make it; None when there was nothing to do.

    Never raises for a delta that fails: the failure is on the row.
    """
    owner = new_owner(socket.gethostname(), os.getpid())
    delta = delta_lease_next(owner=owner, delta_id=delta_id)
    if delta is None:
        return None
    try:
        _run(delta, owner)
    except LeaseLostError as error:
        logger.warning("%s; its work is dropped", error)
    except CompileFailure as error:
        delta_fail(delta=delta, owner=owner, failure=error)
    except (ApplicationError, OSError) as error:
        delta_fail(delta=delta, owner=owner, failure=as_failure(error))
    return delta


def _run(delta: Delta, owner: str) -> None:
    with run_folder(f"delta-{delta.pk}") as folder:
        request = {
            "do": "delta",
            "base": str(lay_out_bundle(delta.base, folder / "base")),
            "new": str(lay_out_bundle(delta.new, folder / "new")),
            "out": str(folder / "out"),
        }
        batches = listen(
            compile_command(),
            job=json.dumps(request).encode(),
            folder=settings.BASE_DIR,
            time_limit_s=settings.SPARSEFLEET.build_time_limit_s,
        )
        beat_at = time.monotonic()
        for batch in batches:
            for line in batch:
                if isinstance(line, Log):
                    logger.info("delta %d: %s", delta.pk, line.text)
            if (
                time.monotonic() - beat_at
                > settings.SPARSEFLEET.build_lease_s / HEARTBEATS_PER_LEASE
            ):
                delta_heartbeat(delta=delta, owner=owner)
                beat_at = time.monotonic()
        delta_finish(delta=delta, owner=owner, output=_read(folder / "out"))


def _read(folder: Path) -> DeltaOutput:
    try:
        report = json.loads((folder / REPORT_NAME).read_bytes())
        return DeltaOutput(
            path=folder / DELTA_NAME,
            full_bytes=int(report.pop("full_bytes")),
            bsdiff4_bytes=report.pop("bsdiff4_bytes"),
            report=report,
        )
    except (OSError, ValueError, KeyError) as error:
        raise BuildOutputError(f"the codec's output cannot be read: {error!r}") from error
