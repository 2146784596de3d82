"""Degrade rules from the server: followed if signed for this device now, else the last stay."""

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from compiler.contract.degrade import Rung, rules_bytes
from compiler.contract.errors import ContractError
from compiler.contract.rules_order import RulesOrder, rules_order_from_json
from device_agent.runtime.degrade_keeper import DegradeKeeper
from device_agent.runtime.rule_book import RuleBook
from tests.simulators.bundles import ToyBundle
from tests.simulators.device import Device, toy_config
from tests.simulators.release_server import Fault, ReleaseServer
from tests.simulators.tuf_repository import Director, now


def text(name: str = "hot", when: str = "temperature > 55 C") -> str:
    row = {
        "name": name,
        "when": when,
        "leave": "temperature < 50 C",
        "rung": "fewer_experts",
        "priority": 50,
        "cooldown_s": 0.5,
    }
    return rules_bytes([row]).decode()


@pytest.fixture
def device(start: Callable[..., Device]) -> Device:
    return start(rules_s=1e-9)


def follow(device: Device) -> tuple[list[str], int]:
    """Ask the server; return names and revision of what the device follows then."""
    rules = device.agent.rules
    assert rules is not None
    rules._due_at = 0.0
    rules.turn()
    book = device.agent.engine.rules
    return [rule.name for rule in book.rules], book.revision


def test_it_follows_what_the_server_signs_and_goes_back(
    server: ReleaseServer, device: Device
) -> None:
    assert follow(device) == ([], 0)
    server.rules = 3, text("a")
    assert follow(device) == (["a"], 3)
    assert follow(device) == (["a"], 3)
    server.rules = 4, text("b")
    assert follow(device) == (["b"], 4)
    server.rules = 5, None
    assert follow(device) == ([], 5)


def test_it_keeps_them_over_a_restart_and_without_a_server(
    server: ReleaseServer, device: Device
) -> None:
    server.rules = 3, text("a")
    follow(device)
    config = device.agent.config
    device.stop()
    server.fail("rules", Fault(drop=True), Fault(status=500))
    again = Device.start(server, config)
    try:
        assert follow(again) == (["a"], 3)
        server.rules = None
        assert follow(again) == (["a"], 3)
    finally:
        again.stop()


@pytest.mark.parametrize(
    "values",
    [
        {"device_id": "f" * 32},
        {"key_thumbprint": "f" * 64},
        {"nonce": "0" * 32},
        {"text": "{}"},
        {"text": text().replace("temperature > 55", "eval > 5")},
        {"revision": 2},
    ],
)
def test_what_is_not_for_this_device_now_changes_nothing(
    server: ReleaseServer, device: Device, values: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server.rules = 3, text("a")
    assert follow(device) == (["a"], 3)
    server.rules = 4, text("b")
    server.order = lambda who, nonce: server._order(who, nonce, **values)
    with caplog.at_level(logging.WARNING):
        assert follow(device) == (["a"], 3)
    assert "stay at revision 3" in caplog.text


@pytest.mark.parametrize(
    "attack",
    [
        {"key": Director().online_key},
        {"expires": now() - timedelta(days=1)},
        {"version": 9},
        {"body": b"other bytes"},
    ],
)
def test_what_the_director_did_not_sign_so_changes_nothing(
    server: ReleaseServer, device: Device, attack: Any
) -> None:
    server.rules = 3, text("a")
    follow(device)
    server.rules = 4, text("b")
    original = server.director.order
    server.director.order = lambda order: original(order, **attack)  # type: ignore[method-assign]
    assert follow(device) == (["a"], 3)


def test_an_assignment_is_no_order_and_an_order_no_assignment(
    server: ReleaseServer, device: Device, v1: ToyBundle
) -> None:
    server.rules = 3, text("a")
    update = server.offer(v1)
    server.order = lambda _who, nonce: server._assign(update, nonce)
    assert follow(device) == ([], 0)
    server.assign = lambda update, nonce: server._order(update.device_id, nonce)
    device.take(update)
    assert device.code == "agent.trust.metadata"


def test_a_copy_that_cannot_be_read_is_none(server: ReleaseServer, start: Any) -> None:
    device = start()
    folder: Path = device.agent.config.state_dir / "trust"
    device.stop()
    for number in range(2):
        (folder / f"rules.{number}").write_bytes(b"SFT1 1 2 00000000\n{}")
    again = Device.start(server, toy_config(server, device.agent.config.state_dir))
    assert again.agent.engine.rules.revision == 0
    again.stop()


def test_rules_change_under_a_running_bundle() -> None:
    clock, book = [0.0], RuleBook()
    keeper = DegradeKeeper(
        book, (Rung.NORMAL, Rung.FEWER_EXPERTS), lambda: clock[0], lambda: {"temperature": 70.0}
    )
    assert keeper.rung() is Rung.NORMAL
    order = RulesOrder("d" * 32, "e" * 64, "0" * 32, 7, text())
    assert rules_order_from_json(order.to_json()) == order
    book.follow(order.rules(), order.revision)
    clock[0] = 2.0
    assert keeper.rung() is Rung.FEWER_EXPERTS
    assert keeper.facts()["rules_revision"] == keeper.revision == 7
    book.follow((), 8)
    clock[0] = 40.0
    assert keeper.rung() is Rung.NORMAL


@pytest.mark.parametrize(
    "change",
    [{"schema": "x"}, {"revision": 0}, {"revision": -1}, {"rules": {}}, {"key_thumbprint": "e"}],
)
def test_an_order_that_is_none_is_refused(change: Any) -> None:
    order = RulesOrder("d" * 32, "e" * 64, "0" * 32, 7, text())
    with pytest.raises(ContractError):
        rules_order_from_json({**order.to_json(), **change})
