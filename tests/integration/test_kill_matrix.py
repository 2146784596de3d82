"""Every state of an update x {error, hang, power loss, disk full, network loss}.

Always the old bundle or the new one, whole; it goes on or goes back by itself; each report is made
once. One fault strikes in one state, before its step or behind it; then the world is well again.

    error     the step raises                 hang     it never returns, and whoever watches the
    full      the disk takes nothing for a             agent kills and starts it again
              while                           power    the power is cut at an operation of the step,
    network   no request gets through for              with all that a cut may lose and tear
              a while
"""

import itertools
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from compiler.contract.protocol import (
    TERMINAL_STATES,
    DeltaOffer,
    OfferKind,
    ReportFact,
    UpdateState,
)
from device_agent.errors import AgentError, DiskFullError, NoBundleError
from device_agent.states import State
from device_agent.storage.disk import Disk
from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle
from tests.simulators.device import Device, toy_config, toy_ports
from tests.simulators.disk import CountingDisk, FastDisk, PowerCut, PowerCutDisk
from tests.simulators.release_server import ReleaseServer, Update

STATES = [state for state in State if state is not State.IDLE]
FAULTS = ("error", "hang", "power", "full", "network")
KINDS = ("whole", "delta", "in_place", "rollback")
PLACES = ("before", "after")
EARLY = 10
"""Operations after the beginning of a step among which the power is cut."""
FULL_FOR = 6
LOST_FOR = 4
CODES = 400_000
"""Of a section in place: patching needs a journal of 512 KiB, which must be less than it saves."""
ROOM = 800_000


class HungError(BaseException):
    """The step does not return: whoever watches the agent ends it."""


@dataclass(frozen=True)
class Case:
    kind: str
    state: State
    fault: str
    place: str
    seed: int = 0

    @property
    def is_bad(self) -> bool:
        """Whether the bundle has to fail, so that there is something to roll back."""
        return self.state is State.ROLLING_BACK

    @property
    def is_daily(self) -> bool:
        if self.place == "after" or self.seed:
            return False
        if self.kind == "in_place":
            critical = (State.APPLYING, State.ROLLING_BACK, State.COMMITTING, State.CLEANING)
            return self.state in critical and self.fault in ("power", "error")
        if self.kind == "rollback":
            return self.fault in ("power", "network")
        return self.kind == "delta"

    def __str__(self) -> str:
        return f"{self.kind}-{self.state.value}-{self.fault}-{self.place}-{self.seed}"


def cases() -> Iterator[Any]:
    for kind, state, fault, place, seed in itertools.product(
        KINDS, STATES, FAULTS, PLACES, range(3)
    ):
        case = Case(kind, state, fault, place, seed)
        if case.is_bad and kind == "rollback":
            continue  # what ran here before is not tested again, so it cannot fail
        if seed and fault != "power":
            continue  # chance plays no part
        yield pytest.param(case, id=str(case), marks=() if case.is_daily else pytest.mark.full)


class FaultyDisk(PowerCutDisk):
    """Has no room for some operations, or loses power before one."""

    full_from = full_to = 0

    def before(self, what: str, path: Path) -> None:
        super().before(what, path)
        if what in ("create", "write") and self.full_from <= self.count < self.full_to:
            raise DiskFullError(f"simulated at {what} {path.name[:16]}")


class Strike:
    """Lets the fault of a case happen once, when its state comes to its place."""

    def __init__(self, case: Case, disk: FaultyDisk, link: "Link") -> None:
        self.case, self.disk, self.link = case, disk, link
        self.struck = False

    def __call__(self, checkpoint: str) -> None:
        case = self.case
        if self.struck or checkpoint != f"{case.state.value}:{case.place}":
            return
        self.struck = True
        if case.fault == "error":
            raise AgentError("simulated")
        if case.fault == "hang":
            raise HungError
        if case.fault == "power":
            self.disk.cut_at = self.disk.count + 1 + (7 * case.seed + len(case.kind)) % EARLY
        elif case.fault == "full":
            self.disk.full_from = self.disk.count + 1
            self.disk.full_to = self.disk.full_from + FULL_FOR
        else:
            self.link.lost = LOST_FOR


