"""Which rule is chosen from trials, and what a sweep tries."""

import json

import pytest

from compiler.driver import cli
from compiler.driver.choose_pruning import ALL, PruneTrial, fewest_rows, rule_json, sweep
from compiler.driver.native_check import host_target
from compiler.frontend.pipeline_json import parse_pipeline
from compiler.passes.pipeline_spec import PruneSpec
from tests.factories.onnx_models import tiny_document


def trial(p: float, accuracy: float, rows: float) -> PruneTrial:
    return PruneTrial(PruneSpec(p, 1, 64, 0, "row"), accuracy, rows, int(rows), int(rows))


UNPRUNED = PruneTrial(ALL, 0.9, 64.0, 64, 64)
TRIALS = [trial(0.5, 0.88, 10), trial(0.7, 0.897, 20), trial(0.8, 0.91, 30), trial(0.9, 0.9, 50)]


@pytest.mark.parametrize(
    ("max_loss", "p"), [(0.0, 0.8), (0.0031, 0.7), (0.02001, 0.5), (0.002, 0.8)]
)
def test_it_takes_the_fewest_rows_within_the_loss(max_loss: float, p: float) -> None:
    chosen = fewest_rows(UNPRUNED, TRIALS, max_loss)
    assert chosen is not None
    assert chosen.rule.p == p


def test_of_equal_rows_the_more_accurate_wins() -> None:
    better = trial(0.75, 0.905, 20)
    assert fewest_rows(UNPRUNED, [*TRIALS, better], 0.01) is better


def test_it_takes_nothing_when_everything_loses_too_much() -> None:
    assert fewest_rows(UNPRUNED, TRIALS[:1], 0.003) is None
    assert fewest_rows(UNPRUNED, [], 1.0) is None


def test_every_rule_of_a_sweep_can_be_written_into_a_submission() -> None:
    rules = sweep(shares=(0.5, 0.9), merges=(0, 3), min_keep=2, score="mean")
    assert [(rule.p, rule.merge) for rule in rules] == [(0.5, 0), (0.9, 0), (0.5, 3), (0.9, 3)]
    for rule in (*rules, ALL):
        document = tiny_document() | {"prune": rule_json(rule)}
        assert parse_pipeline(json.dumps(document).encode()).prune == rule


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--p", "0"], "--p must be in"),
        (["--p", "1.5"], "--p must be in"),
        (["--merge", "-1"], "--merge not negative"),
        (["--min-keep", "0"], "--min-keep starts at 1"),
        (["--max-loss", "-0.1"], "--max-loss at 0"),
        (["--target", "aarch64"], "cannot run aarch64"),
    ],
)
def test_the_command_refuses_bad_numbers(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    target = host_target()
    if target is None:
        pytest.skip("no target runs on this machine")
    assert cli.main(["prune", "nowhere", "--target", target.id, *words]) == cli.BAD_ARGUMENTS
    assert message in capsys.readouterr().err
