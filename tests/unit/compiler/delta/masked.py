"""Bundles whose weights are stored by their masks, before and after a change of the mask."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compiler.delta import SectionBytes
from compiler.emitters.plan import emit_plan
from compiler.kernels.program import COO, CSR, ELL, TILES, Buffer, Call, Module, Op, Program, Weight
from compiler.quant.w4 import GROUP, PANEL, Grid, GridReport, W4Matrix, pack_w4
from tests.unit.compiler.delta.bundles import Bundle, draw_codes, move_codes

ZERO = 8
UNITS = {TILES: (16, 32), ELL: (32, 4), CSR: (1, 1), COO: (1, 1)}
DENSITY = {TILES: 0.5, ELL: 0.3, CSR: 0.05, COO: 0.02}


@dataclass(frozen=True)
class Masked:
    """A W4 matrix and its mask, (N, K)."""

    codes: np.ndarray
    scales: np.ndarray
    mask: np.ndarray
    layout: str

    @classmethod
    def draw(cls, rng: np.random.Generator, mask: np.ndarray, layout: str) -> "Masked":
        n, k = mask.shape
        codes = draw_codes(rng, n * k).reshape(n, k)
        codes[codes == ZERO] = ZERO + 1  # what the mask keeps is not zero by chance
        scales = np.clip(np.rint(rng.normal(150, 25, (n, k // GROUP))), 60, 255)
        return cls(codes, scales.astype(np.uint8), mask, layout)

    def with_mask(self, mask: np.ndarray) -> "Masked":
        return Masked(self.codes, self.scales, mask, self.layout)

    def tuned(self, rng: np.random.Generator, share: float) -> "Masked":
        moved = move_codes(rng, self.codes.reshape(-1), share).reshape(self.codes.shape)
        moved[moved == ZERO] = self.codes[moved == ZERO]
        return Masked(moved, self.scales, self.mask, self.layout)

    @property
    def stored_codes(self) -> np.ndarray:
        return np.where(self.mask, self.codes, ZERO).astype(np.uint8)


def bundle(weights: Sequence[Masked]) -> Bundle:
    """One LINEAR after the other, plan and weights as the compiler emits them."""
    stored, packed, calls, buffers = [], {}, [], []
    for at, weight in enumerate(weights):
        n, k = weight.mask.shape
        rows = np.full(n, 1e-4, np.float32)
        matrix = W4Matrix(weight.stored_codes, Grid(weight.scales, rows), GridReport(0))
        packed[at] = pack_w4(matrix)
        stored.append(
            Weight(at, "w4", np.ones((n, k), np.float32), "weights.shared", weight.layout)
        )
        buffers += [Buffer(2 * at, 1, False, k, "f32"), Buffer(2 * at + 1, 1, False, n, "f32")]
        calls.append(Call(Op.LINEAR, (2 * at,), (2 * at + 1,), (at,), {"check": 0}))
    inputs = {f"x{at}": 2 * at for at in range(len(weights))}
    outputs = {f"y{at}": 2 * at + 1 for at in range(len(weights))}
    program = Program("run", tuple(calls), inputs, outputs)
    emitted = emit_plan(
        Module((program,), tuple(buffers), tuple(stored), None, 1), weights_packed=packed
    )
    sections = {
        name: SectionBytes(data, emitted.planes[name]) for name, data in emitted.sections.items()
    }
    return sections | {"plan": SectionBytes(emitted.plan_bytes)}


def blocks(live: np.ndarray, rows: int = PANEL, cols: int = GROUP) -> np.ndarray:
    """Spread a mask of blocks to a mask of elements."""
    return np.kron(live, np.ones((rows, cols), bool))


def flipped(
    rng: np.random.Generator, live: np.ndarray, share: float, woken: float = 1
) -> np.ndarray:
    """Kill `share` of the living and wake `woken` times as many of the dead."""
    flat = live.reshape(-1).copy()
    number = max(1, round(share * np.count_nonzero(flat)))
    dying = rng.choice(np.flatnonzero(flat), number, replace=False)
    waking = rng.choice(np.flatnonzero(~flat), round(woken * number), replace=False)
    flat[dying], flat[waking] = False, True
    return flat.reshape(live.shape)


def entropy_bytes(symbols: np.ndarray) -> float:
    """Order-0 entropy of symbols in bytes."""
    _, counts = np.unique(symbols, return_counts=True)
    return float((counts * (np.log2(symbols.size) - np.log2(counts))).sum() / 8)


def update_bound(old: Masked, new: Masked, live: tuple[np.ndarray, np.ndarray]) -> float:
    """Plug-in entropy in bytes of an update of mask and codes.

    Which blocks flipped; of woken blocks all codes and, by group, scales; of those that stayed the
    difference of their codes.
    """
    of = [side // blocks_ for side, blocks_ in zip(old.mask.shape, live[0].shape, strict=True)]
    woken = blocks(live[1] & ~live[0], *of)
    kept = blocks(live[1] & live[0], *of)
    groups = woken.reshape(len(woken), -1, GROUP).any(axis=2)
    bound = entropy_bytes(live[0] ^ live[1])
    bound += entropy_bytes(new.stored_codes[woken]) + entropy_bytes(new.scales[groups])
    return bound + entropy_bytes((new.stored_codes - old.stored_codes)[kept] & 15)


def live_blocks(rng: np.random.Generator, layout: str, rows: int, cols: int) -> np.ndarray:
    high, wide = UNITS[layout]
    return rng.random((rows // high, cols // wide)) < DENSITY[layout]


def masks(
    rng: np.random.Generator, layout: str, rows: int, cols: int, share: float, woken: float = 1
) -> tuple[Masked, Masked, tuple[np.ndarray, np.ndarray]]:
    """A weight, the same under another mask, and both masks in units."""
    live = live_blocks(rng, layout, rows, cols)
    moved = flipped(rng, live, share, woken)
    old = Masked.draw(rng, blocks(live, *UNITS[layout]), layout)
    return old, old.with_mask(blocks(moved, *UNITS[layout])), (live, moved)
