"""Whom `benchmarks.decode` compares, by name: how each is made on disk, and how it is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from benchmarks import decode_ort, peer_table, peers_ggml
from benchmarks.decode_gguf import BLOCKS, GgufDecoder, write_gguf
from benchmarks.decode_graph import Shape
from benchmarks.decode_ort import RuntimeDecoder
from benchmarks.decode_plan import PlanDecoder, variant, write_plan

OURS: Final = "ours"
DENSE_F32, DENSE_W4, STATIC, FULL = "dense f32", "dense W4A8", "static top-2", "full system"
PLAN: Final = "plan"
SHAPE: Final = Shape()
PROMPT: Final = 128
"""Tokens of the prompt whose first answer token is timed."""
PROMPT_IDS: Final = [(7 * at) % SHAPE.vocabulary for at in range(PROMPT)]


class Decoder(Protocol):
    """A model with a cache."""

    def forget(self) -> None:
        """Empty the cache."""

    def step(self, ids: list[int]) -> int:
        """Append tokens; return the greedy next one."""


@dataclass(frozen=True)
class Candidate:
    """One way to run the decoder.

    Attributes:
        version: Of the peer's package; empty for ours.
        load: Loads it for a number of threads.
    """

    version: str
    load: Callable[[int], Decoder]


def prepare(folder: Path, target: str) -> None:
    """Write the plan and the GGUF files; ONNX models are made while they are loaded."""
    write_plan(SHAPE, target, PROMPT, folder / PLAN)
    for kind in BLOCKS:
        write_gguf(SHAPE, kind, _gguf(folder, kind))


def candidates(folder: Path) -> dict[str, Candidate]:
    """Return all candidates of a folder that `prepare` filled, ours first."""
    found = {OURS: Candidate("", lambda threads: PlanDecoder(folder / PLAN, threads))}
    for block in peer_table.ORT_BLOCKS:
        load = partial(RuntimeDecoder, SHAPE, block)
        found[f"onnxruntime QMoE block {block}"] = Candidate(decode_ort.VERSION, load)
    for kind in BLOCKS:
        load = partial(GgufDecoder, SHAPE, _gguf(folder, kind))
        found[f"llama.cpp {kind} repacked"] = Candidate(peers_ggml.version(), load)
    return found


def table_rows(folder: Path, single: float) -> dict[str, Candidate]:
    """Return the rows of the table of our own.

    Args:
        single: Share of the tokens for which the full system takes one expert.
    """
    plan = folder / PLAN
    dense = variant(SHAPE.experts)
    return {
        DENSE_F32: Candidate(decode_ort.VERSION, partial(RuntimeDecoder, SHAPE, 0)),
        DENSE_W4: Candidate("", lambda threads: PlanDecoder(plan, threads, dense)),
        STATIC: Candidate("", lambda threads: PlanDecoder(plan, threads)),
        FULL: Candidate("", lambda threads: PlanDecoder(plan, threads, single=single)),
    }


def _gguf(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.gguf"
