"""Run one first look at a version from lease to end."""

import json
import logging
import os
import socket

from django.conf import settings

from builds.common.errors import ApplicationError
from builds.compile_runner.folders import lay_out_submission, run_folder
from builds.compile_runner.process import listen
from builds.compile_runner.run import as_failure, compile_command
from builds.errors import CompileFailure, LeaseLostError
from builds.models import VersionCheck
from builds.services.jobs import new_owner
from builds.services.version_checks import (
    check_accept,
    check_fail,
    check_heartbeat,
    check_lease_next,
)

logger = logging.getLogger(__name__)


def check_run_one(check_id: int | None = None) -> VersionCheck | None:
    """Lease a check (this one, or any) and do it; None when there was nothing to do."""
    owner = new_owner(socket.gethostname(), os.getpid())
    check = check_lease_next(owner=owner, check_id=check_id)
    if check is None:
        return None
    try:
        _run(check, owner)
    except LeaseLostError as error:
        logger.warning("%s; its work is dropped", error)
    except CompileFailure as error:
        check_fail(check=check, owner=owner, failure=error)
    except (ApplicationError, OSError) as error:
        check_fail(check=check, owner=owner, failure=as_failure(error))
    return check


def _run(check: VersionCheck, owner: str) -> None:
    with run_folder(f"check-{check.pk}") as folder:
        request = {
            "do": "check",
            "submission": str(lay_out_submission(check.version, folder / "submission")),
            "constant_time": check.version.constant_time,
        }
        batches = listen(
            compile_command(),
            job=json.dumps(request).encode(),
            folder=settings.BASE_DIR,
            time_limit_s=settings.SPARSEFLEET.build_time_limit_s,
        )
        for batch in batches:
            if batch:
                check_heartbeat(check=check, owner=owner)
        check_accept(check=check, owner=owner)
