"""EdgeCard and two exported MoE blocks, from ONNX to native code, with the real C compiler."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from benchmarks.compile import change_one_expert
from compiler.contract.bands import STEP, BandedRunner, Bands, parse_bands, verify_bands
from compiler.contract.degrade import Rung
from compiler.contract.ladder import require_ladder
from compiler.contract.manifest import parse_manifest
from compiler.contract.native import NativePlan
from compiler.contract.pipeline import parse_pipeline
from compiler.contract.selftest import parse_selftest, run_selftest
from compiler.contract.substitutes import Substitute, SubstituteRunner, parse_substitutes
from compiler.driver.band_trial import try_bands
from compiler.driver.base_grids import base_weights
from compiler.driver.bundle_files import read_bundle
from compiler.driver.bundle_simulator import BundleSimulator, module_of
from compiler.driver.cards import read_cards
from compiler.driver.compile import compile_model
from compiler.driver.evaluate import answer_cards, evaluate_bundle, score
from compiler.driver.native_check import runs_here
from compiler.driver.options import STAGES, CompiledBundle, CompileOptions
from compiler.emitters.c import CEmitter
from compiler.errors import CompilerError, MalformedModelError, SelfTestError
from compiler.hardware.targets import find_target
from tests.factories.bundles import STORE, compiled, submission

MEASURED = ("stages", "native_check", "explained", "picture")
"""Rows of the report with times in them."""
NARROW = Substitute.NARROW_DENSE
TARGETS = ("x86-64-v3", "x86-64-v2", "x86-64-v1")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
GRAPHS = {
    "exp_qwen3_moe_batched_mm_dynamo.onnx": "view_5",
    "exp_mixtral_batched_mm_dynamo.onnx": "view_7",
}
REFERENCE = json.loads((EXAMPLES / "edgecard" / "reference.json").read_text())["measured"]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def here(target: str) -> str:
    if not runs_here(find_target(target)):
        pytest.skip(f"this machine cannot run {target}")
    return target


def native(bundle: CompiledBundle) -> NativePlan:
    return NativePlan(bundle.sections["kernels"], bundle.sections["plan"], bundle.sections)


def evaluation(version: str, bundle: CompiledBundle, folder: Path):
    image = parse_pipeline(bundle.sections["pipeline"]).image
    assert image is not None
    return read_cards(submission(version, folder), "evaluation", image)


@pytest.mark.parametrize("target", TARGETS)
def test_it_verifies_the_shipped_code_on_this_machine(target, folder) -> None:
    bundle = compiled("v1", here(target), folder)
    assert bundle.manifest.verified_on == "host"
    selftest = parse_selftest(bundle.sections["selftest"])
    assert len(selftest.vectors) >= 16
    assert selftest.experts == {layer: tuple(range(16)) for layer in range(4)}
    with native(bundle) as plan:
        report = run_selftest(plan, bundle.sections["selftest"])
    assert report.passed
    assert report.runs > 48


def test_it_answers_alike_on_every_target_and_in_the_simulator(folder) -> None:
    bundles = [compiled("v1", here(target), folder) for target in TARGETS]
    pipeline = parse_pipeline(bundles[0].sections["pipeline"])
    cards = evaluation("v1", bundles[0], folder)[:4]
    expected = [
        item.answer for item in answer_cards(BundleSimulator(bundles[0].sections), pipeline, cards)
    ]
    assert len(expected) >= 40
    for bundle in bundles:
        with native(bundle) as plan:
            assert [item.answer for item in answer_cards(plan, pipeline, cards)] == expected


def test_it_shares_everything_but_kernels_and_policy_between_targets(folder) -> None:
    first, second = (compiled("v1", target, folder) for target in TARGETS[:2])
    assert first.sections.keys() == second.sections.keys()
    differing = [name for name, data in first.sections.items() if data != second.sections[name]]
    assert differing == ["kernels", "policy"]


def test_it_keeps_the_accuracy_of_the_f32_model(folder) -> None:
    bundle = compiled("v1", here("x86-64-v3"), folder)
    scores = evaluate_bundle(bundle.sections, submission("v1", folder))
    assert scores.questions == REFERENCE["v1"]["greedy"]["questions"]
    assert scores.accuracy > REFERENCE["v1"]["greedy"]["accuracy"] - 0.01
    assert scores.cut_off_ratio == 0.0
    few = evaluate_bundle(bundle.sections, submission("v1", folder), most_cards=1)
    simulated = evaluate_bundle(
        bundle.sections, submission("v1", folder), most_cards=1, in_simulator=True
    )
    assert simulated == few
    assert few.cards == 1


def test_its_entropy_bands_cost_no_accuracy(folder) -> None:
    """Variants run where calibration allows them; the evaluation set, unseen by it, agrees."""
    bundle = compiled("v1", here("x86-64-v3"), folder)
    bands = parse_bands(bundle.sections["bands"])
    assert 3 <= len(bands.bands) <= 5
    assert sum(band.share for band in bands.bands) >= 950
    assert bands.programs
    assert {band.reason for band in bands.bands if band.program == STEP} != set()
    selftest = parse_selftest(bundle.sections["selftest"])
    assert {run.program for v in selftest.vectors for run in v.runs} >= {STEP, *bands.programs}
    cards = evaluation("v1", bundle, folder)
    pipeline = parse_pipeline(bundle.sections["pipeline"])
    with native(bundle) as plan:
        verify_bands(plan.plan, bands)
        before = score(answer_cards(plan, pipeline, cards)).accuracy
        runner = BandedRunner(plan, bands)
        after = score(answer_cards(runner, pipeline, cards)).accuracy
        alone = [
            score(answer_cards(BandedRunner(plan, only(bands, at)), pipeline, cards)).accuracy
            for at in range(len(bands.bands))
        ]
    assert after >= before - bands.max_loss / 1e6
    assert min(alone) >= before - bands.max_loss / 1e6
    assert after > REFERENCE["v1"]["greedy"]["accuracy"] - 0.01
    taken = sum(runner.ran[name] for name in bands.programs)
    assert taken > 0.2 * sum(runner.ran.values())
    simulated = BandedRunner(BundleSimulator(bundle.sections), bands)
    with native(bundle) as plan:
        few = answer_cards(BandedRunner(plan, bands), pipeline, cards[:1])
    assert answer_cards(simulated, pipeline, cards[:1]) == few
    assert sum(simulated.ran.get(name, 0) for name in bands.programs) > 0


def test_its_narrow_layers_answer_as_they_were_judged(folder) -> None:
    """On cards that neither the fit nor the trial saw, with fewer bytes than any rung above."""
    bundle = compiled("v1", here("x86-64-v3"), folder)
    found = parse_substitutes(bundle.sections["substitutes"])
    assert found.kinds == (NARROW,)
    assert bundle.report["substitutes"]["refused"].keys() == {"shared_only", "full_dense"}
    pipeline = parse_pipeline(bundle.sections["pipeline"])
    cards = evaluation("v1", bundle, folder)
    with native(bundle) as plan:
        ladder = require_ladder(plan.plan, parse_bands(bundle.sections["bands"]))
        assert min(ladder, key=lambda rung: ladder[rung]) is Rung.NARROW_DENSE
        before = score(answer_cards(plan, pipeline, cards)).accuracy
        runner = SubstituteRunner(plan, found.kinds, pipeline.programs)
        runner.taken = NARROW
        after = score(answer_cards(runner, pipeline, cards)).accuracy
        few = answer_cards(runner, pipeline, cards[:1])
    judged = (found.right - found.rows[0].worse + found.rows[0].better) / found.questions
    assert abs(after - judged) < 0.06
    assert before - after < found.max_loss / 1e6
    assert set(runner.ran) == {"see.narrow", "step.narrow"}
    simulated = SubstituteRunner(BundleSimulator(bundle.sections), found.kinds, pipeline.programs)
    simulated.taken = NARROW
    assert answer_cards(simulated, pipeline, cards[:1]) == few
    tested = parse_selftest(bundle.sections["selftest"])
    assert {run.program for v in tested.vectors for run in v.runs} >= {"see.narrow", "step.narrow"}


def test_native_code_and_simulator_choose_the_same_bands(folder) -> None:
    """Where a compiler can run no native code, the simulator measures: the same trial."""
    bundle = compiled("v1", here("x86-64-v3"), folder)
    pipeline = parse_pipeline(bundle.sections["pipeline"])
    cards = read_cards(submission("v1", folder), "calibration", pipeline.image)[:2]
    few = [replace(card, questions=card.questions[:4]) for card in cards]
    with native(bundle) as plan:
        expected = try_bands(plan, pipeline, few, 2)
    assert try_bands(BundleSimulator(bundle.sections), pipeline, few, 2) == expected


def only(bands: Bands, at: int) -> Bands:
    """Return the bands with the variant of one of them."""
    rows = (band if n == at else replace(band, program=STEP) for n, band in enumerate(bands.bands))
    return replace(bands, bands=tuple(rows))


def test_it_keeps_most_codes_of_the_version_before(folder) -> None:
    bundle = compiled("v2", "x86-64-v3", folder, base_version="v1")
    base = bundle.report["base"]
    assert base["weights_paired"] == len(bundle.report["sqnr_db"])
    assert base["same_codes"] >= 0.9 * base["codes"]
    before = compiled("v1", "x86-64-v3", folder).report["sqnr_db"]
    lost = [before[name] - value for name, value in bundle.report["sqnr_db"].items()]
    assert float(np.mean(lost)) < 0.5  # dB


def test_it_shows_the_bad_version_by_running_it(folder) -> None:
    bundle = compiled("v3-bad", here("x86-64-v3"), folder)
    scores = evaluate_bundle(bundle.sections, submission("v3-bad", folder), most_cards=20)
    assert scores.accuracy < 0.5
    assert scores.mean_answer_tokens > 5
    assert scores.cut_off_ratio > 0


def test_it_makes_the_same_manifest_without_a_cache(folder, tmp_path) -> None:
    cached = compiled("v1", "x86-64-v3", folder)
    seen: list[tuple[str, float]] = []
    options = CompileOptions(
        "x86-64-v3",
        "edgecard",
        "v1",
        cache_dir=tmp_path / "fresh",
        progress=lambda stage, share: seen.append((stage, share)),
    )
    fresh = compile_model(submission("v1", folder), options)
    assert fresh.manifest.to_bytes() == cached.manifest.to_bytes()
    assert parse_manifest(fresh.manifest.to_bytes()) == fresh.manifest
    assert list(dict.fromkeys(stage for stage, _ in seen)) == list(STAGES)
    assert [share for _, share in seen] == sorted(share for _, share in seen)
    planned = [share for stage, share in seen if stage == "plan"]
    assert planned == pytest.approx([0.3, 0.39, 0.42, 0.51])
    again = compile_model(submission("v1", folder), options)
    assert again.manifest == fresh.manifest
    assert [row["cached"] for row in again.report["stages"]][:6] == [True] * 6
    assert again.report["native_check"] == {**fresh.report["native_check"], "kept": True}
    leftovers = list((tmp_path / "fresh").rglob("*.partial"))
    assert leftovers == []


def test_a_changed_expert_gives_what_a_compilation_without_a_cache_gives(folder, tmp_path) -> None:
    base = compiled("v1", "x86-64-v3", folder)
    changed = shutil.copytree(submission("v1", folder), tmp_path / "changed")
    change_one_expert(changed, 0)
    options = CompileOptions("x86-64-v3", "edgecard", "v1", base_sections=base.sections)
    cached = compile_model(changed, dataclasses.replace(options, cache_dir=STORE))
    fresh = compile_model(changed, dataclasses.replace(options, cache_dir=tmp_path / "fresh"))
    assert cached.manifest.to_bytes() == fresh.manifest.to_bytes()
    assert cached.sections == fresh.sections
    assert cached.ir_text == fresh.ir_text
    told = [
        json.loads(json.dumps({k: row for k, row in bundle.report.items() if k not in MEASURED}))
        for bundle in (cached, fresh)
    ]
    assert told[0] == told[1]
    assert cached.sections["expert.L0.E3"] != base.sections["expert.L0.E3"]


def test_it_compiles_cleanly_after_being_killed_anywhere(folder, tmp_path) -> None:
    arguments = ["compile", str(submission("v1", folder)), "--target", "x86-64-v3"]
    arguments += ["--model", "edgecard", "--release", "v1", "--cache", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "compiler", *arguments, "--out", str(tmp_path / "out")]
    for stage in ("raise", "plan", "kernels", "selftest", "manifest"):
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as child:
            assert child.stderr is not None
            for line in child.stderr:
                if line.split()[-1] == stage:
                    break
            child.kill()
        assert child.returncode == -signal.SIGKILL
        if (tmp_path / "out" / "manifest.json").exists():  # killed too late, then all is there
            read_bundle(tmp_path / "out")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "verified on host" in done.stdout
    manifest, sections = read_bundle(tmp_path / "out")
    undisturbed = compiled("v1", "x86-64-v3", folder)
    assert sections == undisturbed.sections
    assert manifest.sections == undisturbed.manifest.sections


def test_it_covers_every_weight_bearing_section_with_planes(folder) -> None:
    manifest = compiled("v1", "x86-64-v3", folder).manifest
    kinds = {
        section.component: {plane.kind for plane in section.planes} for section in manifest.sections
    }
    assert kinds["expert.L0.E0"] >= {"codes4", "scales8", "f32"}
    assert kinds["weights.shared"] >= {"codes4", "scales8", "f32"}
    assert kinds["plan"] == kinds["kernels"] == kinds["selftest"] == set()
    assert sum(name.startswith("expert.") for name in kinds) == 64


@pytest.mark.parametrize("name", GRAPHS)
def test_it_compiles_and_runs_an_exported_block(name, tmp_path) -> None:
    here("x86-64-v3")
    shutil.copy(EXAMPLES / "moe-exports" / name, tmp_path)
    component = {
        "file": name,
        "inputs": {"x": {"role": "tensor"}},
        "outputs": {GRAPHS[name]: {"role": "tensor"}},
    }
    document = {
        "schema": "sparsefleet.pipeline/1",
        "family": "graph",
        "max_step_tokens": 32,
        "components": {"model": component},
    }
    (tmp_path / "pipeline.json").write_text(json.dumps(document))
    bundle = compile_model(tmp_path, CompileOptions("x86-64-v3", "block", "1", cache_dir=STORE))
    assert bundle.manifest.verified_on == "host"
    assert bundle.report["experts"] == {"L0": 4}
    session = onnxruntime.InferenceSession(str(tmp_path / name))
    rows = np.random.default_rng(4).standard_normal((9, 32)).astype(np.float32)
    (expected,) = session.run(None, {"x": rows[None]})
    with native(bundle) as plan:
        raw = plan.run("forward", {"tensor": rows.tobytes()})["tensor"]
        found = np.frombuffer(raw, np.float32).reshape(9, 32).copy()
    # random weights: W4 costs about 9 % (21 dB) per matrix, two matrices and the gate
    error = np.linalg.norm(found - expected[0]) / np.linalg.norm(expected)
    assert error < 0.25


def _compile_broken(monkeypatch, folder: Path, line: str, **changes) -> None:
    """Compile with a line of C put at the start of the ARGMAX kernel."""
    signature = "int32_t sf_argmax(sf_context *ctx, const sf_call *c) {"

    emit = CEmitter.emit

    def broken(self, ops, target) -> str:
        source = emit(self, ops, target)
        assert signature in source
        return source.replace(signature, signature + line)

    compiled("v1", here("x86-64-v3"), folder)  # vectors are in the cache from here on
    monkeypatch.setattr(CEmitter, "emit", broken)
    monkeypatch.setattr("compiler.driver.compile.find_kernels", lambda *_: None)
    monkeypatch.setattr("compiler.driver.kernel_stage.STAGE", "broken")
    options = CompileOptions("x86-64-v3", "edgecard", "v1", cache_dir=STORE, **changes)
    compile_model(submission("v1", folder), options)


def test_it_refuses_kernels_that_give_other_bits(folder, monkeypatch) -> None:
    wrong = "sf_ints(sf_out(c, 0))[0] = 1; if (ctx) return SF_Status_OK;"
    with pytest.raises(SelfTestError, match="differ"):
        _compile_broken(monkeypatch, folder, wrong)


def test_it_survives_kernels_that_crash(folder, monkeypatch) -> None:
    with pytest.raises(SelfTestError, match="SIG"):
        _compile_broken(monkeypatch, folder, "if (ctx) __builtin_trap();")


def test_it_stops_kernels_that_hang(folder, monkeypatch) -> None:
    hang = "for (volatile int i = 1; i && ctx;) {}"
    with pytest.raises(SelfTestError, match="more than 3 s"):
        _compile_broken(monkeypatch, folder, hang, selftest_timeout_s=3.0)


def test_it_refuses_a_base_that_is_no_bundle(folder) -> None:
    good = dict(compiled("v1", "x86-64-v3", folder).sections)
    module, packed = module_of(good)
    assert base_weights(module, good, None).keys() == packed.keys()
    for base in (
        {**good, "plan": good["plan"][:-4]},
        {**good, "weights.shared": good["weights.shared"][:-64]},
        {name: data for name, data in good.items() if name != "expert.L1.E3"},
    ):
        with pytest.raises(CompilerError, match="base bundle"):
            base_weights(module, base, None)


def test_it_refuses_a_submission_without_calibration(folder, tmp_path) -> None:
    shutil.copytree(submission("v1", folder), tmp_path / "s")
    (tmp_path / "s" / "calibration.npz").unlink()
    with pytest.raises(MalformedModelError, match="calibration"):
        compile_model(
            tmp_path / "s", CompileOptions("x86-64-v3", "edgecard", "v1", cache_dir=STORE)
        )
