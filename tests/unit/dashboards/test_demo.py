"""What the demo promises around its story: folder, port, levels, verdict, processes."""

import json
import socket
import sys
from pathlib import Path

import pytest

from dashboards.demo import devices, platform
from dashboards.demo.errors import DemoError
from dashboards.demo.outcome import Outcome
from dashboards.demo.processes import ProcessGroup, require_free_port


def test_it_leaves_a_folder_alone_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(DemoError, match="not made by the demo"), platform.fresh_state(tmp_path):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_it_empties_its_own_folder_but_keeps_the_compilers_cache(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    with platform.fresh_state(root) as state:
        (root / "logs").mkdir()
        (state / "sparsefleet.sqlite3").write_text("rows")
        (state / "cache").mkdir()
        (state / "cache" / "entry").write_text("compiled")
    with platform.fresh_state(root) as state:
        assert [entry.name for entry in state.iterdir()] == ["cache"]
        assert (state / "cache" / "entry").read_text() == "compiled"
        assert not (root / "logs").exists()


def test_it_refuses_a_second_demo_in_the_same_folder(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    with (
        platform.fresh_state(root),
        pytest.raises(DemoError, match="a demo is running"),
        platform.fresh_state(root),
    ):
        pass


def test_it_names_a_busy_port_and_the_option_that_changes_it() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(DemoError, match=str(port)) as caught:
            require_free_port("127.0.0.1", port)
    assert f"--port {port + 1}" in caught.value.hint


@pytest.mark.parametrize(
    ("host", "targets"),
    [
        ("x86-64-v4-vnni", ["x86-64-v4-vnni", "x86-64-v3", "x86-64-v1"]),
        ("x86-64-v3", ["x86-64-v3", "x86-64-v2", "x86-64-v1"]),
    ],
)
def test_it_has_three_targets_on_a_usual_host(host: str, targets: list[str]) -> None:
    assert [level.target for level in devices.levels(host)] == targets


def test_it_fails_without_checks_and_with_one_that_failed(tmp_path: Path) -> None:
    outcome = Outcome()
    assert not outcome.ok
    outcome.check("one", ok=True, seen="fine")
    assert outcome.ok
    outcome.check("two", ok=False, seen="not fine")
    outcome.write_json(tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text())["ok"] is False


def test_it_notices_a_process_that_died(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path / "logs", tmp_path, {}) as group:
        child = group.start("short", [sys.executable, "-c", "print('last words')"])
        child.process.wait()
        with pytest.raises(DemoError, match="last words"):
            group.require_alive()


def test_it_stops_a_process_that_ignores_the_request(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("dashboards.demo.processes.STOP_GRACE_S", 0.5)
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); "
        "print(1, flush=True); time.sleep(60)"
    )
    with ProcessGroup(tmp_path / "logs", tmp_path, {}) as group:
        child = group.start("stubborn", [sys.executable, "-c", stubborn])
        while not child.log.read_text():
            pass
    assert child.process.poll() == -9


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_it_refuses_what_is_no_port(port: int) -> None:
    with pytest.raises(DemoError, match=f"{port} is not a port"):
        require_free_port("127.0.0.1", port)
