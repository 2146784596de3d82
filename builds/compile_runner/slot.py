"""One heavy child per worker process, and who is next.

A worker with several threads must keep some free for ticks, and builds of one version share stage
results when they run one after the other. A message that finds the slot taken is dropped; whoever
leaves the slot rings for what waits.
"""

import threading
from collections.abc import Callable
from typing import Final

from builds.compile_runner.checks import check_run_one
from builds.compile_runner.deltas import delta_run_one
from builds.compile_runner.run import build_run_one
from builds.services.deltas import deltas_ring_next
from builds.services.leases import jobs_ring_next
from builds.services.version_checks import checks_ring_next

_slot: Final = threading.Lock()


def build_in_slot(job_id: int) -> bool:
    """Run a build unless this process is busy; return whether it was free."""
    return _in_slot(build_run_one, job_id)


def delta_in_slot(delta_id: int) -> bool:
    """Make a delta unless this process is busy; return whether it was free."""
    return _in_slot(delta_run_one, delta_id)


def check_in_slot(check_id: int) -> bool:
    """Look at a version unless this process is busy; return whether it was free."""
    return _in_slot(check_run_one, check_id)


def _in_slot(run: Callable[[int], object], row_id: int) -> bool:
    if not _slot.acquire(blocking=False):
        return False
    try:
        run(row_id)
    finally:
        _slot.release()
    checks_ring_next()
    jobs_ring_next()
    deltas_ring_next()
    return True
