"""The `router_stats` section: round trip, bands, canonical form."""

from dataclasses import replace

import pytest

from compiler.contract.errors import ContractError, LimitExceededError
from compiler.contract.router_stats import (
    HISTOGRAM_BINS,
    EntropyBand,
    LayerStats,
    RouterStats,
    parse_router_stats,
)

LAYER = LayerStats(
    layer=0,
    experts=3,
    top_k=2,
    router_bits=8,
    usage_vision=(500, 250, 250),
    usage_text=(0, 250, 750),
    modality_bias=(-1000, 0, 500),
    entropy_histogram=(1, 2, *(0,) * (HISTOGRAM_BINS - 2)),
)
BANDS = (EntropyBand(0, 400, 480, 2, 2), EntropyBand(400, 1099, 500, 3, 3))
STATS = RouterStats(
    steps=12, rows=40, layers=(LAYER, replace(LAYER, layer=3, router_bits=32)), bands=BANDS
)


def test_it_reads_what_it_wrote() -> None:
    assert parse_router_stats(STATS.to_bytes()) == STATS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bands": ()}, "must be a band"),
        ({"bands": BANDS[::-1]}, "adjoin"),
        ({"bands": (BANDS[0], replace(BANDS[1], low=401))}, "adjoin"),
        ({"bands": (replace(BANDS[0], low=400), BANDS[1])}, "none may be empty"),
        ({"bands": BANDS[:1]}, "950"),
        ({"bands": (BANDS[0], replace(BANDS[1], share=521))}, "950 to 1000"),
        ({"bands": (BANDS[0], replace(BANDS[1], prefetch_width=0))}, "prefetch_width"),
        ({"layers": ()}, "layers must ascend"),
        ({"layers": (LAYER, LAYER)}, "layers must ascend"),
        ({"layers": (replace(LAYER, router_bits=7),)}, "router_bits"),
        ({"layers": (replace(LAYER, top_k=4),)}, "top_k"),
        ({"layers": (replace(LAYER, usage_text=(1, 2)),)}, "usage_text"),
        ({"layers": (replace(LAYER, modality_bias=(0, 0, 1001)),)}, "modality_bias"),
        ({"layers": (replace(LAYER, entropy_histogram=(0,)),)}, "entropy_histogram"),
        ({"steps": 0}, "steps"),
    ],
)
def test_it_refuses_statistics_that_make_no_sense(changes, message) -> None:
    with pytest.raises(ContractError, match=message):
        parse_router_stats(replace(STATS, **changes).to_bytes())


def test_it_limits_the_bands_and_the_size() -> None:
    many = tuple(EntropyBand(at, at + 1, 160, 1, 1) for at in range(6))
    with pytest.raises(LimitExceededError):
        parse_router_stats(replace(STATS, bands=many).to_bytes())
    with pytest.raises(LimitExceededError):
        parse_router_stats(b"{" + b" " * (1 << 22))


def test_it_refuses_other_forms_of_the_same_document() -> None:
    good = STATS.to_bytes()
    for bad in (good + b" ", good.replace(b'"steps":12', b'"steps":12.0'), b"[]", b"", good[:-1]):
        with pytest.raises(ContractError):
            parse_router_stats(bad)
    with pytest.raises(ContractError, match="schema"):
        parse_router_stats(good.replace(b"stats/1", b"stats/2"))
