"""Decode products with half of the columns of every panel against our own dense ones, cold.

Called by `benchmarks.kernels`: 2:4 shared by 16 rows has to be 1.15 times as fast, or it would not
be stored so.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from benchmarks.runner import Claim, faster_claim
from benchmarks.synthetic import SECTION, Synthetic, linear_walk, load
from compiler.contract.plan_format import GROUP, PANEL, Kind, weight_bytes
from compiler.emitters.nm import HALF, KEPT, unpack_nm
from compiler.kernels.program import NM, Op
from compiler.quant.w4 import PackedW4

N: Final = 4096
K: Final = 1024
MATRICES: Final = 48
BAR: Final = 1.15
MICROSECONDS: Final = 1e-6
Run = Callable[[], object]
Measured = Callable[[Mapping[str, Run]], Mapping[str, Sequence[float]]]


def halved(seed: int) -> PackedW4:
    """Return a random matrix (N, K) of which every panel keeps 8 of 16 columns."""
    random = np.random.default_rng(seed)
    panels, groups = N // PANEL, K // GROUP
    places = random.random((panels, groups, 2, HALF)).argsort(axis=-1)[..., :KEPT].astype(np.uint8)
    nibbles = places.reshape(panels, groups, KEPT, 2)
    index = (nibbles[..., 0] | nibbles[..., 1] << 4).tobytes()
    codes, scales = random.bytes(N * K // 4), bytes(random.integers(1, 256, N * groups, np.uint8))
    return unpack_nm(N, K, (codes, scales, np.full(N, 2.0**-13, "<f4").tobytes(), index))


def walk() -> Synthetic:
    """Return decode products with matrices of their own."""
    dense = linear_walk(N, K, MATRICES)
    weights = tuple(replace(weight, layout=NM) for weight in dense.module.weights)
    packed = {at: halved(at) for at in range(MATRICES)}
    read = MATRICES * weight_bytes(Kind.W4_NM, N, K)
    return Synthetic(replace(dense.module, weights=weights), packed, read)


def claims(target: str, measured: Measured) -> list[Claim]:
    """Return half against all, by number of threads."""
    dense, half = linear_walk(N, K, MATRICES).emit(), walk().emit()
    assert len(half.sections[SECTION]) < 0.6 * len(dense.sections[SECTION])
    x = np.random.default_rng(0).standard_normal((1, K)).astype(np.float32)
    found = []
    for threads in (1, 2):
        plans = {
            name: load(target, emitted, (Op.LINEAR,), threads)
            for name, emitted in (("dense", dense), ("half", half))
        }
        runs = measured(
            {name: lambda p=plan: p.run("run", {"x": x.data}) for name, plan in plans.items()}
        )
        rate = statistics.median(runs["dense"]) / statistics.median(runs["half"])
        found.append(
            faster_claim(
                f"kernels.nm.{threads}t",
                runs["half"],
                runs["dense"],
                per=MATRICES * MICROSECONDS,
                unit="us",
                peer="own dense",
                peer_version="",
                bar=BAR,
                label="host",
                note=f"2:4 shared by 16 rows, {rate:.2f} times, {threads} threads, cold, {target}",
            )
        )
    return found
