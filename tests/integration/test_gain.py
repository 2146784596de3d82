"""The gate of a release in a compilation: the scores of both versions, the verdict, the refusal."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from compiler.contract.native import NativePlan
from compiler.contract.pipeline import parse_pipeline
from compiler.driver import cli
from compiler.driver.cache import StageCache
from compiler.driver.cards import read_cards
from compiler.driver.compile import compile_model
from compiler.driver.gain import MICRO, AnswerScores, GainLostError
from compiler.driver.gain_stage import scores_in
from compiler.driver.gain_trial import answer_scores
from compiler.driver.lowering import lower_submission
from compiler.driver.native_check import host_target
from compiler.driver.options import CompiledBundle, CompileOptions, no_progress
from compiler.driver.provenance import CALIBRATION
from compiler.driver.removal_trials import RemovalTrials
from compiler.driver.stages import StageClock
from compiler.frontend import import_pipeline
from compiler.passes.pipeline import raise_pipeline
from compiler.quant.module import pack_weight
from compiler.simulator.machine import Simulator
from tests.factories.bundles import STORE
from tests.factories.onnx_adapters import ask_to_merge, put_branch
from tests.factories.weak_models import cards_of, write_cards, write_weak


@pytest.fixture(scope="module")
def weak() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        directory = write_weak(Path(name) / "weak")
        raised = raise_pipeline(import_pipeline(directory))
        trials = RemovalTrials.of(raised, pack_weight, StageCache(STORE))
        write_cards(directory, cards_of(trials, 12))
        yield directory


def options(version: str = "1", **changes: object) -> CompileOptions:
    target = host_target()
    if target is None:
        pytest.skip("no target runs on this machine")
    plain = CompileOptions(target=target.id, model="weak", version=version, cache_dir=STORE)
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def first(weak: Path) -> CompiledBundle:
    return compile_model(weak, options())


@pytest.fixture(scope="module")
def known(first: CompiledBundle) -> AnswerScores:
    found = scores_in(json.loads(json.dumps(first.report)))
    assert found is not None
    return found


def on_top(first: CompiledBundle, answers: AnswerScores | None) -> CompileOptions:
    """Return the options of a version whose base is the first one, with such scores."""
    return options("2", base_sections=first.sections, base_answers=answers)


def lower(scores: tuple[int, ...], nats: float) -> tuple[int, ...]:
    """Return scores that are lower by about `nats`, less for every second question."""
    return tuple(
        min(0, score - round(nats * MICRO * (1.1 if at % 2 else 0.9)))
        for at, score in enumerate(scores)
    )


def test_it_scores_a_version_without_a_base(
    weak: Path, first: CompiledBundle, known: AnswerScores
) -> None:
    pipeline = parse_pipeline(first.sections["pipeline"])
    assert pipeline.image is not None
    cards = read_cards(weak, CALIBRATION, pipeline.image)
    with NativePlan(first.sections["kernels"], first.sections["plan"], first.sections) as plan:
        assert answer_scores(plan, pipeline, cards) == list(known.int4)
    assert len(known.f32) == len(known.int4) > 20
    module = lower_submission(weak, StageClock(no_progress)).module
    exact = answer_scores(Simulator(module, mode="f64"), pipeline, cards)
    assert known.f32 == pytest.approx(exact, abs=1e-3 * MICRO)  # said whole, not watched
    assert first.report["gain"]["rule"] == "no_base"
    assert not any("survives quantisation" in text for text in first.report["caveats"])


def test_an_update_without_a_change_loses_nothing(
    weak: Path, first: CompiledBundle, known: AnswerScores
) -> None:
    gain = compile_model(weak, on_top(first, known)).report["gain"]
    assert (gain["rule"], gain["passed"], gain["f32"]) == ("no_gain", True, 0.0)


def test_an_update_whose_gain_is_kept_goes_on(
    weak: Path, first: CompiledBundle, known: AnswerScores
) -> None:
    base = replace(known, f32=lower(known.f32, 0.5), int4=lower(known.int4, 0.5))
    gain = compile_model(weak, on_top(first, base)).report["gain"]
    assert (gain["rule"], gain["passed"]) == ("gain", True)
    assert gain["kept_ratio"] > 0.9


def test_an_update_that_quantisation_loses_is_refused_with_the_numbers(
    weak: Path, first: CompiledBundle, known: AnswerScores
) -> None:
    base = replace(known, f32=lower(known.f32, 0.5))
    with pytest.raises(GainLostError, match=r"\+0\.\d{4} nats in f32 .* in int4: \d% of the gain"):
        compile_model(weak, on_top(first, base))


def test_an_adapter_that_is_replayed_is_judged_too(
    weak: Path, first: CompiledBundle, known: AnswerScores, tmp_path: Path
) -> None:
    directory = ask_to_merge(shutil.copytree(weak, tmp_path / "adapted"))
    put_branch(directory / "decoder.onnx", rank=2, size=0.02)
    base = replace(known, f32=lower(known.f32, 0.5), int4=lower(known.int4, 0.5))
    report = compile_model(directory, on_top(first, base)).report
    assert [row["merged"] for row in report["adapters"].values()] == ["replay"]
    assert (report["gain"]["rule"], report["gain"]["passed"]) == ("gain", True)
    assert report["gain"]["kept_ratio"] > 0.9
    lost = replace(base, int4=known.int4)
    with pytest.raises(GainLostError):
        compile_model(directory, on_top(first, lost))


def test_it_says_what_it_could_not_compare(
    weak: Path, first: CompiledBundle, known: AnswerScores
) -> None:
    for answers, rule in (
        (None, "no_scores"),
        (replace(known, questions_sha256="0" * 64), "other_questions"),
    ):
        report = compile_model(weak, on_top(first, answers)).report
        assert report["gain"]["rule"] == rule
        assert any("unverified whether the update survives" in text for text in report["caveats"])


def test_the_command_reads_the_scores_of_its_base(
    weak: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = options().target
    common = ["compile", str(weak), "--target", target, "--cache", str(STORE)]
    old, new = tmp_path / "old", tmp_path / "new"
    assert cli.main([*common, "--out", str(old)]) == 0
    assert cli.main([*common, "--base", str(old), "--out", str(new)]) == 0
    assert "gain: over the base" in capsys.readouterr().out
    report = json.loads((old / "report.json").read_text())
    report["answers"]["f32"] = list(lower(tuple(report["answers"]["f32"]), 0.5))
    (old / "report.json").write_text(json.dumps(report))
    assert cli.main([*common, "--base", str(old), "--out", str(new)]) == 1
    shown = capsys.readouterr().err
    assert "error: the update is lost in quantisation" in shown
    assert "hint: quantise from the trained f32 weights" in shown
    (old / "report.json").unlink()
    assert cli.main([*common, "--base", str(old), "--out", str(new)]) == 0
    assert "unverified whether the update survives" in capsys.readouterr().out
