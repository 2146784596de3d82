"""Kernels at the memory limit, against the best of our peers: `python -m benchmarks.kernels`.

One process, candidates in turn, medians. Weights are cold unless a row says hot: a run walks 48
matrices (107 MB) or six layers of experts (320 MB). Peers get huge pages from glibc, as ours get
theirs from the loader. The read limit is a plain loop over memory in the same run. Each row names
the peer that was fastest in it, with its setting. Peers come from requirements-peers.lock.
"""

import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from types import MappingProxyType
from typing import Final

import numpy as np

from benchmarks import kernels_conv, kernels_nm, kernels_w8, peer_table
from benchmarks.kernels_ops import op_claims
from benchmarks.kernels_packed import packed_claims
from benchmarks.kernels_policy import policy_claims
from benchmarks.kernels_skip import skip_claims
from benchmarks.kernels_trace import trace_claims
from benchmarks.peer_table import Peer
from benchmarks.priority import uninterrupted
from benchmarks.read_limit import Reader
from benchmarks.runner import Claim, interleaved, main
from benchmarks.synthetic import CACHE, Synthetic, linear_walk, load, moe_walk, router
from compiler.contract.native import NativePlan
from compiler.driver.native_check import host_target
from compiler.emitters.backends import build_kernels
from compiler.hardware.targets import find_target
from compiler.kernels.program import Op

N: Final = 4096
K: Final = 1024
MATRICES: Final = 48
MOST_MATRICES: Final = 240
LAYERS: Final = 6
EXPERTS: Final = 8
ROUNDS: Final = 15
PREFILL_ROWS: Final = 256
PREFILL_MATRICES: Final = 4
ROUTED_EXPERTS: Final = 16
CALLS: Final = 200
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
    """Return seconds of every round; each sample has the cores to itself, after a pause."""
    return interleaved(candidates, ROUNDS, pause_s=0.01, alone=uninterrupted)


def median(runs: Runs, name: str) -> float:
    return statistics.median(runs[name])


def share_claim(name: str, ours: float, limit: float, bar: float, note: str) -> Claim:
    """Return a claim about how near the read limit we are; both in seconds for the same bytes."""
    value, peer = ours * MICROSECONDS, limit * MICROSECONDS
    ratio = limit / ours
    return Claim(name, value, "us", "read limit", "", peer, ratio, bar, "host", note)


def peer_claim(
    name: str,
    ours: float,
    runs: Runs,
    peers: Sequence[Peer],
    per: int,
    bar: float | None,
    note: str,
) -> Claim:
    """Return a claim against the fastest of the peers; `runs` has them by label."""
    best = min(peers, key=lambda peer: median(runs, peer.label))
    theirs = median(runs, best.label) / per
    value, peer = ours * MICROSECONDS, theirs * MICROSECONDS
    ratio = theirs / ours
    return Claim(name, value, "us", best.label, best.version, peer, ratio, bar, "host", note)


@dataclass(frozen=True)
class Walk:
    """One of our plans that walks weights, and its peers.

    Attributes:
        name: Part of the claims' ids.
        made: The plan.
        op: Its operation.
        steps: How often a run does what is measured.
        what: What that is, for the note.
        peers: Returns the peers for a number of threads.
        bars: By threads: the share of the read limit, and the ratio to the best peer.
    """

    name: str
    made: Synthetic
    op: Op
    steps: int
    what: str
    peers: Callable[[int], list[Peer]]
    bars: Mapping[int, tuple[float, float]]


def gemv_walk() -> Walk:
    """Return decode products."""

    def peers(threads: int) -> list[Peer]:
        return [
            *peer_table.nbits(N, K, MATRICES, 1, threads),
            *peer_table.ggml_products(N, K, MATRICES, 1, threads),
            *peer_table.openvino_products(N, K, MATRICES, 1, threads),
        ]

    made, what = linear_walk(N, K, MATRICES), f"{K} -> {N}, one row"
    bars = {1: (0.85, 1.2), 2: (0.75, 1.05)}
    return Walk("gemv", made, Op.LINEAR, MATRICES, what, peers, bars)


def routed_walk() -> Walk:
    """Return routed layers, one token."""

    def peers(threads: int) -> list[Peer]:
        return peer_table.routed_layers(LAYERS, K, N, EXPERTS, threads)

    made, what = moe_walk(LAYERS, K, N, EXPERTS), f"{EXPERTS} experts, top 2, {K}-{N}, SwiGLU"
    bars = {1: (0.8, 1.2), 2: (0.7, 1.2)}
    return Walk("moe", made, Op.MOE_LAYER, LAYERS, what, peers, bars)


def walk_claims(target: str, reader: Reader, walk: Walk) -> list[Claim]:
    """Return a walk against the read limit and against its peers, by number of threads."""
    claims = []
    for threads, (share, ratio) in walk.bars.items():
        peers = walk.peers(threads)
        candidates: dict[str, Run] = {
            "limit": reader.read(threads),
            "ours": loaded(target, walk.made, (walk.op,), threads),
            **{peer.label: peer.start() for peer in peers},
        }
        runs = measured(candidates)
        ours = median(runs, "ours") / walk.steps
        limit = median(runs, "limit") / reader.size * walk.made.read_bytes / walk.steps
        note = f"{walk.what}, {threads} threads, cold, {target}"
        name = f"kernels.{walk.name}"
        claims.append(share_claim(f"{name}.share.{threads}t", ours, limit, share, note))
        for peer in peers:  # every peer, so that a reader sees who else was measured
            row = f"{name}.{peer.label.replace(' ', '_')}.{threads}t"
            claims.append(peer_claim(row, ours, runs, [peer], walk.steps, None, note))
        best = f"{name}.peer.{threads}t"
        claims.append(peer_claim(best, ours, runs, peers, walk.steps, ratio, note))
    return claims


