"""EdgeCard with adaptive pruning, seen by one back end and answered by another: the same bits."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.backend import Backend
from compiler.contract.pipeline import Pipeline, parse_pipeline
from compiler.contract.plan import parse_plan
from compiler.contract.session import Session, hold, seeing, step_inputs
from compiler.driver.bundle_files import write_bundle
from compiler.driver.choose_pruning import rule_json, sweep
from compiler.driver.compile import compile_model
from compiler.driver.native_check import host_target
from compiler.driver.options import CompiledBundle, CompileOptions
from device_agent.runtime.native_backend import NativeBackend
from device_agent.runtime.process_backend import ProcessBackend
from device_agent.runtime.spanning import SpannedPlan
from examples.edgecard.materialise import materialise
from tests.factories.bundles import STORE
from tests.factories.kernels import raw

QUESTION = ("question", ("what", "at", "top", "left"))
SLICES = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spanned")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> CompiledBundle:
    target = host_target()
    if target is None:
        pytest.skip("this machine can run no target")
    submission = materialise("v1", folder / "v1")
    path = submission / "pipeline.json"
    (rule,) = sweep(shares=(0.85,), merges=(4,))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prune": rule_json(rule)}))
    made = compile_model(submission, CompileOptions(target.id, "edgecard", "v1", cache_dir=STORE))
    write_bundle(made, folder / "bundle")
    return made


@pytest.fixture(scope="module")
def pipeline(bundle: CompiledBundle) -> Pipeline:
    return parse_pipeline(bundle.sections["pipeline"])


@pytest.fixture(scope="module")
def pictures(folder: Path, bundle: CompiledBundle) -> list[bytes]:
    images = np.load(folder / "v1" / "evaluation.npz")["images"][:SLICES]
    return [image.tobytes() for image in images]


@pytest.fixture
def one(bundle: CompiledBundle) -> Iterator[NativeBackend]:
    with NativeBackend(bundle.sections) as backend:
        yield backend


def process(folder: Path, bundle: CompiledBundle) -> Backend:
    module = ["-m", "device_agent.runtime.plan_runner", str(folder / "bundle")]
    return ProcessBackend([sys.executable, *module], parse_plan(bundle.sections["plan"]))


def serial(backend: Backend, pipeline: Pipeline, pictures: list[bytes]) -> dict[str, bytes]:
    """See every picture in turn on one back end; return what it makes of a question."""
    for picture in pictures:
        hold(backend, seeing(pipeline, picture))
    return raw(backend.execute("step", step_inputs([1, 30, 31, 3], 64)))


@pytest.mark.parametrize("where", ["eyes", "voice"])
def test_native_and_process_together_give_the_bits_of_one(
    folder: Path,
    bundle: CompiledBundle,
    pipeline: Pipeline,
    pictures: list[bytes],
    one: NativeBackend,
    where: str,
) -> None:
    wanted = serial(one, pipeline, pictures)
    rows = one.kv_length - 4
    with NativeBackend(bundle.sections) as native, process(folder, bundle) as other:
        eye, voice = (native, other) if where == "voice" else (other, native)
        plan = SpannedPlan([eye], voice, pipeline)
        assert plan.see_slices(pictures) == rows
        assert raw(plan.run("step", step_inputs([1, 30, 31, 3], 64))) == wanted
        session = Session(plan, pipeline)
        session.see(pictures[0])
        assert session.ask(*QUESTION) == ("e", "a", "s", "t")


def test_two_eyes_give_the_bits_of_one(
    bundle: CompiledBundle, pipeline: Pipeline, pictures: list[bytes], one: NativeBackend
) -> None:
    wanted = serial(one, pipeline, pictures)
    with ExitStack() as stack:
        left, right, voice = (
            stack.enter_context(NativeBackend(bundle.sections, one.plan.weights)) for _ in range(3)
        )
        plan = SpannedPlan([left, right], voice, pipeline)
        for _ in range(20):
            plan.kv_length = 0
            assert plan.see_slices(pictures) == one.kv_length - 4
            assert raw(plan.run("step", step_inputs([1, 30, 31, 3], 64))) == wanted
