"""What goes within an accuracy budget: planted units exactly, judged on other cards."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compiler.driver.cache import StageCache
from compiler.driver.calibrate import record_cards
from compiler.driver.cards import Card
from compiler.driver.choose_removal import (
    STRUCTURE_LOSSES,
    RemovalChoice,
    choose_removal,
    take_steps,
)
from compiler.driver.removal_stage import NOTHING_REMOVED, Removed
from compiler.driver.removal_steps import Move, moves_of, ranked_steps, removals_of
from compiler.driver.removal_trials import RemovalTrials
from compiler.errors import CompilerError, MalformedModelError
from compiler.frontend import import_pipeline
from compiler.passes.base import ImportedPipeline
from compiler.passes.pipeline import LOSSLESS, Loss, finish_pipeline, raise_pipeline
from compiler.passes.removable import CHANNELS, EXPERT_CHANNELS, HEADS, UnitSite, removable_units
from compiler.passes.remove_columns import Removal
from compiler.quant.module import pack_weight
from tests.factories.attention_blocks import head_columns, plant_pattern
from tests.factories.bundles import STORE
from tests.factories.onnx_models import tiny_models
from tests.factories.weak_models import (
    SHAPE,
    WEAK_CHANNELS,
    WEAK_HEADS,
    cards_of,
    write_own,
    write_weak,
)


def taken(allowed: Callable[[Sequence[int]], bool], steps: Sequence[int]) -> list[int]:
    return take_steps(allowed, steps)


def test_the_longest_prefix_is_found() -> None:
    for most in range(9):
        assert taken(lambda steps, most=most: len(steps) <= most, list(range(8))) == list(
            range(most)
        )


def test_steps_behind_a_refused_one_are_tried() -> None:
    """Move 1 costs too much; the steps of the others behind it go all the same."""
    steps = [0, 0, 1, 2, 0, 1, 2]
    found = taken(lambda tried: 1 not in tried, steps)
    assert sorted(found) == [0, 0, 0, 2, 2]
    assert found[:2] == [0, 0]


def test_a_move_that_failed_is_not_tried_again() -> None:
    asked: list[list[int]] = []

    def holds(tried: Sequence[int]) -> bool:
        asked.append(list(tried))
        return not tried

    assert take_steps(holds, [0, 0, 0, 1, 1]) == []
    assert asked.count([0]) <= 2
    assert asked.count([1]) == 1


def move(*error: float, parameters: int = 1) -> Move:
    return Move((), np.array(error), parameters)


def test_steps_are_ranked_by_error_per_weight_and_stay_in_order() -> None:
    moves = [
        move(0, 0.2, 0.3, 0.31),
        move(0, 0.3, 0.9, parameters=3),
        move(0, 0.5, 0.5),
    ]
    assert ranked_steps(moves) == [1, 0, 0, 0, 1, 2, 2]


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> ImportedPipeline:
    """A tiny model in which some heads and channels have next to no weight."""
    return import_pipeline(write_weak(tmp_path_factory.mktemp("weak")))


@pytest.fixture(scope="module")
def trials(weak: ImportedPipeline) -> RemovalTrials:
    return RemovalTrials.of(raise_pipeline(weak), pack_weight, StageCache(STORE))


@pytest.fixture(scope="module")
def choice(trials: RemovalTrials) -> RemovalChoice:
    return choose_removal(trials, cards_of(trials, 12), 0.02, lambda _module, _loss: None)


def units(removal: Removal, site: UnitSite) -> list[tuple[int, ...]]:
    """Return the units that a removal takes from each matrix."""
    return [
        tuple(at for at in range(site.units) if at * site.width in columns)
        for columns in removal.columns
    ]


def test_all_sites_of_a_model_are_found(trials: RemovalTrials) -> None:
    sites = removable_units(trials.raised.module, trials.raised.ctx)
    found = [(s.kind, s.units, s.step, s.matrices, s.shares_cache) for s in sites]
    assert found == [
        (HEADS, 4, 2, 1, True),
        (EXPERT_CHANNELS, 64, 32, 2, False),
        (HEADS, 4, 2, 1, True),
        (EXPERT_CHANNELS, 64, 32, 2, False),
    ]
    heads, experts = sites[0], sites[1]
    assert heads.parameters == 16 * 4 * 64
    assert experts.parameters == 2 * 64
    assert heads.steps == experts.steps == 1


def test_it_takes_the_planted_units_and_no_others(
    trials: RemovalTrials, choice: RemovalChoice
) -> None:
    sites = removable_units(trials.raised.module, trials.raised.ctx)
    found = {removal.weight: removal for removal in choice.loss.removals}
    wanted = [WEAK_HEADS[0], WEAK_CHANNELS[0], WEAK_HEADS[1], WEAK_CHANNELS[1]]
    for site, planted in zip(sites, wanted, strict=True):
        assert units(found[site.weight], site) == [planted] * site.matrices, site.kind
    narrow = trials.module(choice.loss)
    assert narrow.kv is not None
    assert narrow.kv.heads == 2
    facts = choice.facts
    assert facts["accuracy_before"] == facts["accuracy_after"] == 1.0
    assert [row["removed"] for row in facts["sites"]] == [2, 2, 64, 64]
    saved = sum(row["parameters"] for row in facts["sites"])
    assert facts["parameters"][0] - facts["parameters"][1] == saved
    assert facts["flops"]["step"][1] < facts["flops"]["step"][0]
    json.dumps(facts)


def test_choosing_and_judging_cards_are_different_ones(
    trials: RemovalTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = cards_of(trials, 6)
    asked: list[Card] = []
    plain = RemovalTrials.accuracy

    def spy(self, module, cards, record=None):
        asked.append(list(cards))
        return plain(self, module, cards, record)

    monkeypatch.setattr(RemovalTrials, "accuracy", spy)
    choose_removal(trials, cards, 0.02, lambda _module, _loss: None)
    assert asked[0] == cards[0::2]
    assert asked[-1] == cards[1::2]
    assert all(found in (cards[0::2], cards[1::2]) for found in asked)


def test_what_the_judges_refuse_is_not_removed(trials: RemovalTrials) -> None:
    """The odd cards expect something else than the model answers when anything is missing."""
    cards = cards_of(trials, 8)
    asked = {"judge": 0}

    class Strict(RemovalTrials):
        def accuracy(self, module, cards, record=None):
            if cards == judging:
                asked["judge"] += 1
                return 1.0 if module.kv.heads == 4 and asked["judge"] == 1 else 0.5
            return 1.0

    judging = cards[1::2]
    strict = Strict(trials.raised, trials.spec, trials.pack, trials.cache, trials.target)
    found = choose_removal(strict, cards, 0.003, lambda _module, _loss: None)
    assert found.loss == LOSSLESS
    assert found.facts["accuracy_after"] == found.facts["accuracy_before"] == 1.0
    assert [row["accuracy"] for row in found.facts["looks"]] == [0.5] * len(found.facts["looks"])
    assert len(found.facts["looks"]) >= 2
    assert found.facts["parameters"][0] == found.facts["parameters"][1]


def test_a_pattern_of_zeros_is_rounded_to_tiles(tmp_path: Path) -> None:
    """Half of the tiles of a sparse matrix hold next to nothing: they go, and are skipped."""
    models = tiny_models(SHAPE)
    plant_pattern(models["decoder"], [(0, 0), (16, 32), (32, 0), (48, 32)])
    found = import_pipeline(write_own(tmp_path, models))
    rounded = RemovalTrials.of(raise_pipeline(found), pack_weight, StageCache(STORE))
    sparse = choose_removal(rounded, cards_of(rounded, 8), 0.0001, lambda _module, _loss: None)
    assert sparse.loss.structure == STRUCTURE_LOSSES[-1]
    assert sparse.facts["accuracy_after"] == 1.0
    whole, narrow = rounded.module(LOSSLESS), rounded.module(sparse.loss)
    assert {weight.layout for weight in whole.weights} == {"dense"}
    tiled = [weight.array for weight in narrow.weights if weight.layout == "tiles"]
    assert len(tiled) == 1
    live = (tiled[0][:64].reshape(4, 16, 2, 32) != 0).any(axis=(1, 3))
    assert np.argwhere(~live).tolist() == [[0, 0], [1, 1], [2, 0], [3, 1]]
    assert any(
        "without loss 1.000" in note
        for note in finish_pipeline(rounded.raised, loss=sparse.loss).notes
    )


def test_too_few_cards_are_refused(trials: RemovalTrials) -> None:
    with pytest.raises(MalformedModelError, match="choose by"):
        choose_removal(trials, cards_of(trials, 1), 0.003, lambda _module, _loss: None)


def test_the_same_cards_give_the_same_choice(trials: RemovalTrials, choice: RemovalChoice) -> None:
    again = choose_removal(trials, cards_of(trials, 12), 0.02, lambda _module, _loss: None)
    assert again == choice


def test_the_simulator_chooses_the_same(trials: RemovalTrials) -> None:
    """Where no target runs the simulator answers, with the same bits."""
    module = trials.module(LOSSLESS)
    cards = cards_of(trials, 1)
    simulated = replace(trials, target=None)
    assert [one.answer for one in simulated.answers(module, cards)] == [
        one.answer for one in trials.answers(module, cards)
    ]


def test_a_removal_for_another_model_is_refused(trials: RemovalTrials) -> None:
    with pytest.raises(CompilerError, match="that the model has not"):
        trials.module(Loss((Removal("0" * 32, ((0,),)),)))
    sites = removable_units(trials.raised.module, trials.raised.ctx)
    with pytest.raises(CompilerError, match="does not fit"):
        trials.module(Loss((Removal(sites[0].weight, ((64,),)),)))


def test_a_site_that_calibration_never_reached_stays(trials: RemovalTrials) -> None:
    raised = trials.raised
    sites = removable_units(raised.module, raised.ctx)
    module = trials.module(LOSSLESS)
    record = record_cards(module, trials.spec, cards_of(trials, 2))
    assert record is not None
    assert len(moves_of(sites, raised.ctx.constants, module, record)) == 3
    unseen = replace(record, source_of={})
    assert moves_of(sites, raised.ctx.constants, module, unseen) == ()


def test_losses_have_names_of_their_own(choice: RemovalChoice) -> None:
    assert NOTHING_REMOVED.digest == ""
    assert NOTHING_REMOVED.report() == {}
    digests = {Removed(choice.loss).digest, Removed(Loss(structure=0.1)).digest}
    assert len(digests | {""}) == 3


def test_channels_of_a_linear_pair_get_a_bias_for_their_mean(trials: RemovalTrials) -> None:
    """Removing what is constant loses nothing: its mean goes into the bias."""
    from compiler.driver.removal_steps import RankedSite
    from compiler.quant.importance import removal_order

    random = np.random.default_rng(1)
    weight = random.standard_normal((8, 64)).astype(np.float32)
    rows = random.standard_normal((30, 64))
    rows[:, :32] = 2.0
    site = UnitSite(CHANNELS, "x", "d", 64, 1, 32, 1, 72)
    order = removal_order(weight, rows, 1, has_bias=True)
    error = order.error[np.arange(site.steps + 1) * 32]
    removal = RankedSite(site, (order,), weight[None], error).removal(1)
    assert removal.columns == (tuple(range(32)),)
    assert np.allclose(removal.bias, 2.0 * weight[:, :32].sum(axis=1), rtol=1e-5)


def test_cached_heads_go_together(choice: RemovalChoice, trials: RemovalTrials) -> None:
    raised, module = trials.raised, trials.module(LOSSLESS)
    record = record_cards(module, trials.spec, cards_of(trials, 2))
    assert record is not None
    moves = moves_of(
        removable_units(raised.module, raised.ctx), raised.ctx.constants, module, record
    )
    assert [len(one.sites) for one in moves] == [2, 1, 1]
    heads = [r for r in removals_of(moves, [0]) if r.weight == moves[0].sites[1].site.weight]
    assert heads[0].columns == (tuple(head_columns(WEAK_HEADS[1], SHAPE.head_dim)),)
    assert len(removals_of(moves, [0])) == 2


def test_the_cards_of_these_tests_have_questions(trials: RemovalTrials) -> None:
    assert all(len(card.questions) >= 3 for card in cards_of(trials, 12))
