"""The `steering` section: round trip, what is refused, the bias of a record."""

import json
from dataclasses import dataclass, replace

import pytest

from compiler.contract.canonical import canonical_bytes
from compiler.contract.errors import ContractError, LimitExceededError
from compiler.contract.router_stats import HISTOGRAM_BINS, EntropyBand, LayerStats, RouterStats
from compiler.contract.steering import Steering
from compiler.contract.steering_points import (
    MAX_POINTS_BYTES,
    Point,
    SteeringPoints,
    modality_bias,
    parse_steering_points,
)

NOTHING = Point(mean_k=2000, misses=500)
ALWAYS = Point(margin=800, mean_k=1800, misses=450, worse=1, better=2)
PRESSED = Point(pull=300, margin=800, lean=500, mean_k=1800, misses=200, worse=2, better=2)
FOUND = SteeringPoints(1000, 900, 500, 500, 5_000, 10_000, 1, 2, (NOTHING, ALWAYS, PRESSED))


def test_it_reads_what_it_wrote() -> None:
    assert parse_steering_points(FOUND.to_bytes()) == FOUND
    assert PRESSED.steering() == Steering(pull=0.3, margin=0.8)
    assert PRESSED.steering(0.5).pull == 0.15


@pytest.mark.parametrize(
    "wrong",
    [
        replace(FOUND, always=3),
        replace(FOUND, pressed=-1),
        replace(FOUND, questions=0),
        replace(FOUND, right=1001),
        replace(FOUND, resident=1001),
        replace(FOUND, max_loss=1_000_001),
        replace(FOUND, always=2),
        replace(FOUND, points=(ALWAYS, ALWAYS, PRESSED)),
        replace(FOUND, points=(NOTHING, replace(ALWAYS, worse=9), PRESSED)),
        replace(FOUND, points=(NOTHING, ALWAYS, replace(PRESSED, worse=20))),
        replace(FOUND, points=(NOTHING, ALWAYS, PRESSED, replace(PRESSED, worse=901))),
        replace(FOUND, points=(NOTHING, ALWAYS, replace(PRESSED, margin=1001))),
        replace(FOUND, points=(NOTHING, ALWAYS, replace(PRESSED, pull=64_001))),
        replace(FOUND, points=()),
        replace(FOUND, points=(NOTHING, ALWAYS, *(PRESSED,) * 63)),
    ],
)
def test_it_refuses_figures_that_make_no_sense(wrong: SteeringPoints) -> None:
    with pytest.raises(ContractError):
        parse_steering_points(wrong.to_bytes())


def test_it_refuses_other_bytes() -> None:
    document = json.loads(FOUND.to_bytes())
    for change in (
        {"schema": "sparsefleet.steering/2"},
        {"more": 1},
        {"points": [{**row, "more": 1} for row in document["points"]]},
        {"points": [{"pull": 0}]},
        {"questions": 1000.0},
        {"always": True},
    ):
        with pytest.raises(ContractError):
            parse_steering_points(canonical_bytes({**document, **change}))
    for data in (b"", b"{}", FOUND.to_bytes() + b" ", FOUND.to_bytes().replace(b":", b": ", 1)):
        with pytest.raises(ContractError):
            parse_steering_points(data)
    with pytest.raises(LimitExceededError):
        parse_steering_points(b" " * (MAX_POINTS_BYTES + 1))


@dataclass
class Named:
    name: str


@dataclass
class Placed:
    section: int


def test_a_bias_has_the_sign_of_the_usage() -> None:
    zeros = (0,) * HISTOGRAM_BINS
    layer = LayerStats(3, 2, 1, 8, (900, 100), (100, 900), (-800, 800), zeros)
    stats = RouterStats(1, 1, (layer,), (EntropyBand(0, 1, 1000, 1, 1),))
    sections = [Named("weights.shared"), Named("expert.L3.E0"), Named("expert.L3.E1")]
    weights = [Placed(0), Placed(2), Placed(2), Placed(1)]
    assert modality_bias(stats, sections, weights, 0.5) == (0.0, 0.4, 0.4, -0.4)
    assert modality_bias(stats, sections[:1], [Placed(0)], 0.5) == ()
    even = replace(stats, layers=(replace(layer, modality_bias=(0, 0)),))
    assert modality_bias(even, sections, weights, 0.5) == ()
