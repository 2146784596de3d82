"""The one benchmark runner: interleaved candidates, medians, a table of claims, a JSON file.

A claim is a row: what was measured, against whom, and the bar it has to reach. Candidates of a
claim run interleaved inside one process, so that a slow spell of the machine hits all of them; the
figure is the median over the rounds.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Final

RESULTS: Final = Path(__file__).parent / "results"
LABELS: Final = ("host", "qemu", "simulator")


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the table.

    Attributes:
        id: Stable name, `area.subject.figure`.
        value: Our figure, in `unit`.
        peer: Whom we compare with; empty if there is nobody.
        peer_value: Their figure, in `unit`.
        ratio: How many times better we are (or the figure itself, without a peer).
        bar: What `ratio` must reach; None for a row that only informs.
        label: Where it was measured: `host`, `qemu` or `simulator`.
    """

    id: str
    value: float
    unit: str
    peer: str
    peer_version: str
    peer_value: float | None
    ratio: float | None
    bar: float | None
    label: str
    note: str = ""

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ValueError(f"label {self.label!r} is not one of {', '.join(LABELS)}")

    @property
    def ok(self) -> bool:
        """Whether the bar is reached; a row without a bar is always ok."""
        return self.bar is None or (self.ratio is not None and self.ratio >= self.bar)


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 1,
    pause_s: float = 0.0,
    alone: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, list[float]]:
    """Return seconds of every round of every candidate, run in turn.

    Args:
        candidates: What to run, by name.
        rounds: Measured rounds, each running every candidate once; every other round runs them in
            reverse order, so that none always follows the same one.
        warm_up: Rounds before, not measured.
        pause_s: Rest before each run, so that threads of the one before go to sleep.
        alone: What each run is wrapped in; entering and leaving it is not measured.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for at in range(-warm_up, rounds):
        order = list(candidates) if at % 2 == 0 else list(candidates)[::-1]
        for name in order:
            sleep(pause_s)
            with alone():
                start = perf_counter()
                candidates[name]()
                spent = perf_counter() - start
            if at >= 0:
                seconds[name].append(spent)
    return seconds


def faster_claim(
    claim_id: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    per: float,
    unit: str,
    peer: str,
    peer_version: str,
    bar: float | None,
    label: str,
    note: str = "",
) -> Claim:
    """Return a claim about time: medians divided by `per`, ratio = their time / our time."""
    value, peer_value = statistics.median(ours) / per, statistics.median(theirs) / per
    return Claim(
        claim_id,
        value,
        unit,
        peer,
        peer_version,
        peer_value,
        peer_value / value,
        bar,
        label,
        note,
    )


def table(claims: Sequence[Claim]) -> str:
    """Return the claims as an aligned text table."""
    head = ("id", "value", "unit", "peer", "peer value", "ratio", "bar", "ok", "label", "note")
    rows = [head] + [
        (
            claim.id,
            _number(claim.value),
            claim.unit,
            f"{claim.peer} {claim.peer_version}".strip(),
            _number(claim.peer_value),
            _number(claim.ratio),
            _number(claim.bar),
            "yes" if claim.ok else "NO",
            claim.label,
            claim.note,
        )
        for claim in claims
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def write_results(name: str, claims: Sequence[Claim], directory: Path = RESULTS) -> Path:
    """Write `<name>.json`, `{"claims": [...]}`, and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    document = {"claims": [{**asdict(claim), "ok": claim.ok} for claim in claims]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def main(name: str, measure: Callable[[], Sequence[Claim]], arguments: Sequence[str]) -> int:
    """Run one benchmark from the command line; return the exit status.

    `--check` makes a missed bar exit status 1; without it the table only says so.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    options = parser.parse_args(arguments)
    claims = measure()
    print(table(claims))
    print(f"written to {write_results(name, claims)}")
    missed = [claim.id for claim in claims if not claim.ok]
    if missed and options.check:
        print(f"error: bar missed: {', '.join(missed)}", file=sys.stderr)
        return 1
    return 0


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
