"""EdgeCard with adaptive pruning: chosen on calibration cards, judged on others, natively."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.native import NativePlan
from compiler.contract.pipeline import parse_pipeline
from compiler.contract.selftest import parse_selftest, run_selftest
from compiler.contract.session import see
from compiler.driver import cli
from compiler.driver.bundle_simulator import BundleSimulator
from compiler.driver.cards import EVALUATION, read_cards
from compiler.driver.choose_pruning import (
    ALL,
    MAX_LOSS,
    PrunablePlans,
    PruneChoice,
    choose_pruning,
    rule_json,
    sweep,
    try_rule,
)
from compiler.driver.compile import compile_model
from compiler.driver.native_check import host_target
from compiler.driver.options import CompiledBundle, CompileOptions
from compiler.frontend.pipeline_json import parse_pipeline as parse_spec
from compiler.hardware.targets import Target
from examples.edgecard.materialise import materialise
from tests.factories.bundles import STORE
from tests.factories.kernels import raw

RULES = sweep(shares=(0.75, 0.85, 0.9), merges=(4,))


@pytest.fixture(scope="module")
def target() -> Target:
    found = host_target()
    if found is None:
        pytest.skip("no target runs on this machine")
    return found


@pytest.fixture(scope="module")
def submission() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield materialise("v1", Path(folder) / "v1")


@pytest.fixture(scope="module")
def choice(submission: Path, target: Target) -> PruneChoice:
    return choose_pruning(submission, target, rules=RULES, cache_dir=STORE)


@pytest.fixture(scope="module")
def bundle(submission: Path, target: Target, choice: PruneChoice) -> CompiledBundle:
    """The submission compiled with the chosen rule in its `pipeline.json`."""
    assert choice.chosen is not None
    path = submission / "pipeline.json"
    document = json.loads(path.read_text()) | {"prune": rule_json(choice.chosen.rule)}
    path.write_text(json.dumps(document))
    return compile_model(submission, CompileOptions(target.id, "edgecard", "v1", cache_dir=STORE))


def native(bundle: CompiledBundle) -> NativePlan:
    return NativePlan(bundle.sections["kernels"], bundle.sections["plan"], bundle.sections)


def test_the_chosen_rule_loses_little_on_cards_it_was_not_chosen_by(
    submission: Path, target: Target, choice: PruneChoice
) -> None:
    assert choice.chosen is not None
    assert choice.chosen.accuracy >= choice.unpruned.accuracy - MAX_LOSS
    plans = PrunablePlans(submission, target, STORE)
    cards = plans.cards(submission, EVALUATION)
    unpruned, pruned = (try_rule(plans, rule, cards) for rule in (ALL, choice.chosen.rule))
    assert (unpruned.least_rows, unpruned.most_rows) == (64, 64)
    assert pruned.accuracy >= unpruned.accuracy - MAX_LOSS
    assert pruned.mean_rows < 0.6 * unpruned.mean_rows
    assert pruned.least_rows * 1.2 < pruned.most_rows


def test_more_mass_keeps_more_rows(choice: PruneChoice) -> None:
    rows = [trial.mean_rows for trial in choice.trials]
    assert rows == sorted(rows)
    assert rows[0] < rows[-1]


def test_the_shipped_code_gives_the_bits_of_the_simulator(bundle: CompiledBundle) -> None:
    assert bundle.manifest.verified_on == "host"
    selftest = parse_selftest(bundle.sections["selftest"])
    kept = {
        run.inputs["tokens"] for v in selftest.vectors for run in v.runs if run.program == "prefill"
    }
    assert len({len(tokens) for tokens in kept}) > 1
    with native(bundle) as plan:
        assert run_selftest(plan, bundle.sections["selftest"]).passed


def test_any_picture_gives_the_bits_of_the_simulator(
    bundle: CompiledBundle, submission: Path
) -> None:
    pipeline = parse_pipeline(bundle.sections["pipeline"])
    assert pipeline.image is not None
    random = np.random.default_rng(11)
    images = [card.image for card in read_cards(submission, EVALUATION, pipeline.image)[:3]]
    images += [random.integers(0, 256, 4096, np.uint8).tobytes(), bytes(4096), b"\xff" * 4096]
    simulator, rows = BundleSimulator(bundle.sections), set()
    with native(bundle) as plan:
        for image in images:
            assert raw(plan.run("see", {"image": image})) == raw(
                simulator.run("see", {"image": image})
            )
            for runner in (plan, simulator):
                runner.kv_length = 0
                see(runner, pipeline, image)
            assert plan.kv_length == simulator.kv_length
            rows.add(plan.kv_length)
    assert len(rows) > 1


def test_the_command_prints_a_rule_for_the_submission(
    submission: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["prune", str(submission), "--target", target.id, "--cards", "6", "--cache", str(STORE)]
    assert cli.main([*words, "--p", "0.9", "--merge", "4", "--max-loss", "0.2", "--json"]) == cli.OK
    printed = json.loads(capsys.readouterr().out)
    assert printed["chosen"] == printed["trials"][0]
    document = json.loads((submission / "pipeline.json").read_text())
    document["prune"] = printed["chosen"]["prune"]
    assert parse_spec(json.dumps(document).encode()).prune == sweep((0.9,), (4,))[0]
    assert printed["unpruned"]["least_rows"] == 64
