"""The rule that chooses visual tokens: what it keeps, that it never makes NaN, and its algebra."""

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.contract.native_errors import NotFiniteError
from compiler.simulator.numerics import Bits, Exact, Numerics
from compiler.simulator.pruning import (
    TopP,
    head_weights,
    keep_top_p,
    looked_at,
    merged_tokens,
    weighted_scores,
)

Floats = NDArray[np.float64]
EXACT, BITS = Exact(()), Bits((), {})
BOTH = pytest.mark.parametrize("numerics", [EXACT, BITS], ids=["f64", "bits"])
SIDE, HEADS = 24, 16


def attention_map() -> tuple[Floats, NDArray[np.bool_]]:
    """Return (16, 576) shares of heads that look at 81 patches more or less, and these patches."""
    random = np.random.default_rng(0)
    y, x = np.divmod(np.arange(SIDE * SIDE), SIDE)
    informative = (abs(y - 10) < 5) & (abs(x - 12) < 5)
    peak = np.where(informative, 2.5, 0.0) * random.uniform(0.2, 1.2, (HEADS, 1))
    terms = np.exp(random.standard_normal((HEADS, SIDE * SIDE)) * 0.7 + peak)
    return terms / terms.sum(axis=1, keepdims=True), informative


def shares(seed: int, heads: int = 4, count: int = 40, peak: float = 2.0) -> Floats:
    terms = np.exp(np.random.default_rng(seed).standard_normal((heads, count)) * peak)
    return np.asarray(terms / terms.sum(axis=1, keepdims=True))


def as_dtype(numerics: Numerics, values: Floats) -> Floats:
    return values.astype(numerics.dtype)


def test_entropy_over_heads_keeps_what_nobody_looks_at_and_ours_the_rest() -> None:
    shares_, informative = attention_map()
    count = int(0.3 * shares_.shape[1])
    inverted = np.argsort(-(shares_ * np.log(shares_)).sum(axis=0))[:count]
    assert informative.sum() == 81
    assert informative[inverted].sum() / informative.sum() < 0.01
    ours, _ = keep_top_p(EXACT, weighted_scores(EXACT, shares_), TopP(1.0, 1, count))
    assert informative[ours].sum() / informative.sum() >= 0.95


def test_top_p_alone_keeps_the_informative_patches_of_the_map() -> None:
    shares_, informative = attention_map()
    kept, _ = keep_top_p(EXACT, weighted_scores(EXACT, shares_), TopP(0.8, 1, 576))
    assert informative[kept].sum() / informative.sum() >= 0.95
    assert len(kept) < 0.7 * len(informative)


@BOTH
def test_a_uniform_head_says_nothing_and_a_peak_everything(numerics: Numerics) -> None:
    rows = as_dtype(numerics, np.stack([np.full(32, 1 / 32), np.eye(32)[5]]))
    weights = head_weights(numerics, rows)
    assert weights == pytest.approx([0.0, 1.0], abs=1e-6)
    score = weighted_scores(numerics, rows)
    assert (score.argmax(), float(score.sum())) == (5, pytest.approx(1.0, abs=1e-5))


@BOTH
def test_zero_shares_and_a_single_token_make_no_nan(numerics: Numerics) -> None:
    rows = as_dtype(numerics, shares(1))
    rows[0, :7] = 0
    rows[1, 3] = 1e-40
    with np.errstate(all="raise", under="ignore"):
        assert np.isfinite(weighted_scores(numerics, rows)).all()
        assert weighted_scores(numerics, as_dtype(numerics, np.ones((3, 1)))) == [1.0]
        uniform = weighted_scores(numerics, as_dtype(numerics, np.full((2, 8), 0.125)))
    assert uniform == pytest.approx(np.full(8, 0.125))


@BOTH
def test_not_a_number_is_refused(numerics: Numerics) -> None:
    rows = as_dtype(numerics, shares(1))
    rows[2, 0] = np.nan
    with pytest.raises(NotFiniteError, match="attention score"):
        weighted_scores(numerics, rows)
    for bad in (np.nan, np.inf, -9.0):
        score = as_dtype(numerics, np.full(4, 0.25))
        score[1] = bad
        with pytest.raises(NotFiniteError, match="add up"):
            keep_top_p(numerics, score, TopP(0.5, 1, 4))


@BOTH
@pytest.mark.parametrize("seed", range(8))
def test_more_mass_keeps_more_and_never_drops_a_token(numerics: Numerics, seed: int) -> None:
    score = weighted_scores(numerics, as_dtype(numerics, shares(seed)))
    kept = [
        set(keep_top_p(numerics, score, TopP(p, 1, 40))[0].tolist())
        for p in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.99)
    ]
    assert all(less <= more for less, more in pairwise(kept))
    assert len(kept[0]) < len(kept[-1])


