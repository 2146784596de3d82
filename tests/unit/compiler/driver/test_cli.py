"""The command line: what it prints, where, and how it ends."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from compiler.driver import cli
from compiler.errors import MalformedModelError, SelfTestError, ToolchainError
from compiler.frontend.limits import ImportLimits
from tests.factories.onnx_blocks import mlp_block
from tests.factories.onnx_models import write_block

ROOT = Path(__file__).resolve().parents[4]


def test_it_lists_every_target(capsys) -> None:
    assert cli.main(["targets"]) == cli.OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines][:3] == ["x86-64-v1", "x86-64-v2", "x86-64-v3"]
    assert all(line.endswith(("runs here", "does not run here")) for line in lines)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MalformedModelError("bad file", hint="send another"), cli.USER_FAULT),
        (SelfTestError("bits differ"), cli.OUR_FAULT),
        (ToolchainError("no compiler", hint="install it"), cli.OUR_FAULT),
        (OSError(28, "No space left on device"), cli.OUR_FAULT),
    ],
)
def test_it_turns_errors_into_lines_and_a_status(
    monkeypatch, capsys, tmp_path, error, status
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(cli, "compile_model", fail)
    arguments = ["compile", str(tmp_path), "--target", "x86-64-v3", "--out", str(tmp_path / "o")]
    assert cli.main(arguments) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {error}\n")
    assert ("hint: " in printed.err) is bool(getattr(error, "hint", ""))
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["compile", "{}", "--target", "z80", "--out", "{}/o"], 2, "unknown target 'z80'"),
        (["compile", "{}", "--target", "x86-64-v3", "--out", "{}/o"], 1, "pipeline.json"),
        (
            ["compile", "{}", "--target", "x86-64-v3", "--out", "{}/o", "--model", "A/B"],
            3,
            "model 'A/B' cannot be released",
        ),
        (["explain", "{}"], 1, "no bundle in"),
        (["evaluate", "{}", "{}"], 1, "no bundle in"),
    ],
)
def test_it_says_what_is_wrong_with_the_arguments(
    capsys, tmp_path, arguments, status, message
) -> None:
    assert cli.main([item.format(tmp_path) for item in arguments]) == status
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")


def test_it_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "compiler", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    for word in ("compile", "targets", "explain", "evaluate", "exit status"):
        assert word in done.stdout


def test_it_asks_for_a_command(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2


def test_every_limit_is_an_option(tmp_path, capsys) -> None:
    write_block(tmp_path / "s", mlp_block)
    arguments = ["compile", str(tmp_path / "s"), "--target", "x86-64-v3", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--max-nodes", "2"]) == cli.USER_FAULT
    printed = capsys.readouterr().err
    assert "the limit max_nodes is 2" in printed
    assert "hint: option --max-nodes" in printed
    with pytest.raises(SystemExit):
        cli.main(["compile", "--help"])
    shown = capsys.readouterr().out
    assert all(f"--{f.name.replace('_', '-')}" in shown for f in fields(ImportLimits))
