"""The papers' result table for our own rows: from dense f32 to everything that we have.

    row            decoder of `benchmarks.decode`, one thread                      EdgeCard
    dense f32      ONNX Runtime, all 8 experts for every token                     f32 graphs
    dense W4A8     our plan, all 8 experts for every token                         as static top-2
    static top-2   our plan, two experts for every token                           nothing adapts
    full system    a shorter prompt and steps of one expert, both as on EdgeCard   adapts both

The decoder's weights are random, so what it would adapt to is not in it: the full row drops from
the picture's half of the prompt as many tokens as EdgeCard drops on average, and takes one expert
in the share of steps in which EdgeCard does, both counted on its evaluation cards in this run. A
dense execution weighs the experts that were not chosen with zero, so it answers like the row that
leaves them out: dense W4A8 has the accuracy of static top-2. Experts are not paged here. Energy is
not measured: nothing on a virtual machine tells it.
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.decode_candidates import (
    DENSE_F32,
    DENSE_W4,
    FULL,
    PROMPT,
    STATIC,
    table_rows,
)
from benchmarks.decode_edgecard import TOKENS, EdgeCardFacts, edgecard_facts
from benchmarks.decode_memory import held_bytes
from benchmarks.decode_talk import WINDOW, Run, Talk, timed
from benchmarks.runner import Claim

NOT_MEASURED: Final = "n/a"
ROUNDS: Final = 5
DENSE_ROUNDS: Final = 1
MILLISECONDS: Final = 1e3
MIB: Final = 1 << 20
COLUMNS: Final = ("row", "first token", "tokens/s", "peak memory", "EdgeCard", "energy")
FORMAT: Final = "{:<14}{:>14}{:>10}{:>14}{:>10}{:>8}"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Attributes:
        first_token_s: From the prompt to the first token.
        token_s: Per token after it.
        held_bytes: As `decode_memory` measures it.
        accuracy: On EdgeCard's evaluation cards.
        note: What ran.
    """

    name: str
    first_token_s: float
    token_s: float
    held_bytes: int
    accuracy: float
    note: str


def measured_rows(folder: Path) -> list[Row]:
    """Evaluate EdgeCard, then time every row: f32 by itself, because it takes much memory."""
    facts = edgecard_facts()
    prompts = dict.fromkeys((DENSE_F32, DENSE_W4, STATIC), PROMPT)
    prompts[FULL] = PROMPT - TOKENS + round(facts.rows)
    held = {name: held_bytes(name, folder, size, facts.single) for name, size in prompts.items()}
    first, later = {}, {}
    for names, rounds in (((DENSE_F32,), DENSE_ROUNDS), ((DENSE_W4, STATIC, FULL), ROUNDS)):
        found = table_rows(folder, facts.single)
        talks = {name: Talk(found[name].load(1), prompts[name]) for name in names}
        first |= _medians({name: talk.prompt for name, talk in talks.items()}, rounds)
        later |= _medians({name: talk.window for name, talk in talks.items()}, rounds)
    accuracy, notes = _accuracy(facts), _notes(facts, prompts[FULL])
    return [
        Row(name, first[name], later[name] / WINDOW, held[name], accuracy[name], notes[name])
        for name in prompts
    ]


def _medians(runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    seconds = timed(runs, rounds, min(1, rounds - 1))
    return {name: median(found) for name, found in seconds.items()}


def _accuracy(facts: EdgeCardFacts) -> dict[str, float]:
    return {
        DENSE_F32: facts.float_accuracy,
        DENSE_W4: facts.static_accuracy,
        STATIC: facts.static_accuracy,
        FULL: facts.adaptive_accuracy,
    }


def _notes(facts: EdgeCardFacts, prompt: int) -> dict[str, str]:
    return {
        DENSE_F32: "ONNX Runtime, all experts; EdgeCard in f32",
        DENSE_W4: "all experts; on EdgeCard the same answers as static top-2",
        STATIC: "two experts, every visual token",
        FULL: (
            f"EdgeCard keeps {facts.rows:.1f} of {TOKENS} visual tokens and takes one expert in"
            f" {facts.single:.0%} of its steps, so here: {prompt} of {PROMPT} tokens, same steps"
        ),
    }


def printed(rows: Sequence[Row]) -> str:
    """Return the table as text, the host under it."""
    lines = [FORMAT.format(*COLUMNS)]
    for row in rows:
        first, rate = f"{row.first_token_s * MILLISECONDS:.0f} ms", f"{1 / row.token_s:.1f}"
        held, right = f"{row.held_bytes / MIB:.0f} MiB", f"{row.accuracy:.1%}"
        lines.append(FORMAT.format(row.name, first, rate, held, right, NOT_MEASURED))
    return "\n".join([*lines, f"one thread of {host()}", ""])


def host() -> str:
    """Return processor and system of this machine."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{len(names)} x {names[0] if names else platform.machine()}, {platform.system()}"


def row_claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yield the table as rows of the results; each figure against the row of static top-2."""
    base = next(row for row in rows if row.name == STATIC)
    for row in rows:
        figures = (
            ("first_token", row.first_token_s, base.first_token_s, "s", -1),
            ("tokens", 1 / row.token_s, 1 / base.token_s, "tokens/s", 1),
            ("memory", row.held_bytes / MIB, base.held_bytes / MIB, "MiB", -1),
            ("accuracy", row.accuracy, base.accuracy, "share", 1),
        )
        for name, value, other, unit, sign in figures:
            yield Claim(
                id=f"decode.table.{row.name.replace(' ', '_')}.{name}",
                value=value,
                unit=unit,
                peer="" if row is base else f"own {STATIC}",
                peer_version="",
                peer_value=None if row is base else other,
                ratio=None if row is base else (value / other) ** sign,
                bar=None,
                label="host",
                note=f"{row.note}; 1 thread, {host()}",
            )