def hot_claims(target: str) -> list[Claim]:
    """Return one decode product whose weights stay in the cache; informs, has no bar."""
    claims = []
    for threads in (1, 2):
        peers = [
            *peer_table.nbits(N, K, 1, 1, threads),
            *peer_table.ggml_products(N, K, 1, 1, threads),
        ]
        ours = loaded(target, linear_walk(N, K, 1), (Op.LINEAR,), threads)
        candidates: dict[str, Run] = {"ours": ours}
        candidates |= {peer.label: peer.start() for peer in peers}
        runs = measured({name: repeated(run, MATRICES) for name, run in candidates.items()})
        note = f"{K} -> {N}, one row, {threads} threads, hot, with the call, {target}"
        name = f"kernels.gemv.hot.{threads}t"
        value = median(runs, "ours") / MATRICES
        claims.append(peer_claim(name, value, runs, peers, MATRICES, None, note))
    return claims


def repeated(run: Run, times: int) -> Run:
    """Return a run that repeats another."""

    def runs() -> None:
        for _ in range(times):
            run()

    return runs


def sparse_matrices(live: float) -> int:
    """Return how many matrices a sparse walk has: about the bytes of the dense one."""
    return min(round(MATRICES / live), MOST_MATRICES)


def sparse_claims(target: str) -> list[Claim]:
    """Return products with dead 32 x 32 blocks against our own dense product.

    A sparse candidate walks more matrices: the same number would be half a millisecond, of which
    waking up is a tenth.
    """
    candidates = {"dense": loaded(target, linear_walk(N, K, MATRICES), (Op.LINEAR,), 1)}
    for live in SPARSE_BARS:
        made = linear_walk(N, K, sparse_matrices(live), live=live)
        candidates[f"{live}"] = loaded(target, made, (Op.LINEAR,), 1)
    runs = measured(candidates)
    dense = median(runs, "dense") / MATRICES
    claims = []
    for live, bar in SPARSE_BARS.items():
        ours = median(runs, f"{live}") / sparse_matrices(live)
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
    """Return products over many rows against MatMulNBits and ggml; OpenVINO informs."""
    claims = []
    made = linear_walk(N, K, PREFILL_MATRICES, PREFILL_ROWS)
    shape = (N, K, PREFILL_MATRICES, PREFILL_ROWS)
    for threads in (1, 2):
        rivals = [*peer_table.nbits(*shape, threads), *peer_table.ggml_products(*shape, threads)]
        others = peer_table.openvino_products(*shape, threads)
        ours_run = loaded(target, made, (Op.LINEAR,), threads, PREFILL_ROWS)
        candidates: dict[str, Run] = {"ours": ours_run}
        candidates |= {peer.label: peer.start() for peer in (*rivals, *others)}
        runs = measured(candidates)
        ours = median(runs, "ours") / PREFILL_MATRICES
        rate = N * K * PREFILL_ROWS / ours / 1e9
        note = (
            f"W4A8, {K} -> {N}, {PREFILL_ROWS} rows, {threads} threads, {rate:.0f} GMAC/s, {target}"
        )
        for name, peers, bar in (("peer", rivals, 1.8), ("openvino", others, None)):
            row = f"kernels.prefill.{name}.{threads}t"
            claims.append(peer_claim(row, ours, runs, peers, PREFILL_MATRICES, bar, note))
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


def cold_reader(target: str) -> Reader:
    """Return what reads as many bytes as a walk over dense matrices."""
    return Reader(target, MATRICES * N * K // 2, CACHE)


PARTS: Final[Mapping[str, Callable[[str], Sequence[Claim]]]] = MappingProxyType(
    {
        "gemv": lambda target: walk_claims(target, cold_reader(target), gemv_walk()),
        "moe": lambda target: walk_claims(target, cold_reader(target), routed_walk()),
        "hot": hot_claims,
        "blocks": sparse_claims,
        "skip": lambda target: skip_claims(target, measured),
        "prefill": prefill_claims,
        "w8": lambda target: kernels_w8.claims(target, measured),
        "nm": lambda target: kernels_nm.claims(target, measured),
        "conv": lambda target: kernels_conv.claims(target, measured),
        "call": call_claims,
        "ops": op_claims,
        "packed": packed_claims,
        "trace": trace_claims,
        "policy": policy_claims,
    }
)
"""Rows that are measured together, each part in a process of its own: what one peer leaves behind
(threads, loaded libraries) has brought the next one down."""


def part_claims(name: str, target: str) -> Sequence[Claim]:
    """Measure one part."""
    return PARTS[name](target)


def measure() -> list[Claim]:
    """Measure every part, one after another."""
    target = host_target()
    peer_table.require()
    if target is None:
        raise SystemExit("error: no target runs on this machine")
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        parts = [pool.submit(part_claims, name, target.id) for name in PARTS]
        return [claim for part in parts for claim in part.result()]


if __name__ == "__main__":
    name, value = TUNABLE
    if os.environ.get(name) != value:
        os.environ[name] = value
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:]])
    sys.exit(main("kernels", measure, sys.argv[1:]))
