"""Coefficients that the compiler found for EdgeCard: what they say is what they do."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiler.analysis.expert_cache import Lru
from compiler.contract.bands import parse_bands
from compiler.contract.native import NativePlan
from compiler.contract.pipeline import SEE, parse_pipeline
from compiler.contract.router_stats import parse_router_stats
from compiler.contract.session import STEP
from compiler.contract.steered_runner import SteeredRunner
from compiler.contract.steering import Steering
from compiler.contract.steering_points import (
    Point,
    SteeringPoints,
    modality_bias,
    parse_steering_points,
)
from compiler.driver.cards import read_cards
from compiler.driver.explain.running_text import steering_lines
from compiler.driver.options import CompiledBundle
from compiler.driver.steering_stage import judged_points
from compiler.driver.steering_trial import Trial
from tests.factories.bundles import compiled_here, submission


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def bundle(folder: Path) -> CompiledBundle:
    return compiled_here("v1", folder)


@pytest.fixture(scope="module")
def trial(bundle: CompiledBundle, folder: Path) -> Iterator[Trial]:
    sections = bundle.sections
    pipeline = parse_pipeline(sections["pipeline"])
    assert pipeline.image is not None
    cards = read_cards(submission("v1", folder), "calibration", pipeline.image)
    stats = parse_router_stats(sections["router_stats"])
    bands = parse_bands(sections["bands"])
    with NativePlan(sections["kernels"], sections["plan"], sections) as plan:
        yield Trial(plan, pipeline, cards, bands, stats, found(bundle).resident)


def found(bundle: CompiledBundle) -> SteeringPoints:
    return parse_steering_points(bundle.sections["steering"])


def test_the_section_says_what_its_points_do(bundle: CompiledBundle, trial: Trial) -> None:
    points = found(bundle)
    plain = trial.judge(None)
    assert (sum(plain.marks), plain.misses) == (points.right, points.misses)
    pressed = points.points[points.pressed]
    bare = Point(pressed.pull, pressed.protect, pressed.margin, pressed.lean)
    assert judged_points([bare], [trial.judge(bare)], plain) == [pressed]


def test_half_of_the_misses_go_for_less_than_a_percent(
    bundle: CompiledBundle, trial: Trial
) -> None:
    points = found(bundle)
    pressed = points.points[points.pressed]
    lru = trial.judge(None, Lru)
    assert pressed.misses <= lru.misses / 2
    assert pressed.worse - pressed.better <= 0.01 * points.questions


def test_sure_tokens_save_experts_always(bundle: CompiledBundle) -> None:
    points = found(bundle)
    always = points.points[points.always]
    assert always.mean_k < points.points[0].mean_k < 2000
    assert always.worse - always.better <= 0.005 * points.questions


def test_a_report_says_it(bundle: CompiledBundle) -> None:
    text = "\n".join(steering_lines(bundle.report["steering"]))
    assert "calibration questions right" in text
    assert "as memory gets short" in text
    assert steering_lines(None) is not None
    assert [*steering_lines(None)] == []
    assert "because" in "\n".join(steering_lines({"reason": "nothing runs here"}))


def test_a_lean_follows_what_rows_are_made_of(trial: Trial) -> None:
    """Pictures lean towards their experts, and a talk comes back to its own within some rows."""
    plan = trial.plan
    bias = modality_bias(trial.stats, plan.plan.sections, plan.plan.weights, 0.5)
    assert min(bias) < 0 < max(bias)
    runner = SteeredRunner(plan)
    runner.follow(Steering(bias=bias))
    (card, *_) = trial.cards
    runner.run(SEE, {"image": card.image})
    seen = [plan.steering.present]
    assert seen[0] is not None
    assert seen[0].steering.modality == -1.0
    for token in range(1, 40):
        position = (100 + token).to_bytes(4, "little")
        runner.run(STEP, {"token_ids": token.to_bytes(4, "little"), "positions": position})
        seen.append(plan.steering.present)
    levels = [record.steering.modality for record in seen if record is not None]
    assert levels == sorted(levels)
    assert levels[-1] == 1.0
    assert len({id(record) for record in seen}) <= 17
    runner.follow(None)
    assert plan.steering.present is None
    plan.kv_length = 0
