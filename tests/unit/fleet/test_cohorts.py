"""Stage membership: random, stratified, growing, disjoint from control, never empty."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.cohorts import (
    Candidate,
    EmptyStageError,
    Goal,
    NoControlError,
    StageSize,
    exposure_order,
    form_stage,
    holdback_size,
    stage_sizes,
    unit,
)


def fleet(*sizes, can_control=True):
    return [
        Candidate(f"{stratum}-{number:04d}", f"t{stratum}/pc", can_control)
        for stratum, size in enumerate(sizes)
        for number in range(size)
    ]


fleets = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(lambda sizes: fleet(*sizes))
salts = st.text("abcdef0123456789", min_size=8, max_size=8)


@given(fleets, salts, st.randoms())
def test_it_orders_by_salt_alone_and_not_by_input_order(devices, salt, random):
    shuffled = list(devices)
    random.shuffle(shuffled)
    order = exposure_order(devices, salt)
    assert order == exposure_order(shuffled, salt)
    assert sorted(order, key=lambda c: c.device) == sorted(devices, key=lambda c: c.device)


@given(fleets, salts)
def test_it_makes_every_prefix_a_stratified_sample(devices, salt):
    order = exposure_order(devices, salt)
    totals = Counter(candidate.stratum for candidate in devices)
    for size in range(len(totals), len(order) + 1):
        prefix = Counter(candidate.stratum for candidate in order[:size])
        for stratum, total in totals.items():
            assert prefix[stratum] >= 1
            assert abs(prefix[stratum] - size * total / len(order)) <= len(totals)


def test_it_gives_each_stratum_one_device_in_the_first_stage_of_the_demo_fleet():
    order = exposure_order(fleet(5, 5, 5), "salt")
    assert {candidate.stratum for candidate in order[:3]} == {"t0/pc", "t1/pc", "t2/pc"}


def test_it_chooses_other_canaries_with_another_salt():
    devices = fleet(200)
    first = {c.device for c in exposure_order(devices, "one")[:20]}
    second = {c.device for c in exposure_order(devices, "two")[:20]}
    assert len(first & second) < 10


def test_it_spreads_devices_evenly_over_the_unit_interval():
    places = [unit("salt", f"device-{number}") for number in range(4_000)]
    for percent in (1, 10, 40, 60, 75, 90):
        share = sum(place < percent / 100 for place in places) / len(places)
        assert abs(share - percent / 100) < 0.03


@given(fleets, salts, st.lists(st.integers(1, 100), min_size=1, max_size=5, unique=True))
def test_it_grows_and_keeps_treatment_and_control_apart(devices, salt, percents):
    goals = [Goal(percent=percent) for percent in sorted(percents)]
    try:
        sizes = stage_sizes(goals, devices, compare=True)
    except (EmptyStageError, NoControlError):
        return
    order = exposure_order(devices, salt)
    treated: set[str] = set()
    for size in sizes:
        cohort = form_stage(order, size, treated=treated, control_max=1_000, compare=True)
        assert cohort.treatment
        assert not set(cohort.treatment) & treated
        assert not set(cohort.control) & (treated | set(cohort.treatment))
        treated |= set(cohort.treatment)
        assert len(treated) == size.total
        assert bool(cohort.control) != size.is_release
        controlled = {cohort.strata[device] for device in cohort.control}
        if cohort.control:
            assert {cohort.strata[device] for device in treated} <= controlled
    if goals[-1].percent == 100:
        assert treated == {candidate.device for candidate in devices}


def test_it_keeps_members_when_devices_join_or_leave_between_stages():
    order = exposure_order(fleet(20), "salt")
    first = form_stage(order, StageSize(4, False), treated=(), control_max=9, compare=True)
    later = exposure_order([*fleet(20)[2:], *fleet(0, 10)], "salt")
    second = form_stage(
        later, StageSize(14, False), treated=set(first.treatment), control_max=9, compare=True
    )
    assert not set(second.treatment) & set(first.treatment)
    still_there = {c.device for c in later} & set(first.treatment)
    assert len(second.treatment) == 14 - len(still_there)


def test_it_counts_the_stages_of_the_demo():
    goals = [Goal(percent=20), Goal(percent=50), Goal(percent=100)]
    sizes = stage_sizes(goals, fleet(5, 5, 5), compare=True)
    assert sizes == (
        StageSize(3, False),
        StageSize(8, False),
        StageSize(12, False),
        StageSize(15, True),
    )


def test_it_rounds_a_small_share_of_a_small_fleet_up_to_one_device():
    assert Goal(percent=1).size(10) == 1
    assert Goal(percent=100).size(10) == 10
    assert Goal(count=50).size(10) == 10
    assert [Goal(percent=p).size(100) for p in (40, 60, 75, 90)] == [40, 60, 75, 90]


def test_it_refuses_a_stage_that_adds_nobody():
    with pytest.raises(EmptyStageError, match="stage 2"):
        stage_sizes([Goal(percent=1), Goal(percent=2)], fleet(30), compare=True)
    with pytest.raises(EmptyStageError):
        stage_sizes([Goal(percent=50), Goal(percent=20)], fleet(30), compare=True)
    with pytest.raises(EmptyStageError):
        stage_sizes([Goal(percent=10)], [], compare=True)
    with pytest.raises(EmptyStageError):
        stage_sizes([], fleet(3), compare=True)


def test_it_refuses_a_comparison_without_anybody_to_compare_with():
    with pytest.raises(NoControlError):
        stage_sizes([Goal(percent=100)], fleet(1), compare=True)
    with pytest.raises(NoControlError):
        stage_sizes([Goal(percent=100)], fleet(5, can_control=False), compare=True)


def test_it_serves_everybody_at_once_when_nothing_can_be_compared():
    assert stage_sizes([Goal(percent=100)], fleet(3, can_control=False), compare=False) == (
        StageSize(3, False),
    )


def test_it_holds_back_one_device_per_stratum_when_the_fleet_allows():
    assert holdback_size(fleet(5, 5, 5)) == 3
    assert holdback_size(fleet(1, 1, 1)) == 1
    assert holdback_size(fleet(1_000)) == 50
    assert holdback_size(fleet(2)) == 1


def test_it_compares_a_stratum_without_control_in_the_best_served_one():
    order = [
        Candidate("a", "v3/pc"),
        Candidate("b", "v3/car"),
        Candidate("c", "v3/car"),
        Candidate("d", "v1/pc"),
        Candidate("e", "v1/pc"),
    ]
    cohort = form_stage(order, StageSize(2, False), treated=(), control_max=3, compare=True)
    assert cohort.treatment == ("a", "b")
    assert cohort.control == ("e", "d", "c")
    assert cohort.strata["a"] == "v3/car"
    assert cohort.strata["b"] == "v3/car"
    assert cohort.strata["d"] == "v1/pc"
