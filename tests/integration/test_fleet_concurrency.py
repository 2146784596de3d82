"""Many workers and devices at once on a real database server: no deadlock, nothing done twice."""

import threading
from collections.abc import Callable

import pytest
from django.db import connection, connections

from compiler.contract.protocol import parse_poll_answer
from fleet.edge.snapshot import snapshot_build
from fleet.models import FleetVersion, Rollout, Update
from fleet.services.replays import rollout_replay
from fleet.services.rollouts import rollout_halt
from fleet.services.running import Beat, heartbeats_store
from fleet.services.tick import fleet_tick
from fleet.states import OPEN_STATES, RolloutState
from tests.factories.fleet import MANAGER, SimulatedFleet

pytestmark = pytest.mark.django_db(transaction=True)
ROUNDS = 12


class Crew:
    """Threads with database connections of their own; the first error is raised at the end."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 -- raised by `finish`
                self.errors.append(error)
            finally:
                connections.close_all()

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def finish(self) -> None:
        for thread in self.threads:
            thread.join(timeout=600)
            assert not thread.is_alive(), "a thread waits for ever"
        if self.errors:
            raise self.errors[0]


@pytest.fixture(autouse=True)
def _needs_a_server() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("needs a database server; run by test_postgres.py")


def test_it_survives_ticks_reports_and_a_halt_at_the_same_time():
    fleet = SimulatedFleet(per_target=2)
    fleet.run(4)
    fleet.release()
    rollout = fleet.rollout(percents=(50, 100))
    crew = Crew()

    def tick() -> None:
        for _ in range(ROUNDS):
            fleet.clock.advance(0.4)
            fleet_tick(clock=fleet.clock)

    def devices(start: int) -> None:
        for _ in range(ROUNDS):
            for device in fleet.devices[start::2]:
                heartbeats_store(beats=[Beat(device.pk, fleet.clock.now(), device.running)])
                snapshot = snapshot_build()
                answer = snapshot.answers.get(device.pk, snapshot.idle)
                device.step(fleet, parse_poll_answer(answer.body))

    def halt() -> None:
        rollout_halt(actor=MANAGER, rollout_id=rollout.pk, clock=fleet.clock)

    for _ in range(3):
        crew.start(tick)
    for start in range(2):
        crew.start(lambda start=start: devices(start))
    crew.finish()

    assert Rollout.objects.get().state in (RolloutState.RUNNING, RolloutState.SUCCEEDED)
    assert rollout.looks.count() > 0
    assert all(replay.is_same for replay in rollout_replay(rollout_id=rollout.pk))

    if Rollout.objects.get().state == RolloutState.RUNNING:
        before = FleetVersion.objects.get().number
        crew = Crew()
        for work in (tick, lambda: devices(0), halt, lambda: devices(1)):
            crew.start(work)
        crew.finish()
        assert FleetVersion.objects.get().number > before
        assert Rollout.objects.get().state == RolloutState.STOPPED
        assert snapshot_build().live == {}
        late = Update.objects.filter(state__in=[state.value for state in OPEN_STATES])
        assert all(update.activated_at is not None for update in late)
