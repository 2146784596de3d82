"""Replays choose as the simulator does; caches forget in their order."""

import numpy as np
import pytest

from compiler.analysis.expert_cache import CACHES, ExpertCache, LeastStale, Lru
from compiler.analysis.routing_replay import LayerTrace, choose, replay
from compiler.contract.operations import RouteOrder
from compiler.contract.steering import SPREAD_RATE, Steering
from compiler.kernels.program import Op
from compiler.simulator import Simulator
from tests.factories.steering import TOKENS, WIDTH, residency, routed

LAYERS, EXPERTS, RUNS = 3, 8, 200


def trace(seed: int = 1) -> tuple[LayerTrace, ...]:
    """Return routers whose favourites last a few runs."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(LAYERS):
        slow = np.repeat(random.standard_normal((RUNS // 10, EXPERTS)) * 2, 10, axis=0)
        logits = slow + random.standard_normal((RUNS, EXPERTS))
        found.append(LayerTrace(logits, np.arange(RUNS), 2))
    return tuple(found)


@pytest.mark.parametrize("kind", CACHES)
def test_a_pull_saves_misses_and_says_what_it_moved(kind: type[ExpertCache]) -> None:
    plain = replay(trace(), Steering(), kind(12, LAYERS))
    assert plain.moved == 0
    assert plain.uses == plain.chosen == 2 * LAYERS * RUNS
    assert plain.rows == LAYERS * RUNS
    before = plain
    for pull in (0.1, 0.3, 1.0):
        found = replay(trace(), Steering(pull=pull), kind(12, LAYERS))
        assert found.misses < before.misses
        assert before.moved < found.moved < 0.5
        before = found
    assert before.misses < 0.55 * plain.misses


def test_where_all_fits_nothing_is_pulled() -> None:
    wide = Lru(LAYERS * EXPERTS, LAYERS)
    found = replay(trace(), Steering(pull=5.0), wide)
    assert found.misses <= LAYERS * EXPERTS
    assert found.mean_k == 2


def test_sure_tokens_take_one_expert() -> None:
    found = replay(trace(), Steering(margin=0.5), Lru(12))
    assert 1 < found.mean_k < 2
    assert replay(trace(), Steering(max_k=1), Lru(12)).mean_k == 1


def test_it_chooses_as_the_simulator_does() -> None:
    module = routed(RouteOrder.TOPK_SOFTMAX)
    present = {0, 2, 4}
    table = residency(module, present)
    (route,) = [call for call in module.programs[0].calls if call.op is Op.ROUTE]
    matrix, bias = (module.weights[at].array for at in route.weights)
    gamma = module.weights[module.programs[0].calls[0].weights[0]].array
    sure = Steering(pull=0.3, protect=2, margin=0.4)
    for steering in (Steering(pull=0.3), sure, Steering(max_k=2)):
        simulator = Simulator(module, mode="f64")
        simulator.set_steering(steering, table)
        x = np.random.default_rng(2).standard_normal((TOKENS, WIDTH)).astype(np.float32)
        index = simulator.run_arrays("run", {"x": x})["index"]
        wide = x.astype(np.float64)
        h = wide / np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + np.float32(1e-5)) * gamma
        logits = h @ matrix.T.astype(np.float64) + bias
        spreads = logits.max(axis=1) - logits.min(axis=1)
        mean, means = spreads[0], []
        for spread in spreads:
            mean += (spread - mean) * SPREAD_RATE
            means.append(mean)
        absent = np.array([at not in present for at in range(logits.shape[1])])
        taken = choose(logits, 3, steering, np.array(means), absent)
        for row, chosen in zip(taken, index, strict=True):
            assert {*np.flatnonzero(row)} == {*chosen[chosen >= 0]}


def test_lru_forgets_what_was_used_longest_ago() -> None:
    cache = Lru(2)
    assert [cache.use(key, 0, 0) for key in (1, 2, 1, 3, 2)] == [True, True, False, True, True]
    assert (cache.uses, cache.misses, cache.evicted) == (5, 4, 1)


def test_least_stale_keeps_what_the_pass_still_comes_to() -> None:
    """Three layers take turns with room for two of them: LRU always drops what comes next."""
    lru, least_stale = Lru(2, 3), LeastStale(2, 3)
    for step in range(10):
        for layer in range(3):
            lru.use(layer, layer, step)
            least_stale.use(layer, layer, step)
    assert lru.misses == 30
    assert least_stale.misses < 22


def test_least_stale_forgets_first_what_nobody_used_for_long() -> None:
    cache = LeastStale(3, 2)
    cache.use(7, 1, 0)
    for step in (4, 5):
        cache.use(1, 0, step)
        cache.use(2, 1, step)
    cache.use(3, 0, 6)
    assert cache.evicted == 7


def test_a_cache_has_room_for_one() -> None:
    with pytest.raises(ValueError, match="0 experts"):
        Lru(0)
