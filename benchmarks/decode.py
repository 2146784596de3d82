"""A whole decoder, token by token: our compiled plan, ONNX Runtime and llama.cpp in one process.

    make peers; python -m benchmarks.decode [--check]

Twelve layers of width 1024 with grouped attention and 8 SwiGLU experts 4096 wide, top 2, 4-bit
weights that are random and different for every candidate. Each answers a prompt of 128 tokens and
goes on greedily; windows of 16 tokens run in turn at equal lengths of the cache, after warm-up,
with the cores to themselves and a pause between. Peers have huge pages, int8 activations and their
fastest layouts, and every setting that might be the best one is measured. The read limit is a plain
loop over memory in the same run; a token reads all attention weights, the head and two of eight
experts per layer. Memory is what a child process holds at most while it answers, without loading.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks import peer_table
from benchmarks.decode_candidates import (
    OURS,
    SHAPE,
    Candidate,
    candidates,
    prepare,
)
from benchmarks.decode_memory import held_bytes
from benchmarks.decode_table import measured_rows, printed, row_claims
from benchmarks.decode_talk import WINDOW, Seconds, Talk, timed
from benchmarks.read_limit import Reader
from benchmarks.runner import Claim, main
from benchmarks.synthetic import CACHE
from compiler.driver.native_check import host_target

WINDOWS: Final = 9
WARM_UP: Final = 2
PROMPT_ROUNDS: Final = 3
LIMIT: Final = "limit"
LIMIT_BYTES: Final = 100 << 20
BAR_PEER: Final = 1.1
BAR_SHARE: Final = 0.8
MILLISECONDS: Final = 1e3
MIB: Final = 1 << 20
TUNABLE: Final = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


def thread_claims(
    found: Mapping[str, Candidate], reader: Reader, threads: int, where: str
) -> Iterator[Claim]:
    """Measure every candidate on a number of threads."""
    talks = {name: Talk(candidate.load(threads)) for name, candidate in found.items()}
    starts = {name: talk.prompt for name, talk in talks.items()}
    prompts = timed(starts, PROMPT_ROUNDS, 1)
    steps = {LIMIT: reader.read(threads), **{name: talk.window for name, talk in talks.items()}}
    windows = timed(steps, WINDOWS, WARM_UP)
    note = f"{threads} threads, {where}"
    ours, limit = (statistics.median(windows[name]) for name in (OURS, LIMIT))
    yield from _against(f"decode.tokens.{threads}t", windows, found, note, BAR_PEER)
    yield _share_claim(threads, ours / WINDOW, limit / reader.size, note)
    yield from _against(f"decode.first_token.{threads}t", prompts, found, note, None)


def _against(
    claim: str, seconds: Seconds, found: Mapping[str, Candidate], note: str, bar: float | None
) -> Iterator[Claim]:
    """Yield ours against each peer, then against the fastest, which alone has the bar."""
    medians = {name: statistics.median(seconds[name]) for name in found}
    peers = sorted((name for name in found if name != OURS), key=medians.__getitem__, reverse=True)
    is_rate = "tokens" in claim
    for name in peers:
        ours, theirs = medians[OURS], medians[name]
        shown = (WINDOW / t if is_rate else t * MILLISECONDS for t in (ours, theirs))
        row = Claim(
            f"{claim}.{name.replace(' ', '_')}",
            next(shown),
            "tokens/s" if is_rate else "ms",
            name,
            found[name].version,
            next(shown),
            theirs / ours,
            None,
            "host",
            note,
        )
        yield row
    yield replace(row, id=f"{claim}.peer", bar=bar)


def _share_claim(threads: int, per_token: float, per_byte: float, note: str) -> Claim:
    limit = SHAPE.read_bytes * per_byte
    return Claim(
        f"decode.share.{threads}t",
        per_token * MILLISECONDS,
        "ms/token",
        "read limit",
        "",
        limit * MILLISECONDS,
        limit / per_token,
        BAR_SHARE,
        "host",
        f"{SHAPE.read_bytes / 1e6:.1f} MB of weights, {1e-9 / per_byte:.1f} GB/s, {note}",
    )


def memory_claims(found: Mapping[str, Candidate], folder: Path) -> Iterator[Claim]:
    """Measure what each candidate holds, each in a process of its own."""
    held = {name: held_bytes(name, folder) for name in found}
    for name, candidate in found.items():
        yield Claim(
            f"decode.memory.{name.replace(' ', '_')}",
            held[OURS] / MIB,
            "MiB",
            "" if name == OURS else name,
            candidate.version,
            None if name == OURS else held[name] / MIB,
            None if name == OURS else held[name] / held[OURS],
            None,
            "host",
            "most that is resident while a prompt and a window are answered",
        )


def measure() -> list[Claim]:
    """Make every candidate, measure all on one and two threads, then the table of our own rows."""
    peer_table.require()
    target = host_target()
    if target is None:
        raise SystemExit("error: no target runs on this machine")
    reader = Reader(target.id, LIMIT_BYTES, CACHE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, target.id)
        found = candidates(folder)
        claims = [
            claim
            for threads in (1, 2)
            for claim in thread_claims(found, reader, threads, f"cold, {target.id}")
        ]
        claims += memory_claims(found, folder)
        rows = measured_rows(folder)
    print(printed(rows))
    return [*claims, *row_claims(rows)]


if __name__ == "__main__":
    name, value = TUNABLE
    if os.environ.get(name) != value:
        os.environ[name] = value
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.decode", *sys.argv[1:]])
    sys.exit(main("decode", measure, sys.argv[1:]))
