"""Router widths, routing statistics and expert groups, learned from a recorded run."""

from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.expert_groups import parse_expert_groups
from compiler.contract.router_stats import parse_router_stats
from compiler.contract.session import step_inputs
from compiler.driver.routing import learn_routing
from compiler.kernels.program import ABSENT, Module, Op
from compiler.quant.expert_groups import (
    expert_steps,
    group_experts,
    grouping_report,
    simulate_loads,
)
from compiler.quant.record import CalibrationRecord, Recorder, RouterSample
from compiler.quant.router_bits import (
    LEAST_ROWS,
    MOST_FLIPS,
    UNROUNDED,
    choices,
    round_routers,
    round_rows,
    search_width,
)
from compiler.quant.router_stats import router_stats
from compiler.quant.row_codes import layout_of
from compiler.simulator import Simulator
from tests.factories.modules import ModuleBuilder, small_decoder

PICTURE = np.random.default_rng(5).integers(0, 256, 256, np.uint8).tobytes()


@pytest.fixture(scope="module")
def module() -> Module:
    return small_decoder(3)


@pytest.fixture(scope="module")
def record(module: Module) -> CalibrationRecord:
    recorder = Recorder(module)
    simulator = Simulator(module, mode="f64", observer=recorder)
    simulator.run("see", {"image": PICTURE})
    for step in range(24):
        if simulator.kv_length > 50:
            simulator.kv_length = 6
        ids = [(13 * step + 5 * at) % 50 for at in range(1 + step % 4)]
        simulator.run("step", step_inputs(ids, 6 + step))
    return recorder.finish()


def router(rows: int, experts: int = 8, seed: int = 0) -> tuple[np.ndarray, RouterSample]:
    random = np.random.default_rng(seed)
    weight = random.standard_normal((experts, 32)).astype(np.float32)
    inputs = random.standard_normal((rows, 32)).astype(np.float32)
    index = choices(weight, None, inputs, 2).astype(np.uint16)
    run = np.arange(rows, dtype=np.int32)
    return weight, RouterSample(
        0, 0, ABSENT, inputs, index, run, np.zeros(rows, bool), by_logits=True
    )


def test_it_rounds_rows_to_their_own_grid() -> None:
    weight, _ = router(1)
    for bits in (4, 6, 8, 16):
        rounded = round_rows(weight, bits)
        most = 2 ** (bits - 1) - 1
        steps = np.abs(weight).max(axis=1, keepdims=True) / most
        codes = rounded / steps
        assert np.allclose(codes, np.rint(codes), atol=1e-3 * most / 100)
        assert np.abs(rounded - weight).max() <= 0.5001 * steps.max()
        assert np.allclose(round_rows(rounded, bits), rounded, rtol=1e-6)
    assert not round_rows(np.zeros((2, 4), np.float32), 8).any()


def test_it_takes_the_narrowest_width_that_keeps_the_choices() -> None:
    weight, sample = router(600)
    found = search_width(weight, None, sample)
    assert found.flips[found.bits] <= MOST_FLIPS
    assert all(found.flips[bits] > MOST_FLIPS for bits in found.flips if bits < found.bits)
    assert found.flips[4] > found.flips[8] > found.flips[16]
    easy = search_width(round_rows(weight, 4), None, sample)
    assert easy.bits == 4


def test_it_leaves_a_router_alone_that_it_cannot_judge() -> None:
    weight, sample = router(LEAST_ROWS - 1)
    assert search_width(weight, None, sample).bits == UNROUNDED
    weight, sample = router(600)
    grouped = replace(sample, by_logits=False)
    assert search_width(weight, None, grouped).bits == UNROUNDED


def test_it_rounds_the_routers_of_a_module_and_nothing_else(module, record) -> None:
    many = replace(
        record,
        routers=tuple(
            replace(one, inputs=np.tile(one.inputs, (3, 1)), index=np.tile(one.index, (3, 1)))
            for one in record.routers
        ),
    )
    rounded = round_routers(module, many)
    assert [width.layer for width in rounded.widths] == [0, 1]
    changed = {
        old.id
        for old, new in zip(module.weights, rounded.module.weights, strict=True)
        if not np.array_equal(old.array, new.array)
    }
    expected = {
        one.weight
        for one, width in zip(many.routers, rounded.widths, strict=True)
        if width.bits != UNROUNDED
    }
    assert changed == expected
    assert expected
    for one, width in zip(many.routers, rounded.widths, strict=True):
        before = choices(module.weights[one.weight].array, None, one.inputs, 2)
        after = choices(rounded.module.weights[one.weight].array, None, one.inputs, 2)
        assert np.mean(before != after) <= 2 * MOST_FLIPS
        assert width.flips[width.bits] <= MOST_FLIPS
        if width.bits != UNROUNDED:
            assert rounded.module.weights[one.weight].layout == layout_of(width.bits)


