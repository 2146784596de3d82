"""How few bits a router's weights need: the narrowest grid on which calibration rows choose alike.

A grid of b bits has one scale per row (expert), its largest weight over 2^(b-1) - 1: a function of
the weights alone, so that an unchanged router keeps its bytes whatever the calibration set. A
module holds rounded weights as f32 and says how they are stored: as 8- or 16-bit codes and a step
per row, which the router's kernel decodes to the very same f32 (`compiler.quant.row_codes`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from compiler.contract.operations import Op
from compiler.kernels.program import ABSENT, Module
from compiler.quant.products import small_products
from compiler.quant.record import CalibrationRecord, Floats, RouterSample
from compiler.quant.row_codes import layout_of, round_to_codes

WIDTHS: Final = (4, 6, 8, 16)
UNROUNDED: Final = 32
MOST_FLIPS: Final = 0.005
_ROUTER_AT: Final[Mapping[Op, int]] = MappingProxyType({Op.ROUTE: 0, Op.MOE_LAYER: 2})
"""Which weight of a call is its router."""
LEAST_ROWS: Final = 64
"""Fewer rows say too little; the weights stay as they are."""


@dataclass(frozen=True, slots=True)
class RouterWidth:
    """What was found for one router.

    Attributes:
        layer: Number of the expert layer.
        bits: The least of `WIDTHS` with at most `MOST_FLIPS`, or `UNROUNDED`.
        flips: By width, share of the calibration rows' choices that the original router does not
            make.
    """

    layer: int
    bits: int
    flips: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class RoundedRouters:
    """A module whose router weights lie on the grids found, and what was found."""

    module: Module
    widths: tuple[RouterWidth, ...]


def round_routers(
    module: Module, record: CalibrationRecord | None, base: Mapping[int, int] | None = None
) -> RoundedRouters:
    """Round every router that calibration reached to the narrowest width that serves.

    A matrix that another operation reads too, or that several layers share, stays as it is.

    Args:
        module: The module that was recorded.
        record: What calibration saw.
        base: Bits per code that an older bundle stores, by weight: kept where they serve, because
            another width would move everything behind it and make a large delta.
    """
    if record is None:
        return RoundedRouters(module, ())
    shared = _other_uses(module)
    weights = list(module.weights)
    widths = []
    for router in record.routers:
        array = weights[router.weight].array
        bias = None if router.bias == ABSENT else weights[router.bias].array
        found = search_width(array, bias, router)
        kept = (base or {}).get(router.weight, UNROUNDED)
        if found.bits < kept < UNROUNDED and found.flips[kept] <= MOST_FLIPS:
            found = replace(found, bits=kept)
        uses = sum(other.weight == router.weight for other in record.routers)
        if router.weight in shared or uses > 1:
            found = replace(found, bits=UNROUNDED)
        if found.bits != UNROUNDED:
            stored = round_rows(array, found.bits)
            weights[router.weight] = replace(
                weights[router.weight], array=stored, layout=layout_of(found.bits)
            )
        widths.append(found)
    return RoundedRouters(replace(module, weights=tuple(weights)), tuple(widths))


def search_width(weight: Floats, bias: Floats | None, sample: RouterSample) -> RouterWidth:
    """Return the least width that keeps the choices of a router (E, D) on a sample.

    A router that does not simply choose the greatest logits is left alone.
    """
    if not sample.by_logits:
        return RouterWidth(sample.layer, UNROUNDED, {})
    top_k = sample.index.shape[1]
    before = choices(weight, bias, sample.inputs, top_k)
    flips = {
        width: _flips(before, choices(round_rows(weight, width), bias, sample.inputs, top_k))
        for width in WIDTHS
    }
    serving = [width for width in WIDTHS if flips[width] <= MOST_FLIPS]
    enough = len(sample.inputs) >= LEAST_ROWS
    return RouterWidth(sample.layer, serving[0] if serving and enough else UNROUNDED, flips)


def round_rows(weight: Floats, bits: int) -> Floats:
    """Return a matrix (E, D) with each row on its own symmetric grid of `bits` bits, as f32."""
    return round_to_codes(weight, bits).values()


def choices(weight: Floats, bias: Floats | None, inputs: Floats, top_k: int) -> np.ndarray:
    """Return the experts chosen per row, (R, k) ascending; ties to the lower."""
    best = np.argsort(-logits(weight, bias, inputs), axis=1, kind="stable")[:, :top_k]
    return np.sort(best, axis=1)


def logits(weight: Floats, bias: Floats | None, inputs: Floats) -> np.ndarray:
    """Return (R, E) f64 router logits."""
    found = small_products(inputs.astype(np.float64), weight.astype(np.float64).T)
    return found if bias is None else found + bias.reshape(1, -1)


def _flips(before: np.ndarray, after: np.ndarray) -> float:
    """Return the share of `after` (R, k) that is not in the same row of `before`."""
    kept = (after[:, :, None] == before[:, None, :]).any(axis=2)
    return float(1.0 - kept.mean()) if kept.size else 0.0


def _other_uses(module: Module) -> set[int]:
    """Return the weights that operations other than routers read."""
    return {
        weight
        for program in module.programs
        for call in program.calls
        for at, weight in enumerate(call.weights)
        if weight != ABSENT and at != _ROUTER_AT.get(call.op)
    }
