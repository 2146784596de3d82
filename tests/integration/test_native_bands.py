"""Variants of `step`: the simulator's bits, one cache, and what a bundle with bands must hold."""

from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.bands import (
    ENTROPY,
    STEP,
    Band,
    BandedRunner,
    Bands,
    BandsError,
    verify_bands,
)
from compiler.contract.plan import Plan, parse_plan
from compiler.contract.plan_format import Direction
from compiler.driver.band_trial import LEAST_STEPS, Changes, _chosen, _together
from compiler.emitters.bands import can_band, common_top_k, with_entropy, with_variants
from compiler.emitters.schedule import obey, schedule_ops
from compiler.kernels.program import Module
from compiler.quant.router_bits import logits
from compiler.simulator import Simulator
from tests.factories.kernels import Case, ids, native_targets, raw
from tests.factories.modules import DecoderBuilder, small_decoder

NARROW = "step.band0"


def banded(module: Module, **variants: tuple[int, ...]) -> Module:
    made = with_variants(with_entropy(module), variants or {NARROW: (1, 1)})
    return obey(made, schedule_ops(made))


def step(tokens: list[int], first: int) -> dict[str, bytes]:
    positions = ids(range(first, first + len(tokens)))
    return {"token_ids": ids(tokens).tobytes(), "positions": positions.tobytes()}


@pytest.mark.parametrize("target", native_targets())
def test_every_variant_has_the_bits_of_the_simulator(target: str) -> None:
    case = Case.of(banded(small_decoder(5), **{NARROW: (1, 1), "step.band1": (1, 2)}))
    simulator = case.simulator()
    with case.native(target) as native:
        first = 0
        for program, tokens in (
            (STEP, [1, 2, 3]), (NARROW, [4]), ("step.band1", [5]), (STEP, [6]), (NARROW, [7, 8]),
        ):  # fmt: skip
            values = step(tokens, first)
            expected = raw(simulator.run(program, values))
            assert raw(native.run(program, values)) == expected
            first += len(tokens)
            assert native.kv_length == simulator.kv_length == first


def test_telling_the_entropy_changes_nothing_else() -> None:
    plain = Case.of(small_decoder(5)).simulator()
    told = Case.of(with_entropy(small_decoder(5))).simulator()
    for first, tokens in ((0, [3, 4, 5]), (3, [6])):
        before, after = (raw(some.run(STEP, step(tokens, first))) for some in (plain, told))
        entropy = np.frombuffer(after.pop(ENTROPY), "<f4")
        assert before == after
        assert entropy.shape == (2,)
        assert (entropy > 0).all()
        assert (entropy <= np.log(4) + 1e-6).all()


def test_the_entropy_is_that_of_the_softmax_over_all_experts() -> None:
    module = with_entropy(small_decoder(6))
    seen: list[float] = []

    class Observer:
        def product(self, weight: int, x: object) -> None: ...

        def ran(self) -> None: ...

        def call(self, program: str, call, inputs, outputs, runs=None) -> None:
            if call.op.name == "ROUTE":
                scores = logits(module.weights[call.weights[0]].array, None, inputs[0][-1:])[0]
                shares = np.exp(scores - scores.max())
                shares /= shares.sum()
                seen.append(float(-(shares * np.log(shares)).sum()))

    exact = Simulator(module, mode="f64", observer=Observer())
    results = exact.run_arrays(STEP, {"token_ids": ids([1, 2]), "positions": ids([0, 1])})
    assert np.allclose(results[ENTROPY][0], seen, atol=1e-9)


def test_a_variant_shares_everything_but_the_tape() -> None:
    base, case = Case.of(with_entropy(small_decoder(5))), Case.of(banded(small_decoder(5)))
    assert base.emitted.sections == case.emitted.sections
    plan = parse_plan(case.emitted.plan_bytes)
    assert plan.arena_bytes == parse_plan(base.emitted.plan_bytes).arena_bytes
    steps = {program.name: program for program in plan.programs}
    used = {
        name: {at for call in program.calls for at in call.weights}
        for name, program in steps.items()
    }
    assert used[NARROW] == used[STEP]
    routing = [call for call in steps[NARROW].calls if call.op.name == "ROUTE"]
    assert [call.params["k"] for call in routing] == [1, 1]