@BOTH
@pytest.mark.parametrize("seed", range(8))
def test_the_kept_set_is_the_smallest(numerics: Numerics, seed: int) -> None:
    score = weighted_scores(numerics, as_dtype(numerics, shares(seed)))
    kept, _ = keep_top_p(numerics, score, TopP(0.8, 1, 40))
    held = np.sort(score[kept].astype(np.float64))[::-1]
    assert held.sum() >= 0.8 * score.sum() - 1e-6
    assert held[:-1].sum() < 0.8 * score.sum() + 1e-6
    assert kept.tolist() == sorted(kept.tolist())


@BOTH
def test_bounds_win_over_mass(numerics: Numerics) -> None:
    score = weighted_scores(numerics, as_dtype(numerics, shares(3)))
    assert len(keep_top_p(numerics, score, TopP(0.01, 6, 40))[0]) == 6
    assert len(keep_top_p(numerics, score, TopP(1.0, 1, 9))[0]) == 9
    kept, into = keep_top_p(numerics, score, TopP(1.0, 1, 38, merge=8))
    assert (len(kept), len(into)) == (38, 2)


@BOTH
def test_ties_go_to_the_lower_token(numerics: Numerics) -> None:
    score = as_dtype(numerics, np.array([0.1, 0.2, 0.2, 0.1, 0.2, 0.2]))
    kept, into = keep_top_p(numerics, score, TopP(0.3, 1, 6, merge=1))
    assert (kept.tolist(), into.tolist()) == ([1, 2], [4])


@BOTH
@pytest.mark.parametrize("seed", range(6))
def test_it_follows_a_permutation_of_the_tokens(numerics: Numerics, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, keys = (
        as_dtype(numerics, shares(seed)),
        as_dtype(numerics, random.standard_normal((40, 12))),
    )
    tokens, rule = as_dtype(numerics, random.standard_normal((40, 6))), TopP(0.6, 2, 30, merge=3)
    order = random.permutation(40)

    def choose(places: NDArray[np.int64]) -> tuple[dict[int, Floats], set[int]]:
        score = weighted_scores(numerics, rows[:, places])
        kept, into = keep_top_p(numerics, score, rule)
        merged = merged_tokens(numerics, tokens[places], score, keys[places], kept, into)
        return dict(zip(places[into].tolist(), merged, strict=True)), set(places[kept].tolist())

    (merged, kept), (merged_too, kept_too) = choose(np.arange(40)), choose(order)
    assert kept == kept_too
    assert merged.keys() == merged_too.keys()
    for token, row in merged.items():
        assert row == pytest.approx(merged_too[token], abs=1e-5)


@BOTH
def test_others_join_the_most_similar_by_score(numerics: Numerics) -> None:
    keys = as_dtype(numerics, np.array([[9, 9], [4, 0], [0, 1], [3, 1], [1, 5], [2, 0.0]]))
    tokens = as_dtype(numerics, np.diag(np.arange(1.0, 7.0)))
    score = as_dtype(numerics, np.array([0.4, 0.2, 0.15, 0.1, 0.1, 0.05]))
    kept, into = np.array([0]), np.array([1, 2])
    first, second = merged_tokens(numerics, tokens, score, keys, kept, into)
    assert first == pytest.approx(np.array([0, 0.4, 0, 0.4, 0, 0.3]) / 0.35)
    assert second == pytest.approx(np.array([0, 0, 0.45, 0, 0.5, 0]) / 0.25)


@BOTH
def test_a_context_token_that_nobody_joins_stays_itself(numerics: Numerics) -> None:
    tokens = as_dtype(numerics, np.random.default_rng(2).standard_normal((3, 5)))
    score, keys = as_dtype(numerics, np.array([0.5, 0.3, 0.2])), tokens
    merged = merged_tokens(numerics, tokens, score, keys, np.array([0]), np.array([1, 2]))
    assert (merged == tokens[1:]).all()


def test_the_two_arithmetics_agree() -> None:
    random = np.random.default_rng(5)
    q, k = (random.standard_normal((3, 21, 8)) for _ in range(2))
    for queries in (q, q[:, :1]):
        exact = weighted_scores(EXACT, looked_at(EXACT, queries, k, np.float64(0.7)))
        q32, k32 = queries.astype(np.float32), k.astype(np.float32)
        bits = weighted_scores(BITS, looked_at(BITS, q32, k32, np.float32(0.7)))
        assert bits == pytest.approx(exact, rel=1e-5)


def test_our_logarithm_is_right_to_four_units() -> None:
    x = np.geomspace(2.0**-126, 3e38, 20_001).astype(np.float32)
    x = np.concatenate([x, np.linspace(0.5, 2.0, 20_001, dtype=np.float32)])
    exact = np.log(x.astype(np.float64))
    unit = np.spacing(np.abs(exact).astype(np.float32))
    assert (np.abs(BITS.log(x) - exact) <= 4 * unit).all()
