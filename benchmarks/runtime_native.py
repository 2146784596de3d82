"""The memory managers of `benchmarks.runtime` by themselves, timed in C within their own library.

Allocation: pairs of alloc and free of a buddy pool that is half full, of 2^4 to 2^16 blocks. Runs:
64 MB that change their place by page tables, in runs of 512 KiB that lie side by side.
What is timed is the product's code; the loops around it are appended to its source.
"""

import ctypes
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Final

import numpy as np

from benchmarks.runner import Claim
from benchmarks.synthetic import CACHE
from compiler.contract.buddy_pool import BuddyPool
from compiler.contract.expert_pool import ExpertFile, ExpertPool
from compiler.contract.native_library import KernelLibrary
from compiler.contract.operations import Op
from compiler.contract.pool_plan import RUN_BYTES
from compiler.emitters.backends import render_kernels
from compiler.emitters.toolchain import compile_shared
from compiler.hardware.targets import find_target

LOOPS: Final = """
SF_EXPORT int32_t bench_pairs(void *pool, const uint64_t *bytes, uint32_t n, uint32_t rounds) {
  uint32_t handle[64], failed = 0;
  for (uint32_t r = 0; r < rounds; r++) {
    for (uint32_t i = 0; i < n; i++) failed += sf_buddy_alloc(pool, bytes[i], &handle[i]) != 0;
    for (uint32_t i = 0; i < n; i++) failed += sf_buddy_free(pool, handle[i]) != 0;
  }
  return (int32_t)failed;
}

/* Places [0, count) and [count, 2 count) take turns in having the memory. */
SF_EXPORT int32_t bench_moves(void *address, uint32_t count, uint32_t rounds, uint32_t touch) {
  sf_runs *r = &sf_pool_of(address)->runs;
  for (uint32_t i = 0; i < rounds; i++) {
    const uint32_t at = i % 2 * count;
    if (sf_runs_fill(r, at, count)) return 1;
    const uint64_t bytes = touch ? (uint64_t)count << r->shift : 0;
    for (uint64_t b = 0; b < bytes; b += 4096) sf_place(r, at)[b] = 1;
    sf_runs_free(r, at, count);
  }
  return 0;
}
"""
BLOCKS: Final = tuple(1 << order for order in (4, 8, 12, 16))
BLOCK_BYTES: Final = 4096
BATCH: Final = 4
PAIRS: Final = 20_000
MOVED_BYTES: Final = 64 << 20
MOVES: Final = 20
ROUNDS: Final = 9
NS: Final = 1e9
MOST_NS: Final = 200.0
MOST_MS: Final = 1.0


def native_claims(target_id: str) -> list[Claim]:
    """Return what an allocation and a move take."""
    target = find_target(target_id)
    code = compile_shared(render_kernels(target, (Op.EXPERTS,)) + LOOPS, target, CACHE)
    library = KernelLibrary(code)
    return [*_pair_claims(library), _move_claim(library)]


def _pair_claims(library: KernelLibrary) -> list[Claim]:
    pairs = library.bind("bench_pairs", ctypes.c_int32, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32))  # fmt: skip  # noqa: E501
    assert pairs is not None
    claims = []
    for blocks in BLOCKS:
        pool = BuddyPool(library, block_bytes=BLOCK_BYTES, blocks=blocks, handles=blocks)
        for _ in range(blocks // 2 // BATCH):
            pool.put(BLOCK_BYTES)
        sizes = np.random.default_rng(blocks).integers(1, BLOCK_BYTES, BATCH).astype(np.uint64)
        run = _checked(pairs, pool._at, sizes.ctypes.data, BATCH, PAIRS // BATCH)
        ns = statistics.median(_seconds(run) for _ in range(ROUNDS)) / PAIRS * NS
        name = f"runtime.alloc.{blocks}"
        note = "alloc and free of a block, buddy pool, in C"
        claims.append(Claim(name, ns, "ns", "most", "", MOST_NS, MOST_NS / ns, 1.0, "host", note))
    return claims


def _move_claim(library: KernelLibrary) -> Claim:
    moves = library.bind("bench_moves", ctypes.c_int32, (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32))  # fmt: skip  # noqa: E501
    assert moves is not None
    runs = MOVED_BYTES // RUN_BYTES
    files = [ExpertFile(-1, MOVED_BYTES, "", 0), ExpertFile(-1, MOVED_BYTES, "", 0)]
    pool = ExpertPool(library, files, run_bytes=RUN_BYTES, runs=runs)
    _checked(moves, pool.address, runs, 2, 1)()
    run = _checked(moves, pool.address, runs, MOVES, 0)
    ms = statistics.median(_seconds(run) for _ in range(ROUNDS)) / MOVES * 1e3
    counts = pool.counts()
    pool.close()
    note = f"64 MB in runs of {RUN_BYTES // 1024} KiB to other places; {counts['moved']} moves"
    return Claim("runtime.move", ms, "ms", "most", "", MOST_MS, MOST_MS / ms, 1.0, "host", note)


def _checked(call: Callable[..., int], *arguments: int) -> Callable[[], None]:
    def run() -> None:
        assert call(*arguments) == 0

    return run


def _seconds(run: Callable[[], None]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
