"""Deltas of a rollout: no update while one is built, all sections after that, and the way back."""

import json

import pytest

from builds.models import Delta
from builds.services.signing import keys_generate, repositories_init
from builds.states import DeltaState
from compiler.contract.protocol import Assignment, assignment_from_json
from fleet.edge.snapshot import snapshot_build
from fleet.models import Rollout, Update
from fleet.selectors.poll import device_explain, device_poll_answer, late_delta_offered
from fleet.services.assignments import update_assignment
from fleet.services.rollouts import rollout_rollback
from fleet.services.tick import fleet_tick
from tests.factories.builds import make_blob
from tests.factories.fleet import MANAGER, SimulatedFleet

pytestmark = pytest.mark.django_db
NONCE = "ab" * 16
WAIT_S = 60.0


@pytest.fixture
def fleet() -> SimulatedFleet:
    keys_generate()
    repositories_init()
    fleet = SimulatedFleet()
    fleet.release()
    return fleet


@pytest.fixture
def rollout(fleet: SimulatedFleet) -> Rollout:
    return fleet.rollout(gate={"delta_wait_s": WAIT_S})


def make_ready(delta: Delta, data: bytes = b"a delta") -> Delta:
    blob = make_blob(data)
    delta.state, delta.sha256, delta.size_bytes = DeltaState.READY.value, blob.sha256, len(data)
    delta.save()
    return delta


def assigned(update: Update, fleet: SimulatedFleet) -> Assignment:
    data = update_assignment(
        device_pk=update.device_id, update_id=update.pk, nonce=NONCE, clock=fleet.clock
    )
    [target] = json.loads(data)["signed"]["targets"].values()
    return assignment_from_json(target["custom"])


def offers(update: Update) -> bool:
    """Return whether the device is offered the update, by the slow way and by the fast one."""
    slow = device_poll_answer(device_pk=update.device_id)
    assert slow is not None
    snapshot = snapshot_build()
    fast = snapshot.answers.get(update.device_id, snapshot.idle)
    assert (slow.offer is not None) == (b'"offer":{' in fast.body)
    return slow.offer is not None


@pytest.mark.parametrize("state", [DeltaState.QUEUED, DeltaState.DEFERRED, DeltaState.BUILDING])
def test_it_has_no_update_yet_while_the_delta_is_not_decided(fleet, rollout, state) -> None:
    Delta.objects.update(state=state.value)
    update = rollout.updates.first()
    fleet.clock.advance(WAIT_S - 1)
    fleet_tick(clock=fleet.clock)
    assert not offers(update)
    [_, why] = device_explain(device_pk=update.device_id).reasons[:2]
    assert why.endswith(f"waits for its delta, which is {state.value}")


def test_it_offers_the_delta_as_soon_as_it_is_ready(fleet, rollout) -> None:
    update = rollout.updates.select_related("delta__base").first()
    delta = make_ready(update.delta)
    fleet_tick(clock=fleet.clock)
    assert offers(update)
    offer = assigned(update, fleet).delta
    assert offer is not None
    assert (offer.sha256, offer.size_bytes) == (delta.sha256, len(b"a delta"))
    assert offer.base_manifest_sha256 == update.delta.base.manifest_sha256


def test_it_offers_all_sections_when_the_wait_is_over(fleet, rollout) -> None:
    update = rollout.updates.first()
    Delta.objects.update(state=DeltaState.BUILDING.value)
    fleet.clock.advance(WAIT_S)
    fleet_tick(clock=fleet.clock)
    assert offers(update)
    assert assigned(update, fleet).delta is None
    update.refresh_from_db()
    assert (update.state, update.used_delta) == ("offered", False)


@pytest.mark.parametrize("state", [DeltaState.TOO_LARGE, DeltaState.FAILED])
def test_it_offers_all_sections_at_once_without_a_delta(fleet, rollout, state) -> None:
    Delta.objects.update(state=state.value)
    fleet_tick(clock=fleet.clock)
    update = rollout.updates.first()
    assert offers(update)
    assert assigned(update, fleet).delta is None


def test_it_asks_for_the_way_back_beside_the_way_there(fleet, rollout) -> None:
    there = {(delta.base_id, delta.new_id): delta for delta in Delta.objects.all()}
    pairs = {(old.pk, fleet.version.bundles.get(target=old.target).pk) for old in olds(fleet)}
    assert set(there) == pairs | {(new, old) for old, new in pairs}
    assert all(delta.is_urgent == (pair in pairs) for pair, delta in there.items())


def olds(fleet: SimulatedFleet):
    return fleet.bundles.values()


def test_it_sends_back_at_once_and_with_the_delta_of_the_way_back(fleet) -> None:
    rollout = fleet.rollout()
    for delta in Delta.objects.exclude(new__version=fleet.version):
        make_ready(delta, b"the way back")
    fleet.run(12)
    rollout_rollback(actor=MANAGER, rollout_id=rollout.pk, clock=fleet.clock)
    back = Update.objects.filter(rollout=rollout, kind="rollback").first()
    assert back is not None
    assert offers(back)
    assert (back.delta.base_id, back.delta.new_id) == (back.base_bundle_id, back.bundle_id)
    offer = assigned(back, fleet).delta
    assert offer is not None
    assert offer.sha256 == back.delta.sha256
    assert snapshot_build().downloads[back.pk].allows(offer.sha256)
    assert late_delta_offered(update_id=back.pk, sha256=offer.sha256)


def test_it_sends_back_without_waiting_for_a_delta_that_is_asked_for_only_now(fleet) -> None:
    rollout = fleet.rollout()
    fleet.run(12)
    Update.objects.update(delta=None)
    Delta.objects.all().delete()
    rollout_rollback(actor=MANAGER, rollout_id=rollout.pk, clock=fleet.clock)
    backs = list(Update.objects.filter(rollout=rollout, kind="rollback").select_related("delta"))
    assert backs
    assert all(offers(back) and assigned(back, fleet).delta is None for back in backs)
    assert {back.delta.state for back in backs} == {"queued"}
    assert all(back.delta.is_urgent for back in backs)


def test_it_prefers_deltas_that_devices_of_a_rollout_under_way_wait_for(fleet, rollout) -> None:
    fleet_tick(clock=fleet.clock)
    waited_for = set(rollout.updates.values_list("delta_id", flat=True))
    urgent = Delta.objects.filter(is_urgent=True).values_list("pk", flat=True)
    assert set(urgent) == waited_for
    Rollout.objects.update(state="paused")
    fleet_tick(clock=fleet.clock)
    assert not Delta.objects.filter(is_urgent=True).exists()


def test_it_releases_installs_that_waited_beyond_the_end_of_their_rollout(fleet, rollout) -> None:
    Delta.objects.update(state=DeltaState.BUILDING.value)
    update = rollout.updates.first()
    Rollout.objects.update(state="succeeded", finished_at=fleet.clock.now())
    fleet_tick(clock=fleet.clock)
    assert not offers(update)
    fleet.clock.advance(3 * 3600)
    fleet_tick(clock=fleet.clock)
    assert offers(update)
