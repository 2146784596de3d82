"""The gate of a release: its rules, and the two mistakes that lose an update in quantisation."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.contract.errors import ContractError
from compiler.driver.gain import (
    LEAST,
    MAX_LOSS,
    MICRO,
    AnswerScores,
    Gain,
    GainLostError,
    judge_gain,
    require_gain,
)
from compiler.quant.w4 import Grid, W4Matrix, dequantise_w4, on_grid, quantise_w4

ASKED = "1" * 64
Array = NDArray[np.float32]
RNG = np.random.default_rng(5)
COUNT = 60
START = -np.abs(RNG.normal(0.8, 0.5, COUNT))


def scores(f32: NDArray[np.float64], int4: NDArray[np.float64] | None = None) -> AnswerScores:
    def micro(values: NDArray[np.float64]) -> tuple[int, ...]:
        return tuple(int(max(LEAST, min(0.0, value * MICRO))) for value in values)

    return AnswerScores(ASKED, micro(f32), () if int4 is None else micro(int4))


BASE = scores(START - 1.0, START - 1.05)


def judged(f32_gain: float, int4_gain: float, noise: float = 0.05) -> Gain:
    """Return the verdict over updates that gain so much, with noise from question to question."""
    rng = np.random.default_rng(9)
    spread = rng.normal(0.0, noise, COUNT)
    spread -= spread.mean()
    rounding = rng.normal(0.0, noise / 4, COUNT)
    rounding -= rounding.mean()
    new = scores(START - 1.0 + f32_gain + spread, START - 1.05 + int4_gain + spread + rounding)
    return judge_gain(BASE, new)


@pytest.mark.parametrize(
    ("f32", "int4", "passed"),
    [
        (0.2, 0.2, True),
        (0.2, 0.181, True),
        (0.2, 0.17, False),
        (0.2, 0.0, False),
        (0.2, -0.3, False),
        (0.02, 0.0, False),
    ],
)
def test_nine_tenths_of_a_gain_are_kept_or_the_release_is_refused(
    f32: float, int4: float, passed: bool
) -> None:
    gain = judged(f32, int4)
    assert (gain.rule, gain.passed) == ("gain", passed)
    assert gain.f32 == pytest.approx(f32, abs=1e-4)
    assert gain.int4 == pytest.approx(int4, abs=1e-4)
    assert gain.to_json()["kept_ratio"] == pytest.approx(int4 / f32, abs=1e-2)


@pytest.mark.parametrize(
    ("f32", "int4", "passed"),
    [
        (0.0, 0.0, True),
        (0.0, -MAX_LOSS, True),
        (0.0, -0.02, False),
        (-0.3, -0.3, True),  # an honest regression is the business of other gates
        (-0.3, -0.35, False),
        (-0.3, 0.1, True),
        (0.005, 0.0, True),  # within the noise of the questions
    ],
)
def test_without_a_gain_quantisation_may_cost_no_more_than_any_other_choice(
    f32: float, int4: float, passed: bool
) -> None:
    gain = judged(f32, int4)
    assert (gain.rule, gain.passed) == ("no_gain", passed)
    assert gain.to_json()["kept_ratio"] is None


def test_too_few_questions_refuse_nothing_that_they_do_not_show() -> None:
    one = replace(BASE, f32=BASE.f32[:1], int4=BASE.int4[:1])
    better = replace(one, f32=(0,), int4=one.int4)
    gain = judge_gain(one, better)
    assert (gain.rule, gain.passed, gain.questions) == ("no_gain", True, 1)


@pytest.mark.parametrize(
    ("base", "new", "rule"),
    [
        (None, BASE, "no_base"),
        (replace(BASE, questions_sha256="2" * 64), BASE, "other_questions"),
        (replace(BASE, f32=BASE.f32[1:]), BASE, "other_questions"),
        (replace(BASE, int4=()), BASE, "no_scores"),
        (BASE, replace(BASE, int4=()), "no_scores"),
    ],
)
def test_it_says_why_there_is_no_comparison(
    base: AnswerScores | None, new: AnswerScores, rule: str
) -> None:
    gain = require_gain(judge_gain(base, new))
    assert (gain.rule, gain.f32, gain.int4) == (rule, None, None)
    assert "base" in gain.says


def test_it_refuses_with_the_numbers_and_a_hint() -> None:
    with pytest.raises(GainLostError) as caught:
        require_gain(judged(0.2, 0.1))
    assert caught.value.code == "build.user.gain_lost"
    assert "+0.2000 nats in f32" in str(caught.value)
    assert "+0.1000 in int4: 50% of the gain, 90% are needed" in str(caught.value)
    assert "f32 weights" in caught.value.hint
    with pytest.raises(GainLostError, match=r"no gain to keep, and \+0.0500 nats lost"):
        require_gain(judged(-0.3, -0.35))


def test_scores_come_back_as_they_were() -> None:
    assert AnswerScores.from_json(BASE.to_json()) == BASE
    bare = replace(BASE, int4=())
    assert AnswerScores.from_json(bare.to_json()) == bare
    for name, value in (
        ("f32", [1]),
        ("f32", [0.5]),
        ("f32", None),
        ("int4", [0]),
        ("f32", [LEAST - 1]),
        ("questions_sha256", "x"),
    ):
        with pytest.raises(ContractError):
            AnswerScores.from_json({**BASE.to_json(), name: value})


# --- a real quantiser on a small model whose update is smaller than a step of the grid ----------

CLASSES, WIDTH, QUESTIONS = 32, 1024, 60
HELD, RATE, STEPS = 100.0, 2e-4, 300


def model() -> tuple[Array, Array, Array, NDArray[np.int64]]:
    """Return weights (C, K), a fine-tune of them, questions (Q, K) and the right answers.

    The fine-tune ends where another step would gain nothing, held near the old weights.
    """
    rng = np.random.default_rng(11)
    weights = rng.normal(0.0, 0.05, (CLASSES, WIDTH)).astype(np.float32)
    asked = rng.normal(0.0, 1.0, (QUESTIONS, WIDTH)).astype(np.float32)
    right = (asked @ weights.T + rng.normal(0.0, 1.0, (QUESTIONS, CLASSES))).argmax(axis=1)
    tuned = weights.copy()
    for _ in range(STEPS):
        chance = np.exp(log_chances(tuned, asked))
        chance[np.arange(QUESTIONS), right] -= 1.0
        tuned -= (RATE * (chance.T @ asked + HELD * (tuned - weights))).astype(np.float32)
    return weights, tuned - weights, asked, right


def log_chances(weights: Array, asked: Array) -> NDArray[np.float64]:
    logits = asked.astype(np.float64) @ weights.astype(np.float64).T
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


WEIGHTS, UPDATE, ASKED_ROWS, RIGHT = model()
OLD = quantise_w4(WEIGHTS)


def answer_scores(f32: Array, int4: W4Matrix) -> AnswerScores:
    def picked(weights: Array) -> NDArray[np.float64]:
        return log_chances(weights, ASKED_ROWS)[np.arange(QUESTIONS), RIGHT]

    return scores(picked(f32), picked(dequantise_w4(int4)))


def sticky(weights: Array, old: W4Matrix, tau: float) -> W4Matrix:
    """Requantise, keeping each code whose weight is within `tau` steps beyond its rounding."""
    step = np.repeat(old.grid.scales * old.grid.rows[:, None], 32, axis=1)
    exact = weights / step + 8
    moved = np.abs(exact - old.codes) > 0.5 + tau
    codes = np.where(moved, np.clip(np.rint(exact), 0, 15), old.codes).astype(np.uint8)
    return W4Matrix(codes, Grid(old.grid.scales, old.grid.rows), old.report)


def test_the_update_is_far_smaller_than_a_step() -> None:
    steps = OLD.grid.scales * OLD.grid.rows[:, None]
    assert 0.1 < np.abs(UPDATE).mean() / steps.mean() < 0.2


def test_our_quantiser_keeps_the_gain_on_the_frozen_grid() -> None:
    new = quantise_w4(WEIGHTS + UPDATE, OLD.grid)
    changed = np.mean(new.codes != OLD.codes)
    assert 0.1 < changed < 0.2
    gain = judge_gain(answer_scores(WEIGHTS, OLD), answer_scores(WEIGHTS + UPDATE, new))
    assert (gain.rule, gain.passed) == ("gain", True)
    assert gain.int4 is not None
    assert gain.f32 is not None
    assert gain.int4 > 0.9 * gain.f32


@pytest.mark.parametrize("tau", [0.25, 0.5])
def test_a_dead_zone_loses_the_update_and_is_refused(tau: float) -> None:
    new = sticky(WEIGHTS + UPDATE, OLD, tau)
    assert np.mean(new.codes != OLD.codes) < 0.05
    gain = judge_gain(answer_scores(WEIGHTS, OLD), answer_scores(WEIGHTS + UPDATE, new))
    assert (gain.rule, gain.passed) == ("gain", False)
    with pytest.raises(GainLostError, match="of the gain, 90% are needed"):
        require_gain(gain)


def test_an_adapter_merged_into_dequantised_weights_vanishes_and_is_refused() -> None:
    merged = dequantise_w4(OLD) + UPDATE
    new = on_grid(merged, OLD.grid)
    assert np.mean(new.codes != OLD.codes) < 0.1
    gain = judge_gain(answer_scores(WEIGHTS, OLD), answer_scores(merged, new))
    assert (gain.rule, gain.passed) == ("gain", False)
    assert quantise_w4(WEIGHTS + UPDATE, OLD.grid).codes.tobytes() != new.codes.tobytes()
