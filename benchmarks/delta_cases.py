"""An expert of 2048 x 4096 in three matrices, and the updates that a fine-tune makes of it.

25.2 M weights in W4-G32-S8 with a mask of one bit per 4 x 4 block. Sizes of the updates are those
measured on real fine-tunes: the standard deviation of a change is 0.01, 0.05 or 0.16 of a
quantisation step, kurtosis 4.5, or a low-rank product of the same size. `fresh` means new scales,
otherwise the old ones are kept. Called by `benchmarks.delta`; the same seed gives the same bytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.delta_bound import Parts
from compiler.contract.planes import Plane
from compiler.delta import SectionBytes
from compiler.delta.lowrank import Factors, quantise_factors, replay_codes
from compiler.quant.w4 import W4Matrix, pack_w4, quantise_w4

HIDDEN: Final = 2048
INNER: Final = 4096
SHAPES: Final = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
RANK: Final = 16
BLOCK: Final = 4
KEPT: Final = 0.5
"""Of the blocks."""

Floats = NDArray[np.float32]
Masks = list[NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class Case:
    """One update.

    Attributes:
        name: What changed.
        section: The expert after it.
        parts: The same as numbers.
        dense: Whether weights all over the expert changed.
    """

    name: str
    section: SectionBytes
    parts: Parts
    dense: bool = False


class Expert:
    """The expert before."""

    def __init__(self, seed: int = 1000, shapes: tuple[tuple[int, int], ...] = SHAPES) -> None:
        """Draw it: Gaussian weights whose rows and columns differ in size."""
        random = np.random.default_rng(seed)
        self._random = np.random.default_rng(seed + 6000)
        self.weights = [_draw(random, *shape) for shape in shapes]
        self.matrices = [quantise_w4(weight) for weight in self.weights]
        self.masks: Masks = [_mask(weight) for weight in self.weights]
        self.section, self.parts = _laid_out(self.matrices, self.masks)

    def cases(self) -> Iterator[Case]:
        """Yield the updates."""
        low = [_low_rank(weight, self._random) * _step(weight) for weight in self.weights]
        full = [_laplacian(weight, self._random) * _step(weight) for weight in self.weights]
        yield self._dense("low rank 16, fresh scales", low, 0.05, fresh=True)
        yield self._dense("low rank 16", low, 0.05)
        yield self._dense("all weights, fresh scales", full, 0.05, fresh=True)
        yield self._dense("all weights", full, 0.05)
        yield self._dense("all weights, small", full, 0.01)
        yield self._dense("all weights, large", full, 0.16)
        yield self._structured("5 % of blocks of 4 x 4", BLOCK, BLOCK)
        yield self._structured("5 % of tiles of 16 x 32", 16, 32)
        flipped = [np.where(self._random.random(m.shape) < 0.01, ~m, m) for m in self.masks]
        yield Case("mask, 1 % of bits", *_laid_out(self.matrices, flipped))

    def _dense(self, name: str, change: list[Floats], size: float, *, fresh: bool = False) -> Case:
        made = [
            quantise_w4(weight + delta * np.float32(size), None if fresh else matrix.grid)
            for weight, delta, matrix in zip(self.weights, change, self.matrices, strict=True)
        ]
        return Case(name, *_laid_out(made, self.masks), dense=True)

    def _structured(self, name: str, high: int, wide: int) -> Case:
        made = []
        for matrix in self.matrices:
            n, k = matrix.shape
            chosen = self._random.random((n // high, k // wide)) < 0.05
            spread = np.repeat(np.repeat(chosen, high, 0), wide, 1)
            drawn = np.clip(np.rint(self._random.normal(8, 2.4, (n, k))), 0, 15)
            codes = np.where(spread, drawn.astype(np.uint8), matrix.codes)
            made.append(W4Matrix(codes, matrix.grid, matrix.report))
        section, parts = _laid_out(made, self.masks)
        return Case(name, section, parts)


def merged_adapter(n: int, k: int, rank: int) -> tuple[SectionBytes, SectionBytes, Factors]:
    """Return a matrix, the same merged with an adapter by replay, and the adapter's factors."""
    random = np.random.default_rng(rank)
    matrix = quantise_w4(_draw(random, n, k))
    packed = pack_w4(matrix)
    size = np.float32(0.05) * _step(_draw(random, n, k)) / np.sqrt(np.float32(rank))
    left = random.standard_normal((n, rank), dtype=np.float32) * size
    right = random.standard_normal((rank, k), dtype=np.float32)
    factors = quantise_factors(left, right, bytes(range(16)))
    codes = replay_codes(packed.codes, packed.scales, packed.rows, factors)
    rest = (("scales8", packed.scales), ("f32", packed.rows))
    return _joined(("codes4", packed.codes), *rest), _joined(("codes4", codes), *rest), factors


