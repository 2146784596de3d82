"""The command line: what it prints, where, and how it ends."""

import errno
import io
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from compiler.driver import cache, cli
from compiler.driver.commands import compile_submission
from compiler.driver.commands.base import Console, size_bytes
from compiler.errors import MalformedModelError, SelfTestError, ToolchainError
from compiler.frontend.limits import ImportLimits
from tests.factories.onnx_blocks import mlp_block
from tests.factories.onnx_models import write_block

ROOT = Path(__file__).resolve().parents[4]


def test_it_lists_every_target(capsys) -> None:
    assert cli.main(["targets"]) == cli.OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines][:3] == ["x86-64-v1", "x86-64-v2", "x86-64-v3"]
    assert all(line.endswith(("runs here", "emulated here", "does not run here")) for line in lines)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MalformedModelError("bad file", hint="send another"), cli.USER_FAULT),
        (SelfTestError("bits differ"), cli.OUR_FAULT),
        (ToolchainError("no compiler", hint="install it"), cli.OUR_FAULT),
    ],
)
def test_it_turns_errors_into_lines_and_a_status(
    monkeypatch, capsys, tmp_path, error, status
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(compile_submission, "compile_model", fail)
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
        (["compile", "{}", "--target", "x86-64-v3", "--out", "{}/file/o"], 2, "file is a file"),
        (["compile", "{}", "--target", "x86-64-v3"], 2, "compile needs --out"),
        (["compile", "{}", "--out", "{}/o"], 2, "compile needs --target"),
        (["compile", "{}/file", "--target", "x86-64-v3", "--out", "{}/o"], 2, "is a file"),
        (["compile", "{}", "--target", "x86-64-v3", "--out", "{}/s"], 2, "holds a submission"),
        (["import", "{}/no.onnx", "--out", "{}/o"], 2, "no.onnx does not exist"),
        (["import", "{}/s", "--out", "{}/o"], 2, "is a submission already"),
        (["import", "{}/file", "--out", "{}/o"], 1, "file is empty"),
        (["compile", "--target", "x86-64-v3", "--out", "{}/o"], 2, "compile needs a submission"),
        (["compile", "--cache-info"], 2, "--cache-info needs --cache"),
        (["explain", "{}"], 1, "no bundle in"),
        (["evaluate", "{}", "{}"], 1, "no bundle in"),
        (["inspect", "{}"], 1, "no bundle in"),
        (["diff", "{}", "{}"], 1, "no bundle in"),
        (["simulate", "{}", "--run", "forward=random"], 1, "pipeline.json"),
    ],
)
def test_it_says_what_is_wrong_with_the_arguments(
    capsys, tmp_path, arguments, status, message
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "pipeline.json").write_text("{}")
    assert cli.main([item.format(tmp_path) for item in arguments]) == status
    lines = capsys.readouterr().err.splitlines()
    error, hint = [line for line in lines if line.startswith(("error: ", "hint: "))]
    assert message in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_it_explains_every_command_with_an_example(capsys, name) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == cli.OK
    shown = capsys.readouterr().out
    assert f"python -m compiler {name} " in shown.split("example:")[1]
    assert "exit status" in shown
    assert "--json" in shown


def test_it_lists_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "compiler", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    for name, (_, summary) in cli.COMMANDS.items():
        assert name in done.stdout
        assert summary[:30] in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["polish"],
        ["compile", "s", "--release-seq", "one"],
        ["compile", "s", "--cache-limit", "many"],
        ["simulate", "b"],
        ["simulate", "b", "--run", "see=random", "--mode", "f16"],
    ],
)
def test_it_refuses_a_line_that_it_cannot_read(capsys, arguments) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == cli.BAD_ARGUMENTS
    assert "usage: python -m compiler" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("12", 12), ("3K", 3072), ("500M", 500 * 1024**2), ("2g", 2**31)]
)
def test_it_reads_sizes(text, size) -> None:
    assert size_bytes(text) == size


def test_it_draws_a_bar_on_a_terminal(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    console = Console(as_json=False)
    console.progress("kernels", 0.5)
    console.clear()
    shown = capsys.readouterr().err
    assert "[############............]  50% kernels" in shown
    assert shown.endswith("\r\x1b[K")


def test_it_loads_nothing_of_the_passes_for_a_kept_submission() -> None:
    code = (
        "import sys; from compiler.driver.cli import load; load('compile');"
        "print([n for n in ('numpy', 'onnx', 'xdsl', 'jinja2', 'ziglang') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


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


def test_it_says_that_it_was_interrupted_and_leaves_no_bundle(
    monkeypatch, capsys, tmp_path
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_submission, "compile_model", stop)
    arguments = ["compile", str(tmp_path), "--target", "x86-64-v3", "--out", str(tmp_path / "o")]
    assert cli.main(arguments) == cli.INTERRUPTED
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "interrupted\n")
    assert not (tmp_path / "o").exists()


def test_it_shows_a_stage_once_where_there_is_no_terminal(capsys) -> None:
    console = Console(as_json=False)
    for stage, fraction in (("import", 0.0), ("import", 0.0), ("raise", 0.1), ("raise", 0.15)):
        console.progress(stage, fraction)
    assert capsys.readouterr().err.splitlines() == ["   0% import", "  10% raise", "  15% raise"]


@pytest.mark.parametrize(
    ("number", "way_out"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "read-only"), (errno.EACCES, "may write")],
)
def test_it_names_the_file_that_the_machine_would_not_write_and_the_way_out(
    monkeypatch, capsys, tmp_path, number, way_out
) -> None:
    class Full(io.BytesIO):
        def write(self, _data: object) -> int:
            raise OSError(number, os.strerror(number))

    def open_full(descriptor: int, _mode: str) -> Full:
        os.close(descriptor)
        return Full()

    def keep(*arguments: object) -> None:
        cache.write_atomic(tmp_path / "o" / "plan", b"bytes")

    monkeypatch.setattr(cache.os, "fdopen", open_full)
    monkeypatch.setattr(compile_submission, "compile_model", keep)
    arguments = ["compile", str(tmp_path), "--target", "x86-64-v3", "--out", str(tmp_path / "o")]
    assert cli.main(arguments) == cli.OUR_FAULT
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: {tmp_path / 'o' / 'plan'}: {os.strerror(number)}"
    assert way_out in hint
    assert list((tmp_path / "o").iterdir()) == []


def test_it_shows_the_usage_of_the_command_that_got_an_unknown_option(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["compile", "s", "--output", "o"])
    assert caught.value.code == cli.BAD_ARGUMENTS
    shown = capsys.readouterr().err
    assert "usage: python -m compiler compile" in shown
    assert "unrecognized arguments: --output o" in shown
