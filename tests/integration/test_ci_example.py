"""The example of a CI job against a live server: submitted, repeated, refused, compiled."""

import json
from pathlib import Path
from typing import Any

import pytest

from builds.common.auth import token_create
from builds.common.roles import Role
from builds.models import BuildJob, ModelVersion
from examples.ci import submit
from tests.factories.builds import MINIMAL_ONNX, PIPELINE, make_target

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def line(live_server: Any, tmp_path: Path) -> list[str]:
    """Return the command line of a job with a token, a submission and one active target."""
    make_target("x86-64-v3")
    _, token = token_create(name="ci", role=Role.DEVELOPER)
    (tmp_path / "ci.token").write_text(token + "\n")
    folder = tmp_path / "submission"
    folder.mkdir()
    (folder / "pipeline.json").write_text(json.dumps(PIPELINE))
    (folder / "model.onnx").write_bytes(MINIMAL_ONNX)
    return [
        *(live_server.url, str(folder), "--model", "doc-reader", "--version", "1.4.0"),
        *("--token-file", str(tmp_path / "ci.token"), "--timeout", "0"),
    ]


def test_it_submits_a_version_once_however_often_it_is_sent(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert submit.main(line) == 1  # nobody compiles here, and it does not wait
        printed = capsys.readouterr()
        (build,) = json.loads(printed.out)
        assert (build["target"], build["state"]) == ("x86-64-v3", "queued")
        assert "doc-reader 1.4.0: submitted, 1 builds" in printed.err
        assert "error: 1 builds have not ended" in printed.err
    assert ModelVersion.objects.count() == 1


def test_it_ends_well_when_every_build_is_ready(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    submit.main(line)
    BuildJob.objects.update(state="ready")
    assert submit.main(line) == 0
    assert "build" in capsys.readouterr().err


def test_it_asks_for_constant_time(line: list[str]) -> None:
    submit.main([*line, "--constant-time"])
    assert ModelVersion.objects.get().constant_time


def test_it_says_why_it_was_refused(
    line: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    submit.main(line)
    folder = tmp_path / "submission"
    (folder / "model.onnx").write_bytes(MINIMAL_ONNX + b"\0")
    capsys.readouterr()
    assert submit.main(line) == 1
    assert "(version.exists)\nhint: versions are immutable" in capsys.readouterr().err
    (folder / "pipeline.json").unlink()
    assert submit.main([*line, "--version", "2"]) == 1
    assert "python -m compiler import" in capsys.readouterr().err
    (tmp_path / "ci.token").write_text("sf_1_wrong")
    assert submit.main(line) == 1
    assert "app.unauthenticated" in capsys.readouterr().err
    assert submit.main(["http://127.0.0.1:9", *line[1:]]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    (tmp_path / "ci.token").unlink()
    assert submit.main(line) == 2
