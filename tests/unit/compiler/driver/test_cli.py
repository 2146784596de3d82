"""The command line: what it prints, where, and how it ends."""

import errno
import io
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import onnx
import pytest

from compiler.contract.manifest import VERIFIED_ON
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
    names = [line.split()[0] for line in lines[1:]]
    assert names[:3] == ["x86-64-v1", "x86-64-v2", "x86-64-v3"]
    assert names[-1] == "opencl"
    endings = ("runs here", "emulated here", "does not run here", "no device is given it")
    assert all(line.endswith(endings) for line in lines[1:])
    unmeasured = {line.split()[0] for line in lines[1:] if "  unmeasured  " in line}
    assert "aarch64" in unmeasured
    assert "x86-64-v3" not in unmeasured


def test_it_lists_how_every_variant_was_checked(capsys) -> None:
    assert cli.main(["targets", "--json"]) == cli.OK
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert {row["verified_on"] for row in rows.values()} <= set(VERIFIED_ON)
    assert {rows[name]["backend"] for name in ("aarch64", "aarch64-sve2")} == {"aarch64"}
    opencl = rows["opencl"]
    assert (opencl["backend"], opencl["tile"], opencl["runs_here"]) == ("opencl", "opencl", False)


def test_it_lists_the_gpu_of_a_system_as_unverified(capsys) -> None:
    assert cli.main(["targets", "--socs", "--json"]) == cli.OK
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["sm8250"]["gpu"] == "Adreno 650"
    assert rows["sm8250"]["accelerator_targets"] == ["opencl"]
    assert "opencl" not in rows["sm8250"]["targets"]
    assert rows["sm8250"]["verified_on"] == "unverified"
    assert rows["x86-zen4"]["accelerator_targets"] == []


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
            2,
            "model 'A/B' cannot be released",
        ),
        *(
            (["compile", "{}", "--target", "x86-64-v3", "--out", "{}/o", *option], 2, message)
            for option, message in (
                (["--release-seq", "-1"], "release_seq -1 cannot be released"),
                (["--release-seq", "9" * 20], "release_seq 99999999999999999999 cannot"),
                (["--security-epoch", "9" * 20], "security_epoch 99999999999999999999 cannot"),
                (["--max-seconds", "nan"], "limit max_seconds must be positive"),
                (["--max-seconds", "inf"], "limit max_seconds must be positive"),
                (["--max-seconds", "1e300"], "limit max_seconds must be positive"),
                (["--max-nodes", "0"], "limit max_nodes must be positive"),
                (["--max-memory-bytes", "9" * 20], "limit max_memory_bytes must be positive"),
            )
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


def test_a_submission_beyond_a_limit_is_refused(tmp_path, capsys) -> None:
    write_block(tmp_path / "s", mlp_block)
    arguments = ["compile", str(tmp_path / "s"), "--target", "x86-64-v3", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--max-nodes", "2"]) == cli.USER_FAULT
    printed = capsys.readouterr().err
    assert "the limit max_nodes is 2" in printed
    assert "hint: option --max-nodes" in printed


@pytest.mark.parametrize("command", ["compile", "import"])
def test_every_limit_is_an_option(capsys, command) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    assert all(f"--{f.name.replace('_', '-')}" in shown for f in fields(ImportLimits))


@pytest.mark.parametrize(
    ("option", "value"),
    [("max-file-bytes", "10"), ("max-nodes", "1"), ("max-seconds", "0.0001")],
)
def test_an_import_beyond_a_limit_is_refused_and_writes_nothing(
    capsys, tmp_path, option, value
) -> None:
    source = next(write_block(tmp_path / "s", mlp_block).glob("*.onnx"))
    arguments = ["import", str(source), "--out", str(tmp_path / "o"), f"--{option}", value]
    assert cli.main(arguments) == cli.USER_FAULT
    printed = capsys.readouterr().err
    assert f"the limit {option.replace('-', '_')} is" in printed
    assert f"hint: option --{option}" in printed
    assert not (tmp_path / "o" / "pipeline.json").exists()


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


EVIL = "e\x1b[31mVIL\n\x9b\u202e<"


def _evil_submission(directory: Path) -> Path:
    """Write a model whose nodes have names that could steer a terminal."""
    write_block(directory, mlp_block)
    model = onnx.load(directory / "model.onnx")
    for at, node in enumerate(model.graph.node):
        node.name = f"{EVIL}{at}"
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    return directory


def test_no_name_of_a_file_steers_the_terminal_or_breaks_the_picture(tmp_path, capsys) -> None:
    _evil_submission(tmp_path / "s")
    out = str(tmp_path / "o")
    line = ["compile", str(tmp_path / "s"), "--target", "x86-64-v1", "--out", out]
    assert cli.main(line) == cli.OK
    svg = tmp_path / "o.svg"
    assert cli.main(["explain", out, "--svg", str(svg)]) == cli.OK
    assert cli.main(["inspect", out, "plan", "weights"]) == cli.OK
    shown = capsys.readouterr()
    assert "e\\x1b[31mVIL" in shown.out
    assert all(line.isprintable() for line in (shown.out + shown.err).split("\n"))
    ElementTree.fromstring(svg.read_text())


NO_REPORTS = [
    {"explained": 1},
    {"explained": {"programs": []}},
    {"stages": 1},
    {"stages": [{}]},
    {"explain": [[]]},
    {"sqnr_db": 1},
    {"notes": [1]},
]


def test_a_report_that_compile_did_not_write_is_refused(tmp_path, capsys) -> None:
    submission, out = write_block(tmp_path / "s", mlp_block), tmp_path / "o"
    assert cli.main(["compile", str(submission), "--target", "x86-64-v1", "--out", str(out)]) == 0
    report = json.loads((out / "report.json").read_text())
    for change in NO_REPORTS:
        (out / "report.json").write_text(json.dumps({**report, **change}))
        assert cli.main(["explain", str(out), "--svg", str(tmp_path / "o.svg")]) == cli.USER_FAULT
        assert "is not as `compile` writes it" in capsys.readouterr().err


@pytest.mark.parametrize("value", [[{}] * 8, ["a"] * 8, [None] * 8, {"a": 1}, [10**30] * 8, []])
def test_inputs_that_are_no_numbers_are_refused(tmp_path, capsys, value) -> None:
    submission = write_block(tmp_path / "s", mlp_block)
    (tmp_path / "in.json").write_text(json.dumps({"tensor": value}))
    line = ["simulate", str(submission), "--run", f"forward={tmp_path / 'in.json'}"]
    assert cli.main(line) == cli.USER_FAULT
    assert "hint: " in capsys.readouterr().err


def test_a_defect_of_ours_ends_with_its_own_status(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import compiler.driver.cli as cli\n\n\ndef main():\n    raise KeyError('defect')\n\n\n"
        "cli.main = main\n"
    )
    done = _module("targets", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == cli.OUR_FAULT
    assert "KeyError: 'defect'" in done.stderr


def test_running_out_of_memory_is_an_error_with_a_hint(monkeypatch, capsys, tmp_path) -> None:
    def run(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(compile_submission, "compile_model", run)
    line = ["compile", str(tmp_path), "--target", "x86-64-v1", "--out", str(tmp_path / "o")]
    assert cli.main(line) == cli.OUR_FAULT
    assert "error: out of memory\nhint: " in capsys.readouterr().err


def test_a_name_that_is_no_utf8_is_shown_as_an_escape(tmp_path) -> None:
    """The parser of ONNX files gives bytes for it."""
    submission = write_block(tmp_path / "s", mlp_block)
    model = onnx.load(submission / "model.onnx")
    for node in model.graph.node:
        node.name = "qqqq"
    data = model.SerializeToString().replace(b"qqqq", b"q\xff\xfeq")
    (submission / "model.onnx").write_bytes(data)
    line = ["compile", str(submission), "--target", "x86-64-v1", "--out", str(tmp_path / "o")]
    assert cli.main(line) == cli.OK
    assert r"q\\xff\\xfeq" in (tmp_path / "o" / "report.json").read_text()


def test_a_refused_submission_always_has_a_hint() -> None:
    assert MalformedModelError("input 'x' twice").hint.startswith("mend what the message names")
    assert MalformedModelError("input 'x' twice", hint="drop one").hint == "drop one"


def test_errors_are_printable_and_of_bounded_length(tmp_path, capsys) -> None:
    error = MalformedModelError(f"node {EVIL}" + "x" * 10**6, hint=f"look at {EVIL[:9]}\nand more")
    assert len(str(error)) < 5_000
    assert str(error).isprintable()
    assert error.hint.count("\n") <= 2
    Console(as_json=False).fail(ToolchainError(f"{EVIL}"), EVIL, "code")
    assert all(line.isprintable() for line in capsys.readouterr().err.split("\n"))


def _module(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = f'exec "{sys.executable}" -m compiler {line}'
    return subprocess.run(
        ["sh", "-c", command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_speaks_to_closed_streams_and_to_ascii(tmp_path) -> None:
    for streams in (">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"):
        assert _module(f"targets {streams}").returncode == cli.OK
    done = _module(
        'import "$FILE" --out "$FILE/o"',
        FILE=str(tmp_path / "\udcff\u2026"),
        LC_ALL="C",
        PYTHONCOERCECLOCALE="0",
        PYTHONUTF8="0",
    )
    assert done.returncode == cli.BAD_ARGUMENTS
    assert "does not exist" in done.stderr


def test_sigterm_ends_it_like_ctrl_c(tmp_path) -> None:
    """Stopped in the self-test, whose child would run on and whose folder would stay."""
    submission = write_block(tmp_path / "s", mlp_block)
    folder = tmp_path / "temporary"
    folder.mkdir()
    options = ["--target", "x86-64-v1", "--out", str(tmp_path / "o")]
    with subprocess.Popen(
        [sys.executable, "-m", "compiler", "compile", str(submission), *options],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        while "kernels" not in running.stderr.readline():
            assert running.poll() is None
        while not list(folder.iterdir()):
            assert running.poll() is None
        running.terminate()
        assert running.wait(60) == 143
    assert list(folder.iterdir()) == []
    assert not (tmp_path / "o").exists()
