"""Multimodal families from their directories to native code: same bits, and what W4 costs."""

from pathlib import Path

import numpy as np
import pytest

from compiler.contract.native import NativePlan
from compiler.contract.pipeline import Pipeline, parse_pipeline
from compiler.contract.selftest import parse_selftest, run_selftest
from compiler.contract.session import PlanRunner, see, step_inputs
from compiler.driver.bundle_simulator import BundleSimulator, module_of
from compiler.driver.compile import compile_model
from compiler.driver.native_check import host_target
from compiler.driver.options import CompiledBundle, CompileOptions
from compiler.errors import MalformedModelError
from compiler.frontend.families import FamilyOptions, write_family_submission
from compiler.simulator import Simulator
from tests.factories.bundles import STORE
from tests.factories.cards import QUESTION, write_calibration
from tests.factories.families import (
    LLAVA_PHI,
    MINICPM_V,
    Vlm,
    variant,
)
from tests.factories.family_runs import Files, Original, minicpm, text_positions, transformers_js

Array = np.ndarray
OPTIONS = FamilyOptions(max_context=32, max_step_tokens=8, max_answer_tokens=4, prompts=QUESTION)
WIDE = {"width": 64, "hidden": 96, "vision_width": 32, "scale": 0.125}
"""Rows that fill whole groups of W4, and layers without gain, as real models have them."""
FAMILIES = {
    "llava-phi": (transformers_js, variant(LLAVA_PHI, **WIDE)),
    "minicpm-v": (minicpm, variant(MINICPM_V, **WIDE)),
}
TEXT, DECODED = [4, 7, 2], [5, 9, 3]
W4_TOLERANCE = 0.35
"""Most that W4 may cost against f32: norm of the logits' difference over their norm. Random weights
lose about 0.09 per matrix, and some seven matrices lie one behind the other."""
INT8_TOLERANCE = 0.05
"""The same against f64 on the very weights that are stored: int8 rows and f32 sums alone."""


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def made(request, tmp_path_factory) -> tuple[CompiledBundle, Files, Vlm]:
    target = host_target()
    if target is None:
        pytest.skip("this machine can run no target")
    folder = tmp_path_factory.mktemp(request.param)
    layout, shape = FAMILIES[request.param]
    files = layout(folder / "source", shape)
    spec = write_family_submission(folder / "source", folder / "out", OPTIONS)
    write_calibration(folder / "out", spec)
    options = CompileOptions(target.id, request.param, "1", cache_dir=STORE)
    return compile_model(folder / "out", options), files, shape


def native(bundle: CompiledBundle) -> NativePlan:
    return NativePlan(bundle.sections["kernels"], bundle.sections["plan"], bundle.sections)


def pixels(shape: Vlm) -> Array:
    return np.random.default_rng(3).integers(0, 256, (*shape.sides, 3)).astype(np.uint8)


def answers(runner: PlanRunner, pipeline: Pipeline, shape: Vlm) -> list[dict[str, bytes]]:
    """Return all outputs of text after a picture, then of single tokens."""
    runner.kv_length = 0
    see(runner, pipeline, pixels(shape).tobytes())
    found, at = [], shape.image_tokens
    for ids in (TEXT, *([token] for token in DECODED)):
        outputs = runner.run("step", step_inputs(ids, at))
        found.append({role: bytes(data) for role, data in outputs.items()})
        at += len(ids)
    return found


def logits(found: list[dict[str, bytes]]) -> Array:
    return np.stack([np.frombuffer(outputs["logits"], "<f4") for outputs in found])


def wanted(original: Original, shape: Vlm) -> Array:
    """Return ONNX Runtime's logits for the same tokens."""
    count = shape.image_tokens
    ids = np.array([shape.image_token] * count + TEXT)
    embeds = original.embed(ids, original.see(pixels(shape)))
    rows = [original.decode(embeds, text_positions(0, len(ids)))]
    for number, token in enumerate(DECODED):
        embeds = original.embed(np.array([token]), np.zeros((1, 0, 1)))
        rows.append(original.decode(embeds, text_positions(len(ids) + number, 1)))
    return np.stack(rows)


def distance(found: Array, right: Array) -> float:
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


def test_it_verifies_pictures_and_words_on_this_machine(made) -> None:
    bundle, _, _ = made
    assert bundle.manifest.verified_on == "host"
    tests = parse_selftest(bundle.sections["selftest"])
    seen = [vector for vector in tests.vectors if vector.runs[0].program == "see"]
    assert len(seen) >= 16
    assert all(run.program == "step" for vector in seen for run in vector.runs[1:])
    with native(bundle) as plan:
        assert run_selftest(plan, bundle.sections["selftest"]).passed


def test_it_gives_the_bits_of_the_simulator(made) -> None:
    bundle, _, shape = made
    pipeline = parse_pipeline(bundle.sections["pipeline"])
    with native(bundle) as plan:
        found = answers(plan, pipeline, shape)
    assert found == answers(BundleSimulator(bundle.sections), pipeline, shape)


def test_it_stays_near_onnx_runtime_after_quantisation(made) -> None:
    bundle, files, shape = made
    pipeline = parse_pipeline(bundle.sections["pipeline"])
    with native(bundle) as plan:
        found = logits(answers(plan, pipeline, shape))
    stored, _ = module_of(bundle.sections)
    exact = logits(answers(Simulator(stored, mode="f64"), pipeline, shape))
    assert distance(found, exact) <= INT8_TOLERANCE
    assert 0 < distance(found, wanted(Original(files, shape), shape)) <= W4_TOLERANCE


def test_it_asks_for_pictures_to_test_with(made, tmp_path: Path) -> None:
    layout, shape = FAMILIES["llava-phi"]
    layout(tmp_path / "source", shape)
    write_family_submission(tmp_path / "source", tmp_path / "out", OPTIONS)
    with pytest.raises(MalformedModelError, match=r"calibration\.json") as refused:
        compile_model(tmp_path / "out", CompileOptions(made[0].manifest.target, "vlm", "1"))
    assert "sparsefleet.cards/1" in (refused.value.hint or "")
