"""Compilations with an accuracy budget: what goes, what is reported, the same bytes again."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from compiler.contract.native import NativePlan
from compiler.contract.plan import parse_plan
from compiler.contract.selftest import run_selftest
from compiler.driver import cli
from compiler.driver.bundle_files import read_report
from compiler.driver.cache import StageCache
from compiler.driver.compile import compile_model
from compiler.driver.evaluate import evaluate_bundle
from compiler.driver.native_check import host_target
from compiler.driver.options import CompiledBundle, CompileOptions
from compiler.driver.removal_trials import RemovalTrials
from compiler.errors import CompilerError, UserModelError
from compiler.frontend import import_pipeline
from compiler.passes.pipeline import raise_pipeline
from compiler.quant.module import pack_weight
from tests.factories.bundles import STORE, submission
from tests.factories.onnx_blocks import mlp_block
from tests.factories.onnx_models import write_block
from tests.factories.weak_models import cards_of, write_cards, write_weak

BUDGET = 0.25
"""Weights of the model are random: rounding groups anew changes some answers at any rate."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def weak(folder: Path) -> Path:
    directory = write_weak(folder / "weak")
    raised = raise_pipeline(import_pipeline(directory))
    write_cards(directory, cards_of(RemovalTrials.of(raised, pack_weight, StageCache(STORE)), 12))
    return directory


def options(budget: float, cache: Path | None = STORE) -> CompileOptions:
    target = host_target()
    if target is None:
        pytest.skip("no target runs on this machine")
    return CompileOptions(
        target=target.id, model="weak", version="1", cache_dir=cache, accuracy_budget=budget
    )


@pytest.fixture(scope="module")
def whole(weak: Path) -> CompiledBundle:
    return compile_model(weak, options(0.0))


@pytest.fixture(scope="module")
def narrow(weak: Path) -> CompiledBundle:
    return compile_model(weak, options(BUDGET))


def test_without_a_budget_nothing_is_asked(whole: CompiledBundle) -> None:
    assert "removal" not in whole.report
    assert "accuracy_budget" not in whole.report["provenance"]
    assert "removed" not in whole.ir_text


def test_the_bundle_gets_smaller_and_says_why(
    whole: CompiledBundle, narrow: CompiledBundle
) -> None:
    found = narrow.report["removal"]
    assert [row["removed"] for row in found["sites"]] == [2, 2, 64, 64]
    assert found["accuracy_after"] >= found["accuracy_before"] - BUDGET
    assert narrow.manifest.total_bytes < whole.manifest.total_bytes
    assert narrow.report["provenance"]["accuracy_budget"] == BUDGET
    assert narrow.manifest.provenance_sha256 != whole.manifest.provenance_sha256
    stored = found["weight_bytes"]
    assert stored[1] < stored[0]
    before, after = (parse_plan(one.sections["plan"]).kv for one in (whole, narrow))
    assert before is not None
    assert after is not None
    assert (before.heads, after.heads) == (4, 2)
    assert narrow.report["memory"]["kv_bytes"] * 2 == whole.report["memory"]["kv_bytes"]


def test_native_code_and_simulator_still_agree(weak: Path, narrow: CompiledBundle) -> None:
    with NativePlan(narrow.sections["kernels"], narrow.sections["plan"], narrow.sections) as plan:
        assert run_selftest(plan, narrow.sections["selftest"]).passed
    native = evaluate_bundle(narrow.sections, weak, stem="calibration", most_cards=2)
    simulated = evaluate_bundle(
        narrow.sections, weak, stem="calibration", most_cards=2, in_simulator=True
    )
    assert native == simulated


def test_an_empty_cache_gives_the_same_bytes(
    weak: Path, narrow: CompiledBundle, tmp_path: Path
) -> None:
    again = compile_model(weak, options(BUDGET, tmp_path))
    assert again.manifest == narrow.manifest
    assert again.report["removal"] == narrow.report["removal"]


def test_the_command_explains_what_went(weak: Path, tmp_path: Path, capsys) -> None:
    target, out = host_target(), str(tmp_path / "bundle")
    assert target is not None
    words = ["compile", str(weak), "--target", target.id, "--out", out, "--cache", str(STORE)]
    assert cli.main([*words, "--model", "weak", "--accuracy-budget", str(BUDGET)]) == 0
    capsys.readouterr()
    assert cli.main(["explain", out]) == 0
    text = capsys.readouterr().out
    assert "removed within an accuracy budget of 25.00%: 32768 of " in text
    assert "accuracy on " in text
    assert "expert channels" in text
    assert "64 of 128" in text
    assert read_report(tmp_path / "bundle")["removal"]["structure_loss"] == 0.0


@pytest.mark.parametrize("budget", [-0.1, 1.0])
def test_a_budget_is_a_share(budget: float) -> None:
    with pytest.raises(CompilerError, match="accuracy budget"):
        options(budget)


def test_a_model_without_questions_has_nothing_to_judge_by(tmp_path: Path) -> None:
    with pytest.raises(UserModelError, match="answers questions"):
        compile_model(write_block(tmp_path, mlp_block), options(0.01))


@pytest.mark.full
def test_edgecard_keeps_its_accuracy_within_the_budget(folder: Path) -> None:
    """Judged on the evaluation set, which no step of the choice opens."""
    directory = submission("v1", folder)
    bundles = [
        compile_model(directory, replace(options(budget), model="edgecard"))
        for budget in (0.0, 0.003)
    ]
    found = bundles[1].report["removal"]
    assert found["parameters"][1] < found["parameters"][0]
    assert found["accuracy_after"] >= found["accuracy_before"] - 0.003
    scores = [evaluate_bundle(one.sections, directory).accuracy for one in bundles]
    assert scores[1] >= scores[0] - 0.01
