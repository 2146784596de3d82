"""Which coefficients are judged, and which of the judged ones a bundle carries."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from compiler.contract.steering_points import MILLI, SECTION, Point, parse_steering_points
from compiler.driver import base_grids
from compiler.driver.steering_stage import (
    MOST_JUDGED,
    best_margin,
    candidate_pulls,
    chosen_points,
    judged_points,
    kept_points,
    undominated,
)
from compiler.driver.steering_trial import Judged
from tests.factories.kernels import Case
from tests.factories.modules import small_decoder
from tests.unit.compiler.analysis.test_routing_replay import trace

ASKED = 1000
NOTHING = Point(mean_k=2000, misses=100)


PLAIN = Judged((True,) * 900 + (False,) * 100, 500, 120, 2000)


def test_a_point_is_judged_against_the_plain_answers() -> None:
    plain, found = Judged((True, True, False), 9, 5, 2000), Judged((False, True, True), 7, 2, 1500)
    (point,) = judged_points([Point(pull=100)], [found], plain)
    assert point == Point(pull=100, mean_k=1500, misses=2, worse=1, better=1)


def test_the_narrowest_margin_within_the_loss_is_taken() -> None:
    bold = Point(margin=500, mean_k=1500, worse=20, better=20)
    sure = Point(margin=800, mean_k=1800, worse=2, better=2)
    surer = Point(margin=900, mean_k=1900)
    assert best_margin([NOTHING, surer, sure, bold], ASKED) == sure
    assert best_margin([NOTHING, bold], ASKED) == NOTHING


def test_pulls_are_judged_that_save_something_the_others_do_not() -> None:
    pulls = candidate_pulls(trace(), 800)
    assert 2 <= len(pulls) <= MOST_JUDGED + 1
    assert {point.margin for point in pulls} == {800}
    assert all(point.pull > 0 and point.protect == 1 for point in pulls)
    assert [point.lean > 0 for point in pulls] == [False] * (len(pulls) - 1) + [True]


def test_the_fewest_misses_within_the_loss_are_pressed_for() -> None:
    always = Point(margin=800, mean_k=1800, misses=90)
    mild = Point(pull=100, margin=800, misses=60, worse=3, better=3)
    strong = Point(pull=300, margin=800, misses=40, worse=30, better=3)
    worse = Point(pull=200, margin=800, misses=70, worse=9, better=3)
    found = chosen_points(PLAIN, [NOTHING, always], always, [mild, strong, worse])
    assert found.points[found.always] == always
    assert found.points[found.pressed] == mild
    assert found.points[0] == NOTHING
    assert {*found.points} == {NOTHING, always, mild, strong}
    assert parse_steering_points(found.to_bytes()) == found


def test_where_every_pull_loses_too_much_nothing_is_pulled() -> None:
    strong = Point(pull=300, margin=MILLI, misses=40, worse=30, better=3)
    found = chosen_points(PLAIN, [NOTHING], NOTHING, [strong])
    assert found.always == found.pressed == 0
    assert parse_steering_points(found.to_bytes()) == found


def test_points_that_another_beats_are_dropped() -> None:
    a, b, c = Point(pull=1), Point(pull=2), Point(pull=3)
    assert undominated({a: (1, 2), b: (2, 1), c: (2, 2)}) == [a, b]
    assert undominated({a: (1, 1), b: (1, 1)}) == [a, b]
    assert replace(a, worse=1) != a


def test_a_few_changed_experts_keep_the_coefficients_of_the_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Case.of(small_decoder(3)).emitted
    found = chosen_points(PLAIN, [NOTHING], NOTHING, [])
    base = {**made.sections, "plan": made.plan_bytes, SECTION: found.to_bytes()}
    experts = sorted(name for name in made.sections if name.startswith("expert."))
    few, many = len(experts) // 2, len(experts) // 2 + 1
    monkeypatch.setattr(base_grids, "KEPT_SHARE", 2)

    def changed(names: Iterable[str]) -> dict[str, bytes]:
        return {**base, **{name: bytes(len(base[name])) for name in names}}

    kept = kept_points(changed(experts[:few]), base)
    assert kept is not None
    assert kept.sections == {SECTION: base[SECTION]}
    assert kept.facts[SECTION]["kept_from_base"] == few
    assert kept_points(changed(experts[:many]), base) is None
    assert kept_points(changed(["weights.shared"]), base) is None
    assert kept_points(base, {**base, SECTION: b"{}"}) is None
    assert kept_points(base, {}) is None
