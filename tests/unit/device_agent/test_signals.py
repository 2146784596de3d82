"""What rules look at beside the sensors: latencies, the expert pool, the device's own doing."""

import pytest

from compiler.contract.bands import Band, Bands
from compiler.contract.degrade import Rung, parse_rules, rules_bytes
from device_agent.runtime.degrade import Counter, Observation
from device_agent.runtime.degrade_keeper import DegradeKeeper, rungs_of
from device_agent.runtime.signals import LEAST_ANSWERS, MAX_ANSWERS, WINDOW_S, LatencyWindow

FEWER = Bands(
    1, 0, 100, 90, 10_000, 0, 0,
    (Band(0, "step.band0", 1, 400, 0, 0, ""), Band(500, "step", 2, 600, 0, 0, "")),
)  # fmt: skip


def rules(when: str, leave: str, rung: str = "fewer_experts"):
    row = {"name": "r", "when": when, "leave": leave, "rung": rung, "priority": 1, "cooldown_s": 0}
    return parse_rules(rules_bytes([row]))


class TestLatencies:
    def test_the_slowest_of_a_hundred_answers_is_beyond_it(self) -> None:
        window = LatencyWindow()
        for at in range(200):
            window.add(1.0, 10.0 if at % 100 else 500.0)
        assert window.p99(1.0) == 500.0
        window.add(1.0, 10.0)
        window = LatencyWindow()
        for at in range(201):
            window.add(1.0, 10.0 if at else 500.0)
        assert window.p99(1.0) == 10.0

    def test_few_answers_and_old_ones_say_nothing(self) -> None:
        window = LatencyWindow()
        for _ in range(LEAST_ANSWERS - 1):
            window.add(0.0, 5.0)
        assert window.p99(0.0) is None
        window.add(0.0, 7.0)
        assert window.p99(WINDOW_S) == 7.0
        assert window.p99(WINDOW_S + 1) is None

    def test_it_is_bounded(self) -> None:
        window = LatencyWindow()
        for _ in range(3 * MAX_ANSWERS):
            window.add(0.0, 5.0)
        assert len(window._seen) == MAX_ANSWERS


class Device:
    """A keeper with a clock, a pool and no sensors."""

    def __init__(self, written, *, is_paged: bool = False, pool: Observation | None = None) -> None:
        self.now, self.pool = 0.0, pool or Observation()
        self.keeper = DegradeKeeper(
            written,
            rungs_of(FEWER, is_paged=is_paged),
            lambda: self.now,
            dict,
            lambda: self.pool,
        )

    def run(self, seconds: int, latency_ms: float, *, failed: bool = False) -> Rung:
        for _ in range(seconds):
            rung = self.keeper.rung()
            self.keeper.answered(failed=failed, latency_ms=latency_ms)
            self.now += 1.0
        return rung


def test_slow_answers_take_fewer_experts_until_they_are_quick_again() -> None:
    device = Device(rules("answer_p99 > 200 ms for 5 s", "answer_p99 < 100 ms"))
    assert device.run(LEAST_ANSWERS + 4, 500.0) is Rung.NORMAL
    assert device.run(5, 500.0) is Rung.FEWER_EXPERTS
    assert device.keeper.reasons() == ("answer_p99",)
    assert device.run(60, 50.0) is Rung.FEWER_EXPERTS
    assert device.run(60, 50.0) is Rung.NORMAL


def test_failures_below_normal_do_not_hold_the_device_there() -> None:
    device = Device(rules("rate(faults) > 0.5 for 2 s", "rate(faults) < 0.1"))
    assert device.run(20, 1.0, failed=True) is Rung.FEWER_EXPERTS
    later = {device.run(1, 1.0, failed=True) for _ in range(100)}
    assert later == {Rung.NORMAL, Rung.FEWER_EXPERTS}


@pytest.mark.parametrize("is_paged", [True, False])
def test_a_pool_that_misses_stops_fetching_ahead_where_experts_are_paged(is_paged: bool) -> None:
    device = Device(rules("expert_misses > 20 %", "expert_misses < 10 %", "no_prefetch"))
    assert device.run(3, 1.0) is Rung.NORMAL, "unknown without a pool"
    device = Device(
        rules("expert_misses > 20 %", "expert_misses < 10 %", "no_prefetch"),
        is_paged=is_paged,
        pool=Observation({"expert_misses": 30.0}),
    )
    expected = Rung.NO_PREFETCH if is_paged else Rung.FEWER_EXPERTS
    assert device.run(3, 1.0) is expected
    device.pool = Observation({"expert_misses": 5.0})
    assert device.run(60, 1.0) is Rung.NORMAL


def test_stalls_that_degrading_caused_do_not_count() -> None:
    written = rules("rate(stalls) > 1", "rate(stalls) < 0.5", "no_prefetch")
    device = Device(written, is_paged=True)
    for total in range(0, 200, 5):
        device.pool = Observation({}, {"stalls": Counter(total, total)})
        assert device.run(1, 1.0) is Rung.NORMAL
    for total in range(200, 300, 5):
        device.pool = Observation({}, {"stalls": Counter(total, 195)})
        device.run(1, 1.0)
    assert device.keeper.rung() is Rung.NO_PREFETCH
