"""What the tick of this app does: everything that a lost message or a dead worker left undone."""

import logging
from dataclasses import dataclass

from builds.common.clock import Clock, SystemClock
from builds.common.idempotency import keys_forget
from builds.errors import SigningKeysError
from builds.services.delta_queue import deltas_admit
from builds.services.deltas import delta_leases_expire, deltas_ring
from builds.services.leases import jobs_ring, leases_expire
from builds.services.signing import metadata_refresh
from builds.services.version_checks import checks_ring

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Overdue:
    """Work that the queue seems to have lost and the caller should do itself; None when none."""

    build_id: int | None
    delta_id: int | None
    check_id: int | None


def everything_due(*, clock: Clock | None = None) -> Overdue:
    """Free dead leases, tell the queue what waits, renew metadata, forget old keys."""
    clock = clock or SystemClock()
    freed = leases_expire(clock=clock) + delta_leases_expire(clock=clock)
    if freed:
        logger.warning("%d leases ran out; their jobs wait for another worker", freed)
    try:
        renewed = metadata_refresh(clock=clock)
    except SigningKeysError as error:
        logger.error("update metadata cannot be renewed: %s", error)  # noqa: TRY400 -- expected
    else:
        if renewed:
            logger.info("signed again: %s", ", ".join(renewed))
    keys_forget()
    deltas_admit()
    return Overdue(
        build_id=_first(jobs_ring(clock=clock)),
        delta_id=_first(deltas_ring(clock=clock)),
        check_id=_first(checks_ring(clock=clock)),
    )


def _first(ids: list[int]) -> int | None:
    return ids[0] if ids else None
