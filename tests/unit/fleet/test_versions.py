"""The fleet's version number: counted up once, last, and in the same commit."""

import threading

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from fleet.models import FleetVersion
from fleet.services.versions import _scope, fleet_atomic, fleet_version_bump
from tests.factories.fleet import MANAGER, SimulatedFleet

pytestmark = pytest.mark.django_db


def number() -> int:
    row = FleetVersion.objects.first()
    return row.number if row else 0


def test_it_counts_up_once_for_all_that_happens_in_one_transaction():
    with fleet_atomic():
        fleet_version_bump()
        with fleet_atomic():
            fleet_version_bump()
        fleet_version_bump()
        assert number() == 0
    assert number() == 1
    fleet_version_bump()
    assert number() == 2


@fleet_atomic()
def change_and_fail() -> None:
    fleet_version_bump()
    raise ZeroDivisionError


def test_it_does_not_count_what_was_rolled_back():
    with pytest.raises(ZeroDivisionError):
        change_and_fail()
    assert number() == 0
    with fleet_atomic():
        pass
    assert number() == 0


def test_it_keeps_threads_apart():
    seen = []
    with fleet_atomic():
        fleet_version_bump()
        thread = threading.Thread(target=lambda: seen.append((_scope.depth, _scope.is_changed)))
        thread.start()
        thread.join()
    assert seen == [(0, False)]


def test_it_locks_the_row_last(monkeypatch):
    from fleet.services.rollouts import rollout_halt

    fleet = SimulatedFleet(per_target=2)
    fleet.release()
    rollout = fleet.rollout()
    with CaptureQueriesContext(
        connection,
    ) as queries:
        rollout_halt(actor=MANAGER, rollout_id=rollout.pk, clock=fleet.clock)
    writes = [
        query["sql"]
        for query in queries.captured_queries
        if query["sql"].startswith(("UPDATE", "INSERT", "RELEASE"))
    ]
    for place, sql in enumerate(writes):
        if "fleet_fleetversion" in sql:
            assert writes[place + 1].startswith("RELEASE")
