"""The `bands` section: round trip, refusals, and how a device moves between bands."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.bands import (
    MAX_BANDS_BYTES,
    STEP,
    Band,
    Bands,
    BandState,
    is_within,
    most_lost,
    next_band,
    parse_bands,
)
from compiler.contract.errors import ContractError, LimitExceededError

VECTORS = Path(__file__).parents[3] / "contract" / "vectors"
BANDS = Bands(
    window=2,
    margin=50,
    questions=799,
    right=700,
    max_loss=5000,
    worse=2,
    better=1,
    bands=(
        Band(0, "step.band0", 1, 199, 0, 0, "top-1 loses 0 and wins 0 questions"),
        Band(1500, "step.band1", 1, 200, 1, 1, "top-1 loses 1 and wins 1 questions"),
        Band(2000, STEP, 2, 601, 0, 0, "top-1 loses 14 and wins 9 questions"),
    ),
)


def test_it_reads_what_it_wrote() -> None:
    assert parse_bands(BANDS.to_bytes()) == BANDS
    assert BANDS.programs == ("step.band0", "step.band1")
    assert (VECTORS / "sections" / "bands.json").read_bytes() == BANDS.to_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 0},
        {"window": 65},
        {"margin": -1},
        {"questions": 0},
        {"right": 800},
        {"max_loss": 1_000_001},
        {"worse": 800},
        {"worse": 5, "better": 0},
        {"bands": ()},
        {"bands": BANDS.bands * 2},
        {"bands": BANDS.bands[1:]},
        {"bands": (BANDS.bands[0], BANDS.bands[0])},
        {"bands": (replace(BANDS.bands[0], worse=4),)},
        {"bands": (replace(BANDS.bands[0], worse=13, better=12),)},
        {"bands": (replace(BANDS.bands[2], low=0, worse=1),)},
        {"bands": (replace(BANDS.bands[0], program="see"),)},
        {"bands": (replace(BANDS.bands[0], top_k=0),)},
        {"bands": (replace(BANDS.bands[0], share=1001),)},
        {"bands": (replace(BANDS.bands[0], reason=""),)},
        {"bands": (replace(BANDS.bands[0], program="step.band" + "9" * 40),)},
    ],
)
def test_it_refuses_what_is_wrong(changes) -> None:
    with pytest.raises(ContractError):
        parse_bands(replace(BANDS, **changes).to_bytes())


def test_it_refuses_damaged_bytes() -> None:
    good = BANDS.to_bytes()
    for bad in (good + b" ", good[:-1], good.replace(b"bands/1", b"bands/2"), b"{}", b"[]"):
        with pytest.raises(ContractError):
            parse_bands(bad)
    with pytest.raises(LimitExceededError):
        parse_bands(b" " * (MAX_BANDS_BYTES + 1))


def test_the_loss_is_bounded_with_confidence() -> None:
    assert most_lost(0, 0) == 0
    assert is_within(0, 0, 1, 0)
    assert is_within(1, 1, 799, 5000)
    assert not is_within(5, 4, 799, 5000)  # one of nine changes lost: too much churn to be sure
    assert not is_within(4, 0, 799, 5000)
    for worse, better in ((3, 2), (10, 0), (0, 7)):
        assert most_lost(worse, better) > worse - better


def walk(values: list[float], bands: Bands = BANDS) -> list[int | None]:
    state, found = BandState(), []
    for value in values:
        state = next_band(bands, state, value)
        found.append(state.band)
    return found


def test_it_moves_by_the_mean_of_the_window() -> None:
    assert walk([1.0, 1.0, 2.6, 2.6, 2.6]) == [0, 0, 1, 2, 2]
    assert walk([2.4]) == [2]


def test_it_stays_within_the_margin() -> None:
    one = replace(BANDS, window=1)
    assert walk([1.49, 1.52, 1.54, 1.551], one) == [0, 0, 0, 1]
    assert walk([1.6, 1.46, 1.451, 1.449], one) == [1, 1, 1, 0]
    flutter = [1.48, 1.52] * 50
    assert len({*walk(flutter, one)}) == 1
    sharp = replace(one, margin=0)
    assert len({*walk(flutter, sharp)}) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e30])
def test_no_number_counts_as_the_greatest(value: float) -> None:
    assert walk([0.1, value, value]) == [0, 2, 2]


def test_it_is_a_function_of_what_it_is_given() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        values = random.uniform(0, 3, 12).tolist()
        bands = replace(BANDS, window=int(random.integers(1, 5)), margin=int(random.integers(200)))
        found = walk(values, bands)
        assert found == walk(values, bands)
        lows = [band.low for band in bands.bands] + [10**9]
        for at, (before, band) in enumerate(pairwise([None, *found])):
            last = values[max(0, at + 1 - bands.window) : at + 1]
            mean = 1000 * sum(last) / len(last)
            assert band is not None
            slack = bands.margin + 1e-6
            assert lows[band] - slack <= mean < lows[band + 1] + slack
            if band != before:
                assert lows[band] <= mean + 1e-6
                assert mean < lows[band + 1] + 1e-6
