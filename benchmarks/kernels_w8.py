"""Products of 8-bit weights and activations against the best int8 peer and what the processor can.

Called by `benchmarks.kernels`. Decode walks 48 matrices of its own and is compared with the read
limit, prefill repeats four matrices over 256 rows and is compared with a loop of nothing but
`vpdpbusd` on registers, where the processor has it.
"""

import ctypes
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np

from benchmarks import peer_table
from benchmarks.loaded_code import loaded_code
from benchmarks.read_limit import Reader
from benchmarks.runner import Claim, faster_claim
from benchmarks.synthetic import CACHE, SECTION, load
from compiler.contract.plan_format import Kind, weight_parts
from compiler.emitters.plan import EmittedPlan, emit_plan
from compiler.hardware.targets import find_target
from compiler.kernels.program import Buffer, Call, Module, Op, Program, Weight

N: Final = 4096
K: Final = 1024
MATRICES: Final = 48
PREFILL_MATRICES: Final = 4
PREFILL_ROWS: Final = 256
DECODE_BARS: Final = {1: (0.85, 1.2), 2: (0.75, 1.05)}
"""By threads: the share of the read limit, and the ratio to the best peer."""
PREFILL_BARS: Final = {1: (0.8, 0.95), 2: (0.8, 1.1)}
"""By threads: the share of what `vpdpbusd` can do, and the ratio to the best peer."""
MICROSECONDS: Final = 1e-6
VNNI: Final = "avx512vnni"
PEAK_LOOPS: Final = 1_000_000
PEAK_MACS: Final = 24 * 64 * PEAK_LOOPS
PEAK_SOURCE: Final = """
#include <immintrin.h>
#include <stdint.h>
__attribute__((visibility("default"))) uint32_t multiply(uint64_t loops) {
  __m512i sum[24], left = _mm512_set1_epi8(3), right = _mm512_set1_epi8(5);
  for (int i = 0; i < 24; i++) sum[i] = _mm512_set1_epi32(i);
  for (uint64_t at = 0; at < loops; at++) {
    for (int i = 0; i < 24; i++) sum[i] = _mm512_dpbusd_epi32(sum[i], left, right);
    __asm__ volatile("" : "+v"(left), "+v"(right));
  }
  for (int i = 1; i < 24; i++) sum[0] = _mm512_add_epi32(sum[0], sum[i]);
  return (uint32_t)_mm512_reduce_add_epi32(sum[0]);
}
"""
Run = Callable[[], object]
Measured = Callable[[Mapping[str, Run]], Mapping[str, Sequence[float]]]


def walk(count: int, rows: int) -> EmittedPlan:
    """Return `count` products of one x (rows, K) with matrices (N, K) of random codes."""
    ones = np.ones((N, K), np.float32)
    weights = tuple(Weight(at, "w8", ones, SECTION) for at in range(count))
    buffers = [Buffer(0, rows, False, K, "f32")]
    buffers += [Buffer(at + 1, rows, False, N, "f32") for at in range(count)]
    calls = tuple(Call(Op.LINEAR_W8, (0,), (at + 1,), (at,), {}) for at in range(count))
    program = Program("run", calls, {"x": 0}, {f"y{at}": at + 1 for at in range(count)})
    emitted = emit_plan(Module((program,), tuple(buffers), weights, None, 1), weights_packed={})
    data = bytearray(emitted.sections[SECTION])
    random = np.random.default_rng(7)
    for weight in emitted.plan.weights:
        data[weight.offset : weight.offset + N * K] = random.bytes(N * K)
    return replace(emitted, sections={SECTION: bytes(data)})


def ours(target: str, emitted: EmittedPlan, rows: int, threads: int) -> Run:
    """Return a run of a walk."""
    plan = load(target, emitted, (Op.LINEAR_W8,), threads)
    x = np.random.default_rng(0).standard_normal((rows, K)).astype(np.float32)
    return lambda: plan.run("run", {"x": x.data})


