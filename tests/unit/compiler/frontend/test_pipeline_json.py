import json
import os
from pathlib import Path
from typing import Any

import pytest

from compiler.errors import MalformedModelError
from compiler.frontend.pipeline_json import parse_pipeline, read_pipeline
from compiler.passes.pipeline_spec import PruneSpec
from tests.factories.onnx_models import tiny_document


def changed(path: str, value: Any) -> bytes:
    """Return the tiny document with one value replaced (None removes it)."""
    document = tiny_document()
    *parents, last = path.split("/")
    at: Any = document
    for key in parents:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return json.dumps(document).encode()


def test_it_reads_roles_and_settings() -> None:
    spec = parse_pipeline(json.dumps(tiny_document()).encode())
    decoder = spec.component("decoder")
    assert [port.role for port in decoder.inputs if port.value is not None] == ["constant"]
    assert spec.tokens is not None
    assert spec.tokens.prompts["caption"] == ("w2",)
    assert (spec.max_context, spec.max_step_tokens, spec.max_positions) == (32, 8, 48)


def test_it_reads_how_to_prune() -> None:
    assert parse_pipeline(changed("prune", {"mode": "model"})).prune is None
    rule = {"mode": "top_p", "p": 0.8, "max_keep": 6, "merge": 2, "score": "mean"}
    assert parse_pipeline(changed("prune", rule)).prune == PruneSpec(0.8, 1, 6, 2, "mean")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", "sparsefleet.pipeline/2", "schema"),
        ("family", "speech", "unknown family"),
        ("family", 3, "non-empty string"),
        ("max_context", 0, "from 1 to"),
        ("max_context", True, "from 1 to"),
        ("max_context", None, "no 'max_context'"),
        ("surprise", 1, "unknown key 'surprise'"),
        ("components/vision", None, "no 'vision'"),
        ("components/extra", {}, "unknown key 'extra'"),
        ("components/vision/file", "../vision.onnx", "plain file name"),
        ("components/vision/file", "/etc/passwd", "plain file name"),
        ("components/vision/inputs/image/role", "logits", "role 'logits'"),
        ("components/vision/inputs/image/value", 1.0, "unknown key 'value'"),
        ("components/decoder/inputs/lam/value", None, "no 'value'"),
        ("components/decoder/inputs/lam/value", "0", "must be a number"),
        ("components/decoder/outputs/next_k", None, "no input or output of role 'present_key'"),
        ("components/decoder/inputs/twin", {"role": "embeds"}, "given twice"),
        ("components/decoder/inputs", [], "must be an object"),
        ("prune", 0.8, "must be an object"),
        ("prune", {"mode": "entropy"}, "'mode' is 'entropy'"),
        ("prune", {"mode": "model", "p": 0.8}, "unknown key 'p'"),
        ("prune", {"mode": "top_p"}, "no 'p'"),
        ("prune", {"mode": "top_p", "p": 0}, "'p' must be in"),
        ("prune", {"mode": "top_p", "p": 1.5}, "'p' must be in"),
        ("prune", {"mode": "top_p", "p": 0.8, "min_keep": 0}, "from 1 to"),
        ("prune", {"mode": "top_p", "p": 0.8, "min_keep": 9, "max_keep": 8}, "exceeds"),
        ("prune", {"mode": "top_p", "p": 0.8, "merge": -1}, "from 0 to"),
        ("prune", {"mode": "top_p", "p": 0.8, "score": "column"}, "'score' is 'column'"),
        ("image/divide", 0, "positive"),
        ("image/divide", 10**400, "beyond"),
        ("image/channels", 9, "from 1 to 4"),
        ("tokens/vocabulary", ["a", "a"], "distinct"),
        ("tokens/vocabulary", "abc", "list of strings"),
        ("tokens/eos", 12, "from 0 to 11"),
        ("tokens/prompts/caption", ["nowhere"], "unknown token 'nowhere'"),
    ],
)
def test_it_says_what_is_wrong(path: str, value: Any, message: str) -> None:
    with pytest.raises(MalformedModelError, match=message) as caught:
        parse_pipeline(changed(path, value))
    assert caught.value.code == "build.user.malformed_model"


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff\xfe", b'{"schema": NaN}', b'{"a": 1, "a": 2}']
)
def test_it_refuses_what_is_not_strict_json(data: bytes) -> None:
    with pytest.raises(MalformedModelError):
        parse_pipeline(data)


def test_it_tells_how_to_lay_out_a_submission(tmp_path: Path) -> None:
    with pytest.raises(MalformedModelError) as caught:
        read_pipeline(tmp_path)
    assert "a submission is a directory" in caught.value.hint


def test_it_opens_no_pipe_and_no_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipeline.json")
    with pytest.raises(MalformedModelError, match="not a regular file"):
        read_pipeline(tmp_path)
    (tmp_path / "pipeline.json").unlink()
    (tmp_path / "pipeline.json").symlink_to("/dev/zero")
    with pytest.raises(MalformedModelError, match="not a regular file"):
        read_pipeline(tmp_path)
