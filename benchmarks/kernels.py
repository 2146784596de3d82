"""Kernels at the memory limit, against ONNX Runtime: `python -m benchmarks.kernels`.

One process, candidates in turn, medians. Weights are cold: a run walks 48 matrices (107 MB) or six
layers of experts (320 MB). Peers get huge pages from glibc, as ours get theirs from the loader. The
read limit is a plain loop over memory in the same run. A row whose peer needs a processor that this
one is not says so in its note.
"""

import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks import peers
from benchmarks.priority import uninterrupted
from benchmarks.read_limit import Reader
from benchmarks.runner import Claim, interleaved, main
from benchmarks.synthetic import CACHE, Synthetic, linear_walk, load, moe_walk, router
from compiler.contract.native import NativePlan
from compiler.driver.native_check import host_target
from compiler.emitters.toolchain import build_kernels
from compiler.hardware.targets import find_target
from compiler.kernels.program import Op

N: Final = 4096
K: Final = 1024
MATRICES: Final = 48
LAYERS: Final = 6
EXPERTS: Final = 8
ROUNDS: Final = 15
PREFILL_ROWS: Final = 256
PREFILL_MATRICES: Final = 4
ROUTED_EXPERTS: Final = 16
CALLS: Final = 200
BLOCKS: Final = (32, 128)
MICROSECONDS: Final = 1e6
TUNABLE: Final = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
SPARSE_BARS: Final = {0.5: 1.6, 0.3: 2.4, 0.1: 4.5}
Runs = Mapping[str, Sequence[float]]
Run = Callable[[], object]


def plan_run(plan: NativePlan, rows: int, cols: int) -> Run:
    """Return a run of a plan's one program over fixed random rows."""
    x = np.random.default_rng(0).standard_normal((rows, cols)).astype(np.float32)
    return lambda: plan.run("run", {"x": x.data})


def loaded(target: str, made: Synthetic, ops: tuple[Op, ...], threads: int, rows: int = 1) -> Run:
    """Emit and load a synthetic plan, return its run."""
    plan = load(target, made.emit(), ops, threads)
    return plan_run(plan, rows, made.module.buffers[0].cols)


def measured(candidates: Mapping[str, Run]) -> dict[str, list[float]]:
    """Return seconds of every round; each sample has the cores to itself, with a pause after it."""

    def alone(run: Run) -> Run:
        def sample() -> None:
            with uninterrupted():
                run()

        return sample

    return interleaved({name: alone(run) for name, run in candidates.items()}, ROUNDS, pause_s=0.01)


def median(runs: Runs, name: str) -> float:
    return statistics.median(runs[name])


def share_claim(name: str, ours: float, limit: float, bar: float, note: str) -> Claim:
    """Return a claim about how near the read limit we are; both in seconds for the same bytes."""
    value, peer = ours * MICROSECONDS, limit * MICROSECONDS
    ratio = limit / ours
    return Claim(name, value, "us", "read limit", "", peer, ratio, bar, "host", note)


def peer_claim(name: str, ours: float, runs: Runs, per: int, bar: float, note: str) -> Claim:
    """Return a claim against the fastest of the peers in `runs`."""
    names = [name for name in runs if name.startswith(peers.NAME)]
    best = min(names, key=lambda peer: median(runs, peer))
    theirs = median(runs, best) / per
    value, peer = ours * MICROSECONDS, theirs * MICROSECONDS
    return Claim(name, value, "us", best, peers.VERSION, peer, theirs / ours, bar, "host", note)


@dataclass(frozen=True)
class Walk:
    """One of our plans that walks cold weights, and its peer.

    Attributes:
        name: Part of the claims' ids.
        made: The plan.
        op: Its operation.
        steps: How often a run does what is measured.
        what: What that is, for the note.
        peer: Returns a peer's run for a block size and a number of threads.
        peer_name: What the peer runs.
        bars: By threads: the share of the read limit, and the ratio to the peer.
    """

    name: str
    made: Synthetic
    op: Op
    steps: int
    what: str
    peer: Callable[[int, int], Run]
    peer_name: str
    bars: Mapping[int, tuple[float, float]]


def gemv_walk() -> Walk:
    """Return decode products."""

    def peer(block: int, threads: int) -> Run:
        return peers.nbits_walk(N, K, MATRICES, block, 1, threads)

    made, what = linear_walk(N, K, MATRICES), f"{K} -> {N}, one row"
    bars = {1: (0.85, 1.2), 2: (0.75, 1.05)}
    return Walk("gemv", made, Op.LINEAR, MATRICES, what, peer, "MatMulNBits", bars)


def routed_walk() -> Walk:
    """Return routed layers, one token."""

    def peer(block: int, threads: int) -> Run:
        return peers.qmoe_walk(LAYERS, K, N, EXPERTS, block, threads)

    made, what = moe_walk(LAYERS, K, N, EXPERTS), f"{EXPERTS} experts, top 2, {K}-{N}, SwiGLU"
    bars = {1: (0.8, 1.2), 2: (0.7, 1.0)}
    return Walk("moe", made, Op.MOE_LAYER, LAYERS, what, peer, "QMoE", bars)


