"""On a metered network: an update that has to wait, and bytes that may not be fetched."""

from collections.abc import Callable

import pytest

from compiler.contract.protocol import DeltaOffer, Network, NetworkPolicy, UpdateState
from device_agent.config import AgentConfig
from device_agent.errors import ConfigurationError
from device_agent.states import State
from device_agent.update import loop
from device_agent.update.plan import may_fetch, plan_fetch
from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle
from tests.simulators.device import Device
from tests.simulators.release_server import Fault, ReleaseServer
from tests.unit.device_agent.test_plan import manifest

Start = Callable[..., Device]


@pytest.fixture
def device(start: Start, v1: ToyBundle) -> Device:
    device = start(network="metered")
    device.install(v1)
    return device


def bind(server: ReleaseServer, policy: NetworkPolicy = NetworkPolicy.DELTA_ONLY) -> None:
    """Have the server state a policy in every assignment."""
    server.assign = lambda update, nonce: server._assign(update, nonce, network_policy=policy)


@pytest.mark.parametrize("network", Network)
@pytest.mark.parametrize("policy", NetworkPolicy)
def test_only_whole_sections_over_a_metered_network_are_forbidden(
    network: Network, policy: NetworkPolicy
) -> None:
    bundle = manifest(b"a" * 100)
    whole = plan_fetch(bundle, lambda *_: False, None, base_here=False)
    small = plan_fetch(bundle, lambda *_: False, DeltaOffer("1" * 64, "2" * 64, 9), base_here=True)
    nothing = plan_fetch(bundle, lambda *_: True, None, base_here=False)
    is_free = network is not Network.METERED or policy is NetworkPolicy.ANY
    assert may_fetch(whole, policy, network) == is_free
    assert may_fetch(small, policy, network)
    assert may_fetch(nothing, policy, network)


def test_it_says_what_network_it_is_on(
    server: ReleaseServer, device: Device, v2: ToyBundle
) -> None:
    device.install(v2)
    assert server.networks == ["metered", "metered"]


def test_it_waits_for_another_network_and_takes_the_update_then(
    server: ReleaseServer,
    device: Device,
    v2: ToyBundle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "POSTPONED_S", 0.0)
    server.requests.clear()
    server.fail("assignment", *([Fault(status=425)] * 3))
    update = device.install(v2)
    assert server.faults_left("assignment") == 0
    assert update.outcome is UpdateState.SUCCEEDED
    assert [report.seq for report in update.reports] == list(range(1, 8))


def test_it_asks_seldom_while_it_waits(
    server: ReleaseServer, device: Device, v2: ToyBundle
) -> None:
    server.requests.clear()
    server.fail("assignment", *([Fault(status=425)] * 10))
    update = server.offer(v2)
    polls = len(server.polls)
    device.run(lambda: len(server.polls) > polls + 5)
    assert (device.state, device.says()) == (State.IDLE, "1")
    assert server.faults_left("assignment") == 9
    assert update.reports == []
    context = device.agent.machine.context if device.agent.machine else None
    assert context is not None
    assert context.message == "simulated"


def test_it_asks_at_once_after_a_restart_and_for_another_update(
    server: ReleaseServer, device: Device, start: Start, v2: ToyBundle
) -> None:
    server.fail("assignment", Fault(status=425), Fault(status=425))
    server.offer(v2)
    device.run(lambda: server.faults_left("assignment") == 1)
    device.run(lambda: device.state is State.IDLE)
    device.stop()
    again = start(network="metered")
    again.run(lambda: server.faults_left("assignment") == 0 and again.state is State.IDLE)
    v3 = server.publish(toy_bundle(ToySpec(version="3", release_seq=3, changed=80)))
    assert again.install(v3).outcome is UpdateState.SUCCEEDED


def test_it_takes_a_delta_where_only_deltas_are_allowed(
    server: ReleaseServer, device: Device, v1: ToyBundle, v2: ToyBundle
) -> None:
    bind(server)
    delta = server.publish_delta(v1, v2)
    server.sent_bytes.clear()
    update = device.take(server.offer(v2, delta=delta))
    assert update.outcome is UpdateState.SUCCEEDED
    assert server.sent_bytes["blob"] == delta.size_bytes


def test_it_gives_up_before_it_fetches_whole_sections(
    server: ReleaseServer, device: Device, v2: ToyBundle
) -> None:
    bind(server)
    server.sent_bytes.clear()
    update = device.take(server.offer(v2))
    assert (update.outcome, device.code) == (UpdateState.CANCELLED, "agent.metered")
    assert "whole sections are needed" in update.reports[-1].message
    assert "blob" not in server.sent_bytes
    assert device.says() == "1"


def test_it_gives_up_when_the_delta_proves_useless(
    server: ReleaseServer, device: Device, v1: ToyBundle, v2: ToyBundle
) -> None:
    bind(server)
    other = server.publish(toy_bundle(ToySpec(version="9", release_seq=9, changed=90)))
    wrong = server.publish_delta(v1, other)
    server.sent_bytes.clear()
    update = device.take(server.offer(v2, delta=wrong))
    assert (update.outcome, device.code) == (UpdateState.CANCELLED, "agent.metered")
    assert server.sent_bytes["blob"] == wrong.size_bytes
    assert device.says() == "1"


@pytest.mark.parametrize("network", ["unknown", "unmetered"])
def test_another_network_is_not_bound(
    server: ReleaseServer, start: Start, v1: ToyBundle, network: str
) -> None:
    bind(server)
    device = start(network=network)
    assert device.install(v1).outcome is UpdateState.SUCCEEDED


def test_it_knows_three_kinds_of_network() -> None:
    with pytest.raises(ConfigurationError, match="network 'dial-up'") as caught:
        AgentConfig(network="dial-up")
    assert "unknown, unmetered, metered" in caught.value.hint
