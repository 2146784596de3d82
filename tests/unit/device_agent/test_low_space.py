"""Where space is short: what is given up, who answers meanwhile, and what the server is told."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from compiler.contract.protocol import OfferKind, ReportFact, UpdateState
from device_agent.errors import NoBundleError
from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle
from tests.simulators.device import Device, toy_ports
from tests.simulators.disk import CountingDisk
from tests.simulators.release_server import ReleaseServer

CODES = 400_000
SPEC = ToySpec(codes=CODES)
LITTLE = 800_000
"""Room for the journal and a delta, not for three sections of 400 kB."""
Start = Callable[..., Device]


class Ground:
    """A device with versions 1 and 2 on it, and the third at the server."""

    def __init__(self, server: ReleaseServer, start: Start, **changes: Any) -> None:
        self.server = server
        self.disk = CountingDisk()
        self.v1, self.v2, self.v3 = (
            server.publish(
                toy_bundle(replace(SPEC, version=str(n), release_seq=n, changed=40 * (n - 1)))
            )
            for n in (1, 2, 3)
        )
        options = {"patch_in_place": "on", **changes}
        self.device = start(ports=toy_ports(disk=self.disk), **options)
        for bundle in (self.v1, self.v2):
            self.device.install(bundle)

    def take(self, bundle: ToyBundle, room: int) -> Any:
        """Offer a bundle with a delta from version 2 while there is so much room."""
        self.disk.room = room
        delta = self.server.publish_delta(self.v2, bundle)
        return self.device.take(self.server.offer(bundle, delta=delta))

    def versions(self) -> list[str]:
        table = self.device.agent.slots.table
        return [pointer.version for pointer in (table.current, table.other) if pointer]


def test_it_patches_in_place_and_says_so(server: ReleaseServer, start: Start) -> None:
    ground = Ground(server, start)
    update = ground.take(ground.v3, LITTLE)
    assert update.outcome is UpdateState.SUCCEEDED
    assert ground.device.says() == "3"
    (told,) = [report for report in update.reports if report.fact is ReportFact.IN_PLACE]
    assert "version 1 was dropped" in told.message
    assert "it answers from memory meanwhile" in told.message
    assert ground.versions() == ["3"], "there is no way back without a download"
    assert ground.device.agent.low_space.job is None


def test_it_goes_back_with_a_download_afterwards(server: ReleaseServer, start: Start) -> None:
    ground = Ground(server, start)
    ground.take(ground.v3, LITTLE)
    ground.disk.room = None
    update = ground.device.take(server.offer(ground.v2, kind=OfferKind.ROLLBACK))
    assert update.outcome is UpdateState.SUCCEEDED
    assert ground.device.says() == "2"


def test_it_restores_what_it_patched_when_the_new_bundle_fails(
    server: ReleaseServer, start: Start
) -> None:
    ground = Ground(server, start)
    spec = replace(SPEC, version="bad", release_seq=9, changed=77, behaviour={"self_test": "fail"})
    update = ground.take(server.publish(toy_bundle(spec)), LITTLE)
    assert (update.outcome, ground.device.code) == (UpdateState.FAILED, "agent.self_test")
    assert ground.versions() == ["2"]
    ground.device.stop()
    again = start(ports=toy_ports(disk=ground.disk), patch_in_place="on")
    assert again.says() == "2"


@pytest.mark.parametrize("in_memory", [True, False])
def test_nobody_answers_from_files_that_change(
    server: ReleaseServer, start: Start, in_memory: bool
) -> None:
    ground = Ground(server, start)
    ground.device.stop()
    seen: list[str] = []

    def engine(store: Any, config: Any) -> Any:
        made = toy_ports().engine(store, config)
        made.keeps_in_memory = in_memory
        return made

    def patcher(store: Any, disk: Any, config: Any) -> Any:
        inner = toy_ports().patcher(store, disk, config)

        class Watching:
            def run(self, job: Any) -> None:
                try:
                    seen.append(ground.device.says())
                except NoBundleError:
                    seen.append("nobody")
                inner.run(job)

        return Watching()

    ports = toy_ports(disk=ground.disk, engine=engine, patcher=patcher)
    ground.device = start(ports=ports, patch_in_place="on")
    update = ground.take(ground.v3, LITTLE)
    assert update.outcome is UpdateState.SUCCEEDED
    assert seen == ["2" if in_memory else "nobody"]
    told = next(report for report in update.reports if report.fact is ReportFact.IN_PLACE)
    assert ("nothing answers" in told.message) is not in_memory


def test_it_first_drops_the_version_before(server: ReleaseServer, start: Start) -> None:
    """With its room the new sections fit beside the old, so nothing is patched in place."""
    ground = Ground(server, start)
    used = ground.device.agent.store.used_bytes()
    most = used + 3 * CODES - 500_000
    object.__setattr__(ground.device.agent.store, "max_bytes", most)
    update = ground.take(ground.v3, 1 << 40)
    assert update.outcome is UpdateState.SUCCEEDED
    assert [report.fact for report in update.reports].count(ReportFact.IN_PLACE) == 0
    assert ground.versions() == ["3", "2"]


def test_it_fails_where_that_is_not_allowed(server: ReleaseServer, start: Start) -> None:
    ground = Ground(server, start, patch_in_place="off")
    update = ground.take(ground.v3, LITTLE)
    assert (update.outcome, ground.device.code) == (UpdateState.FAILED, "agent.disk_full")
    assert ground.versions() == ["2", "1"]