def walk_claims(target: str, reader: Reader, walk: Walk) -> list[Claim]:
    """Return a walk against the read limit and against its peer, by number of threads."""
    claims = []
    for threads, (share, ratio) in walk.bars.items():
        candidates: dict[str, Run] = {
            "limit": reader.read(threads),
            "ours": loaded(target, walk.made, (walk.op,), threads),
        }
        for block in BLOCKS:
            candidates[f"{peers.NAME} {walk.peer_name} block {block}"] = walk.peer(block, threads)
        runs = measured(candidates)
        ours = median(runs, "ours") / walk.steps
        limit = median(runs, "limit") / reader.size * walk.made.read_bytes / walk.steps
        note = f"{walk.what}, {threads} threads, cold, {target}"
        name = f"kernels.{walk.name}"
        claims.append(share_claim(f"{name}.share.{threads}t", ours, limit, share, note))
        claims.append(peer_claim(f"{name}.peer.{threads}t", ours, runs, walk.steps, ratio, note))
    return claims


def sparse_claims(target: str) -> list[Claim]:
    """Return products with dead 32 x 32 blocks against our own dense product."""
    candidates = {"dense": loaded(target, linear_walk(N, K, MATRICES), (Op.LINEAR,), 1)}
    for live in SPARSE_BARS:
        made = linear_walk(N, K, MATRICES, live=live)
        candidates[f"{live}"] = loaded(target, made, (Op.LINEAR,), 1)
    runs = measured(candidates)
    dense = median(runs, "dense") / MATRICES
    claims = []
    for live, bar in SPARSE_BARS.items():
        ours = median(runs, f"{live}") / MATRICES
        zeros = round(100 * (1 - live))
        claims.append(
            Claim(
                f"kernels.blocks.{zeros}",
                ours * MICROSECONDS,
                "us",
                "own dense",
                "",
                dense * MICROSECONDS,
                dense / ours,
                bar,
                "host",
                f"32 x 32 blocks, {zeros} % zeros, 1 thread, cold, {target}",
            )
        )
    return claims


def prefill_claims(target: str) -> list[Claim]:
    """Return products over many rows against MatMulNBits."""
    claims = []
    made = linear_walk(N, K, PREFILL_MATRICES, PREFILL_ROWS)
    for threads in (1, 2):
        ours_run = loaded(target, made, (Op.LINEAR,), threads, PREFILL_ROWS)
        candidates: dict[str, Run] = {"ours": ours_run}
        for block in BLOCKS:
            run = peers.nbits_walk(N, K, PREFILL_MATRICES, block, PREFILL_ROWS, threads)
            candidates[f"{peers.NAME} MatMulNBits block {block}"] = run
        runs = measured(candidates)
        ours = median(runs, "ours") / PREFILL_MATRICES
        rate = N * K * PREFILL_ROWS / ours / 1e9
        note = (
            f"W4A8, {K} -> {N}, {PREFILL_ROWS} rows, {threads} threads, {rate:.0f} GMAC/s, {target}"
        )
        name = f"kernels.prefill.peer.{threads}t"
        claims.append(peer_claim(name, ours, runs, PREFILL_MATRICES, 1.8, note))
    return claims


def call_claims(target: str) -> list[Claim]:
    """Return what one small call costs through Python, and what loading a plan costs."""
    routed = Synthetic(router(K, ROUTED_EXPERTS), {}, 0)
    decide = loaded(target, routed, (Op.ROUTE,), 1)
    emitted = linear_walk(K, K, 4).emit()
    kernels = build_kernels(find_target(target), (Op.LINEAR,), CACHE)

    def start() -> None:
        NativePlan(kernels, emitted.plan_bytes, emitted.sections).close()

    def decisions() -> None:
        for _ in range(CALLS):
            decide()

    runs = measured({"decide": decisions, "load": start})
    rows = (
        ("kernels.route.call", median(runs, "decide") / CALLS, 20.0, f"{ROUTED_EXPERTS} experts"),
        ("kernels.plan.load", median(runs, "load"), 20_000.0, "four matrices of 1024 x 1024"),
    )
    return [
        Claim(
            name,
            seconds * MICROSECONDS,
            "us",
            "bar",
            "",
            bar,
            bar / (seconds * MICROSECONDS),
            1.0,
            "host",
            f"{note}, through the Python call, {target}",
        )
        for name, seconds, bar, note in rows
    ]


def measure() -> list[Claim]:
    """Measure every row, one group of candidates after another."""
    target = host_target()
    if target is None:
        raise SystemExit("error: no target runs on this machine")
    reader = Reader(target.id, MATRICES * N * K // 2, CACHE)
    return [
        *walk_claims(target.id, reader, gemv_walk()),
        *walk_claims(target.id, reader, routed_walk()),
        *sparse_claims(target.id),
        *prefill_claims(target.id),
        *call_claims(target.id),
    ]


if __name__ == "__main__":
    name, value = TUNABLE
    if os.environ.get(name) != value:
        os.environ[name] = value
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:]])
    sys.exit(main("kernels", measure, sys.argv[1:]))