@cache
def _multiply(target: str) -> Callable[[int], int]:
    multiply = loaded_code(PEAK_SOURCE, target, CACHE).multiply
    multiply.argtypes, multiply.restype = (ctypes.c_uint64,), ctypes.c_uint32
    return multiply


def peak(target: str, threads: int) -> Run:
    """Return a run of PEAK_MACS products of bytes on each of that many threads."""
    multiply = _multiply(target)

    def run() -> None:
        others = [threading.Thread(target=multiply, args=(PEAK_LOOPS,)) for _ in range(threads - 1)]
        for other in others:
            other.start()
        multiply(PEAK_LOOPS)
        for other in others:
            other.join()

    return run


def claims(target: str, measured: Measured) -> list[Claim]:
    """Return decode and prefill, by number of threads."""
    size = sum(length for _, length in weight_parts(Kind.W8, N, K))
    reader = Reader(target, MATRICES * size, CACHE)
    decode, prefill = walk(MATRICES, 1), walk(PREFILL_MATRICES, PREFILL_ROWS)
    found = []
    for threads, (share, ratio) in DECODE_BARS.items():
        limit = {"limit": reader.read(threads)}
        one = ours(target, decode, 1, threads)
        runs, peers = _against(measured, one, MATRICES, 1, threads, limit)
        seconds = [value * MATRICES * size / reader.size for value in runs["limit"]]
        name, note = f"kernels.w8.gemv.{{}}.{threads}t", f"one row, {threads} threads, cold"
        found += _rows(name, runs, seconds, "read limit", peers, MATRICES, (share, ratio), note)
    for threads, (share, ratio) in PREFILL_BARS.items():
        has_peak = VNNI in find_target(target).isa
        limit = {"limit": peak(target, threads)} if has_peak else {}
        one = ours(target, prefill, PREFILL_ROWS, threads)
        runs, peers = _against(measured, one, PREFILL_MATRICES, PREFILL_ROWS, threads, limit)
        macs = N * K * PREFILL_ROWS * PREFILL_MATRICES
        seconds = [value * macs / (PEAK_MACS * threads) for value in runs.get("limit", ())]
        rate = macs / statistics.median(runs["ours"]) / 1e9
        name = f"kernels.w8.prefill.{{}}.{threads}t"
        note = f"{PREFILL_ROWS} rows, {threads} threads, {rate:.0f} GMAC/s"
        bars, per = (share, ratio), PREFILL_MATRICES
        found += _rows(name, runs, seconds, "vpdpbusd alone", peers, per, bars, note)
    return [replace(claim, note=f"W8A8, {K} -> {N}, {claim.note}, {target}") for claim in found]


def _against(
    measured: Measured, run: Run, count: int, rows: int, threads: int, limit: Mapping[str, Run]
) -> tuple[Mapping[str, Sequence[float]], list[peer_table.Peer]]:
    """Return seconds of every round of ours, of the limit and of the peers."""
    peers = peer_table.int8_products(N, K, count, rows, threads)
    return measured({"ours": run, **limit, **{p.label: p.start() for p in peers}}), peers


def _rows(
    name: str,
    runs: Mapping[str, Sequence[float]],
    limit: Sequence[float],
    limit_name: str,
    peers: Sequence[peer_table.Peer],
    per: int,
    bars: tuple[float, float],
    note: str,
) -> list[Claim]:
    """Return a row against the limit, if there is one, against every peer and against the best."""
    best = min(peers, key=lambda peer: statistics.median(runs[peer.label]))
    rows = [("share", limit, limit_name, "", bars[0])] if limit else []
    rows += [
        (peer.label.replace(" ", "_"), runs[peer.label], peer.label, peer.version, None)
        for peer in peers
    ]
    rows.append(("peer", runs[best.label], best.label, best.version, bars[1]))
    return [
        faster_claim(
            name.format(row),
            runs["ours"],
            theirs,
            per=per * MICROSECONDS,
            unit="us",
            peer=peer,
            peer_version=version,
            bar=bar,
            label="host",
            note=note,
        )
        for row, theirs, peer, version, bar in rows
    ]