def _joined(*parts: tuple[str, bytes]) -> SectionBytes:
    data, planes = b"", []
    for kind, part in parts:
        planes.append(Plane(kind, len(data), len(part)))
        data += part
    return SectionBytes(data, tuple(planes))


def random_model(sections: int, codes: int, share: float) -> Iterator[tuple[bytes, bytes]]:
    """Yield sections of packed codes before and after a share of them moved by a step.

    Args:
        sections: How many.
        codes: Codes of one.
        share: Of the codes that change.
    """
    for at in range(sections):
        random = np.random.default_rng(at)
        old = np.clip(np.rint(random.normal(8, 2.4, codes)), 0, 15).astype(np.int8)
        moved = random.random(codes) < share
        new = np.clip(old + np.where(moved, random.choice([-1, 1], codes), 0), 0, 15)
        yield _nibbles(old), _nibbles(new)


def _nibbles(codes: NDArray[np.int8]) -> bytes:
    packed: NDArray[np.uint8] = codes[0::2].astype(np.uint8) | codes[1::2].astype(np.uint8) << 4
    return packed.tobytes()


def _draw(random: np.random.Generator, n: int, k: int) -> Floats:
    rows = np.exp(random.normal(0, 0.15, (n, 1))).astype(np.float32)
    cols = np.exp(random.normal(0, 0.1, (1, k))).astype(np.float32)
    drawn: Floats = random.standard_normal((n, k), dtype=np.float32) * rows * cols
    return drawn * np.float32(0.02)


def _mask(weight: Floats) -> NDArray[np.bool_]:
    n, k = weight.shape
    energy = (weight.reshape(n // BLOCK, BLOCK, k // BLOCK, BLOCK) ** 2).sum((1, 3))
    kept: NDArray[np.bool_] = energy > np.quantile(energy, 1 - KEPT)
    return kept


def _step(weight: Floats) -> Floats:
    """Return the mean quantisation step of a matrix, as (1,)."""
    grid = quantise_w4(weight[:256]).grid
    return np.array([(grid.scales * grid.rows[:, None]).mean()], np.float32)


def _unit(change: Floats) -> Floats:
    return change / np.float32(change.std())


def _laplacian(weight: Floats, random: np.random.Generator) -> Floats:
    sharp = random.laplace(0, 1, weight.shape).astype(np.float32)
    return _unit(sharp + random.standard_normal(weight.shape, dtype=np.float32))


def _low_rank(weight: Floats, random: np.random.Generator) -> Floats:
    n, k = weight.shape
    left = random.standard_normal((n, RANK), dtype=np.float32)
    right = random.standard_normal((RANK, k), dtype=np.float32)
    return _unit(left @ (right * np.exp(random.normal(0, 0.7, (RANK, 1))).astype(np.float32)))


def _laid_out(matrices: list[W4Matrix], masks: Masks) -> tuple[SectionBytes, Parts]:
    parts: list[tuple[str, bytes]] = []
    for matrix, mask in zip(matrices, masks, strict=True):
        packed = pack_w4(matrix)
        parts += [("codes4", packed.codes), ("scales8", packed.scales), ("f32", packed.rows)]
        parts.append(("raw", np.packbits(mask).tobytes()))
    numbers = Parts(
        np.concatenate([matrix.codes.ravel() for matrix in matrices]),
        np.concatenate([np.repeat(m.grid.scales.ravel(), 32) for m in matrices]),
        np.concatenate([m.grid.scales.ravel() for m in matrices]),
        np.concatenate([m.grid.rows for m in matrices]),
        np.concatenate([mask.ravel() for mask in masks]),
        tuple(matrix.shape for matrix in matrices),
    )
    return _joined(*parts), numbers


Measure = Callable[[Case], float]
