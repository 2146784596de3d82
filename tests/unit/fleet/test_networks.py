"""Metered networks: what may be fetched, why a device waits, and until when."""

import json
from itertools import product

import pytest

from builds.common.errors import InvalidInputError
from builds.models import Delta
from builds.services.signing import keys_generate, repositories_init
from builds.states import DeltaState
from compiler.contract.protocol import (
    Assignment,
    Network,
    NetworkPolicy,
    OfferKind,
    assignment_from_json,
)
from fleet.apis.schemas import DeviceDetailOut, RolloutOut, UpdateOut
from fleet.cohorts import Goal
from fleet.errors import UpdateWaitsError
from fleet.models import Device, Rollout, Update
from fleet.networks import policy_now, wait_reason
from fleet.selectors.poll import device_explain
from fleet.services.assignments import update_assignment
from fleet.services.plans import RolloutRequest
from fleet.services.rollouts import rollout_create, rollout_rollback, rollout_start
from tests.factories.builds import make_blob
from tests.factories.fleet import MANAGER, SimulatedFleet

POLICIES = list(NetworkPolicy)
DEADLINE_S = 3600.0


@pytest.mark.parametrize(
    ("policy", "network", "has_delta"), list(product(POLICIES, Network, (True, False)))
)
def test_it_makes_only_metered_devices_wait(policy, network, has_delta) -> None:
    waits = network is Network.METERED and (
        policy is NetworkPolicy.WAIT_UNMETERED
        or (policy is NetworkPolicy.DELTA_ONLY and not has_delta)
    )
    assert bool(wait_reason(policy, network, has_delta=has_delta)) == waits


@pytest.mark.parametrize(("policy", "kind"), list(product(POLICIES, OfferKind)))
def test_it_binds_installs_until_the_deadline(policy, kind) -> None:
    def now(waited_s: float) -> NetworkPolicy:
        return policy_now(policy, kind, waited_s=waited_s, deadline_s=DEADLINE_S)

    if kind is OfferKind.ROLLBACK:
        assert now(0.0) is NetworkPolicy.ANY
        return
    assert now(DEADLINE_S - 1) is policy
    is_over = policy is NetworkPolicy.WAIT_UNMETERED
    assert now(DEADLINE_S) is (NetworkPolicy.ANY if is_over else policy)


@pytest.fixture
def fleet(db: None) -> SimulatedFleet:
    keys_generate()
    repositories_init()
    fleet = SimulatedFleet()
    fleet.release()
    return fleet


def start(fleet: SimulatedFleet, policy: NetworkPolicy) -> Rollout:
    request = RolloutRequest(
        fleet.model.name,
        fleet.version.version,
        fleet.group.name,
        [Goal(percent=50)],
        {"profile": "lab", "delta_wait_s": 0},
        network_policy=policy,
        unmetered_wait_s=DEADLINE_S,
    )
    rollout = rollout_create(actor=MANAGER, request=request, clock=fleet.clock)
    rollout_start(actor=MANAGER, rollout_id=rollout.pk, clock=fleet.clock)
    Update.objects.update(is_offerable=True)
    return rollout


def ask(update: Update, fleet: SimulatedFleet, network: str = "metered") -> Assignment:
    data = update_assignment(
        device_pk=update.device_id,
        update_id=update.pk,
        nonce="ab" * 16,
        network=network,
        clock=fleet.clock,
    )
    [target] = json.loads(data)["signed"]["targets"].values()
    return assignment_from_json(target["custom"])


def make_ready(delta: Delta) -> None:
    blob = make_blob(b"a delta")
    Delta.objects.filter(pk=delta.pk).update(
        state=DeltaState.READY.value, sha256=blob.sha256, size_bytes=7
    )


def test_a_metered_device_waits_for_a_delta_and_says_why(fleet) -> None:
    rollout = start(fleet, NetworkPolicy.DELTA_ONLY)
    update = rollout.updates.first()
    seq = update.device.assignment_seq
    with pytest.raises(UpdateWaitsError, match="only deltas, and none is ready"):
        ask(update, fleet)
    update.refresh_from_db()
    device = Device.objects.get(pk=update.device_id)
    assert (update.state, device.network, device.assignment_seq) == ("queued", "metered", seq)
    why = device_explain(device_pk=device.pk).reasons[1]
    assert why.endswith(
        "waits: the network is metered, the rollout allows only deltas, and none is ready"
    )
    shown = DeviceDetailOut.from_orm(device)
    assert shown.network is Network.METERED
    assert shown.updates[0].waits_for == update.waits_for
    make_ready(update.delta)
    assignment = ask(update, fleet)
    assert assignment.delta is not None
    assert assignment.network_policy is NetworkPolicy.DELTA_ONLY
    update.refresh_from_db()
    assert (update.state, update.waits_for, update.used_delta) == ("offered", "", True)


@pytest.mark.parametrize("network", ["unknown", "unmetered"])
@pytest.mark.parametrize("policy", POLICIES)
def test_other_networks_are_not_bound(fleet, policy, network) -> None:
    update = start(fleet, policy).updates.first()
    assert ask(update, fleet, network).delta is None
    update.refresh_from_db()
    assert update.state == "offered"
    assert Device.objects.get(pk=update.device_id).network == network


def test_a_metered_device_waits_for_another_network_until_the_deadline(fleet) -> None:
    rollout = start(fleet, NetworkPolicy.WAIT_UNMETERED)
    update = rollout.updates.first()
    make_ready(update.delta)
    fleet.clock.advance(DEADLINE_S - 1)
    with pytest.raises(UpdateWaitsError, match="waits for one that is not"):
        ask(update, fleet)
    why = device_explain(device_pk=update.device_id).reasons[1]
    assert why.endswith(", until 2026-11-01 01:00 UTC")
    fleet.clock.advance(1)
    assignment = ask(update, fleet)
    assert assignment.network_policy is NetworkPolicy.ANY
    assert assignment.delta is not None


def test_the_way_back_does_not_wait(fleet) -> None:
    rollout = start(fleet, NetworkPolicy.WAIT_UNMETERED)
    fleet.run(12)
    rollout_rollback(actor=MANAGER, rollout_id=rollout.pk, clock=fleet.clock)
    back = Update.objects.filter(rollout=rollout, kind="rollback").first()
    assert ask(back, fleet).network_policy is NetworkPolicy.ANY


def test_it_refuses_a_network_that_is_none(fleet) -> None:
    update = start(fleet, NetworkPolicy.ANY).updates.first()
    with pytest.raises(InvalidInputError, match="network 'dial-up'"):
        ask(update, fleet, "dial-up")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
def test_it_refuses_a_wait_that_is_none(fleet, seconds) -> None:
    request = RolloutRequest(
        fleet.model.name,
        fleet.version.version,
        fleet.group.name,
        [Goal(percent=50)],
        {"profile": "lab"},
        unmetered_wait_s=seconds,
    )
    with pytest.raises(InvalidInputError, match="unmetered_wait_s"):
        rollout_create(actor=MANAGER, request=request, clock=fleet.clock)


def test_it_shows_the_policy(fleet) -> None:
    rollout = start(fleet, NetworkPolicy.DELTA_ONLY)
    shown = RolloutOut.from_orm(rollout)
    assert (shown.network_policy, shown.unmetered_wait_s) == (NetworkPolicy.DELTA_ONLY, DEADLINE_S)
    assert UpdateOut.from_orm(rollout.updates.first()).waits_for == ""
