"""A real bundle from Python and from the command line: EdgeCard, compiled for this machine."""

import doctest
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.driver.bundle_files import write_bundle
from compiler.driver.native_check import host_target
from device_agent.cli import main
from device_agent.errors import BundleError
from device_agent.runtime import MoERuntime, moe_runtime
from device_agent.runtime.evaluation import load_evaluation
from device_agent.runtime.generation import Reason
from device_agent.runtime.weights import WeightPool
from tests.factories.bundles import compiled, submission

ROOT = Path(__file__).resolve().parents[2]
ANSWER = "e a s t"
"""What the first card says at top left."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = host_target()
    if target is None:
        pytest.skip("this machine can run no target")
    folder = tmp_path_factory.mktemp("infer")
    write_bundle(compiled("v1", target.id, folder), folder / "bundle")
    np.save(folder / "card.npy", np.load(submission("v1", folder) / "evaluation.npz")["images"][0])
    return folder


def run(folder: Path, *arguments: str) -> int:
    picture = ["--image", str(folder / "card.npy")]
    return main(["infer", str(folder / "bundle"), *picture, *arguments])


def test_the_example_of_the_docstring_runs(folder: Path) -> None:
    names = {
        "bundle": folder / "bundle",
        "card": folder / "card.npy",
        "MoERuntime": MoERuntime,
    }
    found = doctest.testmod(moe_runtime, extraglobs=names)
    assert (found.failed, found.attempted > 0) == (0, True)


def test_it_answers_as_the_agent_does(folder: Path) -> None:
    cards = load_evaluation(submission("v1", folder) / "evaluation.json").cards[:4]
    with MoERuntime.open(folder / "bundle", rules=()) as runtime, runtime.session() as session:
        right = asked = 0
        for card in cards:
            for question in card:
                answer = session.generate(
                    " ".join(question.words), template=question.prompt, image=question.image
                )
                right += answer.words() == question.expected
                asked += 1
                assert answer.stats.native_calls == answer.stats.tokens + 2
        assert right / asked > 0.7
        assert runtime.facts["threads"]


def test_two_runtimes_share_weights(folder: Path) -> None:
    pool = WeightPool()
    with (
        MoERuntime.open(folder / "bundle", pool=pool) as one,
        MoERuntime.open(folder / "bundle" / "manifest.json", pool=pool) as two,
    ):
        assert len(pool) == 1
        assert one.manifest_sha256 == two.manifest_sha256
        texts = [
            each.session().generate("what at top left", image=folder / "card.npy").text()
            for each in (one, two)
        ]
    assert texts == [ANSWER, ANSWER]


def test_experts_beyond_a_budget_come_as_they_are_needed(folder: Path) -> None:
    pool = WeightPool(1_900_000)
    with MoERuntime.open(folder / "bundle", pool=pool, rules=()) as runtime:
        answer = runtime.session().generate("what at top left", image=folder / "card.npy")
        assert answer.text() == ANSWER
        assert answer.stats.first_token_ms is not None
        assert 0 < int(str(runtime.facts["resident_bytes"])) <= 1_900_000
    with MoERuntime.open(folder / "bundle", rules=()) as runtime:
        assert "resident_bytes" not in runtime.facts


def test_a_damaged_bundle_is_refused(folder: Path, tmp_path: Path) -> None:
    target = host_target()
    assert target is not None
    write_bundle(compiled("v1", target.id, folder), tmp_path)
    plan = tmp_path / "sections" / "plan"
    plan.write_bytes(plan.read_bytes()[:-1] + b"?")
    with pytest.raises(BundleError, match="section plan is not the one"):
        MoERuntime.open(tmp_path)
    plan.unlink()
    with pytest.raises(BundleError, match="no bundle in"):
        MoERuntime.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(BundleError, match="manifest"):
        MoERuntime.open(tmp_path)


def test_the_command_line_answers_whole_and_in_parts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--prompt", "what at top left")
    assert run(folder, *asked) == 0
    output = capsys.readouterr()
    assert output.out == ANSWER + "\n"
    assert "ended: 4 tokens in" in output.err
    assert run(folder, *asked, "--stream", "--threads", "1") == 0
    output = capsys.readouterr()
    assert output.out == ANSWER + "\n"
    assert "threads: 1" in output.err
    assert run(folder, *asked, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["reason"]) == (ANSWER, "ended")
    assert document["stats"]["tokens"] == 4
    assert run(folder, "--template", "caption", "--stream", "--json", "--max-tokens", "2") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines[:2]] == ["e", "a"]
    assert (lines[2]["reason"], lines[2]["text"]) == (Reason.MAX_TOKENS, "e a")


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (["--prompt", "wat at top left"], "agent.request", "did you mean 'what' or"),
        ([], "agent.request", "caption"),
        (["--prompt", "what", "--image", "absent.npy"], "agent.picture", ""),
    ],
)
def test_it_says_what_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: str, hint: str
) -> None:
    assert run(folder, *arguments) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert f"[{code}]" in output.err
    assert hint in output.err


def test_a_deadline_prints_what_there_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--prompt", "what", "--deadline", "1e-9", "--json") == 3
    assert json.loads(capsys.readouterr().out)["reason"] == "deadline"


def test_ctrl_c_prints_what_there_is(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []

    def interrupt(token: Any, at: int, *, is_json: bool) -> None:
        said.append(token.text)
        if at == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("device_agent.inferring._print_token", interrupt)
    before = signal.getsignal(signal.SIGINT)
    assert run(folder, "--prompt", "what at top left", "--stream", "--json") == 130
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["reason"], said) == ("e a", "cancelled", ["e", "a"])
    assert signal.getsignal(signal.SIGINT) is before


def test_a_reader_that_leaves_is_no_fault(folder: Path) -> None:
    command = [sys.executable, "-m", "device_agent", "infer", str(folder / "bundle")]
    asked = ["--prompt", "what", "--stream", "--json"]
    process = subprocess.Popen(
        [*command, *asked], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait(300) == 1
    assert "Traceback" not in told
    assert "Exception ignored" not in told
