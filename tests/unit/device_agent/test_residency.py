"""What a device tells a pool of experts, and what it says of one."""

import resource
from typing import cast

import pytest

from compiler.contract.expert_groups import ExpertGroups
from compiler.contract.expert_pool import ExpertFile, ExpertPool
from compiler.contract.native_errors import NativeError
from compiler.contract.pool_abi import COUNTERS, HEAT_ONE, NO_GROUP, PoolKnob
from compiler.contract.pool_plan import PooledExpert, PoolPlan
from compiler.contract.router_stats import HISTOGRAM_BINS, EntropyBand, LayerStats, RouterStats
from device_agent.runtime.hotset import HotSetFile
from device_agent.runtime.residency import (
    KEEP_S,
    SPARE_FILES,
    Residency,
    require_files,
    with_statistics,
)


class FakePool:
    """Counts as it is told, and remembers its knobs."""

    persistent_bytes = 1000
    files = ("a", "b")

    def heats(self) -> list[int]:
        return [1, 2]

    def __init__(self) -> None:
        self.now = dict.fromkeys(COUNTERS, 0)
        self.knobs: dict[PoolKnob, int] = {}

    def counts(self) -> dict[str, int]:
        return dict(self.now)

    def set(self, knob: PoolKnob, value: int) -> None:
        self.knobs[knob] = value


class Watch:
    def __init__(self, pressure: float | None = 42.06) -> None:
        self.pool, self.at, self.pressure = FakePool(), 0.0, pressure
        pool = cast("ExpertPool", self.pool)
        self.residency = Residency(pool, lambda: self.at, lambda: self.pressure)

    def look(self, seconds: float = 1.0, **counts: int) -> None:
        self.at += seconds
        self.pool.now.update(counts)
        self.residency.look()


def test_it_tells_the_pressure_once_a_second() -> None:
    watch = Watch()
    watch.look()
    assert watch.pool.knobs == {PoolKnob.PRESSURE: 421}
    watch.pressure = 80.0
    watch.look(0.5)
    assert watch.pool.knobs[PoolKnob.PRESSURE] == 421
    watch.look(0.5)
    assert watch.pool.knobs[PoolKnob.PRESSURE] == 800
    watch.pressure = 250.0
    watch.look()
    assert watch.pool.knobs[PoolKnob.PRESSURE] == 1000


def test_an_unknown_pressure_changes_nothing() -> None:
    watch = Watch(None)
    watch.look()
    assert watch.pool.knobs == {}


def test_misses_are_of_the_lookups_since_the_last_look() -> None:
    watch = Watch()
    assert watch.residency.gauges()["expert_misses"] is None
    watch.look(hits=30, misses=6, late=4)
    assert watch.residency.gauges()["expert_misses"] == pytest.approx(25.0)
    watch.look()
    assert watch.residency.gauges()["expert_misses"] == pytest.approx(25.0)
    watch.look(hits=130)
    assert watch.residency.gauges()["expert_misses"] == 0.0


def test_it_says_what_the_pool_holds_and_counted() -> None:
    watch = Watch()
    watch.look(
        hits=5, misses=2, late=1, hidden=3, timeouts=4, corrupt=1, failed=1,
        cached=2, predicted=9, foreseen=6, loaded_bytes=777, committed_bytes=8192,
        asked_bytes=6000, given_bytes=8000, free_bytes=4096,
    )  # fmt: skip
    assert watch.residency.facts() == {
        "resident_bytes": 9192,
        "expert_hits": 5,
        "expert_misses": 2,
        "expert_late": 1,
        "expert_hidden": 3,
        "expert_cached": 2,
        "expert_predicted": 9,
        "expert_foreseen": 6,
        "expert_read_bytes": 777,
        "expert_stalls": 4,
        "expert_damaged": 2,
        "fragmentation_internal_per_mille": 250,
        "fragmentation_external_per_mille": 0,
    }
    assert watch.residency.gauges()["fragmentation"] == pytest.approx(25.0)
    assert watch.residency.stalls == 4


def test_reading_ahead_is_turned_off_and_on() -> None:
    watch = Watch()
    watch.residency.is_fetching_ahead = True
    assert PoolKnob.PREFETCH not in watch.pool.knobs
    watch.residency.is_fetching_ahead = False
    assert watch.pool.knobs[PoolKnob.PREFETCH] == 0
    watch.residency.is_fetching_ahead = True
    assert watch.pool.knobs[PoolKnob.PREFETCH] == 1


def test_the_hot_set_is_kept_now_and_then_and_only_if_anything_was_used() -> None:
    kept: list[tuple[object, object]] = []

    class Keeper:
        def write(self, files: object, heats: object) -> None:
            kept.append((files, heats))

    pool, at = FakePool(), [0.0]
    residency = Residency(
        cast("ExpertPool", pool), lambda: at[0], lambda: None, cast("HotSetFile", Keeper())
    )
    residency.keep()
    at[0] = 2 * KEEP_S
    residency.look()
    assert kept == []
    pool.now["chosen"] = 7
    at[0] += KEEP_S - 1
    residency.look()
    assert kept == []
    at[0] += 1
    residency.look()
    assert kept == [(pool.files, [1, 2])]
    residency.keep()
    assert len(kept) == 2


def test_statistics_of_the_bundle_say_what_is_likely() -> None:
    experts = [
        PooledExpert(f"expert.L{layer}.E{e}", 10, layer // 3) for layer in (0, 3) for e in (0, 1)
    ]
    layout = PoolPlan((), 0, tuple(experts), 4096, 4, 1)
    files = [ExpertFile(0, 10, "ab", expert.layer) for expert in experts]
    stats = RouterStats(
        steps=1,
        rows=1,
        layers=(LayerStats(3, 2, 2, 32, (0, 0), (600, 400), (0, 0), (0,) * HISTOGRAM_BINS),),
        bands=(EntropyBand(0, 1, 1000, 1, 1),),
    )
    groups = ExpertGroups(((0, 1), (1, 0)), (0, 3, 1, 2))
    views = {
        "router_stats": memoryview(stats.to_bytes()),
        "expert_groups": memoryview(groups.to_bytes()),
    }
    found = with_statistics(files, layout, views, None)
    assert [file.heat for file in found] == [0, 0, HEAT_ONE, 800 * HEAT_ONE // 1000]
    assert [file.group for file in found] == [0, 1, 1, 0]
    plain = with_statistics(files, layout, {}, None)
    assert [(file.heat, file.group) for file in plain] == [(0, NO_GROUP)] * 4


def test_files_for_all_experts_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    require_files(700)
    assert asked == []
    require_files(1000)
    assert asked == [(1000 + SPARE_FILES, 4096)]
    with pytest.raises(NativeError, match="4096"):
        require_files(4000)