class Link(httpx.BaseTransport):
    """The network between a device and the release server."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self.inner = inner
        self.lost = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.lost > 0:
            self.lost -= 1
            raise httpx.ConnectError("simulated")
        return self.inner.handle_request(request)


@dataclass
class Scene:
    """A device that runs version 1 (and one that went on to version 2), and what it is offered."""

    server: ReleaseServer
    folder: Path
    v1: ToyBundle
    v2: ToyBundle
    bad: ToyBundle

    def start(self, folder: Path, disk: Disk, **ports: Any) -> Device:
        config = toy_config(
            self.server, folder, poll_s=0.0001, serial="x", patch_in_place="on", denied_s=0.0
        )
        ports.setdefault("transport", Link(self.server.transport()))
        return Device.start(self.server, config, toy_ports(disk=disk, **ports))

    def offer(self, case: Case) -> Update:
        new = self.bad if case.is_bad else self.v2
        if case.kind == "rollback":
            return self.server.offer(self.v1, kind=OfferKind.ROLLBACK)
        delta = None if case.kind == "whole" else self.delta(new)
        return self.server.offer(new, delta=delta)

    def delta(self, new: ToyBundle) -> DeltaOffer:
        return self.server.publish_delta(self.v1, new)


def make_scene(folder: Path, **spec: Any) -> Scene:
    server = ReleaseServer()
    server.poll_after_s = 0.001
    v1 = server.publish(toy_bundle(ToySpec(**spec)))
    second = ToySpec(version="2", release_seq=2, changed=40, **spec)
    v2 = server.publish(toy_bundle(second))
    bad = replace(second, release_seq=3, behaviour={"self_test": "fail"})
    scene = Scene(server, folder, v1, v2, server.publish(toy_bundle(bad)))
    for name, bundle in (("old", v1), ("new", v2)):
        if name == "new":
            shutil.copytree(folder / "old", folder / "new", symlinks=True)
        device = scene.start(folder / name, FastDisk())
        device.install(bundle)
        device.stop()
    return scene


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Scene]:
    """Return a scene of small bundles, and one of bundles that are worth patching in place."""
    return {
        False: make_scene(tmp_path_factory.mktemp("small")),
        True: make_scene(tmp_path_factory.mktemp("large"), codes=CODES),
    }


@pytest.mark.parametrize("case", list(cases()))
def test_it_survives(scenes: dict[bool, Scene], case: Case, record_property: Any) -> None:
    scene = scenes[case.kind == "in_place"]
    folder = scene.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    source = scene.folder / ("new" if case.kind == "rollback" else "old")
    shutil.copytree(source, folder, symlinks=True)
    scene.server.posts.clear()
    disk, link = FaultyDisk(folder, cut_at=10**9), Link(scene.server.transport())
    disk.room = ROOM if case.kind == "in_place" else None
    strike = Strike(case, disk, link)
    update = scene.offer(case)
    device = until_struck(scene, folder, disk, link, strike, update)
    assert strike.struck, "the state was never reached"
    record_property("cuts", int(disk.is_cut))
    try:
        answers_whole(device)
        device.take(update)
        check_end(scene, device, case, update)
        check_reports(scene, case, update)
    finally:
        device.stop()


def until_struck(
    scene: Scene, folder: Path, disk: FaultyDisk, link: Link, strike: Strike, update: Update
) -> Device:
    """Run an update through its fault; return the device, started again if it was ended."""
    agent = None
    try:
        device = scene.start(folder, disk, transport=link, checkpoint=strike)
        agent = device.agent
        for _ in range(100):
            answers_whole(device)
            try:
                agent.loop.turn()
            except AgentError:
                continue  # the journal cannot be written: the service calls again
            if update.outcome is not None:
                break
        disk.cut_at = 10**9 if not disk.is_cut else disk.cut_at
    except (PowerCut, HungError):
        agent._lock.release()
        agent.http.close()
        if disk.is_cut:
            disk.lose(strike.case.seed)
        after = CountingDisk()
        after.room = disk.room
        return scene.start(folder, after)
    return device


def answers_whole(device: Device) -> None:
    """Check that the old or the new bundle answers, whole; or that the device says why nobody."""
    try:
        said = device.says()
    except NoBundleError:
        assert device.agent.low_space.job is not None, "nobody answers"
        return
    assert said in ("1", "2")
    current = device.agent.slots.table.current
    assert current is not None
    if device.agent.low_space.blocks(current):
        return  # it answers from memory
    assert current.manifest_sha256 == device.agent.host.manifest_sha256
    device.agent.engine.start(current).close()


def check_end(scene: Scene, device: Device, case: Case, update: Update) -> None:
    """Check that what was reported is what runs, and that nothing is left over."""
    new = "1" if case.kind == "rollback" else "2"
    old = "2" if case.kind == "rollback" else "1"
    expected = new if update.outcome is UpdateState.SUCCEEDED else old
    assert device.says() == expected
    if case.is_bad:
        assert update.outcome is UpdateState.FAILED
    elif case.fault in ("hang", "power", "network"):
        assert update.outcome is UpdateState.SUCCEEDED, device.code
    answers_whole(device)
    state_dir = device.agent.config.state_dir
    assert device.agent.low_space.job is None
    assert list((state_dir / "partial").iterdir()) == []
    assert [path for path in state_dir.glob("patching/*") if path.name != "journal"] == []


def check_reports(scene: Scene, case: Case, update: Update) -> None:
    """Check that reports are in order, of one end, and sent once unless the sending was cut."""
    assert [report.seq for report in update.reports] == list(range(1, len(update.reports) + 1))
    assert sum(report.state in TERMINAL_STATES for report in update.reports) == 1
    if case.kind == "in_place":
        facts = [report.fact for report in update.reports]
        is_begun = UpdateState.DOWNLOADING in update.states
        assert facts.count(ReportFact.IN_PLACE) == is_begun, "it says what it does, once"
    posts = [post for post in scene.server.posts if post[0] == update.update_id]
    times = Counter(seq for _, seq, _ in posts)
    assert len({(seq, body) for _, seq, body in posts}) == len(times), "a repeat says the same"
    if case.fault in ("error", "hang", "network"):
        assert set(times.values()) == {1}
    elif case.fault == "power":
        assert max(times.values()) <= 2


def test_the_matrix_is_whole() -> None:
    listed = [param.values[0] for param in cases()]
    assert {(case.state, case.fault) for case in listed} == set(itertools.product(STATES, FAULTS))
    daily = [case for case in listed if case.is_daily]
    assert {(case.state, case.fault) for case in daily} == set(itertools.product(STATES, FAULTS))
    assert {case.kind for case in daily} == {"delta", "in_place", "rollback"}
