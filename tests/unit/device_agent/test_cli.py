import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compiler.contract.degrade import rules_bytes
from device_agent.cli import main
from tests.simulators.bundles import ToyBundle
from tests.simulators.device import Device
from tests.simulators.release_server import ReleaseServer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device_agent.cli.set_up_log", lambda verbose: None)


def options(server: ReleaseServer, folder: Path) -> list[str]:
    return [
        *("--server-url", server.url, "--state-dir", str(folder)),
        *("--serial", "cli", "--claim", "sfc_1_x", "--model", "toy"),
    ]


def test_it_enrols_and_says_what_it_is(
    server: ReleaseServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["enrol", *options(server, tmp_path)]) == 0
    device_id, state = capsys.readouterr().out.split()
    assert device_id in server.keys
    assert state == "accepted"
    assert main(["status", "--json", "--state-dir", str(tmp_path)]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["enrolled"]
    assert status["device_id"] == device_id
    assert status["running"] is None


def test_it_says_what_runs_and_what_happened(
    start: Callable[..., Device], v1: ToyBundle, capsys: pytest.CaptureFixture[str]
) -> None:
    device = start()
    device.install(v1)
    assert main(["status", "--state-dir", str(device.agent.config.state_dir)]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["running.version"] == "1"
    assert lines["update.outcome"] == "succeeded"
    assert lines["floors.assignment_seq"] == "1"
    assert lines["on_trial"] == "False"


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["enrol", "--serial", "x", "--server-url", "http://127.0.0.1:9"], "agent.network", ""),
        (["enrol", "--server-url", "nonsense"], "agent.configuration", "for example https"),
        (["status", "--config", "nowhere.toml"], "agent.configuration", ""),
        (["ask", "hello"], "agent.no_bundle", "folder of a device's agent"),
        (["ask", "--card", "1"], "agent.configuration", ""),
        (["ask", "--card", "1", "hello"], "agent.configuration", "give words"),
        (["ask"], "agent.configuration", "give words"),
        (["ask", "--template", "question"], "agent.configuration", "give words"),
        (["ask", "--prompt", "  "], "agent.configuration", "give words"),
        (["ask", "--prompt", "what", "at", "top"], "agent.configuration", "either --prompt, or"),
        (["trace", "--out", "trace.json"], "agent.configuration", "give words"),
        (["infer", "--prompt", "hello"], "agent.no_bundle", "folder of a device's agent"),
        (["infer", "nowhere", "--prompt", "hello"], "agent.bundle", "compile --out"),
        (["check-rules", "nowhere"], "no rules in nowhere: No such file or directory", ""),
        (["trace", "--out", "no/t.json", "hello"], "no/t.json cannot be written: No such file", ""),
        (["trace", "--out", ".", "hello"], "--out: . cannot be written: Is a directory", ""),
        (["trace", "--out", "t.json", "hello"], "agent.no_bundle", ""),
        (["farm", "--count", "0", "--serial", "x"], "agent.configuration", ""),
    ],
)
def test_it_says_what_went_wrong_and_what_to_do(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    error: str,
    hint: str,
) -> None:
    assert main([*arguments, "--state-dir", str(tmp_path / "state")]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert error in output.err
    assert "[Errno 2" not in output.err
    assert not Path("t.json").exists()
    assert hint in output.err
    assert "Traceback" not in output.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--deadline", "-1"], "argument --deadline: '-1': above 0"),
        (["--deadline", "nan"], "argument --deadline: 'nan': above 0"),
        (["--deadline", "inf"], "argument --deadline: 'inf': above 0"),
        (["--max-tokens", "0"], "argument --max-tokens: '0': at least 1"),
        (["--max-tokens", "1.5"], "argument --max-tokens: '1.5': at least 1"),
        (["--threads", "100"], "argument --threads: '100': 0, as many as help, to 64"),
        (["--threads", "x"], "argument --threads: 'x': 0, as many as help, to 64"),
        (["--temperature", "-1"], "argument --temperature: '-1': 0, greedy, to 100"),
    ],
)
def test_wrong_values_are_wrong_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["infer", "bundle", "--prompt", "hello", *arguments])
    assert leave.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {told}\n")


def test_it_refuses_a_folder_that_is_in_use(
    start: Callable[..., Device],
    server: ReleaseServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    device = start()
    assert main(["enrol", *options(server, device.agent.config.state_dir)]) == 1
    assert "agent.state_busy" in capsys.readouterr().err


def test_it_checks_rules_without_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rules.json"
    path.write_bytes(
        rules_bytes(
            [
                {
                    "name": "hot",
                    "when": "temperature > 90 C for 10 s or battery < 5 %",
                    "leave": "temperature < 80 C",
                    "rung": "fewer_experts",
                    "priority": 7,
                    "cooldown_s": 60,
                }
            ]
        )
    )
    assert main(["check-rules", str(path)]) == 0
    rule, last = capsys.readouterr().out.splitlines()
    assert rule == "hot: fewer_experts, priority 7, looks at battery, temperature"
    assert last == "rules.json: rules: 1, no fault found"
    path.write_bytes(path.read_bytes().replace(b"fewer_experts", b"fewer_bits"))
    assert main(["check-rules", str(path)]) == 0
    told = capsys.readouterr().out
    assert "hot: no bundle can have fewer_bits: devices go to what theirs has instead\n" in told
    path.write_bytes(path.read_bytes().replace(b"battery", b"batery"))
    assert main(["check-rules", str(path)]) == 1
    output = capsys.readouterr()
    assert "rules.json: rule 'hot', when: character" in output.err
    assert "hint: signals: " in output.err


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (">/dev/full", "error: the result cannot be written: No space left on device [agent.disk]"),
        (">&-", "error: the result cannot be written: stdout is closed [agent.disk]"),
    ],
    ids=["full", "closed"],
)
def test_what_cannot_be_printed_is_a_failure_in_one_line(
    tmp_path: Path, where: str, told: str
) -> None:
    path = tmp_path / "rules.json"
    path.write_bytes(rules_bytes([]))
    command = f"{sys.executable} -m device_agent check-rules {path} {where}"
    done = subprocess.run(
        ["/bin/bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (1, told)


COMMANDS = ("enrol", "run", "status", "ask", "infer", "trace", "check-rules", "probe", "farm")


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_it_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main([*command, "--help"])
    assert leave.value.code == 0
    assert "usage: python -m device_agent" in capsys.readouterr().out


def test_ctrl_c_before_an_answer_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("device_agent.cli.infer", stop)
    assert main(["infer", "bundle", "--prompt", "hello"]) == 130


def test_ctrl_c_while_it_loads_leaves_no_traceback() -> None:
    interrupted = (
        "import builtins, runpy\n"
        "load = builtins.__import__\n"
        "def stop(name, *more, **named):\n"
        "    if name == 'device_agent.cli':\n"
        "        raise KeyboardInterrupt\n"
        "    return load(name, *more, **named)\n"
        "builtins.__import__ = stop\n"
        "runpy.run_module('device_agent.__main__', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", interrupted], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_it_is_a_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "device_agent", "status", "--state-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "enrolled: False" in done.stdout
    assert "floors.reason: none yet: this device is not enrolled\n" in done.stdout
    assert done.stderr == ""
