"""Statistics of routing over a calibration run, for the `router_stats` section.

Steps are program runs on text, if there are any: those are what a device schedules one by one.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.router_stats import (
    HISTOGRAM_BINS,
    MAX_BANDS,
    PER_MILLE,
    EntropyBand,
    LayerStats,
    RouterStats,
)
from compiler.kernels.program import ABSENT, Module
from compiler.quant.record import CalibrationRecord, RouterSample
from compiler.quant.router_bits import UNROUNDED, RouterWidth, logits

PREFETCH_COVER: Final = 0.9
LIKELY_COVER: Final = 0.5
"""Share of a layer's choices that the experts on its prefetch list held."""
_MILLI: Final = 1000

Numbers = NDArray[np.float64]


def router_stats(
    module: Module, record: CalibrationRecord, widths: Sequence[RouterWidth] = ()
) -> RouterStats | None:
    """Return the statistics of all routers, or None if no router ran.

    Args:
        module: The module that was recorded.
        record: What calibration saw.
        widths: Widths of the routers' weights, where they were rounded.
    """
    if not record.routers:
        return None
    bits = {width.layer: width.bits for width in widths}
    entropies = [_entropy(module, router) for router in record.routers]
    layers = tuple(
        _layer(module, router, entropy, bits.get(router.layer, UNROUNDED))
        for router, entropy in zip(record.routers, entropies, strict=True)
    )
    return RouterStats(
        steps=len(set().union(*(set(router.run.tolist()) for router in record.routers))),
        rows=max(len(router.index) for router in record.routers),
        layers=layers,
        bands=_bands(record.routers, entropies, max(layer.experts for layer in layers)),
    )


def likely_experts(
    record: CalibrationRecord, *, vision: bool, runs: frozenset[int] | None = None
) -> dict[int, tuple[int, ...]]:
    """Return, by layer, the fewest experts that held `LIKELY_COVER` of the choices, ascending.

    Args:
        record: What calibration saw.
        vision: Of rows of programs that see a picture, or of the others. A layer that no such row
            went through is left out.
        runs: Only of these program runs.
    """
    found = {}
    for router in record.routers:
        taken = router.vision == vision
        if runs is not None:
            taken &= np.isin(router.run, sorted(runs))
        counts = np.bincount(router.index[taken].ravel())
        if counts.sum():
            order = np.argsort(-counts, kind="stable")
            cover = np.cumsum(counts[order]) / counts.sum()
            most = int(np.searchsorted(cover, LIKELY_COVER)) + 1
            found[router.layer] = tuple(sorted(int(expert) for expert in order[:most]))
    return found


def step_entropies(module: Module, record: CalibrationRecord) -> dict[int, float]:
    """Return, by number of a run without a picture, its entropy: of the last row, mean over layers.

    Nats. Rows that the record thinned out count as if they had not been there.
    """
    values: dict[int, list[float]] = {}
    for router in record.routers:
        entropy = _entropy(module, router)
        text = np.flatnonzero(~router.vision)
        last = {int(router.run[at]): at for at in text.tolist()}
        for run, at in last.items():
            values.setdefault(run, []).append(float(entropy[at]))
    return {run: sum(found) / len(found) for run, found in values.items()}


def _entropy(module: Module, router: RouterSample) -> Numbers:
    """Return (R,) entropies of the softmax over all experts, nats."""
    bias = None if router.bias == ABSENT else module.weights[router.bias].array
    scores = logits(module.weights[router.weight].array, bias, router.inputs)
    scores = scores - scores.max(axis=1, keepdims=True)
    terms = np.exp(scores)
    total = terms.sum(axis=1, keepdims=True)
    entropy: Numbers = (np.log(total) - (terms * scores).sum(axis=1, keepdims=True) / total)[:, 0]
    return np.maximum(entropy, 0.0)


