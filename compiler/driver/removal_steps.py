"""From a calibration record to the steps in which heads and channels may go, cheapest error first.

    UnitSite, record --importance--> Move (one site, or all layers of a cache) --> steps --> Loss

Pure decisions, called by `compiler.driver.choose_removal`. A move is what must shrink alike: one
site, or all attentions that share a cache. Its n-th step takes, from each of its matrices, the next
units in the order of `compiler.quant.importance`. Steps of all moves are ranked by the error that a
step adds per weight that it saves; within a move they stay in order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compiler.analysis.constants import Array, ConstantTable
from compiler.contract.canonical import Json, sha256_hex
from compiler.kernels.program import Module
from compiler.passes.removable import EXPERT_CHANNELS, UnitSite
from compiler.passes.remove_columns import Removal
from compiler.quant.importance import RemovalOrder, removal_order
from compiler.quant.record import CalibrationRecord, InputSample


@dataclass(frozen=True, slots=True, eq=False)
class RankedSite:
    """A site with the order in which its units go, per matrix.

    Attributes:
        error: (steps + 1,) relative error of the site's output after so many steps.
    """

    site: UnitSite
    orders: tuple[RemovalOrder, ...]
    matrices: Array
    error: NDArray[np.float64]

    def removal(self, steps: int) -> Removal:
        """Return what goes with the first `steps` steps."""
        units = steps * self.site.step
        columns = [_columns(order.units[:units], self.site.width) for order in self.orders]
        mean = self.orders[0].mean
        bias: tuple[float, ...] = ()
        if self.site.kind != EXPERT_CHANNELS and mean[columns[0]].any():
            lost = self.matrices[0][:, columns[0]].astype(np.float64) @ mean[columns[0]]
            bias = tuple(float(one) for one in lost.astype(np.float32))
        return Removal(self.site.weight, tuple(tuple(one) for one in columns), bias)

    def to_json(self, steps: int) -> dict[str, Json]:
        """Return a row of the report."""
        site, units = self.site, steps * self.site.step
        return {
            "kind": site.kind,
            "name": site.name,
            "units": site.units * site.matrices,
            "removed": units * site.matrices,
            "parameters": units * site.matrices * site.parameters,
            "output_error": float(f"{self.error[steps]:.4g}"),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Sites that lose as many steps as each other.

    Attributes:
        error: (steps + 1,) sum of the sites' relative errors.
        parameters: Weights that one step saves.
    """

    sites: tuple[RankedSite, ...]
    error: NDArray[np.float64]
    parameters: int

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.error) - 1


def moves_of(
    sites: Sequence[UnitSite],
    constants: ConstantTable,
    module: Module,
    record: CalibrationRecord,
) -> tuple[Move, ...]:
    """Return the moves of a model, in order of their sites.

    Args:
        sites: See `compiler.passes.removable`.
        constants: Where their weights are.
        module: What the same raised module lowers to, as recorded.
        record: What its weights were multiplied with.
    """
    samples = _samples(module, record)
    ranked = [_rank(site, constants.arrays[site.weight], samples) for site in sites]
    cached = tuple(one for one in ranked if one is not None and one.site.shares_cache)
    alone = [(one,) for one in ranked if one is not None and not one.site.shares_cache]
    known = sum(site.shares_cache for site in sites) == len(cached)
    return tuple(_move(group) for group in ([cached] if cached and known else []) + alone)


def ranked_steps(moves: Sequence[Move]) -> list[int]:
    """Return moves by number, one entry per step, in the order in which steps are taken."""
    keys: list[tuple[float, int, int]] = []
    for number, move in enumerate(moves):
        worst = 0.0
        for step in range(move.steps):
            worst = max(worst, (move.error[step + 1] - move.error[step]) / move.parameters)
            keys.append((worst, number, step))
    return [number for _, number, _ in sorted(keys)]


def removals_of(moves: Sequence[Move], taken: Sequence[int]) -> tuple[Removal, ...]:
    """Return what goes if these steps are taken."""
    counts = Counter(taken)
    return tuple(
        ranked.removal(counts[number])
        for number, move in enumerate(moves)
        if counts[number]
        for ranked in move.sites
    )


def saved_parameters(moves: Sequence[Move], taken: Sequence[int]) -> int:
    """Return the weights that go with these steps."""
    return sum(moves[number].parameters for number in taken)


def _move(sites: tuple[RankedSite, ...]) -> Move:
    steps = min(len(one.error) for one in sites)
    error = np.sum([one.error[:steps] for one in sites], axis=0)
    saved = sum(one.site.parameters * one.site.step * one.site.matrices for one in sites)
    return Move(sites, error, saved)


def _samples(module: Module, record: CalibrationRecord) -> Mapping[str, InputSample]:
    """Return what each four-bit matrix was multiplied with, by the content of the matrix."""
    found: dict[str, InputSample] = {}
    for weight in module.weights:
        sample = record.sample(weight.id) if weight.kind == "w4" else None
        if sample is not None:
            found[_content(weight.array)] = sample
    return found


def _content(array: Array) -> str:
    rows = np.ascontiguousarray(array, np.float32)
    return sha256_hex(repr(rows.shape).encode() + rows.tobytes())


def _rank(site: UnitSite, weight: Array, samples: Mapping[str, InputSample]) -> RankedSite | None:
    """Rank a site; None if calibration never reached it."""
    matrices = weight.reshape(-1, *weight.shape[-2:])
    found = [samples.get(_content(matrix)) for matrix in matrices]
    if not any(found):
        return None
    has_bias = site.kind != EXPERT_CHANNELS
    orders = tuple(
        removal_order(
            matrix,
            np.zeros((0, matrix.shape[1])) if sample is None else sample.values(),
            site.width,
            has_bias=has_bias,
        )
        for matrix, sample in zip(matrices, found, strict=True)
    )
    weights = np.array(
        [
            order.energy * (sample.seen if sample else 0)
            for order, sample in zip(orders, found, strict=True)
        ]
    )
    shares = weights / max(float(weights.sum()), 1e-30)
    at = np.arange(site.steps + 1) * site.step
    error = np.sum(
        [share * order.error[at] for share, order in zip(shares, orders, strict=True)], axis=0
    )
    return RankedSite(site, orders, matrices, error)


def _columns(units: NDArray[np.int64], width: int) -> list[int]:
    flat = (units[:, None] * width + np.arange(width)).reshape(-1)
    return [int(column) for column in np.sort(flat)]