def test_it_keeps_the_width_of_the_base_where_it_serves() -> None:
    weight, sample = router(600)
    easy = round_rows(weight, 6)
    found = search_width(easy, None, sample).bits
    assert found <= 8
    builder = ModuleBuilder()
    x, gate = builder.buffer(None, 32), builder.buffer(None, 2)
    index = builder.buffer(None, 2, "i32")
    builder.call(Op.ROUTE, [x], [index, gate], [builder.weight(easy)], k=2, order=0)
    builder.program("run", {"x": x}, {"index": index})
    record = CalibrationRecord({}, (), (sample,))
    for base, bits in (({}, found), ({0: 16}, 16), ({0: 8}, 8)):
        rounded = round_routers(builder.module(), record, base)
        assert [width.bits for width in rounded.widths] == [bits]
        assert rounded.module.weights[0].layout == layout_of(bits)


def test_its_statistics_count_every_row(module, record) -> None:
    stats = router_stats(module, record)
    assert stats is not None
    assert parse_router_stats(stats.to_bytes()) == stats
    assert stats.steps == 25
    for layer, one in zip(stats.layers, record.routers, strict=True):
        assert sum(layer.entropy_histogram) == len(one.index)
        counts = np.bincount(one.index[~one.vision].ravel(), minlength=4)
        assert np.allclose(layer.usage_text, 1000 * counts / counts.sum(), atol=0.5001)
        for text, vision, bias in zip(
            layer.usage_text, layer.usage_vision, layer.modality_bias, strict=True
        ):
            assert np.sign(text - vision) == np.sign(bias) or abs(text - vision) <= 1


def test_its_bands_cover_the_steps_and_hold_what_they_promise(module, record) -> None:
    stats = router_stats(module, record)
    assert stats is not None
    assert 1 <= len(stats.bands) <= 5
    assert stats.bands[0].low == 0
    assert stats.bands[-1].high >= 1000 * np.log(4)
    assert sum(band.share for band in stats.bands) == 1000
    assert all(2 <= band.expected_experts <= 4 for band in stats.bands)
    assert all(1 <= band.prefetch_width <= 4 for band in stats.bands)


def test_it_groups_experts_that_run_together() -> None:
    steps = tuple((at, at + 4, at + 8) for _ in range(5) for at in range(4))
    groups = group_experts((4, 8), steps, most=3)
    assert parse_expert_groups(groups.to_bytes()) == groups
    assert groups.count == 4
    members = {frozenset(groups.members(group)) for group in range(4)}
    assert members == {frozenset({(0, at), (1, at), (1, at + 4)}) for at in range(4)}
    assert group_experts((4, 8), steps, most=3) == groups


def test_it_clusters_layer_by_layer_above_a_limit(monkeypatch) -> None:
    monkeypatch.setattr("compiler.quant.expert_groups.MOST_TOGETHER", 5)
    steps = ((0, 1, 4, 5), (2, 3, 6, 7)) * 3
    groups = group_experts((4, 4), steps, most=2)
    for group in range(groups.count):
        assert len({layer for layer, _ in groups.members(group)}) == 1


@pytest.mark.parametrize(
    ("groups", "capacity", "expected"),
    [
        ([0, 1, 2, 3], 4, (4, 4)),
        ([0, 1, 2, 3], 2, (8, 8)),
        ([0, 0, 1, 1], 2, (8, 4)),
        ([0, 1, 0, 1], 2, (16, 8)),
        ([0, 1, 0, 1], 4, (4, 2)),
    ],
)
def test_its_cache_drops_what_was_used_longest_ago(groups, capacity, expected) -> None:
    assert simulate_loads(groups, ((0, 1), (2, 3)) * 2, capacity) == expected


def test_it_reports_grouping_on_runs_that_it_did_not_see() -> None:
    random = np.random.default_rng(1)
    topics = random.integers(0, 4, 90)
    steps = tuple(
        tuple(sorted(random.choice(np.arange(4) + 4 * topic, 3, replace=False).tolist()))
        for topic in topics.tolist()
    )
    report = grouping_report((16,), steps)
    assert report.runs == 30
    assert report.cache_experts == 8
    assert report.grouped < 0.8 * report.random
    assert report.requests < report.single_requests
    assert report.single < report.random


def test_the_driver_learns_sections_and_facts(module, record) -> None:
    learned = learn_routing(module, record)
    assert set(learned.sections) == {"router_stats", "expert_groups"}
    sizes, steps = expert_steps(module, record)
    assert sizes == (4, 4)
    assert len(steps) == 25
    assert parse_expert_groups(learned.sections["expert_groups"]) == group_experts(sizes, steps)
    nothing = learn_routing(module, None)
    assert (nothing.module, nothing.sections) == (module, {})
    unrouted = CalibrationRecord({}, (), ())
    assert learn_routing(module, unrouted).sections == {}
