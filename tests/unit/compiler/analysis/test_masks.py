"""The lattice: meet, join, movement, densities, and the order of its levels."""

from itertools import pairwise

import numpy as np
import pytest

from compiler.analysis.mask_moves import Cut, Environment, Expand, Gather, Pad, Permute, Reshape
from compiler.analysis.masks import (
    BOTTOM,
    DENSE,
    MAX_CLAUSES,
    Band,
    Mask,
    Produced,
    normal,
    of_array,
    of_pattern,
    padded,
)
from compiler.dialects.dims import Dim, symbol_dim

SHAPE = (3, 4)
RNG = np.random.default_rng(7)
ENV = Environment({"T": 3, "P": 2}, {n: RNG.random(SHAPE) < 0.5 for n in range(12)})


def random_mask(rng: np.random.Generator, depth: int = 3) -> Mask:
    choice = int(rng.integers(6 if depth else 4))
    if choice == 0:
        return BOTTOM if rng.random() < 0.3 else DENSE
    if choice == 1:
        drawn = rng.random([SHAPE, (1, 4), (3, 1)][int(rng.integers(3))]) < 0.6
        return of_array(np.broadcast_to(drawn, SHAPE))
    if choice in (2, 3):
        return of_pattern(Produced(int(rng.integers(4))))
    a, b = random_mask(rng, depth - 1), random_mask(rng, depth - 1)
    return a & b if choice == 4 else a | b


def bits(mask: Mask) -> np.ndarray:
    return mask.evaluate(ENV, SHAPE)


def test_meet_and_join_are_bounds_in_the_lattice() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        a, b, c = (random_mask(rng) for _ in range(3))
        assert not (bits(a & b) & ~(bits(a) & bits(b))).any()
        assert not ((bits(a) | bits(b)) & ~bits(a | b)).any()
        assert a & b == b & a
        assert a | b == b | a
        assert a & a == a
        assert a | a == a
        assert (a & (a | b)).implies(a)
        assert a.implies(a | b)
        assert (a & b).implies(a)
        assert (a & b & c).implies(b)
        assert a & DENSE == a
        assert a | BOTTOM == a
        assert (a | DENSE).is_dense
        assert (a & BOTTOM).is_bottom


def test_levels_are_ordered() -> None:
    static, dynamic = of_array(np.array([True, False])), of_pattern(Produced(0))
    levels = [BOTTOM, static, static & dynamic, DENSE]
    assert [mask.level for mask in levels] == ["bottom", "static", "dynamic", "dense"]
    for low, high in pairwise(levels):
        assert low.implies(high) or low.level == "static"
    assert (static | dynamic).level == "dynamic"


def test_it_forgets_rather_than_grows() -> None:
    mask = DENSE
    for number in range(3 * MAX_CLAUSES):
        mask = mask & of_pattern(Produced(number))
    assert len(mask.clauses) == MAX_CLAUSES


@pytest.mark.parametrize(
    "step",
    [
        Reshape((Dim(2), Dim(6))),
        Expand((Dim(2), Dim(3), Dim(4))),
        Permute((1, 0)),
        Cut(1, Dim(3), Dim(2), -2),
        Gather(0, 0),
        Pad(0, Dim(1), symbol_dim("T") + Dim(2)),
    ],
)
def test_it_moves_masks_like_elements(step) -> None:
    env = Environment(ENV.binding, ENV.patterns, {0: np.array([2, 0, -1, 2])})
    rng = np.random.default_rng(2)
    for _ in range(40):
        mask = random_mask(rng)
        wanted = step.apply(mask.evaluate(env, SHAPE), env)
        is_pad = isinstance(step, Pad)
        moved = padded(mask, step, (Dim(3), Dim(4))) if is_pad else mask.moved(step)
        assert np.array_equal(moved.evaluate(env, wanted.shape), wanted)


def test_static_masks_are_evaluated_when_they_move() -> None:
    mask = of_array(np.eye(4, dtype=bool)).moved(Cut(0, Dim(1), Dim(2), 1))
    assert mask == of_array(np.eye(4, dtype=bool)[1:3])
    assert mask.density == (0.25, 0.25)


def test_densities_are_bounds() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        mask = random_mask(rng)
        low, high = mask.density
        assert low - 1e-9 <= bits(mask).mean() <= high + 1e-9


def test_bands_are_what_attention_sees() -> None:
    band = Band(symbol_dim("T"), symbol_dim("P") + symbol_dim("T"), symbol_dim("P"))
    found = of_pattern(band).evaluate(ENV, (3, 5))
    assert found.tolist() == [[True] * (3 + i) + [False] * (2 - i) for i in range(3)]
    window = Band(Dim(4), Dim(4), Dim(0), window=2, sink=1)
    assert of_pattern(window).evaluate(ENV, (4, 4))[3].tolist() == [True, False, True, True]


def test_the_coarsest_part_gives_the_granularity() -> None:
    rows = of_array(np.array([[True], [False]]))
    columns = of_array(np.array([[True, False]]))
    assert (rows.granularity, columns.granularity) == ("row", "column")
    assert (rows | columns).granularity == "row"
    assert (rows | of_pattern(Produced(0, "block"))).granularity == "block"


def test_assumptions_are_kept_until_they_are_discharged() -> None:
    mask = of_pattern(Produced(0)).assuming([3]) & of_pattern(Produced(1))
    assert mask.unconditional() == of_pattern(Produced(1))
    assert mask.discharged(lambda n: n == 3).unconditional() == of_pattern(
        Produced(0)
    ) & of_pattern(Produced(1))
    weaker = of_pattern(Produced(0)).assuming([3]) & of_pattern(Produced(0))
    assert weaker == of_pattern(Produced(0))
    assert normal(mask.clauses) == mask
