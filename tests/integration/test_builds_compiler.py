"""The real compiler behind the runner: a real model, and submissions that are at fault."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builds.compile_runner.checks import check_run_one
from builds.compile_runner.run import build_run_one
from builds.models import BuildJob, Bundle, Model, ModelVersion
from builds.selectors.pages import gain_of
from builds.services.signing import keys_generate, repositories_init
from builds.services.version_checks import check_create
from builds.states import VersionState
from compiler.driver.cache import StageCache
from compiler.driver.removal_trials import RemovalTrials
from compiler.frontend import import_pipeline
from compiler.passes.pipeline import raise_pipeline
from compiler.quant.module import pack_weight
from tests.factories.builds import make_files, make_job, make_model, make_target, make_version
from tests.factories.bundles import STORE
from tests.factories.weak_models import cards_of, write_cards, write_weak

pytestmark = pytest.mark.django_db
ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT / "examples" / "moe-exports" / "exp_qwen3_moe_batched_mm_dynamo.onnx"


def pipeline(source: str = "x", result: str = "view_5") -> bytes:
    component = {
        "file": "model.onnx",
        "inputs": {source: {"role": "tensor"}},
        "outputs": {result: {"role": "tensor"}},
    }
    document = {
        "schema": "sparsefleet.pipeline/1",
        "family": "graph",
        "max_step_tokens": 64,
        "components": {"model": component},
    }
    return json.dumps(document).encode()


def unsupported_model() -> bytes:
    node = helper.make_node("Unique", ["x"], ["y"], name="odd_one")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "s", 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    return bytes(model.SerializeToString())


@pytest.fixture(autouse=True)
def keys(state_dir: Path) -> None:
    keys_generate()
    repositories_init()


def build(model: bytes, description: bytes, version: ModelVersion | None = None) -> BuildJob:
    version = version or make_version(state=VersionState.SUBMITTED)
    version.files = make_files(model__onnx=model, pipeline__json=description)
    version.save()
    job = make_job(version, make_target("x86-64-v1"))
    build_run_one(job.pk)
    job.refresh_from_db()
    version.refresh_from_db()
    return job


def test_it_builds_two_versions_of_a_real_model() -> None:
    model = make_model("moe-block")
    first = build(REAL.read_bytes(), pipeline(), make_version(model))
    assert (first.state, first.error_message) == ("ready", "")
    assert first.report["selftest_vectors"] >= 16
    assert first.bundle.verified_on == "host"
    second = build(REAL.read_bytes(), pipeline(), make_version(model))
    assert (second.state, second.base_bundle) == ("ready", Bundle.objects.get(job=first))
    # The same weights on the same grids: every section with weights is the same blob.
    digests = [
        dict(job.bundle.sections.values_list("component", "sha256")) for job in (first, second)
    ]
    weights = {name for name in digests[0] if name.startswith(("weights", "expert"))}
    assert len(weights) == 5
    assert {name: digests[0][name] for name in weights} == {
        name: digests[1][name] for name in weights
    }


def test_it_builds_other_weights_into_another_bundle() -> None:
    model = make_model("moe-block")
    graph = onnx.load_from_string(REAL.read_bytes())
    largest = max(graph.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weights = np.frombuffer(largest.raw_data, "<f4")
    largest.raw_data = (weights * np.float32(-1.0)).tobytes()
    files = (REAL.read_bytes(), graph.SerializeToString())
    first, second = (build(file, pipeline(), make_version(model)) for file in files)
    assert (first.state, second.state) == ("ready", "ready")
    digests = [
        set(job.bundle.sections.values_list("component", "sha256")) for job in (first, second)
    ]
    assert {name for name, _ in digests[0] - digests[1]} >= {"expert.L0.E0", "selftest"}


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        (lambda: REAL.read_bytes()[:20_000], "build.user.malformed_model", []),
        (lambda: b"this is no ONNX file", "build.user.malformed_model", []),
        (lambda: b"", "build.user.malformed_model", []),
        (unsupported_model, "build.user.unsupported_op", ["Unique", "odd_one"]),
    ],
    ids=["truncated", "no-onnx", "empty", "unsupported"],
)
def test_it_says_what_is_wrong_with_a_submission(model: Any, code: str, words: list[str]) -> None:
    onnx_bytes = model()
    description = pipeline("x", "y") if words else pipeline()
    job = build(onnx_bytes, description)
    for row in (job, job.version):
        assert row.error_code == code, row.error_message
        assert all(word in row.error_message for word in words)
    assert (job.state, job.version.state) == ("failed_user", "invalid")
    if words:
        assert "fixed size" in job.error_hint


@pytest.mark.parametrize(
    ("size", "state", "code"),
    [(None, "validated", ""), (20_000, "invalid", "build.user.malformed_model")],
)
def test_it_reads_a_version_without_building_it(size: int | None, state: str, code: str) -> None:
    version = make_version(state=VersionState.SUBMITTED)
    version.files = make_files(model__onnx=REAL.read_bytes()[:size], pipeline__json=pipeline())
    version.save()
    check_run_one(check_create(version=version).pk)
    version.refresh_from_db()
    assert (version.state, version.error_code) == (state, code)


def summing_model() -> bytes:
    """Return a model with an operator that only a reference kernel does."""
    axis = helper.make_tensor("axis", TensorProto.INT64, [], [1])
    node = helper.make_node("CumSum", ["x", "axis"], ["y"])
    shape = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 8]) for name in "xy"]
    graph = helper.make_graph([node], "g", shape[:1], shape[1:], [axis])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    return bytes(model.SerializeToString())


def test_it_refuses_in_the_first_look_what_has_no_constant_time() -> None:
    rows = []
    description = json.loads(pipeline("x", "y"))
    description["components"]["model"]["inputs"]["x"]["shape"] = [2, 8]
    files = {"model__onnx": summing_model(), "pipeline__json": json.dumps(description).encode()}
    for wanted in (True, False):
        version = make_version(state=VersionState.SUBMITTED)
        version.files = make_files(**files)
        version.constant_time = wanted
        version.save()
        check_run_one(check_create(version=version).pk)
        version.refresh_from_db()
        rows.append(version)
    assert [row.state for row in rows] == ["invalid", "validated"]
    assert rows[0].error_code == "build.user.unsupported_op"
    assert rows[0].error_message == "no constant-time kernel for CumSum the one that makes 'y'"
    told = "export the model without these operators: values decide what they do"
    assert rows[0].error_hint == f"{told}; or leave constant time out"


def test_it_builds_a_version_in_constant_time() -> None:
    version = make_version(make_model("moe-block"))
    version.constant_time = True
    job = build(REAL.read_bytes(), pipeline(), version)
    assert (job.state, job.error_message) == ("ready", "")
    assert job.report["constant_time"] is True
    assert job.report["policy"]["fixed"] is True


def test_it_names_an_output_that_the_model_does_not_have() -> None:
    job = build(REAL.read_bytes(), pipeline("x", "absent"))
    assert job.error_code == "build.user.malformed_model"
    assert "absent" in job.error_message


def card_version(model: Model, folder: Path) -> BuildJob:
    """Build one more version of the same submission with questions."""
    version = make_version(model, state=VersionState.SUBMITTED)
    contents = {path.name.replace(".", "__"): path.read_bytes() for path in folder.iterdir()}
    version.files = [row for row in make_files(**contents) if (folder / str(row["name"])).exists()]
    version.save()
    job = make_job(version, make_target("x86-64-v1"))
    build_run_one(job.pk)
    job.refresh_from_db()
    version.refresh_from_db()
    return job


def test_it_compares_a_version_with_the_scores_of_its_base(tmp_path: Path) -> None:
    folder = write_weak(tmp_path / "weak")
    raised = raise_pipeline(import_pipeline(folder))
    write_cards(folder, cards_of(RemovalTrials.of(raised, pack_weight, StageCache(STORE)), 4))
    model = make_model("cards")
    first = card_version(model, folder)
    assert (first.state, first.report["gain"]["rule"]) == ("ready", "no_base")
    second = card_version(model, folder)
    assert (second.state, second.report["gain"]["rule"]) == ("ready", "no_gain")
    assert gain_of(version_id=second.version_id) == second.report["gain"]["says"]
    answers = second.report["answers"]
    lower = [max(-30_000_000, score - 500_000 - at) for at, score in enumerate(answers["f32"])]
    second.report = {**second.report, "answers": {**answers, "f32": lower}}
    second.save()
    third = card_version(model, folder)
    assert (third.state, third.error_code) == ("failed_user", "build.user.gain_lost")
    assert "nats in f32" in third.error_message
    assert "90% are needed" in third.error_message
    assert third.version.state == VersionState.INVALID