def rows(*programs: str) -> Bands:
    bands = tuple(
        Band(1000 * at, name, 1 if name != STEP else 2, 500, 0, 0, "as tried")
        for at, name in enumerate(programs)
    )
    return Bands(1, 0, 800, 700, 5000, 0, 0, bands)


def test_a_plan_without_the_variants_of_its_bands_is_refused() -> None:
    plan = parse_plan(Case.of(banded(small_decoder(5))).emitted.plan_bytes)
    verify_bands(plan, rows(NARROW, STEP))
    without = replace(plan, programs=tuple(p for p in plan.programs if p.name != NARROW))
    for wrong, bands in (
        (without, rows(NARROW, STEP)),
        (plan, rows(STEP)),
        (plan, rows(NARROW, "step.band1")),
        (replace(plan, programs=plan.programs[-1:]), rows(NARROW)),
        (ports(plan, lambda port: port.role != ENTROPY), rows(NARROW)),
        (ports(plan, lambda port: port.role != "token"), rows(NARROW)),
        (ports(plan, lambda port: port.direction is not Direction.INPUT), rows(NARROW)),
    ):
        with pytest.raises(BandsError):
            verify_bands(wrong, bands)


def ports(plan: Plan, keep) -> Plan:
    """Return the plan with only some ports of the variant."""
    programs = tuple(
        replace(p, ports=tuple(filter(keep, p.ports))) if p.name == NARROW else p
        for p in plan.programs
    )
    return replace(plan, programs=programs)


def test_a_banded_runner_runs_the_variant_of_its_band() -> None:
    case = Case.of(banded(small_decoder(5)))
    simulator = case.simulator()
    runner = BandedRunner(simulator, rows(NARROW))
    first = runner.run(STEP, step([1, 2], 0))
    assert len(first) == 4
    assert "routing" not in runner.run(STEP, step([3], 2))
    assert runner.ran == {STEP: 1, NARROW: 1}
    runner.kv_length = 1
    assert simulator.kv_length == runner.kv_length == 1


def changes(table: dict[frozenset[int], tuple[int, int]]) -> Changes:
    """Return a measurement by the set of bands that have a variant."""

    def measure(bands: Bands):
        chosen = frozenset(at for at, band in enumerate(bands.bands) if band.program != STEP)
        worse, better = table.get(chosen, (0, 0))
        return worse, better, {STEP: 100, **{band.program: LEAST_STEPS for band in bands.bands}}

    return measure


def test_a_band_that_loses_too_much_is_dropped_with_the_reason() -> None:
    bands = rows(STEP, STEP, STEP)
    table = {frozenset({0}): (1, 0), frozenset({1}): (9, 2), frozenset({2}): (1, 1)}
    found = [_chosen(bands, at, 2, changes(table)) for at in range(3)]
    assert [band.program for band in found] == ["step.band1", STEP, "step.band1"]
    assert "loses 9 and wins 2" in found[1].reason
    assert (found[1].worse, found[1].top_k) == (0, 2)


def test_a_variant_that_was_never_taken_proves_nothing() -> None:
    found = _chosen(rows(STEP), 0, 2, lambda _: (0, 0, {STEP: 100, "step.band1": LEAST_STEPS - 1}))
    assert found.program == STEP
    assert "steps" in found.reason


def test_bands_that_lose_too_much_together_are_dropped_one_by_one() -> None:
    start = rows("step.band1", "step.band1", "step.band1")
    lost = (0, 1, 2)
    bands = replace(
        start,
        bands=tuple(
            replace(band, worse=n, better=n // 2) for band, n in zip(start.bands, lost, strict=True)
        ),
    )
    table = {frozenset({0, 1, 2}): (9, 3), frozenset({0, 1}): (5, 1), frozenset({0}): (0, 0)}
    trial = _together(bands, 2, changes(table))
    assert [band.program for band in trial.bands.bands] == ["step.band1", STEP, STEP]
    assert all("lost most" in band.reason for band in trial.bands.bands[1:])
    assert (trial.bands.worse, trial.bands.better) == (0, 0)


def test_some_models_have_nothing_to_take_fewer_of() -> None:
    assert can_band(small_decoder(1))
    assert common_top_k(small_decoder(1)) == 2
    assert not can_band(with_variants_only_see())


def with_variants_only_see() -> Module:
    builder = DecoderBuilder(1)
    builder.add_see()
    return builder.module()
