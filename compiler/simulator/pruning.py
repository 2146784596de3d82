"""The rule that chooses visual tokens, for either arithmetic: the reference of `prune.c.in`.

Called by the simulator for `ATTENTION_SCORE` and `PRUNE_TOP_P`; tests call the functions on maps.
Scores are how much is looked at a token. A head that looks everywhere alike says nothing, so heads
count by how far their entropy over the tokens is below that of a uniform head:

    H_h = -sum_j p_hj ln p_hj / ln N    w_h = 1 - H_h    score_j = sum_h w_h p_hj / sum_h w_h

Keeping tokens by cumulative mass follows PruMerge's adaptive count, merging the rest by similarity
of keys follows VisionZip (arXiv 2403.15388, 2412.04467).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.contract.native_errors import NotFiniteError
from compiler.kernels.constants import LOG
from compiler.simulator.numerics import Numerics

Floats = NDArray[Any]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TopP:
    """How many tokens stay.

    Attributes:
        p: Share of the scores that the kept tokens must hold, in (0, 1].
        min_keep, max_keep: Bounds of the number of kept tokens.
        merge: Context tokens that stand for the others, at most.
    """

    p: float
    min_keep: int
    max_keep: int
    merge: int = 0

    @classmethod
    def of(cls, params: Mapping[str, int | float]) -> "TopP":
        """Return the rule that the parameters of a `PRUNE_TOP_P` call state."""
        counts = (int(params[name]) for name in ("min_keep", "max_keep", "merge"))
        return cls(float(params["p"]), *counts)


def head_weights(numerics: Numerics, p: Floats) -> Floats:
    """Return 1 - H of distributions p (heads, N), as (heads,): 1 for one peak, 0 for uniform.

    Shares below 2^-126 count as zero, and zero times ln zero as zero. A single token gives 0.
    """
    count = p.shape[-1]
    if count < 2:
        return np.zeros(p.shape[:-1], numerics.dtype)
    small = p < numerics.dtype(LOG.least)
    inside = np.where(small, numerics.dtype(LOG.least), p)
    terms = np.where(small, numerics.dtype(0), p * numerics.log(inside))
    uniform = numerics.log(np.array([count], numerics.dtype))[0]
    weights = numerics.dtype(1) + numerics.total(terms) / uniform
    return np.where(weights < 0, numerics.dtype(0), weights)


def weighted_scores(numerics: Numerics, p: Floats) -> Floats:
    """Return the score of each token from distributions p (heads, N), as (N,).

    Raises:
        NotFiniteError: A distribution holds NaN.
    """
    weights = head_weights(numerics, p)
    total, scores = numerics.dtype(0), np.zeros(p.shape[-1], numerics.dtype)
    for weight, row in zip(weights, p, strict=True):
        total = total + weight
        scores = scores + weight * row
    if np.isnan(total):
        raise NotFiniteError("an attention score is infinite or NaN")
    if not total > 0:
        return np.full_like(scores, numerics.dtype(1) / numerics.dtype(len(scores)))
    return np.asarray(scores / total)


def looked_at(numerics: Numerics, q: Floats, k: Floats, scale: Floats) -> Floats:
    """Return the mean over queries of their softmax over keys.

    Args:
        numerics: The arithmetic.
        q: Queries, (heads, Q, head_dim).
        k: Keys, (heads, N, head_dim).
        scale: Factor of the products.

    Returns:
        (heads, N), never more than one row of the map per head at a time.
    """
    total = np.zeros((len(k), k.shape[1]), numerics.dtype)
    for at in range(q.shape[1]):
        row = numerics.dot_rows(q[:, at : at + 1], k)[:, 0] * scale
        terms = numerics.exp(row - row.max(axis=-1, keepdims=True))
        total = total + terms / numerics.total(terms)[:, None]
    return np.asarray(total / numerics.dtype(q.shape[1]))


def keep_top_p(numerics: Numerics, score: Floats, rule: TopP) -> tuple[Integers, Integers]:
    """Return kept and context tokens, each ascending.

    Kept are the fewest of highest score that hold `rule.p` of the sum, within the bounds; context
    tokens are the next ones. Ties go to the lower token.

    Raises:
        NotFiniteError: The sum of scores is negative, infinite or NaN.
    """
    total = numerics.total(score)
    if not 0 <= total < np.inf:
        raise NotFiniteError("the scores of visual tokens do not add up")
    order = np.argsort(-score, kind="stable")
    mass, held, count = numerics.dtype(np.float32(rule.p)) * total, numerics.dtype(0), 0
    while count < rule.max_keep and (count < rule.min_keep or held < mass):
        held = held + score[order[count]]
        count += 1
    context = order[count : count + rule.merge]
    return np.sort(order[:count]), np.sort(context)


def merged_tokens(
    numerics: Numerics, tokens: Floats, score: Floats, keys: Floats, kept: Integers, into: Integers
) -> Floats:
    """Return the context tokens (len(into), D): means of the tokens that joined each, by score.

    Args:
        numerics: The arithmetic.
        tokens: (R, D).
        score: (R,).
        keys: (R, W).
        kept: Tokens that stay as they are.
        into: Tokens that the others join: each the one whose key is most similar to its own.
    """
    left = np.setdiff1d(np.arange(len(tokens)), np.concatenate([kept, into]))
    if not (len(left) and len(into)):
        return tokens[into]
    owners = into[_most_similar(numerics, keys[left], keys[into])]
    merged = tokens[into]
    for at, anchor in enumerate(into):
        joined = left[owners == anchor]
        total, row = score[anchor], score[anchor] * tokens[anchor]
        for other in joined:
            row = row + score[other] * tokens[other]
            total = total + score[other]
        if len(joined) and total > 0:
            merged[at] = row / total
    return merged


def _most_similar(numerics: Numerics, keys: Floats, anchors: Floats) -> Integers:
    """Return for each key (L, W) the number of the anchor (A, W) with the most similar key."""
    squares = [numerics.dot_rows(row[None], row[None])[0, 0] for row in anchors]
    lengths = np.sqrt(np.array(squares, numerics.dtype))
    lengths = np.where(lengths > 0, lengths, numerics.dtype(1))
    similar = numerics.dot_rows(keys, anchors) / lengths
    finite = np.where(np.isnan(similar), numerics.dtype(-np.inf), similar)
    return np.asarray(np.argmax(finite, axis=1))
