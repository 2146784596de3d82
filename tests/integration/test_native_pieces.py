"""How much of a product one ticket takes: by the bytes that are stored, so by the density."""

import numpy as np
import pytest

from compiler.contract.native_trace import Kind, traced
from compiler.kernels.constants import MIN_PIECE_BYTES
from compiler.kernels.program import TILES
from tests.factories.kernels import Case, native_targets, raw
from tests.integration.test_native_threads import load
from tests.integration.test_native_tiles import inputs, linear

N, K, THREADS = 2048, 512, 4
MOST_RUNS = 5_000
"""Lent threads may begin late; fewer of them share in no more pieces."""
PANELS, TILE_BYTES, PIECES_A_THREAD = N // 16, 256, 2


def pieces(case: Case, target: str, expected: dict[str, bytes], wanted: int) -> int:
    """Return in how many pieces a product was shared at most, in runs until it were `wanted`."""
    values, most = inputs(case.module, 1), 0
    with load(case, target, THREADS) as plan:
        for _ in range(MOST_RUNS):
            with traced(plan) as trace:
                assert raw(plan.run("run", values)) == expected
            found = [e.piece for e in trace.events() if e.kind is Kind.PIECE]
            most = max(most, 1 + max(found, default=0))
            if most >= wanted:
                break
    return most


def planned(live: int) -> int:
    """Return the number of pieces for so many stored tiles."""
    least = -(-MIN_PIECE_BYTES // (live * TILE_BYTES // PANELS))
    return -(-PANELS // max(-(-PANELS // (PIECES_A_THREAD * THREADS)), least))


@pytest.mark.parametrize("target", native_targets())
def test_a_piece_takes_more_panels_the_emptier_they_are(target: str) -> None:
    found = []
    for density in (1.0, 0.25, 0.1):
        case = Case.of(linear(TILES, N, K, density))
        expected = raw(case.simulator().run("run", inputs(case.module, 1)))
        (weight, _) = case.module.weights
        tiles = np.asarray(weight.array).reshape(PANELS, 16, K // 32, 32)
        live = int(tiles.any(axis=(1, 3)).sum())
        found.append(pieces(case, target, expected, planned(live)))
        assert found[-1] == planned(live)
    assert found[0] > found[1] > found[2] > 1