def _layer(module: Module, router: RouterSample, entropy: Numbers, bits: int) -> LayerStats:
    experts = len(module.weights[router.weight].array)
    vision = _usage(router.index[router.vision], experts)
    text = _usage(router.index[~router.vision], experts)
    both = vision + text
    bias = np.where(both > 0, (text - vision) / np.where(both > 0, both, 1), 0.0)
    most = max(float(np.log(experts)), 1e-9)
    histogram, _ = np.histogram(np.minimum(entropy, most), bins=HISTOGRAM_BINS, range=(0.0, most))
    return LayerStats(
        layer=router.layer,
        experts=experts,
        top_k=router.index.shape[1],
        router_bits=bits,
        usage_vision=_per_mille(vision),
        usage_text=_per_mille(text),
        modality_bias=_per_mille(bias),
        entropy_histogram=tuple(int(count) for count in histogram),
    )


def _usage(index: NDArray[np.uint16], experts: int) -> Numbers:
    counts = np.bincount(index.ravel(), minlength=experts).astype(np.float64)
    return counts / max(1.0, float(counts.sum()))


def _per_mille(values: Numbers) -> tuple[int, ...]:
    return tuple(int(value) for value in np.rint(values * PER_MILLE))


def _bands(
    routers: Sequence[RouterSample], entropies: Sequence[Numbers], experts: int
) -> tuple[EntropyBand, ...]:
    """Cut the steps' entropies into at most `MAX_BANDS` bands of about equal share.

    The first band starts at 0 and the last ends at the greatest possible entropy, so that every
    step has a band. Neighbours with the same policy become one.
    """
    runs = np.concatenate([router.run for router in routers])
    values = np.concatenate(entropies)
    text = ~np.concatenate([router.vision for router in routers])
    if text.any():
        runs, values = runs[text], values[text]
    steps, at = np.unique(runs, return_inverse=True)
    mean = np.bincount(at, weights=values) / np.bincount(at)
    milli = np.rint(mean * _MILLI).astype(np.int64)
    inner = np.quantile(milli, np.linspace(0, 1, MAX_BANDS + 1)[1:-1]).astype(int).tolist()
    end = max(int(np.ceil(np.log(max(2, experts)) * _MILLI)), int(milli.max()) + 1)
    edges = sorted({0, end, *(edge for edge in inner if 0 < edge < end)})
    found: list[EntropyBand] = []
    for low, high in pairwise(edges):
        chosen = steps[(milli >= low) & (milli < high)]
        if len(chosen):
            _join(found, _band(low, high, chosen, routers, len(steps)))
    return _whole(found, end)


def _band(
    low: int, high: int, steps: NDArray[np.int32], routers: Sequence[RouterSample], total: int
) -> EntropyBand:
    distinct, widths = [], [1]
    for router in routers:
        inside = np.isin(router.run, steps)
        index, run = router.index[inside], router.run[inside]
        if not len(run):
            continue
        pairs = np.unique(np.stack([np.repeat(run, index.shape[1]), index.ravel()]), axis=1)
        distinct.append(pairs.shape[1] / len(np.unique(run)))
        counts = np.sort(np.bincount(index.ravel()))[::-1]
        cover = np.cumsum(counts) / counts.sum()
        widths.append(int(np.searchsorted(cover, PREFETCH_COVER)) + 1)
    return EntropyBand(
        low=low,
        high=high,
        share=PER_MILLE * len(steps) // total,
        expected_experts=int(np.ceil(np.mean(distinct))),
        prefetch_width=max(widths),
    )


def _join(found: list[EntropyBand], band: EntropyBand) -> None:
    """Append a band, or widen the last one if the policies are the same."""
    policy = (band.expected_experts, band.prefetch_width)
    if found and (found[-1].expected_experts, found[-1].prefetch_width) == policy:
        last = found.pop()
        band = EntropyBand(last.low, band.high, last.share + band.share, *policy)
    found.append(band)


def _whole(found: list[EntropyBand], end: int) -> tuple[EntropyBand, ...]:
    """Let bands adjoin from 0 to `end`, and shares add up to the whole."""
    starts = [0, *(band.low for band in found[1:])]
    ends = [*starts[1:], end]
    missing = PER_MILLE - sum(band.share for band in found)
    return tuple(
        EntropyBand(
            low,
            high,
            band.share + (missing if at == 0 else 0),
            band.expected_experts,
            band.prefetch_width,
        )
        for at, (band, low, high) in enumerate(zip(found, starts, ends, strict=True))
    )
